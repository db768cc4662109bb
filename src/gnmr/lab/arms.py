"""Arms: what decides which units are on the recovery path, and what it is matched to.

An arm is written ``trigger[:variant][@reference]``. A variant is one of the recipe's policies: ``gnmr:NAME`` runs with
what the section ``[variants.NAME]`` has in place of ``[policy]``'s. An arm with a reference makes as many units active
at each step as the reference's run of the same seed did, so that the two differ in the choice alone::

    random@gnmr    as many units at the same steps as the arm gnmr, drawn at random ("random" is short for it)
    norm@gnmr      likewise, those of the largest gradient norm

Three are static, and know no policy: ``low`` and ``high`` have every unit on that path, and ``exact`` is the model
without any cast, the 16-bit training that the paper's tables end with.
"""

import difflib
import re
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
    "exact": partial(Fixed, recover=True),
    "gnmr": Controller,
    "random": Random,
    "always": partial(AlwaysTop, by="risk"),
    "norm": partial(AlwaysTop, by="norm"),
}
"""What makes the controller of an arm."""

MATCHED = ("random", "norm")
"""The triggers that can be matched to another arm."""

STATIC = ("high", "low", "exact")
"""The triggers that no policy moves."""

VARIANT = r"^[A-Za-z0-9_-]+$"
"""What a variant is called: a bare key of TOML."""

DEFAULT = ("high", "low", "gnmr", "random", "always", "norm")
"""The arms of a recipe that names none."""


@dataclass(frozen=True)
class Arm:
    """An arm, taken apart.

    Attributes:
        name: as it was written, and as its folder is called.
        trigger: a key of :data:`TRIGGERS`.
        reference: the arm that it is matched to, or None.
        variant: a key of the recipe's ``variants``, or None: its policy.
    """

    name: str
    trigger: str
    reference: str | None = None
    variant: str | None = None

    @property
    def exact(self) -> bool:
        """Whether the model runs without any cast."""
        return self.trigger == "exact"


def parse_arm(name: str) -> Arm:
    """Take the name of an arm apart.

    Raises:
        gnmr.RecipeError: an unknown trigger (the message suggests the right one), or one that cannot be matched.

    Examples:
        >>> parse_arm("norm@gnmr")
        Arm(name='norm@gnmr', trigger='norm', reference='gnmr', variant=None)
        >>> parse_arm("gnmr:half").variant
        'half'
    """
    head, at, reference = name.partition("@")
    trigger, colon, variant = head.partition(":")
    if trigger not in TRIGGERS:
        close = difflib.get_close_matches(trigger, TRIGGERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RecipeError(f"unknown arm {name!r}{hint}; known are {', '.join(TRIGGERS)}, and {_matched()}")
    if at and (trigger not in MATCHED or parse_arm(reference).reference is not None):
        raise RecipeError(f"arm {name!r} cannot be matched like this: {_matched()} are, to an arm that is not matched")
    if colon and (trigger in STATIC or not re.match(VARIANT, variant)):
        raise RecipeError(
            f"arm {name!r} is no variant: it is written TRIGGER:NAME, with the name of a section [variants.NAME]; "
            f"{', '.join(STATIC)} have none"
        )
    if trigger == "random" and not at:
        reference = "gnmr"
    return Arm(name, trigger, reference or None, variant or None)


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
