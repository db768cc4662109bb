"""``gnmr recipes``: what is packaged, and what one of them comes to."""

from itertools import groupby
from typing import Annotated

import typer

from gnmr.cli.train import ScaleOption


def recipes(
    recipe: Annotated[str | None, typer.Argument(help="Print this recipe as TOML, every default written out.")] = None,
    scale: ScaleOption = None,
) -> None:
    """List the packaged recipes, or print one of them whole."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if recipe is not None:
        from gnmr.lab.recipe import load_recipe

        typer.echo(load_recipe(recipe, scale=scale).to_toml(), nl=False)
        return
    if scale is not None:
        raise ValueError(f"--scale {scale} needs the name of a recipe: gnmr recipes paper/a-60m --scale {scale}")
    from gnmr.lab.library import list_recipes

    console = Console()
    for folder, group in groupby(list_recipes().items(), key=lambda item: item[0].rpartition("/")[0]):
        title = f"{folder}: with --scale tiny, small or paper; gnmr tables has what each makes" if folder else None
        table = Table("recipe", "what it is", title=title, title_justify="left")
        for name, description in group:
            table.add_row(name, escape(description))
        console.print(table)
