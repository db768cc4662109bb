"""What the controller is allowed to do, and when: thresholds, window, lock and the hard cap."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Self

Schedule = tuple[tuple[float, float], ...]
"""Piecewise constant: pairs of (first step >= 1, value) or (fraction of the run in [0, 1), value)."""


_MOST = {"window": 100_000, "lock_steps": 2**31 - 1}
"""A window is kept in memory, one row of all units for each of its steps; a lock is a 32-bit number."""


@dataclass(frozen=True, slots=True)
class Ema:
    """A long-horizon mean that forgets: the cumulative mean until it has seen ``1/(1 - decay)`` norms,
    an exponential moving average after (so that the first norm is no special case).

    Args:
        decay: in (0, 1); the weight of the old mean.

    Raises:
        ValueError: ``decay`` is outside (0, 1).
    """  # noqa: D205

    decay: float

    def __post_init__(self) -> None:
        if not _is_real(self.decay) or not 0 < self.decay < 1:
            raise ValueError(f"Ema(decay) must be in (0, 1), got {self.decay!r}")


@dataclass(frozen=True, slots=True)
class Window:
    """A long-horizon mean over the last ``length`` norms.

    Raises:
        ValueError: ``length`` is not an int of at least 1.
    """

    length: int

    def __post_init__(self) -> None:
        if not _is_int(self.length) or not 1 <= self.length <= _MOST["window"]:
            raise ValueError(f"Window(length) must be an int in 1 to {_MOST['window']}, got {self.length!r}")


History = str | Ema | Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The controller's settings (paper, Algorithms 1 and 2), checked when they are made.

    Args:
        max_active: maxO, the hard cap on the active set; more than there are units means all of them.
        alpha: the GNMR threshold, > 0; a number or a schedule. Below 1 it is legal, and means
            near-permanent recovery.
        beta: the ΔGNMR threshold, > 0; a number, a schedule, or ``None``: ΔGNMR unused.
        window: δ, how many past GNMR values ΔGNMR looks back on.
        lock_steps: T_lock, how many updates a unit stays a candidate after its last exceedance.
        warmup_steps: steps 1..W run wholly on the recovery path, outside the cap.
        history: the long-horizon mean: ``"cumulative"`` (the paper), :class:`Ema` or :class:`Window`.
        eps: the paper's eps.

    A schedule is a tuple of pairs ``(first, value)``: all firsts ints from 1 on (steps), or all floats
    in [0, 1) from 0.0 on (fractions of the run, for :meth:`resolve`), strictly increasing.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and the rule.

    Examples:
        >>> Policy(max_active=6, alpha=((0.0, 1.5), (0.025, 1.1)), beta=None).resolve(800).alpha
        ((1, 1.5), (21, 1.1))
        >>> Policy(max_active=4, alpha=0)
        Traceback (most recent call last):
        ...
        ValueError: Policy.alpha must be a finite number > 0 or a schedule of them, got 0
    """

    max_active: int
    alpha: float | Schedule = 1.5
    beta: float | Schedule | None = 1.3
    window: int = 5
    lock_steps: int = 1
    warmup_steps: int = 0
    history: History = field(default="cumulative")
    eps: float = 1e-12

    def __post_init__(self) -> None:
        for name, least in (("max_active", 0), ("window", 1), ("lock_steps", 0), ("warmup_steps", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise ValueError(f"Policy.{name} must be an int >= {least}, got {value!r}")
            most = _MOST.get(name)
            if most is not None and value > most:
                raise ValueError(f"Policy.{name} must be <= {most}, got {value!r}")
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "alpha", _threshold("alpha", self.alpha))
        if self.beta is not None:
            object.__setattr__(self, "beta", _threshold("beta", self.beta))
        if self.history != "cumulative" and not isinstance(self.history, Ema | Window):
            raise ValueError(f"Policy.history must be 'cumulative', Ema(decay) or Window(length), got {self.history!r}")
        if not _is_real(self.eps) or not 0 < self.eps < math.inf:
            raise ValueError(f"Policy.eps must be a finite number > 0, got {self.eps!r}")

    @property
    def resolved(self) -> bool:
        """Whether every schedule is in steps, so that the policy can run."""
        return not any(_fractional(value) for value in (self.alpha, self.beta))

    def resolve(self, total_steps: int) -> Self:
        """Turn fractions of a run into steps: fraction f of T begins at ``floor(f * T) + 1``.

        Raises:
            ValueError: ``total_steps`` is no int >= 1, or two pieces of a schedule would begin at the
                same step of so short a run.
        """
        if not _is_int(total_steps) or total_steps < 1:
            raise ValueError(f"total_steps must be an int >= 1, got {total_steps!r}")
        beta = None if self.beta is None else _in_steps("beta", self.beta, total_steps)
        return replace(self, alpha=_in_steps("alpha", self.alpha, total_steps), beta=beta)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict, the inverse of :meth:`from_dict`."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("alpha", "beta"):
            if isinstance(values[name], tuple):
                values[name] = [list(pair) for pair in values[name]]
        if isinstance(self.history, Ema):
            values["history"] = {"ema": self.history.decay}
        elif isinstance(self.history, Window):
            values["history"] = {"window": self.history.length}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a policy from what :meth:`to_dict` returned, or a recipe holds.

        Raises:
            ValueError: an unknown field, a missing ``max_active``, or a value out of range.
        """
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"Policy has no field {unknown[0]!r}; its fields are {', '.join(known)}")
        if "max_active" not in values:
            raise ValueError("Policy.max_active is required: the hard cap on the active set")
        given = dict(values)
        if isinstance(given.get("history"), Mapping):
            given["history"] = _history(given["history"])
        return cls(**given)


def breakpoints(value: float | Schedule) -> Schedule:
    """Return a threshold as a schedule: a plain number holds from step 1 on."""
    return value if isinstance(value, tuple) else ((1, value),)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _history(value: Mapping[str, Any]) -> History:
    if set(value) == {"ema"}:
        return Ema(value["ema"])
    if set(value) == {"window"}:
        return Window(value["window"])
    raise ValueError(
        f"Policy.history must be 'cumulative', {{'ema': decay}} or {{'window': length}}, got {dict(value)!r}"
    )


def _threshold(name: str, value: object) -> float | Schedule:
    if _is_real(value):
        if not 0 < value < math.inf:  # type: ignore[operator]
            raise ValueError(f"Policy.{name} must be a finite number > 0 or a schedule of them, got {value!r}")
        return float(value)  # type: ignore[arg-type]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"Policy.{name} must be a number or a schedule ((first, value), ...), got {value!r}")
    return _schedule(name, value)


def _schedule(name: str, value: Sequence[Any]) -> Schedule:
    rule = f"Policy.{name} = {value!r} is no schedule: "
    pairs = [tuple(pair) if isinstance(pair, Sequence) else (pair,) for pair in value]
    for pair in pairs:
        if len(pair) != 2 or not all(_is_real(x) and math.isfinite(x) for x in pair):
            raise ValueError(rule + f"{pair!r} is not a pair (first, value) of finite numbers")
        if pair[1] <= 0:
            raise ValueError(rule + f"the value {pair[1]!r} must be > 0")
    firsts = [pair[0] for pair in pairs]
    steps = [_is_int(first) for first in firsts]
    if any(steps) and not all(steps):
        raise ValueError(rule + "steps (ints) and fractions (floats) are not mixed")
    if firsts[0] != (1 if steps[0] else 0):
        raise ValueError(rule + f"it begins at {firsts[0]!r}, and must at step 1 or fraction 0.0")
    if any(b <= a for a, b in pairwise(firsts)):
        raise ValueError(rule + "its firsts must strictly increase")
    if not steps[0] and firsts[-1] >= 1:
        raise ValueError(rule + f"a fraction must be below 1, got {firsts[-1]!r}")
    kind = int if steps[0] else float
    return tuple((kind(first), float(number)) for first, number in pairs)


def _fractional(value: float | Schedule | None) -> bool:
    return isinstance(value, tuple) and isinstance(value[0][0], float)


def _in_steps(name: str, value: float | Schedule, total_steps: int) -> float | Schedule:
    if not isinstance(value, tuple) or not _fractional(value):
        return value
    found = tuple((math.floor(first * total_steps) + 1, number) for first, number in value)
    for (a, _), (b, _) in pairwise(found):
        if a == b:
            raise ValueError(
                f"Policy.{name} = {value!r} has two pieces that begin at step {a} of a run of "
                f"{total_steps} steps; give it in steps, or run longer"
            )
    return found
