"""Paths from the user's own pieces: two functions, or two context managers, for all units."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnmr.paths.base import HIGH, LOW, OperatorPaths
from gnmr.pytorch.units import Operator, Unit

OperatorForward = Callable[[Operator, Tensor], Tensor]
"""``forward(operator, x) -> y``: runs a linear operator; ``operator.plain(x)`` is the model's own way."""

ContextFactory = Callable[[], AbstractContextManager[Any]]
"""``context()``: makes the context manager that one forward of an operator runs in."""


class CustomPaths(OperatorPaths):
    """Each path is a function, a context manager, or (where nothing is given) the operator as it is.

    A *function* ``forward(operator, x) -> y`` replaces an operator's forward. ``operator`` is a
    :class:`gnmr.pytorch.units.Operator`: its ``weight`` is (out, in) also for GPT-2's ``Conv1D``, and
    ``operator.plain(x)`` runs it as the model would.

    A *context* is a function without arguments that makes a context manager; the operator's own forward runs
    in it, and so does its recompute under activation checkpointing (which may leave it by an exception). The
    backward runs outside.

    Args:
        low_forward: function of the low-cost path.
        high_forward: function of the recovery path.
        low_context: context of the low-cost path.
        high_context: context of the recovery path.
        low_bits: bits that the low-cost path keeps for backward of each element of an operator's input
            (Appendix D of the paper); None: as many as the input has.
        high_bits: likewise of the recovery path.

    Raises:
        ValueError: both a function and a context for one path, nothing for either path, bits below 0.
        TypeError: something that cannot be called, or a context manager in place of what makes one.

    Examples:
        >>> import torch, gnmr
        >>> from torch import nn
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(2, 1)})])})
        >>> def rounded(operator, x):
        ...     return operator.plain(x.bfloat16().to(x.dtype))
        >>> paths = gnmr.CustomPaths(low_forward=rounded)
        >>> paths.attach(gnmr.find_units(model))
        >>> paths.detach()
        >>> paths = gnmr.CustomPaths(low_context=lambda: torch.autocast("cpu", torch.bfloat16))
        >>> paths.attach(gnmr.find_units(model))
        >>> model["layers"][0]["q_proj"](torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        *,
        low_forward: OperatorForward | None = None,
        high_forward: OperatorForward | None = None,
        low_context: ContextFactory | None = None,
        high_context: ContextFactory | None = None,
        low_bits: float | None = None,
        high_bits: float | None = None,
    ) -> None:
        super().__init__()
        if (low_forward, high_forward, low_context, high_context) == (None,) * 4:
            raise ValueError(
                "CustomPaths() has nothing to switch: give a function (low_forward=, high_forward=) or a context "
                "(low_context=, high_context=) for at least one path"
            )
        self._low = _run("low", low_forward, low_context)
        self._high = _run("high", high_forward, high_context)
        self._bits = (_bits("low_bits", low_bits), _bits("high_bits", high_bits))
        self._inputs: dict[Operator, tuple[int, int]] = {}
        self._names = tuple(
            _name(forward or context) for forward, context in ((low_forward, low_context), (high_forward, high_context))
        )

    def attach(self, units: Sequence[Unit]) -> None:
        """Replace the forward of every operator of ``units``."""
        super().attach(units)
        self._inputs = {}

    def low(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator on the user's low-cost path."""
        self._see(operator, x)
        return self._low(operator, x)

    def high(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator on the user's recovery path."""
        self._see(operator, x)
        return self._high(operator, x)

    def held_bytes(self) -> NDArray[np.int64]:
        """Return (2, N): elements of the inputs last seen (by an eager forward) times the bits of the path."""
        held = np.zeros((2, len(self.units)), dtype=np.int64)
        for unit in self.units:
            for operator in unit.operators:
                elements, own_bits = self._inputs.get(operator, (0, 0))
                for path in (LOW, HIGH):
                    bits = self._bits[path]
                    held[path, unit.index] += round(elements * (own_bits if bits is None else bits) / 8)
        return held

    def describe(self) -> dict[str, Any]:
        """Return the names of what runs on each path."""
        return {
            **super().describe(),
            "low": self._names[LOW],
            "high": self._names[HIGH],
            "low_bits": self._bits[LOW],
            "high_bits": self._bits[HIGH],
        }

    def _see(self, operator: Operator, x: Tensor) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._inputs[operator] = (x.numel(), 8 * x.element_size())


def _run(path: str, forward: OperatorForward | None, context: ContextFactory | None) -> OperatorForward:
    """Return the function of one path."""
    if forward is not None and context is not None:
        raise ValueError(f"give {path}_forward or {path}_context, not both")
    if context is not None:
        factory = _checked_context(f"{path}_context", context)

        def inside(operator: Operator, x: Tensor) -> Tensor:
            with factory():
                return operator.plain(x)

        return inside
    if forward is None:
        return Operator.plain
    if not callable(forward):
        raise TypeError(f"{path}_forward must be a function (operator, x) -> y, got {forward!r}")
    return forward


def _checked_context(name: str, context: ContextFactory) -> ContextFactory:
    # A context manager may well be callable: torch's are decorators too. Reused, it would nest with itself.
    if not isinstance(context, type) and hasattr(context, "__enter__"):
        raise TypeError(
            f"{name} is a context manager: pass what makes one, {name}=lambda: {type(context).__name__}(...)"
        )
    if not callable(context):
        raise TypeError(f"{name} must be a function that makes a context manager, got {context!r}")
    return context


def _bits(name: str, bits: float | None) -> float | None:
    if bits is not None and not bits >= 0:
        raise ValueError(f"{name} must be >= 0, got {bits!r}")
    return bits


def _name(piece: Any) -> str | None:
    return None if piece is None else getattr(piece, "__qualname__", type(piece).__qualname__)
