"""The process of one run in a comparison: a fork of a server that has torch and transformers imported already."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

PRELOAD = ("gnmr.lab.train",)
"""What the server imports, once for all runs: it takes longer than a short run's training."""


def run_arm(recipe: Path, arm: str, seed: int, folder: Path, environment: Mapping[str, str]) -> None:
    """Train one run and leave the process, with exit code 0 where it came to its end.

    Args:
        recipe: its file.
        arm: which; see :mod:`gnmr.lab.arms`.
        seed: of the run.
        folder: of the run; all that it prints goes into ``run.log`` there.
        environment: variables that this process shall see.
    """
    from gnmr.lab.runs import LOG

    os.environ.update(environment)
    if hasattr(os, "setsid"):
        os.setsid()  # the terminal's Ctrl-C is for the comparison, which then asks its runs to save
    with (folder / LOG).open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    code = _train(recipe, arm, seed, folder)
    sys.stdout.flush()
    sys.exit(code)


def _train(recipe: Path, arm: str, seed: int, folder: Path) -> int:
    """Train, going on where an earlier process stopped; what gnmr has to complain about is one line."""
    from gnmr.errors import GnmrError
    from gnmr.lab.recipe import load_recipe
    from gnmr.lab.runs import RECIPE
    from gnmr.lab.train import InterruptedRunError, train_arm

    begun = (folder / RECIPE).exists()
    try:
        train_arm(load_recipe(str(recipe)), arm, seed, folder, resume=begun, again="the same gnmr compare")
    except InterruptedRunError as stop:
        print(stop)  # noqa: T201 (the run's log)
        return 128 + stop.signal
    except GnmrError as error:
        print(f"error: {error}")  # noqa: T201 (the run's log)
        return 2
    return 0
