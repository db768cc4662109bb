"""Seeded faults in the low-cost path of one unit at a time, for a stretch of steps.

They stand for what goes wrong in real runs, and only the low-cost path has them: a unit on its recovery path is
unharmed. Three act on the gradient dL/dy that a unit's products read, so that its weight gradient and what it passes
on are both wrong; under :class:`gnmr.Simulated` right after the cast of dL/dy, as a wrong scale of it would
(``at="cast"``), or before the path reads it, where no cast can see that it is wrong (``at="output"``):

    gradient_scale   dL/dy is ``factor`` times too large
    saturation       dL/dy is clipped at 1/``factor`` of its largest magnitude
    nan              one element of dL/dy is NaN

and one on the scales of delayed scaling, for every tensor that the path casts:

    stale_scale      the scale is ``factor`` times too small: what is larger than 1/``factor`` of the amax saturates
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnmr import Paths, Simulated
from gnmr.errors import RecipeError
from gnmr.paths.base import LOW, OperatorPaths
from gnmr.pytorch.units import Operator

KINDS = ("gradient_scale", "stale_scale", "saturation", "nan")


class Fault(NamedTuple):
    """A unit's low-cost path is faulty from step ``first`` to step ``last``, both included."""

    first: int
    last: int
    unit: int


def schedule(*, n_units: int, steps: int, first_step: int, every: int, duration: int, seed: int) -> tuple[Fault, ...]:
    """Draw the faults of a run: every ``every`` steps, one random unit for ``duration`` steps.

    Examples:
        >>> faults = schedule(n_units=4, steps=100, first_step=50, every=25, duration=10, seed=0)
        >>> [(fault.first, fault.last) for fault in faults]
        [(50, 59), (75, 84), (100, 100)]
    """
    draw = np.random.default_rng([seed, 1])
    return tuple(
        Fault(first, min(first + duration - 1, steps), int(draw.integers(n_units)))
        for first in range(first_step, steps + 1, every)
    )


def faulty(faults: Sequence[Fault], steps: int, n_units: int) -> NDArray[np.bool_]:
    """Return (steps, N) bool: row t - 1 says whose low-cost path is faulty at step t."""
    found = np.zeros((steps, n_units), dtype=np.bool_)
    for fault in faults:
        found[fault.first - 1 : fault.last, fault.unit] = True
    return found


def stressed(kind: type[Paths], fault: str, factor: float, at: str | None = None) -> type[Any]:
    """Return a subclass of a path class whose low-cost path suffers the faults in its ``faults``.

    Args:
        kind: the path class.
        fault: one of :data:`KINDS`.
        factor: how bad it is, > 0.
        at: ``"cast"`` or ``"output"``; None is the cast where the path class has one to harm, else the output.

    Raises:
        gnmr.RecipeError: the class does not offer what the fault needs.
    """
    simulated = issubclass(kind, Simulated)
    if simulated and at != "output":
        base: type[Any] = _StressedCasts
    elif at == "cast" or (fault == "stale_scale" and not simulated) or not issubclass(kind, OperatorPaths):
        raise RecipeError(f"stress.kind = {fault!r} cannot act on {kind.__name__}: it needs 'simulated' paths")
    elif fault == "stale_scale":
        raise RecipeError("stress.kind = 'stale_scale' is a fault of casts, which stress.at = 'output' leaves alone")
    else:
        base = _StressedOutputs
    return type(f"Stressed{kind.__name__}", (base, kind), {"fault": fault, "factor": factor})


class _Stressed:
    """When which unit is faulty; mixed in before a path class."""

    fault: str
    factor: float
    faults: Sequence[Fault] = ()
    _now = 1

    def is_faulty(self, unit: int) -> bool:
        return any(each.unit == unit and each.first <= self._now <= each.last for each in self.faults)

    def end_step(self, step: int) -> None:
        super().end_step(step)  # type: ignore[misc]
        self._now = step + 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "stress_step": self._now}  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        rest = dict(state_dict)
        self._now = int(rest.pop("stress_step"))
        super().load_state_dict(rest)  # type: ignore[misc]


class _StressedCasts(_Stressed):
    """Faults of the casts of :class:`gnmr.Simulated`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.fault == "stale_scale" and self.scaling != "delayed":  # type: ignore[attr-defined]
            raise RecipeError("stress.kind = 'stale_scale' needs paths.scaling = 'delayed': only that keeps a scale")
        if self.fault != "stale_scale" and "dy" not in self.tensors:  # type: ignore[attr-defined]
            raise RecipeError(f"stress.kind = {self.fault!r} acts on the cast of 'dy', which paths.tensors lacks")

    def cast(self, value: Tensor, at: Any) -> Tensor:
        if at.path != LOW or not self.is_faulty(at.unit):
            return super().cast(value, at)  # type: ignore[misc]
        if self.fault == "stale_scale":
            stale = replace(at, scale=at.scale / self.factor)
            return super().cast(value, stale)  # type: ignore[misc]
        found: Tensor = super().cast(value, at)  # type: ignore[misc]
        return harm(found, self.fault, self.factor) if at.role == "dy" else found


class _StressedOutputs(_Stressed):
    """Faults of the gradient that reaches a unit's output, for any path class."""

    def forward_of(self, operator: Operator, route: Any) -> "partial[Tensor]":
        inner = super().forward_of(operator, route)  # type: ignore[misc]
        return partial(_forward, self, operator, route, inner)


def _forward(paths: _Stressed, operator: Operator, route: Any, inner: "partial[Tensor]", x: Tensor) -> Tensor:
    y = inner(x)
    if route.recover or not operator.module.training or not paths.is_faulty(route.unit):
        return y
    return _Harm.apply(y, paths.fault, paths.factor)  # type: ignore[no-untyped-call]


def harm(dy: Tensor, fault: str, factor: float) -> Tensor:
    """Return a gradient as a fault leaves it."""
    if fault == "gradient_scale":
        return dy * factor
    if fault == "saturation":
        limit = dy.abs().amax() / factor if dy.numel() else dy.new_zeros(())
        return dy.clamp(-limit, limit)
    harmed = dy.clone()
    harmed.view(-1)[:1] = torch.nan
    return harmed


class _Harm(torch.autograd.Function):
    """The identity, with a faulty gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, fault: str, factor: float) -> Tensor:
        ctx.fault, ctx.factor = fault, factor
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return harm(grads[0], ctx.fault, ctx.factor), None, None
