"""Arms: what decides which units are on the recovery path, what it is matched to, and what else steadies the run.

An arm is written ``trigger[@reference][+stabiliser...]``. One with a reference makes as many units active at each step
as the reference's run of the same seed did, so that the two differ in the choice alone; the stabilisers
(:mod:`gnmr.lab.stabilisers`) are the reference's too, for the same reason::

    edges                the first and the last decoder layer for the whole run
    random@gnmr          as many units at the same steps as the arm gnmr, drawn at random ("random" is short for it)
    norm@gnmr            likewise, those of the largest gradient norm
    low+zclip            the low-cost path everywhere, with ZClip on the gradients
    random@gnmr+zclip    with ZClip, as many units as the arm gnmr+zclip
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gnmr import Controller, Policy
from gnmr.errors import RecipeError, RunError
from gnmr.lab import runs
from gnmr.lab.stabilisers import parse_stabilisers
from gnmr.trace import read_trace
from gnmr.triggers import AlwaysTop, Fixed, Random, edge_units

Factory = Callable[..., Controller]


def _edges(n_units: int, policy: Policy, units: Sequence[str]) -> Controller:
    return Fixed(n_units, policy, units, recover=edge_units(units))


TRIGGERS: dict[str, Factory] = {
    "high": partial(Fixed, recover=True),
    "low": partial(Fixed, recover=False),
    "edges": _edges,
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
        reference: the arm that it is matched to, with its stabilisers, or None.
        stabilisers: keys of :data:`gnmr.lab.stabilisers.SETTINGS`.
    """

    name: str
    trigger: str
    reference: str | None = None
    stabilisers: tuple[str, ...] = ()


def parse_arm(name: str) -> Arm:
    """Take the name of an arm apart.

    Raises:
        gnmr.RecipeError: an unknown trigger or stabiliser (the message suggests the right one), a trigger that cannot
            be matched, or stabilisers that cannot stand together.

    Examples:
        >>> parse_arm("norm@gnmr+zclip")
        Arm(name='norm@gnmr+zclip', trigger='norm', reference='gnmr+zclip', stabilisers=('zclip',))
    """
    choice, *added = name.split("+")
    trigger, at, reference = choice.partition("@")
    if trigger not in TRIGGERS:
        close = difflib.get_close_matches(trigger, TRIGGERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RecipeError(f"unknown arm {name!r}{hint}; known are {', '.join(TRIGGERS)}, and {_matched()}")
    if at and (trigger not in MATCHED or parse_arm(reference).reference is not None):
        raise RecipeError(f"arm {name!r} cannot be matched like this: {_matched()} are, to an arm that is not matched")
    stabilisers = parse_stabilisers(name, added)
    if trigger == "random" and not at:
        reference = "gnmr"
    return Arm(name, trigger, "+".join((reference, *stabilisers)) if reference else None, stabilisers)


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
