"""The product of a simulated linear operator: its six casts, as one operator to autograd and to a compiler.

A product is opaque to ``torch.compile``: amax histories, counters and random numbers work the same in a graph.
What a forward learns (amaxes, counts) is booked by its backward, which runs once however often checkpointing
repeats the forward; a forward without gradients books nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.errors import PathError
from gnmr.numerics.formats import Format
from gnmr.numerics.rounding import absmax, scale_from
from gnmr.paths.amax import AmaxHistory
from gnmr.paths.base import HIGH, LOW, first_order
from gnmr.paths.errors import ErrorMeter, sampled
from gnmr.pytorch.units import Operator

if TYPE_CHECKING:
    from gnmr.paths.simulated import Simulated

Role = Literal["w", "x", "y", "dy", "dw", "dx"]
ROLES: tuple[Role, ...] = get_args(Role)
_FORWARD, _BACKWARD = ROLES[:3], ROLES[3:]

MEASURED: tuple[Role, ...] = ("x", "w", "dy", "dw")
"""The roles whose errors are measured: what a unit's own weight gradient is made of, and its weight."""

Formats = tuple[Format, Format]
"""Of forward and backward."""

PLANNED = 2
"""In place of LOW or HIGH, in a compiled graph: the path that the unit is on when the product runs."""

DROPPED, INPUT, CAST = 0, 1, 2
"""What a product keeps of an operand for backward: nothing, the operand itself, its cast."""


@dataclass(frozen=True)
class Cast:
    """One cast: where it happens and how.

    Attributes:
        operator: FQN of the operator.
        unit: index of its unit.
        role: which tensor: ``"w"``, ``"x"``, ``"y"``, ``"dy"``, ``"dw"`` or ``"dx"``.
        path: ``gnmr.paths.base.LOW`` or ``HIGH``.
        step: the optimiser step, from 1.
        format: the number format.
        scale: () float32 under delayed scaling; None where the scale comes from the tensor itself.
        counts: (3,) int64 for the counters of the low-cost path, or None.
    """

    operator: str
    unit: int
    role: Role
    path: int
    step: int
    format: Format
    scale: Tensor | None
    counts: Tensor | None


class Seat:
    """One operator under simulation: the product, and the books that its casts keep."""

    def __init__(self, paths: "Simulated", operator: Operator, unit: int, first: int, number: int) -> None:
        self.paths = paths
        self.operator = operator
        self.unit = unit
        self.counts = torch.zeros(3, dtype=torch.int64)
        self._first = first
        self.measured = slice(number * len(MEASURED), (number + 1) * len(MEASURED))
        self._device = operator.device
        self._bytes = (0, 0)
        self._compiled = False
        self._number = next(_numbers)
        _seats[self._number] = self
        # A tensor, not an int: a compiled graph takes it as an input and serves all operators of a shape. On
        # the module, and no parameter or buffer of it, so that no state_dict key changes.
        operator.module._gnmr_handle = torch.tensor(self._number)

    def leave(self) -> None:
        """Let go of the operator."""
        _seats.pop(self._number, None)
        del self.operator.module._gnmr_handle

    @property
    def history(self) -> AmaxHistory:
        """The amaxes of the operator's device, its own among them."""
        return self.paths.histories[self._device]

    def place(self, roles: Sequence[Role]) -> slice:
        """Return where the amaxes of neighbouring roles are in the history."""
        start = self._first + ROLES.index(roles[0])
        return slice(start, start + len(roles))

    def forward(
        self, path: int, x: Tensor, weight: Tensor, bias: Tensor | None, keep_x: int, keep_w: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return y, what is kept of x and of the weight (or nothing), amaxes (3,) and counts (3,)."""
        self._compiled = path == PLANNED
        if self._compiled:
            path = self._planned()
            self.paths.routes[self.unit].tick(path)
        books = _Books(self, path, x.device)
        w_cast, x_cast = books.cast("w", weight), books.cast("x", x)
        y = books.cast("y", F.linear(x_cast, w_cast, bias))
        if keep_x or keep_w:
            self._bytes = (x.nbytes if keep_x else 0, weight.nbytes if keep_w else 0)
        kept_x = _own(x_cast, x) if keep_x == CAST else x.new_empty(0)
        kept_w = _own(w_cast, weight) if keep_w == CAST else weight.new_empty(0)
        return (
            y.contiguous(),
            kept_x.contiguous(),
            kept_w.contiguous(),
            books.amax(_FORWARD),
            books.counts,
        )

    def backward(
        self,
        path: int,
        dy: Tensor,
        x: Tensor | None,
        weight: Tensor | None,
        amax: Tensor,
        counts: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dL/dx and dL/dw of the operands that were kept, and book what the product saw."""
        # A unit is switched after the backward, so what is planned now is what its forward ran on.
        path = self._planned() if path == PLANNED else path
        books = _Books(self, path, dy.device)
        g = books.cast("dy", dy)
        dw = dx = None
        if x is not None:
            dw = books.cast("dw", g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1]))
        if weight is not None:
            dx = books.cast("dx", g @ weight)
        if not self.paths.booking:
            return dx, dw
        if path == LOW:
            self.counts = self.counts.to(counts.device).add_(counts).add_(books.counts)
        if self.paths.scaling == "delayed":
            self.history.record(self.place(_FORWARD), amax)
            self.history.record(self.place(_BACKWARD), books.amax(_BACKWARD))
        return dx, dw

    def _planned(self) -> int:
        return HIGH if self.paths.routes[self.unit].recover else LOW

    def held_bytes(self, path: int) -> int:
        """Return what the operands kept for backward take, for the shapes last seen."""
        x, weight = self._bytes
        return x + (weight if self.paths.keep("w", PLANNED if self._compiled else path) == CAST else 0)


