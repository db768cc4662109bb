"""The process of one run in a comparison: ``python -m gnmr.lab.worker RECIPE.toml ARM SEED FOLDER``."""

import sys
from pathlib import Path


def main() -> int:
    """Train, going on where an earlier process stopped; what gnmr has to complain about is one line."""
    from gnmr.errors import GnmrError
    from gnmr.lab.recipe import load_recipe
    from gnmr.lab.runs import RECIPE
    from gnmr.lab.train import InterruptedRunError, train_arm

    recipe, arm, seed, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    begun = (folder / RECIPE).exists()
    try:
        train_arm(load_recipe(recipe), arm, seed, folder, resume=begun, again="the same gnmr compare")
    except InterruptedRunError as stop:
        print(stop)  # noqa: T201 (the run's log)
        return 128 + stop.signal
    except GnmrError as error:
        print(f"error: {error}")  # noqa: T201 (the run's log)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
