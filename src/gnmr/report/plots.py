"""The plots of a report, as plotly figures. Names from models are escaped: plotly renders HTML in its labels."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from gnmr.report.data import RunData

MOST_COLUMNS = 600
"""A heat map has at most so many columns."""

MOST_POINTS = 1000
"""A curve has at most so many points."""

CLIP = 3.0
"""The heat map's colours end at 2 to this power, and to its negative."""

# Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = {
    "high": "#000000",
    "low": "#D55E00",
    "gnmr": "#0072B2",
    "random": "#999999",
    "always": "#CC79A7",
    "norm": "#009E73",
}
_OTHERS = ("#56B4E9", "#E69F00", "#7B1FA2", "#8C564B", "#5F9EA0", "#B8860B")
_FAULT, _MARK, _BAD = "#E69F00", "#111111", "#7B1FA2"
LAYOUT: dict[str, Any] = {
    "template": "plotly_white",
    "margin": {"l": 60, "r": 20, "t": 30, "b": 45},
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    "height": 380,
}


def curves(runs: Sequence[RunData], which: str, label: str) -> go.Figure:
    """Draw a loss over the steps: a thin line a seed, a thick one for an arm's mean."""
    figure = go.Figure()
    by_arm: dict[str, list[dict[int, float]]] = defaultdict(list)
    for run in runs:
        by_arm[run.arm].append(dict(zip(*getattr(run, which), strict=True)))
    for arm, colour in palette(by_arm).items():
        seeds = by_arm[arm]
        group = {"legendgroup": arm, "mode": "lines"}
        for values in seeds if len(seeds) > 1 else []:
            x = thinned(sorted(values))
            style = {"line": {"color": colour, "width": 0.7}, "opacity": 0.35, "hoverinfo": "skip"}
            figure.add_scatter(x=x, y=finite(values[step] for step in x), showlegend=False, **group, **style)
        common = thinned(sorted(set.intersection(*map(set, seeds))))
        means = finite(np.mean([values[step] for values in seeds]) for step in common)
        figure.add_scatter(x=common, y=means, name=escape(arm), line={"color": colour, "width": 2.2}, **group)
        if len(common) < 30:
            figure.data[-1].mode = "lines+markers"
    figure.update_layout(**LAYOUT, xaxis_title="step", yaxis_title=label)
    return figure


def heat_map(run: RunData) -> go.Figure:
    """Draw GNMR over units and steps, with what was on the recovery path, what was faulty and what was not finite."""
    trace = run.trace
    assert trace is not None  # noqa: S101 (the caller looked)
    bins = slices(len(trace.steps))
    steps = trace.steps[[bin_.start for bin_ in bins]]
    gnmr = np.array([trace.gnmr[bin_].max(axis=0) for bin_ in bins])
    bad = ~np.isfinite(gnmr)
    names = [escape(name) for name in trace.units]
    shown = np.where(bad, np.nan, np.clip(np.log2(np.maximum(gnmr, 2.0**-CLIP)), -CLIP, CLIP))
    ticks = np.arange(-CLIP, CLIP + 1)
    figure = go.Figure()
    figure.add_heatmap(
        z=np.round(shown, 3).T,
        x=steps,
        y=names,
        zmid=0,
        zmin=-CLIP,
        zmax=CLIP,
        colorscale="RdBu_r",
        hovertemplate="step %{x}<br>%{y}<br>log2 GNMR %{z:.2f}<extra></extra>",
        colorbar={"title": "GNMR", "tickvals": ticks, "ticktext": [f"{2**tick:g}" for tick in ticks], "thickness": 14},
    )
    width = float(steps[1] - steps[0]) if len(steps) > 1 else 1.0
    marks: list[tuple[Any, str, str, float, float]] = [
        (_any(run.faulty, bins), "fault injected", _FAULT, 9, 0.7),
        (bad, "NaN or Inf", _BAD, 9, 1.0),
    ]
    if not run.static:
        marks.append((_any(trace.planned, bins), "on recovery", _MARK, 2.5, 1.0))
    for where, label, colour, thickness, opacity in marks:
        if where is not None and where.any():
            x, y = _segments(where, steps, names, width)
            line = {"color": colour, "width": thickness}
            figure.add_scatter(x=x, y=y, mode="lines", name=label, line=line, opacity=opacity, hoverinfo="skip")
    figure.update_layout(**LAYOUT | {"height": max(360, 130 + 17 * min(len(names), 80))})
    figure.update_xaxes(title="step", range=[steps[0] - width / 2, steps[-1] + width / 2])
    figure.update_yaxes(type="category", autorange="reversed", tickfont={"size": 10}, automargin=True)
    return figure


