"""``gnmr train``: one arm of a recipe, with one seed."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a value: policy.max_active=6. May be repeated.")
]


ScaleOption = Annotated[
    str | None, typer.Option(help="tiny, small or paper, for a recipe that has scales; the default is as printed.")
]


def train(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe's name, or a TOML file.")],
    arm: Annotated[
        str,
        typer.Option(
            help="high, low, exact, edges, gnmr, random, always, norm; a variant: gnmr:NAME; one matched: norm@gnmr; "
            "one steadied: low+zclip."
        ),
    ] = "gnmr",
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data order, faults and draws.")] = 0,
    overrides: Overrides = None,
    scale: ScaleOption = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; default: runs/RECIPE[/SCALE]/ARM-sSEED.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop the run in the folder first.")] = False,
) -> None:
    """Train one arm of a recipe. Ctrl-C saves a checkpoint and says how to go on."""
    from gnmr.lab.recipe import load_recipe
    from gnmr.lab.runs import run_name

    loaded = load_recipe(recipe, overrides or [], scale)
    folder = out or Path("runs") / loaded.folder / run_name(arm, seed)
    again = shlex.join(["gnmr", "train", recipe, "--arm", arm, "--seed", str(seed), "--out", str(folder), "--resume"])
    again += f" --scale {scale}" if scale else ""
    again += "".join(f" --set {shlex.quote(override)}" for override in overrides or [])

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from gnmr.lab.train import InterruptedRunError, train_arm

    console = Console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        # Without a terminal there is no bar; the lines of the evaluations say how far it is.
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("steps", total=loaded.run.steps)
            result = train_arm(
                loaded,
                arm,
                seed,
                folder,
                resume=resume,
                overwrite=overwrite,
                again=again,
                say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except InterruptedRunError as stop:
        typer.echo(str(stop))
        raise typer.Exit(128 + stop.signal) from None
    typer.echo(
        f"validation loss {float(result['eval_loss']):.4f}, perplexity {float(result['perplexity']):.3f}, "
        f"{result['tokens_per_second']:.0f} tokens/s; everything is in {folder}"
    )