class _Books:
    """The casts of one forward or backward, and what they say."""

    def __init__(self, seat: Seat, path: int, device: torch.device) -> None:
        self._seat = seat
        self._path = path
        self._device = device
        self._delayed = seat.paths.scaling == "delayed"
        self._amax: dict[Role, Tensor] = {}
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        if self._delayed:
            seat.history.to(device)

    def cast(self, role: Role, value: Tensor) -> Tensor:
        paths, seat = self._seat.paths, self._seat
        if role not in paths.tensors:
            return value
        amax, formats = None, paths.formats[self._path]
        if self._delayed:
            amax = self._amax[role] = absmax(value, "tensor").float()
        meter = paths.meter(seat, role, self._path)
        if meter is not None and self._path != LOW:
            self._measure(meter, role, value, amax)
        if formats is None:
            return value
        counts = self.counts if self._path == LOW else None
        cast = paths.cast(value, self._at(role, self._path, formats, amax, counts))
        if meter is not None and self._path == LOW:
            meter.add(seat.measured.start + MEASURED.index(role), sampled(value), sampled(cast))
        return cast

    def _at(self, role: Role, path: int, formats: Formats, amax: Tensor | None, counts: Tensor | None) -> Cast:
        seat, scale, fmt = self._seat, None, formats[role in _BACKWARD]
        if amax is not None:
            past = seat.history.largest[seat.place([role]).start]
            scale = scale_from(torch.where(past > 0, past, amax), fmt)
        return Cast(seat.operator.fqn, seat.unit, role, path, seat.paths.step, fmt, scale, counts)

    def _measure(self, meter: ErrorMeter, role: Role, value: Tensor, amax: Tensor | None) -> None:
        """Book the error that the low-cost path would have made of a sample."""
        low, seat = self._seat.paths.formats[LOW], self._seat
        if low is not None:
            rows = sampled(value)
            cast = seat.paths.cast(rows, self._at(role, LOW, low, amax, None))
            meter.add(seat.measured.start + MEASURED.index(role), rows, cast)

    def amax(self, roles: Sequence[Role]) -> Tensor:
        """(3,) float32, -1 for what was not seen."""
        if not self._amax:
            return torch.full((3,), -1.0, device=self._device)
        unseen = torch.tensor(-1.0, device=self._device)
        return torch.stack([self._amax.get(role, unseen) for role in roles])


