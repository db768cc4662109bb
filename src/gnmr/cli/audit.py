"""``gnmr audit``: measure what each unit's low-cost path does, and how well the triggers rank it."""

from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from gnmr.cli.train import Overrides, ScaleOption


def audit(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe's name, or a TOML file.")],
    steps: Annotated[str | None, typer.Option(help="Steps to audit: 50,100; default: five over the run.")] = None,
    arm: Annotated[str, typer.Option(help="The arm that trains; its trigger reads the norms alone.")] = "gnmr",
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data order, faults and draws.")] = 0,
    micro_batches: Annotated[int, typer.Option(min=1, help="The last micro-batches that gaps are measured on.")] = 4,
    overrides: Overrides = None,
    scale: ScaleOption = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; default: runs/RECIPE[/SCALE]-audit/ARM-sSEED.")
    ] = None,
) -> None:
    """Train one arm, run both paths of each unit on the same micro-batches at some steps, and rank the triggers."""
    from gnmr.lab.recipe import load_recipe
    from gnmr.lab.runs import run_name

    loaded = load_recipe(recipe, overrides or [], scale)
    total = loaded.run.steps
    at = _steps(steps) if steps is not None else sorted({max(1, total * part // 5) for part in range(1, 6)})
    folder = out or Path("runs") / f"{loaded.folder}-audit" / run_name(arm, seed)

    from rich.console import Console

    from gnmr.lab.audit import FILE, audit_run

    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    found = audit_run(loaded, folder, at=at, arm=arm, seed=seed, micro_batches=micro_batches, say=say)
    _print(console, found)
    say(f"all units and steps: {folder / FILE}")


def _steps(text: str) -> list[int]:
    try:
        return [int(step) for step in text.split(",")]
    except ValueError:
        raise ValueError(f"--steps takes whole numbers with commas between, such as 50,100, got {text!r}") from None


def _print(console: Any, found: dict[str, Any]) -> None:
    from rich.table import Table

    keys = {"absolute": "gap", "relative": "relative", "bias": "bias", "own": "own", "loss": "loss"}
    units = Table(title=f"gaps of {found['recipe']}, arm {found['arm']}: means over the steps", title_justify="left")
    parts = zip(*(name.split(".")[:-1] for name in found["units"]), strict=False)
    shared = "".join(f"{each[0]}." for each in takewhile(lambda each: len(set(each)) == 1, parts))
    units.add_column(f"unit {shared}…" if shared else "unit", overflow="fold")
    for heading in keys.values():
        units.add_column(heading, justify="right", no_wrap=True)
    means = {key: _means([step["gaps"][key] for step in found["steps"]]) for key in keys}
    order = sorted(range(len(found["units"])), key=lambda unit: -means["absolute"][unit])
    for unit in order[: 2 * max(1, found["max_active"])]:
        units.add_row(found["units"][unit].removeprefix(shared), *(f"{means[key][unit]:.2g}" for key in keys))
    console.print(units)
    ranking = Table(title=f"how triggers rank the gaps (chance: {100 * found['chance']:.0f} %)", title_justify="left")
    ranking.add_column("score", no_wrap=True)
    for heading in ("rank", "precision (%)", "gain (%)"):
        ranking.add_column(heading, justify="right", no_wrap=True)
    for name, values in found["ranking"].items():
        shares = (f"{100 * values[key]:.0f}" for key in ("precision", "gain"))
        ranking.add_row(name, f"{values['rank']:+.2f}", *shares)
    console.print(ranking)
    again = "no such event" if found["persistence"] is None else f"{found['persistence']:.2f}"
    console.print(f"persistence π of a risk above 1: {again}")


def _means(rows: list[list[Any]]) -> list[float]:
    return [sum(float(value) for value in column) / len(column) for column in zip(*rows, strict=True)]
