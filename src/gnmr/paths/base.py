"""The protocol between the guard and a backend: a low-cost and a recovery path for each unit.

A backend gives five things: what it installs (:meth:`Paths.attach`), how it takes that away again
(:meth:`Paths.detach`), a switch (:meth:`Paths.switch`), a read-back of what ran (:meth:`Paths.ran`)
and its bytes (:meth:`Paths.held_bytes`). The guard calls :meth:`Paths.switch` only between the backward
of one step and the forward of the next, so a backend may rely on its plan being the same for all
micro-batches of a step and for the recompute of activation checkpointing.

Most backends replace the forward of a unit's linear operators. They subclass :class:`OperatorPaths`,
which installs, counts and restores, and write three methods. A complete backend that stores nothing new and
rounds the input of a unit on its low path:

    >>> import torch
    >>> from gnmr.paths.base import OperatorPaths
    >>> class RoundedInput(OperatorPaths):
    ...     def low(self, operator, x):
    ...         return operator.plain(x.to(torch.bfloat16).to(x.dtype))
    ...
    ...     def high(self, operator, x):
    ...         return operator.plain(x)
    ...
    ...     def held_bytes(self):
    ...         return np.zeros((2, len(self.units)), dtype=np.int64)

It runs in a guard as the packaged ones do:

    >>> import gnmr
    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(8, 8)})])})
    >>> with gnmr.Guard(model, RoundedInput(), gnmr.Policy(max_active=1)) as guard:
    ...     model["layers"][0]["q_proj"](torch.ones(2, 8)).sum().backward()
    ...     decision = guard.step()
    >>> guard.active
    ()
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnmr.errors import PathError, UnitError
from gnmr.pytorch.units import Operator, Unit, is_te

LOW, HIGH = 0, 1
"""Rows of the read-back and of the bytes: the low-cost path, the recovery path."""


class Paths(ABC):
    """What a backend gives the recoverable units of a model. N units."""

    @abstractmethod
    def attach(self, units: Sequence[Unit]) -> None:
        """Install the paths; every unit starts on the low-cost one.

        Must not rename a parameter or change a ``state_dict`` key.

        Raises:
            gnmr.UnitError: a unit offers nothing that this backend can switch.
        """

    @abstractmethod
    def detach(self) -> None:
        """Leave the model as it was before :meth:`attach`."""

    @abstractmethod
    def switch(self, unit: int, recover: bool) -> None:
        """Move one unit; called at step boundaries only, and only for units that change."""

    @abstractmethod
    def ran(self) -> NDArray[np.int64]:
        """Return (2, N) counts: forwards on the low-cost and on the recovery path since the last call.

        This is the read-back: it must count what ran, not what was asked for.
        """

    @abstractmethod
    def held_bytes(self) -> NDArray[np.int64]:
        """Return (2, N): bytes that a unit holds for backward on the low-cost and the recovery path.

        For the shapes last seen; zeros before the first forward.
        """

    def extra_bytes(self, active: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return (N,): what an active set holds for backward beyond none, charged to its units.

        Args:
            active: (N,) bool.
        """
        held = self.held_bytes()
        return np.where(active, held[HIGH] - held[LOW], 0)

    def watch_errors(self, every: int) -> None:
        """Measure the errors of the low-cost path's casts from now on, for :meth:`errors`.

        Args:
            every: steps between two estimates for a unit on its recovery path.

        Raises:
            gnmr.PathError: this backend measures none.
        """
        raise PathError(
            f"{type(self).__name__} does not measure the errors of its casts, which this trigger needs: use "
            "SavedActivations or Simulated, or implement watch_errors() and errors()"
        )

    def errors(self) -> dict[str, NDArray[np.float64]]:
        """Return what :meth:`watch_errors` asked for, of this step.

        Returns:
            (N,) float64 relative errors by role, such as ``"x"`` and ``"dy"``; NaN where one is not known.
        """
        return {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run what is inside beside the training: forwards and backwards that count, learn and keep nothing."""
        yield

    def end_step(self, step: int) -> None:
        """Hear that the gradients of ``step`` are complete and the next plan is set."""

    def describe(self) -> dict[str, Any]:
        """Return the backend's settings as JSON-able values, for traces and reports."""
        return {"kind": type(self).__name__}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs (scales, counters) as JSON-able values."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""


class OperatorPaths(Paths):
    """A backend that replaces the forward of each operator of a unit, in training mode only.

    In ``eval`` mode an operator runs as it did before: the low-cost path is a training path, so that
    a model is always evaluated the same way.
    """

    takes_te = False
    """Whether the operators may be modules of TransformerEngine, whose products only its own kernels know."""

    def __init__(self) -> None:
        self.units: Sequence[Unit] = ()
        self.operators: list[Operator] = []
        self._routes: list[_Route] = []
        self._counts = np.zeros((2, 0), dtype=np.int64)

    @abstractmethod
    def low(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator on its low-cost path."""

    @abstractmethod
    def high(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator on its recovery path."""

    def attach(self, units: Sequence[Unit]) -> None:
        """Replace the forward of every operator of ``units``."""
        if self.units:
            raise PathError(
                f"this {type(self).__name__} is attached already: detach its guard first, "
                "or make another one for the second model"
            )
        guarded = [op.fqn for unit in units for op in unit.operators if is_guarded(op)]
        if guarded:
            raise PathError(
                f"{guarded[0]!r} is on the paths of another guard: detach that one first ({len(guarded)} such "
                "operators); a model has one guard at a time"
            )
        foreign = [op.fqn for unit in units for op in unit.operators if is_te(op.module)]
        if foreign and not self.takes_te:
            raise UnitError(
                f"{foreign[0]!r} is a module of TransformerEngine, which {type(self).__name__} does not know "
                f"({len(foreign)} such operators): use gnmr.TransformerEngine, or leave them out with exclude=..."
            )
        _take_over([op for unit in units for op in unit.operators])
        self.units = tuple(units)
        self._counts = np.zeros((2, len(units)), dtype=np.int64)
        self._routes = [_Route(self._counts, unit.index) for unit in units]
        self.operators = [operator for unit in units for operator in unit.operators]
        for unit, route in zip(units, self._routes, strict=True):
            for operator in unit.operators:
                _install(operator, self.forward_of(operator, route))

    def forward_of(self, operator: Operator, route: "_Route") -> "partial[Tensor]":
        """Return what replaces an operator's forward: a partial of (self, ...), called with the input.

        A backend with a gate of its own (a tensor, for compiled graphs) overrides this and counts itself.
        """
        return partial(_forward, self, operator, route)

    def detach(self) -> None:
        """Give every operator its own forward back."""
        for operator in self.operators:
            del operator.module._gnmr_seat
            operator.restore()
        self.units, self.operators, self._routes = (), [], []

    def switch(self, unit: int, recover: bool) -> None:
        """Move one unit to its recovery path, or back."""
        self._routes[unit].recover = recover

    def ran(self) -> NDArray[np.int64]:
        """Return and reset the (2, N) forward counts of both paths."""
        counts = self._counts.copy()
        self._counts[:] = 0
        return counts

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run what is inside without a trace in the counts."""
        before = self._counts.copy()
        try:
            yield
        finally:
            self._counts[:] = before


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward of an ``autograd.Function`` an error where its own gradient is asked for.

    ``once_differentiable`` alone is silent where dy needs no gradient: it would drop the part through x and W.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise PathError(
                "a gradient of a gradient was asked for (create_graph=True), which a low-cost path does not have: "
                "leave these operators out with exclude=..., or detach the guard for it"
            )
        return backward(ctx, *grads)

    return checked


def check_linear(operator: Operator, paths: str) -> None:
    """Refuse an operator whose forward is its own, for a backend that knows the backward of a linear one.

    Args:
        operator: the operator.
        paths: the backend's name.

    Raises:
        gnmr.UnitError: its forward is not its class's, or not ``nn.Linear``'s.
    """
    module = operator.module
    known = isinstance(module, nn.Linear)
    own = known and type(module).forward is not nn.Linear.forward
    if own or operator._own_forward is not None:
        what = type(module).__name__ if own else "its instance"
        raise UnitError(
            f"{operator.fqn!r} has a forward of its own (on {what}), whose backward {paths} does not "
            "know: leave it out with exclude=..., or attach the guard before what replaced it"
        )


def is_guarded(operator: Operator) -> bool:
    """Whether a guard's path stands in place of the operator's forward."""
    seat = operator.module.__dict__.get("_gnmr_seat")
    return seat is not None and not seat.vacant


def _take_over(operators: Sequence[Operator]) -> None:
    """Make the model run every operator by its module, or leave it as it was."""
    try:
        for operator in operators:
            operator.take_over()
    except UnitError:
        for operator in operators:
            operator.restore()
        raise


class _Seat:
    """What runs in place of a module's forward, with the arguments that come before the input.

    A copy of a module (an average of the weights, a saved model) is not guarded: its seat is vacant, and its forward
    the one of its class.
    """

    __slots__ = ("args", "run")

    def __init__(self, forward: "partial[Tensor] | None" = None) -> None:
        self.run = None if forward is None else forward.func
        self.args = () if forward is None else forward.args

    @property
    def vacant(self) -> bool:
        return self.run is None

    def __reduce__(self) -> "tuple[type[_Seat], tuple[()]]":
        return (_Seat, ())


def _install(operator: Operator, forward: "partial[Tensor]") -> None:
    # A bound method that finds its arguments on the module, not the partial itself: a compiled graph would
    # be tied to that one object, and so could not serve the next layer.
    operator.module._gnmr_seat = _Seat(forward)  # type: ignore[assignment]
    operator.module.forward = MethodType(forward_, operator.module)


def forward_(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Run what stands in place of a module's forward."""
    seat: _Seat = module._gnmr_seat  # type: ignore[assignment]
    if seat.run is None:
        return type(module).forward(module, *args, **kwargs)
    if len(args) + len(kwargs) == 1:
        (x,) = (*args, *kwargs.values())  # the input goes by several names
        return seat.run(*seat.args, x)
    return seat.run(*seat.args, *args, **kwargs)


# A bound method is pickled by its name, and looked up on the copy: there it is the class's own.
forward_.__name__ = "forward"


class _Route:
    """One unit's switch and its two counters, shared by its operators."""

    __slots__ = ("_counts", "calls", "recover", "unit")

    def __init__(self, counts: NDArray[np.int64], unit: int) -> None:
        self.recover = False
        self.unit = unit
        self._counts = counts
        # The same memory as the counts, one element for each path: a compiled graph ticks it.
        self.calls = torch.from_numpy(counts)[:, unit]

    def tick(self, path: int) -> None:
        self._counts[path, self.unit] += 1


@torch.library.custom_op("gnmr::tick", mutates_args={"calls"})
def tick(calls: Tensor, path: int) -> None:
    """Count a forward in a compiled graph, which has no Python to count with."""
    calls[path] += 1


@tick.register_fake
def _(calls: Tensor, path: int) -> None:
    return None


def _forward(paths: OperatorPaths, operator: Operator, route: _Route, x: Tensor) -> Tensor:
    if not operator.module.training:
        return operator.plain(x)
    path = HIGH if route.recover else LOW
    if torch.compiler.is_compiling():
        tick(route.calls, path)
    else:
        route.tick(path)
    return paths.high(operator, x) if path == HIGH else paths.low(operator, x)
