"""The paper's figures, from the traces and metrics of a comparison: GNMR over the steps, and loss over tokens."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go

from gnmr.report.data import RunData
from gnmr.report.plots import LAYOUT, finite, palette, slices, thinned


def gnmr_over_steps(runs: Sequence[RunData]) -> go.Figure:
    """Draw GNMR over the steps, an arm a colour (paper, Figures 2 and 3).

    The paper does not say of which unit its GNMR is: the thick line is the mean over the units, the thin one the
    largest, of each step or of the steps that a point stands for. What is not finite is a gap.

    Args:
        runs: one for each arm, with traces.
    """
    figure = go.Figure()
    colours = palette(run.arm for run in runs)
    for run in runs:
        trace = run.trace
        assert trace is not None  # noqa: S101 (the caller looked)
        bins = slices(len(trace.steps))
        x = trace.steps[[bin_.start for bin_ in bins]]
        seen = np.where(trace.observed & np.isfinite(trace.gnmr), trace.gnmr, np.nan)
        group = {"legendgroup": run.arm, "mode": "lines", "x": x}
        for name, reduce, width in (("mean", np.nanmean, 2.0), ("largest", np.nanmax, 0.7)):
            y = [reduce(part) if np.isfinite(part).any() else np.nan for part in (seen[bin_] for bin_ in bins)]
            line = {"color": colours[run.arm], "width": width}
            label = f"{escape(run.arm)}, {name}"
            figure.add_scatter(y=finite(y), name=label, line=line, showlegend=name == "mean", **group)
    figure.add_hline(y=1.0, line_dash="dot", line_color="#999")
    figure.update_layout(**LAYOUT, xaxis_title="step", yaxis_title="GNMR")
    figure.update_yaxes(type="log")
    return figure


def loss_over_tokens(runs: Sequence[RunData]) -> go.Figure:
    """Draw the training loss over the tokens seen, the mean over an arm's seeds (paper, Figure 4).

    Args:
        runs: whose metrics have tokens.
    """
    figure = go.Figure()
    by_arm: dict[str, list[dict[int, float]]] = defaultdict(list)
    for run in runs:
        by_arm[run.arm].append(dict(zip(*run.by_tokens, strict=True)))
    for arm, colour in palette(by_arm).items():
        seeds = by_arm[arm]
        common = thinned(sorted(set.intersection(*map(set, seeds))))
        means = finite(np.mean([values[tokens] for values in seeds]) for tokens in common)
        figure.add_scatter(x=common, y=means, mode="lines", name=escape(arm), line={"color": colour, "width": 1.6})
    figure.update_layout(**LAYOUT, xaxis_title="tokens", yaxis_title="training loss")
    return figure
