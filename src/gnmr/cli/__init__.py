"""The command line: one small file a command, each a function that imports what it needs when it runs."""

import sys


def entry() -> None:
    """Run ``gnmr``; what gnmr itself has to complain about is one line, not a traceback."""
    try:
        from gnmr.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit("the command line needs typer and rich: pip install 'gnmr[cli]'")
    app()