def budget(runs: Sequence[RunData]) -> go.Figure:
    """Draw how many units each run had on the recovery path, against maxO; the runs have traces."""
    figure = go.Figure()
    traces = [run.trace for run in runs if run.trace is not None]
    policy, colours = traces[0].policy, palette(run.arm for run in runs)
    for run, trace in zip(runs, traces, strict=True):
        planned = trace.planned.sum(axis=1)
        bins = slices(len(planned))
        used = planned[trace.steps > policy.warmup_steps].mean() / max(1, policy.max_active)
        figure.add_scatter(
            x=trace.steps[[bin_.start for bin_ in bins]],
            y=[int(planned[bin_].max()) for bin_ in bins],
            mode="lines",
            name=f"{escape(run.arm)} ({used:.0%})",
            line={"color": colours[run.arm], "width": 1.4, "shape": "hv"},
        )
    figure.add_hline(y=policy.max_active, line_dash="dash", line_color="#555", annotation_text="maxO")
    if policy.warmup_steps:
        figure.add_vrect(x0=1, x1=policy.warmup_steps, fillcolor="#ddd", opacity=0.5, annotation_text="warm-up")
    figure.update_layout(**LAYOUT, xaxis_title="step", yaxis_title="units on the recovery path")
    return figure


def most_promoted(run: RunData, most: int = 15) -> go.Figure:
    """Draw the units that were longest on the recovery path, the steps with a fault apart."""
    trace = run.trace
    assert trace is not None  # noqa: S101 (the caller looked)
    planned = trace.planned
    steps = planned.sum(axis=0)
    order = np.argsort(-steps, kind="stable")[: min(most, np.count_nonzero(steps))][::-1]
    names = [escape(trace.units[i]) for i in order]
    figure = go.Figure()
    rest, label = planned, "steps on the recovery path"
    if run.faulty is not None:
        rest, label = planned & ~run.faulty, "false alarms"
        hits = (planned & run.faulty)[:, order].sum(axis=0)
        figure.add_bar(y=names, x=hits, orientation="h", name="while it was faulty", marker_color=_FAULT)
    figure.add_bar(y=names, x=rest[:, order].sum(axis=0), orientation="h", name=label, marker_color="#0072B2")
    height = 130 + 22 * len(names)
    figure.update_layout(**LAYOUT | {"height": height}, barmode="stack", xaxis_title="steps on the recovery path")
    figure.update_yaxes(type="category", tickfont={"size": 11}, automargin=True)
    return figure


def palette(arms: Iterable[str]) -> dict[str, str]:
    """Return a colour for each arm: its own, or one of the others in turn."""
    distinct = list(dict.fromkeys(arms))
    others = [arm for arm in distinct if arm not in COLOURS]
    return {arm: COLOURS.get(arm) or _OTHERS[others.index(arm) % len(_OTHERS)] for arm in distinct}


def finite(values: Any) -> list[float | None]:
    """Return numbers as plotly takes them: what is not finite is a gap."""
    return [float(value) if np.isfinite(value) else None for value in values]


def thinned(steps: list[int]) -> list[int]:
    """Return at most :data:`MOST_POINTS` of the steps."""
    return steps[:: -(-len(steps) // MOST_POINTS) or 1]


def slices(count: int) -> list[slice]:
    """Return at most :data:`MOST_COLUMNS` stretches that make up ``count`` steps."""
    width = max(1, -(-count // MOST_COLUMNS))
    return [slice(first, first + width) for first in range(0, count, width)]


def _any(where: NDArray[np.bool_] | None, bins: list[slice]) -> NDArray[np.bool_] | None:
    return None if where is None else np.array([where[bin_].any(axis=0) for bin_ in bins])


def _segments(
    where: NDArray[np.bool_], steps: NDArray[Any], names: list[str], width: float
) -> tuple[list[float | None], list[str | None]]:
    """Return one broken line along the stretches of each unit: one path, however many cells."""
    x: list[float | None] = []
    y: list[str | None] = []
    padded = np.pad(where, ((1, 1), (0, 0))).astype(np.int8)
    for unit, name in enumerate(names):
        edges = np.diff(padded[:, unit])
        for first, end in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
            x += [float(steps[first]) - width / 2, float(steps[end - 1]) + width / 2, None]
            y += [name, name, None]
    return x, y
