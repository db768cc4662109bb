"""The page: one HTML file with everything in it, for a screen and for paper."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from gnmr._io import write_text
from gnmr.report import figures, plots
from gnmr.report.data import RunData, read_comparison
from gnmr.report.style import CSS, SCRIPT
from gnmr.report.tables import findings, promoted_table, result_table, settings


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a comparison.

    Args:
        folder: the comparison's folder, with ``comparison.json`` and the runs.
        out: the file; by default ``report.html`` in the folder.

    Returns:
        The file's path.

    Raises:
        gnmr.RunError: a file of the comparison is missing or damaged; with its path.
        gnmr.TraceError: likewise, for a trace.
    """
    folder = Path(folder)
    path = folder / "report.html" if out is None else Path(out)
    comparison, runs = read_comparison(folder)
    write_text(path, page(comparison, runs))
    return path


def page(comparison: Mapping[str, Any], runs: Sequence[RunData]) -> str:
    """Return the whole page."""
    recipe = comparison["recipe"]
    scale = f" at scale {recipe['scale']}" if recipe.get("scale") else ""
    title = f"{recipe['name']}{scale}: {', '.join(comparison['arms'])}"
    body = [
        f"<header><h1>{escape(recipe['name'] + scale)}</h1><p class=lead>{escape(recipe['description'])}</p>",
        f"<p>{escape(_what(comparison))}</p></header>",
        _section("Result", result_table(comparison) + findings(comparison)),
        _section("Loss", _losses(runs)),
        _section("What the controller saw", _maps(runs)),
        _section("As the paper draws it", _paper(runs)),
        _section("Budget", _budget(runs)),
        _section("Most promoted units", _promoted(runs)),
        _section("Policy, recipe and environment", settings(comparison)),
    ]
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<link rel=icon href="data:,">'
        f"<style>{CSS}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><main>{''.join(body)}</main><script>{SCRIPT}</script></body></html>"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _figure(figure: go.Figure, description: str) -> str:
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]},
    )
    return f'<figure aria-label="{escape(description)}">{drawn}</figure>'


def _what(comparison: Mapping[str, Any]) -> str:
    machine, seeds = comparison["environment"]["machine"], comparison["seeds"]
    run = comparison["recipe"]["run"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    count = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed: no statement about chance is possible"
    said = f"{len(comparison['arms'])} arms of {run['steps']} steps, {count}, on {where}."
    if comparison["recipe"].get("scale") in ("tiny", "small"):
        said += " This scale has other sizes, another text and fewer tokens than the paper: compare the arms here only."
    return said


def _losses(runs: Sequence[RunData]) -> str:
    validation = plots.curves(runs, "evaluations", "validation loss")
    training = plots.curves(runs, "losses", "training loss")
    return (
        f"<h3>Validation</h3>{_figure(validation, 'Validation loss of all arms over the steps')}"
        f"<h3>Training</h3>{_figure(training, 'Training loss of all arms over the steps')}"
        "<p class=note>Thick: the mean over the seeds, at the steps that all of them logged; thin: each seed. A gap is "
        f"a loss that was not finite. Curves of more than {plots.MOST_POINTS} points are thinned.</p>"
    )


def _maps(runs: Sequence[RunData]) -> str:
    first = min(run.seed for run in runs)
    chosen = [run for run in runs if run.trace is not None and (run.arm == "gnmr" or run.seed == first)]
    chosen.sort(key=lambda run: run.arm != "gnmr")
    missing = sorted({run.arm for run in runs if run.trace is None})
    without = f"<p>No trace was recorded for {escape(', '.join(missing))}.</p>" if missing else ""
    if not chosen:
        return without
    options, figures = [], []
    for i, run in enumerate(chosen):
        name = escape(f"{run.arm}, seed {run.seed}")
        options.append(f"<option value={i}>{name}</option>")
        figure = _figure(plots.heat_map(run), f"GNMR of all units over the steps, {run.arm}, seed {run.seed}")
        figures.append(f"<div class=map{' hidden' if i else ''}><p class='note print-only'>{name}</p>{figure}</div>")
    binned = max(len(run.trace.steps) for run in chosen if run.trace is not None) > plots.MOST_COLUMNS
    bins = f" A column is several steps (at most {plots.MOST_COLUMNS}): the largest GNMR, any mark." if binned else ""
    return (
        "<p>GNMR is a unit's gradient norm over its own running mean, ΔGNMR is GNMR over its own last values; a unit "
        "whose risk, the larger of both over their thresholds, exceeds 1 is moved to the recovery path at the next "
        "step, the riskiest first, never more than maxO.</p>"
        f"{without}<label class=screen-only>Run <select id=which>{''.join(options)}</select></label>{''.join(figures)}"
        "<p class=note>Here are the gnmr arm with every seed, and the other arms with the first. Colours end at "
        f"{2**plots.CLIP:g} and {2**-plots.CLIP:g}.{bins} The static arms have no marks of recovery.</p>"
    )


def _paper(runs: Sequence[RunData]) -> str:
    first = min(run.seed for run in runs)
    traced = [run for run in runs if run.seed == first and run.trace is not None]
    drawn = ""
    if traced:
        drawn += "<h3>GNMR over the steps (Figures 2 and 3)</h3>" + _figure(
            figures.gnmr_over_steps(traced), "GNMR of all arms over the steps"
        )
        drawn += (
            f"<p class=note>Seed {first}; thick: the mean over the units, thin: the largest, of the steps of a point. "
            "A click on an arm hides it.</p>"
        )
    counted = [run for run in runs if run.by_tokens[0]]
    if counted:
        drawn += "<h3>Training loss over tokens (Figure 4)</h3>" + _figure(
            figures.loss_over_tokens(counted), "Training loss of all arms over tokens"
        )
    return drawn or "<p>The runs left neither traces nor tokens.</p>"


def _budget(runs: Sequence[RunData]) -> str:
    first = min(run.seed for run in runs)
    chosen = [run for run in runs if run.seed == first and run.trace is not None and not run.static]
    if not chosen:
        return "<p>No arm with a controller left a trace.</p>"
    return _figure(plots.budget(chosen), "Units on the recovery path over the steps") + (
        f"<p class=note>Seed {first}; the static arms are left out. In parentheses: the share of its budget, maxO "
        "units at every step, that the arm used.</p>"
    )


def _promoted(runs: Sequence[RunData]) -> str:
    run = next((run for run in runs if run.arm == "gnmr" and run.trace is not None), None)
    if run is None or run.trace is None:
        return "<p>The gnmr arm left no trace.</p>"
    if not run.trace.planned.any():
        return "<p>The gnmr arm promoted no unit.</p>"
    figure = _figure(plots.most_promoted(run), "Steps on the recovery path of the most promoted units")
    return f"{figure}{promoted_table(run)}<p class=note>Arm gnmr, seed {run.seed}.</p>"
