"""The plots of a report, as plotly figures. Names from models are escaped: plotly renders HTML in its labels."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from gnmr.report.data import RunData
from gnmr.trace import Trace

MOST_COLUMNS = 600
"""A heat map has at most so many columns: longer runs show the largest GNMR of each bin of steps."""

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
_LAYOUT = {
    "template": "plotly_white",
    "margin": {"l": 60, "r": 20, "t": 30, "b": 45},
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    "height": 380,
}


def curves(runs: Sequence[RunData], which: str, label: str) -> go.Figure:
    """Draw a loss over the steps: a thin line a seed, a thick one for an arm's mean."""
    figure = go.Figure()
    by_arm: dict[str, list[RunData]] = defaultdict(list)
    for run in runs:
        by_arm[run.arm].append(run)
    for arm, members in by_arm.items():
        colour = COLOURS.get(arm, "#56B4E9")
        lines = [getattr(run, which) for run in members]
        for steps, values in lines if len(lines) > 1 else []:
            figure.add_scatter(
                x=steps, y=_finite(values), mode="lines", line={"color": colour, "width": 0.7}, opacity=0.35,
                legendgroup=arm, showlegend=False, hoverinfo="skip",
            )  # fmt: skip
        common = [steps for steps, _ in lines if steps == lines[0][0]]
        if len(common) == len(lines) and common[0]:
            mean = np.mean([values for _, values in lines], axis=0)
            mode = "lines+markers" if len(common[0]) < 30 else "lines"
            figure.add_scatter(
                x=common[0], y=_finite(mean), mode=mode, name=escape(arm), legendgroup=arm,
                line={"color": colour, "width": 2.2},
            )  # fmt: skip
    figure.update_layout(**_LAYOUT, xaxis_title="step", yaxis_title=label)
    return figure


def heat_map(run: RunData, trace: Trace) -> go.Figure:
    """Draw GNMR over units and steps, with what was on the recovery path and what was faulty."""
    steps, gnmr, active, faulty = _binned(run, trace)
    names = [escape(name) for name in trace.units]
    shown = np.clip(np.log2(np.maximum(gnmr, 2.0**-CLIP)), -CLIP, CLIP)
    figure = go.Figure()
    figure.add_heatmap(
        z=np.where(np.isfinite(gnmr), shown, CLIP).T, x=steps, y=names, zmid=0, zmin=-CLIP, zmax=CLIP,
        colorscale="RdBu_r", customdata=np.where(np.isfinite(gnmr), gnmr, -1).T,
        hovertemplate="step %{x}<br>%{y}<br>GNMR %{customdata:.3g}<extra></extra>",
        colorbar={"title": "GNMR", "tickvals": [-3, -2, -1, 0, 1, 2, 3],
                  "ticktext": ["⅛", "¼", "½", "1", "2", "4", "8"], "thickness": 14},
    )  # fmt: skip
    marks = [
        (active, "on recovery", "#111111", "square-open"),
        (faulty, "fault injected", "#E69F00", "line-ew-open"),
        (~np.isfinite(gnmr), "NaN or Inf", "#7B1FA2", "x-thin-open"),
    ]
    for where, label, colour, symbol in marks:
        if where is None or not where.any():
            continue
        t, unit = np.nonzero(where)
        figure.add_scatter(
            x=steps[t], y=[names[i] for i in unit], mode="markers", name=label, hoverinfo="skip",
            marker={"color": colour, "symbol": symbol, "size": 6, "line": {"width": 1.4}},
        )  # fmt: skip
    figure.update_layout(**_LAYOUT | {"height": max(360, 130 + 17 * min(len(names), 80))})
    figure.update_xaxes(title="step", range=[steps[0] - 0.5, steps[-1] + 0.5])
    figure.update_yaxes(autorange="reversed", tickfont={"size": 10}, automargin=True)
    return figure


def budget(runs: Sequence[RunData]) -> go.Figure:
    """Draw how many units each run of an arm had on the recovery path, the first seed's runs, against maxO."""
    figure = go.Figure()
    for run in runs:
        if run.trace is None:
            continue
        planned = run.trace.planned.sum(axis=1)
        keep = _bins(len(planned))
        figure.add_scatter(
            x=run.trace.steps[keep], y=[int(planned[bin_].max()) for bin_ in _slices(len(planned))], mode="lines",
            name=escape(run.arm), line={"color": COLOURS.get(run.arm, "#56B4E9"), "width": 1.4, "shape": "hv"},
        )  # fmt: skip
    trace = next(run.trace for run in runs if run.trace is not None)
    policy = trace.policy
    figure.add_hline(
        y=policy.max_active, line_dash="dash", line_color="#555", annotation_text=f"maxO {policy.max_active}"
    )
    if policy.warmup_steps:
        figure.add_vrect(x0=1, x1=policy.warmup_steps, fillcolor="#ddd", opacity=0.5, annotation_text="warm-up")
    figure.update_layout(**_LAYOUT, xaxis_title="step", yaxis_title="units on the recovery path")
    return figure


def most_promoted(trace: Trace, faulty: NDArray[np.bool_] | None, most: int = 15) -> go.Figure:
    """Draw the units that were longest on the recovery path, what was faulty apart."""
    planned = trace.planned
    order = np.argsort(-planned.sum(axis=0), kind="stable")[:most][::-1]
    names = [escape(trace.units[i]) for i in order]
    hit = np.zeros(len(order)) if faulty is None else (planned & faulty)[:, order].sum(axis=0)
    rest = planned[:, order].sum(axis=0) - hit
    figure = go.Figure()
    if faulty is not None:
        figure.add_bar(y=names, x=hit, orientation="h", name="while it was faulty", marker_color="#E69F00")
    label = "steps on the recovery path" if faulty is None else "while it was not"
    figure.add_bar(y=names, x=rest, orientation="h", name=label, marker_color="#0072B2")
    figure.update_layout(**_LAYOUT, barmode="stack", xaxis_title="steps on the recovery path")
    figure.update_yaxes(tickfont={"size": 11}, automargin=True)
    return figure


def _finite(values: Any) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def _slices(count: int) -> list[slice]:
    width = -(-count // MOST_COLUMNS)
    return [slice(first, first + width) for first in range(0, count, max(1, width))]


def _bins(count: int) -> list[int]:
    return [bin_.start for bin_ in _slices(count)]


def _binned(run: RunData, trace: Trace) -> tuple[Any, Any, Any, Any]:
    """Return (bins,) steps and (bins, N) largest GNMR, any on recovery, any faulty."""
    bins = _slices(len(trace.steps))
    steps = trace.steps[[bin_.start for bin_ in bins]]
    gnmr = np.array([trace.gnmr[bin_].max(axis=0) for bin_ in bins])
    active = np.array([trace.planned[bin_].any(axis=0) for bin_ in bins])
    faulty = None if run.faulty is None else np.array([run.faulty[bin_].any(axis=0) for bin_ in bins])
    return steps, gnmr, active, faulty
