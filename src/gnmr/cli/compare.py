"""``gnmr compare``: all arms of a recipe over its seeds."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gnmr.cli.train import Overrides, ScaleOption


def compare(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe's name, or a TOML file.")],
    overrides: Overrides = None,
    scale: ScaleOption = None,
    arms: Annotated[str | None, typer.Option(help="These arms: high,low+zclip,gnmr.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from 0 on.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop the runs in the folder first.")] = False,
    out: Annotated[Path | None, typer.Option(help="The comparison's folder; default: runs/RECIPE[/SCALE].")] = None,
) -> None:
    """Run the arms of a recipe over its seeds, and print one table. Goes on where it was stopped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from gnmr.lab.recipe import load_recipe

    given = list(overrides or [])
    if arms is not None:
        given.append(f"arms={[arm.strip() for arm in arms.split(',')]!r}")
    if seeds is not None:
        given.append(f"run.seeds={list(range(seeds))!r}")
    loaded = load_recipe(recipe, given, scale)
    folder = out or Path("runs") / loaded.folder

    from gnmr.lab.compare import compare_arms
    from gnmr.lab.tables import as_rich, differences, machine

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            comparison = compare_arms(
                loaded,
                folder,
                jobs=jobs,
                overwrite=overwrite,
                progress=lambda done, total, what: bar.update(
                    task, completed=done, total=total, description=what or "steps"
                ),
            )
    except KeyboardInterrupt:
        console.print(f"stopped, and saved: the same command goes on with what is in {folder}")
        raise typer.Exit(130) from None
    console.print(as_rich(comparison))
    for line in differences(comparison):
        console.print(line, highlight=False)
    console.print(machine(comparison), style="dim", highlight=False)
    console.print(f"tables: {folder}/comparison.json, .csv, .md", soft_wrap=True, highlight=False)
    if find_spec("plotly") is None:
        console.print("no report was written: it needs plotly, pip install 'gnmr[report]'")
        return
    from gnmr.report import write_report

    console.print(f"report: {write_report(folder)}", soft_wrap=True, highlight=False)
