"""``gnmr tables``: the paper's tables, which recipe makes each, and ours beside them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console


def tables(
    number: Annotated[str | None, typer.Argument(help="A table of the paper, such as 1.")] = None,
    runs: Annotated[Path, typer.Option(help="The folder with the comparisons.")] = Path("runs"),
) -> None:
    """List what the paper's tables and figures are made by, or print one beside what was measured here."""
    from rich.console import Console

    console = Console()
    if number is None:
        _list(console)
    else:
        _one(console, number, runs)


def _list(console: "Console") -> None:
    from rich.table import Table

    from gnmr.lab.paper import entries

    listed = Table("in the paper", "what it shows", "made by gnmr compare of")
    for entry in entries():
        listed.add_row(entry.name, entry.title, "\n".join(entry.recipes))
    console.print(listed)
    console.print(
        "gnmr compare RECIPE --scale tiny|small|paper makes them, gnmr tables N prints a table beside the paper's, and "
        "the report of a comparison has the figures.",
        highlight=False,
    )


def _one(console: "Console", number: str, root: Path) -> None:
    from rich.table import Table

    from gnmr.lab.paper import finished, lines, table, used_by

    entry = table(number)
    done = finished(root) if root.exists() or root != Path("runs") else {}
    head, body = lines(entry, done)
    shown = Table(*head, title=f"{entry.name}. {entry.title}", title_justify="left")
    for cells in body:
        shown.add_row(*cells)
    console.print(shown)
    used = used_by(entry, done)
    if not used:
        wanted = ", ".join(entry.recipes)
        console.print(f"No finished comparison under {root}: {wanted}", markup=False, highlight=False, soft_wrap=True)
    if any(scale != "paper" for _, scale in used):
        console.print(
            "TINY and SMALL are other models on other text for fewer tokens: compare our rows with each other, and "
            "never with the paper's column.",
            style="bold",
            highlight=False,
        )
    for (recipe, scale), each in used.items():
        changed = f"; NOT as packaged: {', '.join(each.changed)}" if each.changed else ""
        seeds = len(each.comparison["seeds"])
        line = f"{recipe}, {scale}: {each.folder}, {seeds} seed(s){changed}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if entry.note:
        console.print(entry.note, markup=False, highlight=False)
