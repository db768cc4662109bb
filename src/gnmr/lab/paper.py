"""The paper's tables, which recipe makes each, and what our finished comparisons say in the same places.

The numbers stand in ``paper.toml`` beside this file. A comparison counts for a recipe if it bears its name, and for one
scale; what ``--set`` changed is named. Scales below the paper's have other models, other text and fewer tokens, so that
their numbers say how arms compare with each other, and nothing about the paper's.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from gnmr.errors import RunError
from gnmr.lab import runs
from gnmr.lab.scales import SCALES

_UNITS = {"%": 100.0, "MB": 1e-6}
_NEAR = 0.03
"""An evaluation counts for a share of the run if it is no farther from it."""


@dataclass(frozen=True)
class Entry:
    """A table or figure of the paper.

    Attributes:
        numbers: the paper's, such as ``("14", "15")``.
        title: what it shows.
        figure: whether it is drawn, and has no cells.
        recipes: that make it.
        cells: its cells, row by row.
        note: what must be known beside it.
    """

    numbers: tuple[str, ...]
    title: str
    figure: bool
    recipes: tuple[str, ...]
    cells: tuple[dict[str, Any], ...] = field(repr=False)
    note: str = ""

    @property
    def name(self) -> str:
        """What it is called: ``Table 1``, ``Figures 2-3``."""
        kind = "Figure" if self.figure else "Table"
        return f"{kind}{'s' if len(self.numbers) > 1 else ''} {'-'.join(self.numbers)}"


@dataclass(frozen=True)
class Finished:
    """A finished comparison of a recipe.

    Attributes:
        folder: where it lies.
        comparison: what stands in its ``comparison.json``.
        changed: keys in which it differs from the packaged recipe at its scale.
    """

    folder: Path
    comparison: dict[str, Any] = field(repr=False)
    changed: tuple[str, ...] = ()


Done = Mapping[tuple[str, str], Finished]
"""Finished comparisons by recipe and scale."""


def entries() -> tuple[Entry, ...]:
    """Return everything of the paper that the recipes make, tables first.

    Examples:
        >>> entries()[0].name, entries()[0].recipes[0]
        ('Table 1', 'paper/a-60m')
    """
    found = tomllib.loads((files("gnmr.lab") / "paper.toml").read_text())["entry"]
    return tuple(map(_entry, found))


def table(number: str) -> Entry:
    """Return one table.

    Raises:
        ValueError: the paper's facts have no table of this number.
    """
    tables = [entry for entry in entries() if not entry.figure]
    for entry in tables:
        if number in entry.numbers:
            return entry
    known = ", ".join(each for entry in tables for each in entry.numbers)
    raise ValueError(f"there is no table {number!r} here: there are {known}; gnmr tables lists them")


def finished(root: Path) -> dict[tuple[str, str], Finished]:
    """Find the finished comparisons of the paper's recipes under a folder, the newest of each recipe and scale.

    Raises:
        gnmr.RunError: there is no such folder, or a comparison is damaged.
    """
    if not root.is_dir():
        raise RunError(f"{root} is no folder: give the one with the comparisons with --runs")
    found: dict[tuple[str, str], Finished] = {}
    for path in sorted(root.rglob("comparison.json"), key=lambda path: path.stat().st_mtime):
        comparison = runs.read_json(path)
        if not isinstance(comparison, dict) or comparison.get("schema") != 1:
            raise RunError(f"{path} is no comparison of schema 1")
        recipe = comparison["recipe"]
        if recipe["name"].startswith("paper/") and recipe.get("scale"):
            key = (recipe["name"], recipe["scale"])
            found[key] = Finished(path.parent, comparison, _changed(recipe))
    return found


def used_by(entry: Entry, done: Done) -> dict[tuple[str, str], Finished]:
    """Return the finished comparisons that a table can show."""
    return {key: each for key, each in done.items() if key[0] in entry.recipes}


def lines(entry: Entry, done: Done) -> tuple[list[str], list[list[str]]]:
    """Return a table as heading and lines: a line for each cell, the paper's value, and ours at each scale there is.

    Raises:
        gnmr.RunError: a run of a comparison is damaged.
    """
    scales = [scale for scale in SCALES if any(key[1] == scale for key in used_by(entry, done))]
    head = ["row", "column", "paper", *(f"ours, {scale.upper()} scale" for scale in scales)]
    found = []
    for cell in entry.cells:
        ours = [_ours(cell, done.get((cell.get("recipe", ""), scale))) for scale in scales]
        found.append([cell["row"], cell["column"], _shown(cell["paper"], cell), *ours])
    return head, found


def _entry(values: Mapping[str, Any]) -> Entry:
    shared = {key: values[key] for key in ("recipe", "arm", "metric", "digits") if key in values}
    cells = []
    for row in values.get("rows", ()):
        for column, number in zip(values["columns"], row["paper"], strict=False):  # the paper left the rest out
            cell = {**shared, **column, **row, "row": row["label"], "column": column["label"], "paper": number}
            cells.append(cell)
    recipes = values.get("recipes") or dict.fromkeys(cell["recipe"] for cell in cells if "recipe" in cell)
    figure = bool(values.get("figure", False))
    return Entry(
        tuple(values["numbers"]), values["title"], figure, tuple(recipes), tuple(cells), values.get("note", "")
    )


def _changed(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """Name what is other than in the packaged recipe, but for the choice of arms and seeds."""
    from gnmr.lab.recipe import load_recipe

    packaged = load_recipe(recipe["name"], scale=recipe["scale"]).model_dump(mode="json")
    names = []
    for section, mine in packaged.items():
        theirs = recipe.get(section)
        if section in ("arms", "description") or theirs == mine:
            continue
        if isinstance(mine, dict) and isinstance(theirs, dict):
            keys = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
            names += [f"{section}.{key}" for key in keys if (section, key) != ("run", "seeds")]
        else:
            names.append(section)
    return tuple(names)


def _ours(cell: Mapping[str, Any], done: Finished | None) -> str:
    rows: Sequence[Any] = () if done is None else done.comparison["rows"]
    row = next((row for row in rows if row["arm"] == cell.get("arm")), None)
    if done is None or row is None:
        return "-"
    if "at" in cell and cell["at"] < 1:
        return _with_error([_evaluated_at(done, name, cell["metric"], float(cell["at"])) for name in row["runs"]], cell)
    values = row["metrics"][cell["metric"]]["per_seed"]
    return _with_error([None if value is None else float(value) for value in values], cell)


def _evaluated_at(done: Finished, run: str, metric: str, share: float) -> float | None:
    """Return perplexity or loss of the evaluation nearest to a share of the run; None if none is near."""
    steps, key = done.comparison["recipe"]["run"]["steps"], f"eval_{metric.removeprefix('eval_')}"
    rows = [row for row in runs.read_metrics(done.folder / run / runs.METRICS) if key in row]
    nearest = min(rows, key=lambda row: abs(row["step"] / steps - share), default=None)
    if nearest is None or abs(nearest["step"] / steps - share) > _NEAR:
        return None
    return float(nearest[key])


def _with_error(values: Sequence[float | None], cell: Mapping[str, Any]) -> str:
    from gnmr.lab.metrics import aggregate

    total = aggregate(values)
    if total["mean"] is None:
        return "-"
    factor = _UNITS.get(cell.get("unit", ""), 1.0)
    mean = _shown(float(total["mean"]) * factor, cell)
    return mean if total["se"] is None else f"{mean} ± {_shown(float(total['se']) * factor, cell)}"


def _shown(value: float | str, cell: Mapping[str, Any]) -> str:
    if isinstance(value, str):
        return value
    unit = f" {cell['unit']}" if "unit" in cell and math.isfinite(value) else ""
    return f"{value:.{cell.get('digits', 2)}f}{unit}"
