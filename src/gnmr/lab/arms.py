"""Arms: what decides which units are on the recovery path, what it is matched to, and what else steadies the run.

An arm is written ``trigger[:variant][@reference][+stabiliser...]``. A variant is one of the recipe's policies:
``gnmr:NAME`` runs with what the section ``[variants.NAME]`` has in place of ``[policy]``'s. One with a reference makes
as many units active at each step as the reference's run of the same seed did, so that the two differ in the choice
alone; the stabilisers (:mod:`gnmr.lab.stabilisers`) are the reference's too, for the same reason::

    exact                no cast at all: the 16-bit training that the paper's tables end with
    edges                the first and the last decoder layer for the whole run
    random@gnmr          as many units at the same steps as the arm gnmr, drawn at random ("random" is short for it)
    norm@gnmr            likewise, those of the largest gradient norm
    random@0.1           no reference: each unit with a chance of 10 % at each step
    low+zclip            the low-cost path everywhere, with ZClip on the gradients
    random@gnmr+zclip    with ZClip, as many units as the arm gnmr+zclip

``always``, ``norm``, ``gsnr``, ``jacobian`` and ``oracle`` take the top ``max_active`` at every step; ``gnmr`` and
``gap`` have a threshold and a lock; ``static`` is a profile. ``docs/triggers.md`` has a card of each.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gnmr import Controller, Policy
from gnmr.errors import RecipeError, RunError
from gnmr.lab import runs
from gnmr.lab.stabilisers import parse_stabilisers
from gnmr.trace import read_trace
from gnmr.triggers import AlwaysTop, Fixed, Gap, Random, Static, edge_units

Factory = Callable[..., Controller]


def _edges(n_units: int, policy: Policy, units: Sequence[str]) -> Controller:
    return Fixed(n_units, policy, units, recover=edge_units(units))


TRIGGERS: dict[str, Factory] = {
    "high": partial(Fixed, recover=True),
    "low": partial(Fixed, recover=False),
    "exact": partial(Fixed, recover=True),
    "edges": _edges,
    "gnmr": Controller,
    "random": Random,
    "always": partial(AlwaysTop, by="risk"),
    "norm": partial(AlwaysTop, by="norm"),
    "gap": Gap,
    "static": Static,
    "gsnr": partial(AlwaysTop, by="gsnr"),
    "jacobian": partial(AlwaysTop, by="jacobian"),
    "oracle": partial(AlwaysTop, by="oracle"),
}
"""What makes the controller of an arm."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "gap": ("threshold", "change", "every"),
    "static": ("share",),
    "oracle": ("every",),
}
"""The options of a trigger that a recipe may set; ``every`` is its signal's."""

MATCHED = ("random", "always", "norm", "oracle")
"""The triggers that can be matched to another arm."""

STATIC = ("high", "low", "exact", "edges")
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
        reference: the arm that it is matched to, with its stabilisers, or None.
        stabilisers: keys of :data:`gnmr.lab.stabilisers.SETTINGS`.
        rate: in place of a reference, the chance of each unit.
        variant: a key of the recipe's ``variants``, or None: its policy.
    """

    name: str
    trigger: str
    reference: str | None = None
    stabilisers: tuple[str, ...] = ()
    rate: float | None = None
    variant: str | None = None

    @property
    def exact(self) -> bool:
        """Whether the model runs without any cast."""
        return self.trigger == "exact"


def parse_arm(name: str) -> Arm:
    """Take the name of an arm apart.

    Raises:
        gnmr.RecipeError: an unknown trigger or stabiliser (the message suggests the right one), a trigger that cannot
            be matched, or stabilisers that cannot stand together.

    Examples:
        >>> parse_arm("norm@gnmr+zclip").reference
        'gnmr+zclip'
        >>> parse_arm("gnmr:half").variant
        'half'
    """
    choice, *added = name.split("+")
    head, at, reference = choice.partition("@")
    trigger, colon, variant = head.partition(":")
    if trigger not in TRIGGERS:
        close = difflib.get_close_matches(trigger, TRIGGERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RecipeError(f"unknown arm {name!r}{hint}; known are {', '.join(TRIGGERS)}, and {_matched()}")
    if trigger == "random" and _is_number(reference):
        rate = float(reference)
        if not 0 < rate <= 1:
            raise RecipeError(f"arm {name!r}: the rate must be in (0, 1]")
        return Arm(name, trigger, rate=rate, stabilisers=parse_stabilisers(name, added))
    if at and (trigger not in MATCHED or parse_arm(reference).reference is not None):
        raise RecipeError(f"arm {name!r} cannot be matched like this: {_matched()} are, to an arm that is not matched")
    if colon and (trigger in STATIC or not re.match(VARIANT, variant)):
        raise RecipeError(
            f"arm {name!r} is no variant: it is written TRIGGER:NAME, with the name of a section [variants.NAME]; "
            f"{', '.join(STATIC)} have none"
        )
    stabilisers = parse_stabilisers(name, added)
    if trigger == "random" and not at:
        reference = "gnmr"
    matched = "+".join((reference, *stabilisers)) if reference else None
    return Arm(name, trigger, matched, stabilisers, variant=variant or None)


def make_trigger(arm: Arm, options: Mapping[str, Any], seed: int, folder: Path) -> Factory:
    """Return what makes the controller of an arm.

    Args:
        arm: which.
        options: the recipe's, for this trigger.
        seed: of the draws.
        folder: of the run; a reference's run lies beside it.

    Raises:
        gnmr.RunError: the reference has not been run.
    """
    factory = partial(TRIGGERS[arm.trigger], **{key: value for key, value in options.items() if key != "every"})
    if arm.trigger == "random":
        factory = partial(factory, seed=seed)
    if arm.rate is not None:
        return partial(factory, rate=arm.rate)
    if arm.reference is None:
        return factory
    trace = folder.parent / runs.run_name(arm.reference, seed) / "trace.parquet"
    if not trace.exists():
        raise RunError(
            f"the arm {arm.name!r} takes as many units as the arm {arm.reference!r} had, and {trace} is not there: "
            f"run --arm {arm.reference} --seed {seed} first"
        )
    counts = read_trace(trace).active.sum(axis=1).tolist()
    return partial(factory, counts=counts)


def check_options(arms: Sequence[Arm], options: Mapping[str, Mapping[str, Any]], policy: Policy) -> None:
    """Check a recipe's options of triggers, such as ``{"gap": {"threshold": 0.02}}``.

    Args:
        arms: the recipe's.
        options: by trigger.
        policy: with its schedules in steps.

    Raises:
        gnmr.RecipeError: an unknown trigger or option.
        ValueError: an option out of range, or a policy that a trigger cannot work with.
    """
    for name, given in options.items():
        if name not in OPTIONS:
            raise RecipeError(f"triggers.{name}: only {', '.join(OPTIONS)} have options")
        for key in given:
            if key not in OPTIONS[name]:
                raise RecipeError(f"unknown key 'triggers.{name}.{key}'; known here: {', '.join(OPTIONS[name])}")
        every = given.get("every", 1)
        if not isinstance(every, int) or every < 1:
            raise RecipeError(f"triggers.{name}.every must be a whole number of steps >= 1, got {every!r}")
    for arm in arms:
        if arm.reference is None and arm.trigger != "random":
            make_trigger(arm, options.get(arm.trigger, {}), 0, Path())(1, policy, ["layers.0"])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _matched() -> str:
    return ", ".join(f"{trigger}@ARM" for trigger in MATCHED)
