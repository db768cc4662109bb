"""The ``gnmr`` application: to add a command, write its function in a file of its own and register it here."""

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console

from gnmr.cli.audit import audit
from gnmr.cli.compare import compare
from gnmr.cli.doctor import doctor
from gnmr.cli.evaluate import evaluate
from gnmr.cli.recipes import recipes
from gnmr.cli.replay import replay
from gnmr.cli.report import report
from gnmr.cli.suggest import suggest
from gnmr.cli.tables import tables
from gnmr.cli.train import train
from gnmr.errors import GnmrError

app = typer.Typer(
    name="gnmr",
    help="A runtime stability controller for low-precision training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from gnmr import __version__

        typer.echo(f"gnmr {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def _complain(message: str) -> None:
    console = Console(stderr=True)
    console.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


def _plainly(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print what gnmr complains about as one line on stderr, and exit with 2."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (GnmrError, ValueError) as error:
            _complain(str(error))
            raise typer.Exit(2) from None
        except ModuleNotFoundError as error:
            _complain(f"this command needs {error.name}: pip install 'gnmr[all]'")
            raise typer.Exit(2) from None

    return run


for _command in (train, compare, evaluate, audit, replay, suggest, report, recipes, tables, doctor):
    app.command()(_plainly(_command))
