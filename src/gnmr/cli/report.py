"""``gnmr report``: the HTML report of a comparison, again."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a comparison, such as runs/demo.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: report.html in the folder.")] = None,
) -> None:
    """Write the HTML report of a finished comparison."""
    from gnmr.report import write_report

    typer.echo(write_report(folder, out))
