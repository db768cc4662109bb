"""An evaluation as a table, on the terminal and as Markdown, with the words that it needs."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

SHARES = ("acc", "acc_norm", "acc_bytes", "exact_match")
"""Metrics whose names begin so are shown in per cent."""

_HIDDEN = ("acc_bytes", "nll_per_token")
"""What stands in the JSON only: it says the same as another line."""


def as_rich(evaluation: Mapping[str, Any]) -> Table:
    """Return the table for a terminal: tasks and metrics down, models across."""
    table = Table("", "n", title="values ± standard errors over items", title_justify="left")
    for label in evaluation["models"]:
        table.add_column(label, justify="right")
    for task, lines in _lines(evaluation).items():
        for name, n, cells in lines:
            table.add_row(f"{task}  {name}", n, *cells)
    return table


def as_markdown(evaluation: Mapping[str, Any]) -> str:
    """Return the same table as Markdown, with the differences and the notes."""
    labels = list(evaluation["models"])
    lines = [f"| ± standard errors over items | n | {' | '.join(labels)} |", "|---|---:|" + "---:|" * len(labels)]
    for task, rows in _lines(evaluation).items():
        lines += [f"| {task} {name} | {n} | {' | '.join(cells)} |" for name, n, cells in rows]
    said = differences(evaluation)
    return "\n".join([*lines, *([""] if said else []), *(f"- {line}" for line in said)]) + "\n"


def differences(evaluation: Mapping[str, Any]) -> list[str]:
    """Say how the models differ on the same items, what could not be compared, and what the p-values are."""
    lines = [_difference(pair) for pair in evaluation["differences"]] + list(evaluation["notes"])
    tests = sum(pair["p"] is not None for pair in evaluation["differences"])
    if tests:
        lines.append(
            f"Items are paired. p: McNemar's exact test for shares, Student's t otherwise; Holm: corrected for the "
            f"{tests} test(s) here."
        )
    lines += [
        f"{each['task']}: {each['model']} was given {each['cut_off']} of {each['n']} items without their beginning, "
        "which it has no room for"
        for each in evaluation["results"]
        if each["cut_off"]
    ]
    return lines


def _lines(evaluation: Mapping[str, Any]) -> dict[str, list[tuple[str, str, list[str]]]]:
    """Return, by task, the lines: a metric, the number of items, and a cell for each model."""
    found: dict[str, list[tuple[str, str, list[str]]]] = {}
    for task in evaluation["tasks"]:
        results = [each for each in evaluation["results"] if each["task"] == task]
        counts = " / ".join(dict.fromkeys(str(each["n"]) for each in results))
        names = list(dict.fromkeys(name for each in results for name in each["metrics"] if name not in _HIDDEN))
        found[task] = [
            (_named(name), counts, [_cell(each, name) for each in results]) for name in names or ["not finite"]
        ]
    return found


def _named(name: str) -> str:
    return f"{name} (%)" if name.startswith(SHARES) else name


def _cell(result: Mapping[str, Any], name: str) -> str:
    if result["nonfinite"]:
        return f"NaN or Inf in {result['nonfinite']} of {result['n']}"
    if name not in result["metrics"]:
        return "-"
    value, se = (result["metrics"][name][key] for key in ("value", "se"))
    scale, digits = (100.0, 1) if name.startswith(SHARES) else (1.0, 3)
    shown = f"{float(value) * scale:.{digits}f}"
    return shown if se is None else f"{shown} ± {float(se) * scale:.{digits}f}"


def _difference(pair: Mapping[str, Any]) -> str:
    share = pair["metric"].startswith(SHARES)
    scale, digits = (100.0, 1) if share else (1.0, 4)
    line = f"{pair['task']} {pair['metric']}: {pair['first']} minus {pair['second']} {pair['mean'] * scale:+.{digits}f}"
    line += " points" if share else ""
    if pair["interval"] is not None:
        low, high = (f"{end * scale:+.{digits}f}" for end in pair["interval"])
        line += f", 95 % [{low}, {high}]"
    if "only_first" in pair:
        line += f", right alone on {pair['only_first']} and {pair['only_second']} of {pair['n']} items"
    return line if pair["p"] is None else f"{line}, p = {pair['p']:.2g}, Holm {pair['p_holm']:.2g}"
