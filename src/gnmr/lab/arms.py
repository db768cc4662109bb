"""Arms: what decides which units are on the recovery path, and what it is matched to.

An arm is written ``trigger`` or ``trigger@reference``. One with a reference makes as many units active at each step
as the reference's run of the same seed did, so that the two differ in the choice alone::

    random@gnmr    as many units at the same steps as the arm gnmr, drawn at random ("random" is short for it)
    norm@gnmr      likewise, those of the largest gradient norm
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gnmr import Controller
from gnmr.errors import RecipeError, RunError
from gnmr.lab import runs
from gnmr.trace import read_trace
from gnmr.triggers import AlwaysTop, Fixed, Random

Factory = Callable[..., Controller]

TRIGGERS: dict[str, Factory] = {
    "high": partial(Fixed, recover=True),
    "low": partial(Fixed, recover=False),
    "gnmr": Controller,
    "random": Random,
    "always": partial(AlwaysTop, by="risk"),
    "norm": partial(AlwaysTop, by="norm"),
}
"""What makes the controller of an arm."""

MATCHED = ("random", "norm")
"""The triggers that can be matched to another arm."""

DEFAULT = ("high", "low", "gnmr", "random", "always", "norm")
"""The arms of a recipe that names none."""


@dataclass(frozen=True)
class Arm:
    """An arm, taken apart.

    Attributes:
        name: as it was written, and as its folder is called.
        trigger: a key of :data:`TRIGGERS`.
        reference: the arm that it is matched to, or None.
    """

    name: str
    trigger: str
    reference: str | None = None


def parse_arm(name: str) -> Arm:
    """Take the name of an arm apart.

    Raises:
        gnmr.RecipeError: an unknown trigger (the message suggests the right one), or one that cannot be matched.

    Examples:
        >>> parse_arm("norm@gnmr")
        Arm(name='norm@gnmr', trigger='norm', reference='gnmr')
    """
    trigger, at, reference = name.partition("@")
    if trigger not in TRIGGERS:
        close = difflib.get_close_matches(trigger, TRIGGERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RecipeError(f"unknown arm {name!r}{hint}; known are {', '.join(TRIGGERS)}, and {_matched()}")
    if at and (trigger not in MATCHED or parse_arm(reference).reference is not None):
        raise RecipeError(f"arm {name!r} cannot be matched like this: {_matched()} are, to an arm that is not matched")
    if trigger == "random" and not at:
        reference = "gnmr"
    return Arm(name, trigger, reference or None)


def make_trigger(arm: Arm, seed: int, folder: Path) -> Factory:
    """Return what makes the controller of an arm.

    Args:
        arm: which.
        seed: of the draws.
        folder: of the run; a reference's run lies beside it.

    Raises:
        gnmr.RunError: the reference has not been run.
    """
    factory = TRIGGERS[arm.trigger]
    if arm.reference is None:
        return factory
    trace = folder.parent / runs.run_name(arm.reference, seed) / "trace.parquet"
    if not trace.exists():
        raise RunError(
            f"the arm {arm.name!r} takes as many units as the arm {arm.reference!r} had, and {trace} is not there: "
            f"run --arm {arm.reference} --seed {seed} first"
        )
    counts = read_trace(trace).active.sum(axis=1).tolist()
    return partial(factory, counts=counts, seed=seed) if arm.trigger == "random" else partial(factory, counts=counts)


def _matched() -> str:
    return ", ".join(f"{trigger}@ARM" for trigger in MATCHED)
