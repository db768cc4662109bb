"""The tables of a report, and what their numbers say in words."""

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from gnmr.report.data import RunData

_FINE = ("loss_spikes", "grad_spikes")
_SCALES = {"%": 100.0, "ms": 1000.0, "MiB": 2.0**-20}

# Student's t, 97.5 %, by degrees of freedom; beyond ten the last one is close and errs on the careful side.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def result_table(comparison: Mapping[str, Any]) -> str:
    """Return the comparison's table, and the perplexity and loss of each seed behind a fold."""
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
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in comparison.get("notes", ()))
    return (
        f"<div class=wide><table class=result><thead><tr><th scope=col>mean ± standard error</th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>{notes}{_per_seed(comparison)}"
    )


def findings(comparison: Mapping[str, Any]) -> str:
    """Say what the numbers say, and no more."""
    losses = {row["arm"]: row["metrics"]["eval_loss"]["mean"] for row in comparison["rows"]}
    finite = {arm: float(loss) for arm, loss in losses.items() if np.isfinite(float(loss))}
    items = []
    if finite:
        best = min(finite, key=finite.__getitem__)
        items.append(f"Lowest mean validation loss: <b>{escape(best)}</b>, {finite[best]:.4f}.")
    items += [_difference(pair) for pair in comparison["differences"]]
    return (
        "<h3>Differences in validation loss, paired by seed (below zero, the first is better)</h3>"
        f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
    )


def promoted_table(run: RunData, most: int = 15) -> str:
    """Return the units that were longest on the recovery path: promotions, steps, and steps without a fault."""
    trace = run.trace
    assert trace is not None  # noqa: S101 (the caller looked)
    planned = trace.planned
    before = np.concatenate([np.zeros_like(planned[:1]), planned[:-1]])
    promotions, steps = (planned & ~before).sum(axis=0), planned.sum(axis=0)
    lines = []
    for i in np.argsort(-steps, kind="stable")[:most]:
        if not steps[i]:
            break
        alarm = ""
        if run.faulty is not None:
            alarm = f"<td>{(planned[:, i] & ~run.faulty[:, i]).sum() / steps[i]:.0%}</td>"
        name = escape(trace.units[i])
        lines.append(f"<tr><th scope=row>{name}</th><td>{promotions[i]}</td><td>{steps[i]}</td>{alarm}</tr>")
    extra = "" if run.faulty is None else "<th scope=col>false alarms</th>"
    return (
        "<div class=wide><table><thead><tr><th scope=col>unit</th><th scope=col>promotions</th>"
        f"<th scope=col>steps</th>{extra}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def settings(comparison: Mapping[str, Any]) -> str:
    """Return policy, recipe and environment, each behind a fold."""
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
        f"<details class=settings{' open' if name == 'Policy' else ''}><summary>{escape(name)}</summary><table>"
        + "".join(
            f"<tr><th scope=row>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>"
            for key, value in block.items()
            if value is not None
        )
        + "</table></details>"
        for name, block in blocks.items()
        if block
    )


def _cell(entry: Mapping[str, Any], column: Mapping[str, str]) -> str:
    if entry["mean"] is None:
        return "<td>–</td>"
    if column["key"] == "diverged":
        return f"<td>{sum(float(value) for value in entry['per_seed'] if value is not None):.0f}</td>"
    scale = _SCALES.get(column["unit"], 1.0)
    mean = float(entry["mean"]) * scale
    digits = 2 if column["key"] in _FINE else 1 if abs(mean) >= 100 or column["unit"] == "%" else 3
    digits = 0 if abs(mean) >= 1000 else digits
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
        "<details><summary>Validation perplexity of each seed</summary><div class=wide><table><thead><tr>"
        f"<th scope=col>arm</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _difference(pair: Mapping[str, Any]) -> str:
    label = f"{escape(pair['first'])} minus {escape(pair['second'])}"
    mean, seeds = float(pair["mean"]), pair["seeds"]
    if pair["se"] is None:
        return f"{label}: {mean:+.4f}, in the only seed."
    error = float(pair["se"])
    half = _T[min(seeds - 1, len(_T)) - 1] * error
    verdict = "excludes" if abs(mean) > half else "includes"
    return (
        f"{label}: <b>{mean:+.4f} ± {error:.4f}</b>, below zero in {pair['lower']} of {seeds} seeds; the 95 % interval "
        f"(Student's t) {verdict} zero."
    )
