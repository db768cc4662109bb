"""The table of a comparison: on the terminal, and as JSON, CSV and Markdown."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from gnmr._io import write_json, write_text
from gnmr.lab.paired import verdicts

_TERMINAL = (
    "perplexity",
    "diverged",
    "loss_spikes",
    "grad_spikes",
    "promotion_ratio",
    "exceeds_gnmr",
    "exceeds_delta",
    "hit_max",
    "fault_coverage",
    "false_alarms",
    "step_seconds",
    "decision_seconds",
    "tokens_per_second",
    "held_bytes_units",
    "held_bytes_model",
    "peak_memory",
)
_FINE = ("loss_spikes", "grad_spikes")
"""Shares that are small where all is well."""

_ABREAST = 54
"""So many characters of arms fit beside the labels on a terminal of 80."""

_SCALES = {"%": 100.0, "ms": 1000.0, "MiB": 2.0**-20}


def write_tables(comparison: Mapping[str, Any], folder: Path) -> None:
    """Write ``comparison.json``, ``.csv`` (a line for each arm and seed) and ``.md`` into the folder."""
    write_json(folder / "comparison.json", comparison)
    write_text(folder / "comparison.csv", as_csv(comparison))
    write_text(folder / "comparison.md", as_markdown(comparison))


def as_rich(comparison: Mapping[str, Any]) -> Group:
    """Return the table for a terminal: metrics down, arms across, and below what does not fit beside the others."""
    lines, tables, name = _cells(comparison), list[Table](), comparison["recipe"]["name"]
    for arms in _abreast([row["arm"] for row in comparison["rows"]]):
        title = None if tables else f"{name}: means over {_seeds(comparison)}"
        table = Table(title=title, title_justify="left")
        table.add_column("", no_wrap=True)
        for arm in arms.values():
            table.add_column(arm, justify="right", no_wrap=True)
        for label, cells in lines:
            table.add_row(label, *(cells[place] for place in arms))
        tables.append(table)
    return Group(*tables)


def as_markdown(comparison: Mapping[str, Any]) -> str:
    """Return the same table as Markdown, the differences between the arms of a seed, the notes and the machine."""
    arms = [row["arm"] for row in comparison["rows"]]
    lines = [
        f"| means over {_seeds(comparison)} | " + " | ".join(arms) + " |",
        "|---|" + "---:|" * len(arms),
        *(f"| {label} | " + " | ".join(cells) + " |" for label, cells in _cells(comparison)),
        "",
        *differences(comparison),
        "",
        *(f"{note}\n" for note in comparison["notes"]),
        machine(comparison),
    ]
    return "\n".join(lines) + "\n"


def as_csv(comparison: Mapping[str, Any]) -> str:
    """Return one line for each arm and seed, in plain units (seconds, bytes, shares)."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = [column["key"] for column in comparison["columns"]]
    writer.writerow(["arm", "seed", *keys])
    for row in comparison["rows"]:
        for place, seed in enumerate(comparison["seeds"]):
            values = [row["metrics"][key]["per_seed"][place] for key in keys]
            writer.writerow([row["arm"], seed, *("" if value is None else value for value in values)])
    return out.getvalue()


def differences(comparison: Mapping[str, Any]) -> list[str]:
    """Say how the arms differ in validation loss, seed by seed (below zero, the first is better), and what follows."""
    lines = []
    for pair in comparison["differences"]:
        spread = "" if pair["se"] is None else f" ± {float(pair['se']):.4f}"
        lines.append(
            f"- {pair['first']} minus {pair['second']}: {float(pair['mean']):+.4f}{spread} validation loss, lower in "
            f"{pair['lower']} of {pair['seeds']} seeds (sign test p = {pair['p']:.2g})"
        )
    return [*lines, *(f"- {line}" for line in verdicts(comparison))]


def machine(comparison: Mapping[str, Any]) -> str:
    """Name the machine and the versions in one line."""
    facts, versions = comparison["environment"]["machine"], comparison["environment"]["versions"]
    where = facts["gpu"] or f"{facts['cpu']}, {facts['cores']} cores"
    threads = comparison["recipe"]["run"]["threads"]
    return (
        f"{where}, {facts['memory_gib']} GiB, {threads} thread(s) a run; Python {versions['python']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}"
    )


def _abreast(names: Sequence[str]) -> list[dict[int, str]]:
    """Return the arms that stand beside each other, each by its place among all."""
    tables: list[dict[int, str]] = []
    room = 0
    for place, name in enumerate(names):
        width = max(len(name), 6) + 3
        if width > room or not tables:
            tables.append({})
            room = _ABREAST
        tables[-1][place] = name
        room -= width
    return tables


def _cells(comparison: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    columns = {column["key"]: column for column in comparison["columns"]}
    found = []
    for key in _TERMINAL:
        column = columns[key]
        entries = [row["metrics"][key] for row in comparison["rows"]]
        if all(entry["mean"] is None for entry in entries):
            continue
        unit = f" ({column['unit']})" if column["unit"] else ""
        found.append((column["label"] + unit, [_cell(entry, key, column["unit"]) for entry in entries]))
        if key == "perplexity" and entries[0]["se"] is not None:
            found.append(("  standard error", [f"{float(entry['se']):.3f}" for entry in entries]))
    return found


def _cell(entry: Mapping[str, Any], key: str, unit: str) -> str:
    if entry["mean"] is None:
        return "-"
    if key == "diverged":
        return f"{sum(float(value) for value in entry['per_seed'] if value is not None):.0f}"
    scale = _SCALES.get(unit, 1.0)
    mean = float(entry["mean"]) * scale
    digits = 2 if key in _FINE else 1 if unit == "%" else 3 if unit == "" else 2
    if mean >= 100 and unit != "%":
        digits = 0 if unit else 1
    return f"{mean:.{digits}f}"


def _seeds(comparison: Mapping[str, Any]) -> str:
    """Say how many seeds, and at which scale if the recipe has several."""
    count, scale = len(comparison["seeds"]), comparison["recipe"]["scale"]
    return f"{count} seed" + ("s" if count > 1 else "") + (f" at scale {scale}" if scale else "")