def _own(cast: Tensor, operand: Tensor) -> Tensor:
    # An output of an operator may not be its input: in a graph for both paths, an exact one keeps a copy.
    return cast.clone() if cast is operand else cast


_numbers = count()
# Weak: a model that is dropped without detaching takes its seats along.
_seats: WeakValueDictionary[int, Seat] = WeakValueDictionary()


def _seat(handle: Tensor) -> Seat:
    try:
        return _seats[int(handle)]
    except KeyError:
        raise PathError(
            "this forward ran under simulated paths that have been detached since: run backward before detach()"
        ) from None


@torch.library.custom_op("gnmr::simulated_linear", mutates_args=())
def linear(
    handle: Tensor,
    path: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keep_x: int,
    keep_w: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the product of the seat with this number; see :meth:`Seat.forward`."""
    return _seat(handle).forward(path, x, weight, bias, keep_x, keep_w)


@linear.register_fake
def _(
    handle: Tensor,
    path: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keep_x: int,
    keep_w: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    kept_x = x.new_empty(x.shape if keep_x == CAST else 0)
    kept_w = weight.new_empty(weight.shape if keep_w == CAST else 0)
    amax = x.new_empty(3, dtype=torch.float32)
    return y, kept_x, kept_w, amax, x.new_empty(3, dtype=torch.int64)


def _backward(
    handle: Tensor,
    path: int,
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    amax: Tensor,
    counts: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    return _seat(handle).backward(path, dy, x, weight, amax, counts)


@torch.library.custom_op("gnmr::simulated_linear_backward", mutates_args=())
def _linear_backward(
    handle: Tensor,
    path: int,
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    amax: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    dx, dw = _backward(handle, path, dy, x, weight, amax, counts)
    nothing = dy.new_empty(0)
    return (
        nothing if dx is None else dx.contiguous(),
        torch.empty_like(nothing) if dw is None else dw.contiguous(),
    )


@_linear_backward.register_fake
def _(
    handle: Tensor,
    path: int,
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    amax: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    dx = dy.new_empty(0 if weight is None else (*dy.shape[:-1], weight.shape[1]))
    dw = dy.new_empty(0 if x is None else (dy.shape[-1], x.shape[-1]))
    return dx, dw


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    handle, path, x, weight, _bias, keep_x, keep_w = inputs
    _y, kept_x, kept_w, amax, counts = output
    ctx.path = path
    ctx.save_for_backward(
        handle,
        {DROPPED: None, INPUT: x, CAST: kept_x}[keep_x],
        {DROPPED: None, INPUT: weight, CAST: kept_w}[keep_w],
        amax,
        counts,
    )
    ctx.mark_non_differentiable(kept_x, kept_w, amax, counts)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, *_: Any, backward: Any = _linear_backward) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    handle, x, weight, amax, counts = ctx.saved_tensors
    dx, dw = backward(handle, ctx.path, dy, x, weight, amax, counts)
    db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[4] else None
    return (
        None,
        None,
        None if weight is None else dx,
        None if x is None else dw,
        db,
        None,
        None,
    )


linear.register_autograd(_differentiate, setup_context=_keep_for_backward)


class EagerLinear(torch.autograd.Function):
    """The same product without the dispatcher: an operator of a library costs half a millisecond a call."""

    @staticmethod
    def forward(
        handle: Tensor, path: int, x: Tensor, weight: Tensor, bias: Tensor | None, keep_x: int, keep_w: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See :meth:`Seat.forward`."""
        return _seat(handle).forward(path, x, weight, bias, keep_x, keep_w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what backward needs."""
        _keep_for_backward(ctx, inputs, output)

    @staticmethod
    @first_order
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
        """See :meth:`Seat.backward`."""
        return _differentiate(ctx, dy, *rest, backward=_backward)


def as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast casts the operands of ``F.linear``; our own operator is unknown to it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return _lower(x, dtype), _lower(weight, dtype), None if bias is None else _lower(bias, dtype)


def _lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Autocast leaves float64 alone.
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)
