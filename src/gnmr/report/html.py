"""The page: one HTML file with everything in it, for a screen and for paper."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from gnmr._io import write_text
from gnmr.report import plots
from gnmr.report.data import RunData, read_comparison

_SCALES = {"%": 100.0, "ms": 1000.0, "MiB": 2.0**-20}


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
    title = f"{recipe['name']}: {', '.join(comparison['arms'])}"
    body = [
        f"<header><h1>{escape(recipe['name'])}</h1><p class=lead>{escape(recipe['description'])}</p>",
        f"<p>{escape(_what(comparison))}</p></header>",
        _section("Result", _table(comparison) + _findings(comparison)),
        _section(
            "Loss",
            "<h3>Validation</h3>"
            + _figure(
                plots.curves(runs, "evaluations", "validation loss"), "Validation loss of all arms over the steps"
            )
            + "<h3>Training</h3>"
            + _figure(plots.curves(runs, "losses", "training loss"), "Training loss of all arms over the steps")
            + "<p class=note>Thick: the mean over the seeds; thin: each seed. A gap is a loss that was not finite.</p>",
        ),
        _section("What the controller saw", _maps(runs)),
        _section("Budget", _budget(runs)),
        _section("Most promoted units", _promoted(runs)),
        _section("Policy, recipe and environment", _settings(comparison)),
    ]
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<link rel=icon href="data:,">'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><main>{''.join(body)}</main><script>{_SCRIPT}</script></body></html>"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _figure(figure: go.Figure, description: str) -> str:
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]},
    )
    return f'<figure role=img aria-label="{escape(description)}">{drawn}</figure>'


def _what(comparison: Mapping[str, Any]) -> str:
    machine, seeds = comparison["environment"]["machine"], comparison["seeds"]
    run = comparison["recipe"]["run"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    count = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed: no statement about chance is possible"
    return f"{len(comparison['arms'])} arms of {run['steps']} steps, {count}, on {where}."


def _table(comparison: Mapping[str, Any]) -> str:
    columns = [
        column
        for column in comparison["columns"]
        if any(row["metrics"][column["key"]]["mean"] is not None for row in comparison["rows"])
    ]
    head = "".join(f"<th scope=col>{escape(row['arm'])}</th>" for row in comparison["rows"])
    lines = []
    for column in columns:
        unit = f" <small>{escape(column['unit'])}</small>" if column["unit"] else ""
        cells = "".join(_cell(row["metrics"][column["key"]], column) for row in comparison["rows"])
        lines.append(f"<tr><th scope=row>{escape(column['label'])}{unit}</th>{cells}</tr>")
    return (
        f"<div class=wide><table class=result><thead><tr><th scope=col>mean ± standard error</th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>" + _per_seed(comparison)
    )


def _cell(entry: Mapping[str, Any], column: Mapping[str, str]) -> str:
    if entry["mean"] is None:
        return "<td>–</td>"
    if column["key"] in ("diverged", "loss_spikes"):
        return f"<td>{sum(float(value) for value in entry['per_seed'] if value is not None):.0f}</td>"
    scale = _SCALES.get(column["unit"], 1.0)
    mean = float(entry["mean"]) * scale
    digits = 0 if abs(mean) >= 1000 else 1 if abs(mean) >= 100 or column["unit"] == "%" else 3
    se = "" if entry["se"] is None else f" <small>± {float(entry['se']) * scale:.{digits}f}</small>"
    return f"<td>{mean:.{digits}f}{se}</td>"


def _per_seed(comparison: Mapping[str, Any]) -> str:
    head = "".join(f"<th scope=col>seed {seed}</th>" for seed in comparison["seeds"])
    lines = []
    for row in comparison["rows"]:
        values = row["metrics"]["perplexity"]["per_seed"]
        cells = "".join("<td>–</td>" if value is None else f"<td>{float(value):.4f}</td>" for value in values)
        lines.append(f"<tr><th scope=row>{escape(row['arm'])}</th>{cells}</tr>")
    return (
        "<details><summary>Validation perplexity of each seed</summary><table><thead><tr><th></th>"
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></details>"
    )


def _findings(comparison: Mapping[str, Any]) -> str:
    """Say what the numbers say, and no more."""
    losses = {
        row["arm"]: [None if value is None else float(value) for value in row["metrics"]["eval_loss"]["per_seed"]]
        for row in comparison["rows"]
    }
    lines = []
    if {"high", "low"} <= losses.keys():
        lines.append(_gap("low", "high", losses, "What the low-cost path loses: low minus high"))
    for other in ("low", "random", "norm", "always"):
        if {"gnmr", other} <= losses.keys():
            lines.append(_gap("gnmr", other, losses, f"gnmr minus {other}"))
    items = "".join(f"<li>{line}</li>" for line in lines if line)
    return f"<p>Validation loss, paired by seed (below zero, the first is better):</p><ul>{items}</ul>" if items else ""


def _gap(first: str, second: str, losses: Mapping[str, list[float | None]], label: str) -> str:
    pairs = zip(losses[first], losses[second], strict=True)
    gaps = [a - b for a, b in pairs if a is not None and b is not None]
    if not gaps:
        return ""
    mean = sum(gaps) / len(gaps)
    if len(gaps) == 1:
        return f"{escape(label)}: {mean:+.4f} in the only seed."
    error = (sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps)) ** 0.5
    verdict = "more than" if abs(mean) > 2 * error else "less than"
    below = sum(gap < 0 for gap in gaps)
    return (
        f"{escape(label)}: <b>{mean:+.4f} ± {error:.4f}</b>, below zero in {below} of {len(gaps)} seeds; {verdict} two "
        "standard errors from zero."
    )


def _maps(runs: Sequence[RunData]) -> str:
    drawn = [(run, run.trace) for run in runs if run.trace is not None]
    if not drawn:
        return "<p>No trace was recorded.</p>"
    first = min(run.seed for run, _ in drawn)
    options, figures = [], []
    shown = next((run.arm for run, _ in drawn if run.arm == "gnmr"), drawn[0][0].arm)
    for run, trace in drawn:
        if run.seed != first:
            continue  # the other seeds look alike, and every map costs space
        name = f"{run.arm}, seed {run.seed}"
        chosen = run.arm == shown
        options.append(f"<option value={len(figures)}{' selected' if chosen else ''}>{escape(name)}</option>")
        figure = _figure(plots.heat_map(run, trace), f"GNMR of all units over the steps, {name}")
        hidden = "" if chosen else " hidden"
        figures.append(f'<div class=map{hidden}><p class="note print-only">{escape(name)}</p>{figure}</div>')
    binned = max(len(trace.steps) for _, trace in drawn) > plots.MOST_COLUMNS
    return (
        "<p>GNMR is a unit's gradient norm over its own running mean, ΔGNMR is GNMR over its own last values; a unit "
        "whose risk, the larger of both over their thresholds, exceeds 1 is moved to the recovery path at the next "
        "step, the riskiest first, never more than maxO.</p>"
        f"<label class=screen-only>Run <select id=which>{''.join(options)}</select></label>{''.join(figures)}"
        f"<p class=note>Colours end at {2**plots.CLIP:g} and {2**-plots.CLIP:g}. "
        + (
            f"Each column is the largest GNMR of several steps (at most {plots.MOST_COLUMNS} columns)."
            if binned
            else ""
        )
        + "</p>"
    )


def _budget(runs: Sequence[RunData]) -> str:
    first = [run for run in runs if run.seed == min(each.seed for each in runs) and run.arm not in ("high", "low")]
    if not any(run.trace is not None for run in first):
        return "<p>No arm with a controller left a trace.</p>"
    return _figure(plots.budget(first), "Units on the recovery path over the steps") + (
        f"<p class=note>Seed {first[0].seed}; the static arms are left out.</p>"
    )


def _promoted(runs: Sequence[RunData]) -> str:
    run = next((run for run in runs if run.arm == "gnmr" and run.trace is not None), None)
    if run is None or run.trace is None:
        return "<p>The gnmr arm left no trace.</p>"
    if not run.trace.planned.any():
        return "<p>The gnmr arm promoted no unit.</p>"
    return _figure(
        plots.most_promoted(run.trace, run.faulty), "Steps on the recovery path of the most promoted units"
    ) + (f"<p class=note>Arm gnmr, seed {run.seed}.</p>")


def _settings(comparison: Mapping[str, Any]) -> str:
    recipe, environment = comparison["recipe"], comparison["environment"]
    blocks = {
        "Policy": recipe["policy"],
        **{name.capitalize(): recipe[name] for name in ("paths", "model", "data", "optimizer", "units", "run")},
        "Stress": recipe["stress"],
        "Machine": environment["machine"],
        "Versions": environment["versions"] | {"git revision": environment["revision"]},
        "Data as read": environment["data"],
    }
    return "".join(
        f"<details{' open' if name == 'Policy' else ''}><summary>{escape(name)}</summary><table>"
        + "".join(
            f"<tr><th scope=row>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>"
            for key, value in block.items()
            if value is not None
        )
        + "</table></details>"
        for name, block in blocks.items()
        if block
    )


_STYLE = """
:root { color-scheme: light; --ink: #1c2733; --soft: #5b6875; --line: #dde3e8; --tint: #f5f8fa; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { margin: 0; font-size: 2rem; } h2 { margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { margin: 1rem 0 .25rem; font-size: 1rem; color: var(--soft); }
.lead { margin: .25rem 0; font-size: 1.1rem; color: var(--soft); } .note { color: var(--soft); font-size: .875rem; }
.wide { overflow-x: auto; } figure { margin: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th[scope=row] { text-align: left; font-weight: 500; } thead th { border-bottom: 2px solid var(--ink); }
thead th:first-child { text-align: left; font-weight: 400; color: var(--soft); }
.result tbody tr:first-child td { font-weight: 600; } .result tr:hover td, .result tr:hover th { background: var(--tint); }
small { color: var(--soft); font-weight: 400; }
details { margin: .6rem 0; } summary { cursor: pointer; color: #0b62a3; }
details td { text-align: left; overflow-wrap: anywhere; }
select { font: inherit; padding: .15rem .4rem; } .print-only { display: none; }
@media print {
  body { font-size: 11px; } main { max-width: none; padding: 0; } .screen-only { display: none; }
  .print-only { display: block; } section, figure, .map, tr { break-inside: avoid; } h2 { break-after: avoid; }
  .modebar { display: none !important; } th, td { padding: .15rem .4rem; }
}
"""

_SCRIPT = """
const maps = [...document.querySelectorAll('.map')], which = document.getElementById('which');
const resize = element => element.querySelectorAll('.js-plotly-plot').forEach(plot => Plotly.Plots.resize(plot));
if (which) which.addEventListener('change', () => maps.forEach((map, i) => {
  map.hidden = i !== Number(which.value);
  if (!map.hidden) resize(map);
}));
addEventListener('beforeprint', () => {
  document.querySelectorAll('details').forEach(each => { each.open = true; });
  resize(document);
});
addEventListener('afterprint', () => resize(document));
"""
