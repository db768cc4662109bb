"""Simulated low-precision matrix products (paper, setting B), on any device.

A linear operator of a unit computes, with a cast ``Q`` to the number format of its path::

    forward    y  = Q(Q(x) Q(w)^T + b)
    backward   g  = Q(dL/dy),  dL/dw = Q(g^T Q(x)),  dL/dx = Q(g Q(w)),  dL/db = sum of dL/dy

Products and sums run in the tensors' own dtype. Every cast is :meth:`Simulated.cast`.

The product is one operator to ``torch.compile`` and to autograd, so that amax histories, counters and random
numbers work the same in a graph. What a forward learns (amaxes, counts) is booked by its backward, which runs
once however often checkpointing repeats the forward; a forward without gradients books nothing.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from gnmr.errors import GnmrWarning, PathError
from gnmr.numerics.formats import FORMATS, Format, ScalingName, get_format
from gnmr.numerics.rounding import absmax, check_scaling, fake_quantize, scale_from
from gnmr.paths.amax import AmaxHistory
from gnmr.paths.base import HIGH, LOW, OperatorPaths
from gnmr.pytorch.units import Operator, Unit

Role = Literal["w", "x", "y", "dy", "dw", "dx"]
ROLES: tuple[Role, ...] = get_args(Role)
_FORWARD, _BACKWARD = ROLES[:3], ROLES[3:]

_DROPPED, _INPUT, _CAST = 0, 1, 2
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


class Simulated(OperatorPaths):
    """Fake-quantised linear operators: a low-cost and a recovery number format.

    Args:
        low: format of the low-cost path: a number format (``e2m1 e2m3 e3m2 e4m3 e5m2 int2 int4 int6 int8
            bf16``), ``"hybrid-fp8"`` (E4M3 forward, E5M2 backward), or ``"exact"`` (or None): no cast.
        high: format of the recovery path.
        scaling: what shares a scale: ``"token"`` (a row of the last dimension), ``"group"`` (of a row),
            ``"tensor"``, or ``"delayed"``: one for the tensor, from the largest amax of the last steps. Both
            paths feed the amax histories, so that a unit comes back to a fresh scale.
        group_size: elements in a group.
        tensors: the roles that are cast.
        amax_history: steps that delayed scaling remembers. With no history yet, or one of zeros, a tensor's
            own amax is used.
        rounding: ``"nearest"`` (ties to even), or ``"stochastic"``: the noise depends on seed, step, operator
            and role only, so a recompute repeats it (and micro-batches of a step share it).
        seed: of stochastic rounding.

    Raises:
        ValueError: an unknown format, scaling, role or rounding, or a number out of range.

    Examples:
        >>> import gnmr
        >>> from torch import nn
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(2, 1)})])})
        >>> q_proj = model["layers"][0]["q_proj"]
        >>> with torch.no_grad():
        ...     _ = q_proj.weight.copy_(torch.tensor([[1.0, 0.3]])), q_proj.bias.zero_()
        >>> paths = gnmr.Simulated(low="int4", high="exact", tensors=("w", "x"))
        >>> paths.attach(gnmr.find_units(model))
        >>> x = torch.tensor([[7.0, 7.0]])
        >>> round(q_proj(x).item(), 4)  # 0.3 became 2/7
        9.0
        >>> paths.switch(0, recover=True)
        >>> round(q_proj(x).item(), 4)
        9.1
        >>> paths.detach()
    """

    def __init__(
        self,
        low: str | None = "e3m2",
        high: str | None = "hybrid-fp8",
        *,
        scaling: Literal["token", "group", "tensor", "delayed"] = "token",
        group_size: int = 128,
        tensors: Sequence[Role] = ROLES,
        amax_history: int = 16,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._names = (low or "exact", high or "exact")
        self._formats = tuple(_formats(name) for name in self._names)
        self.scaling = scaling
        self._own_scaling: ScalingName = "tensor" if scaling == "delayed" else scaling
        try:
            check_scaling(self._own_scaling, group_size)
        except ValueError as error:
            raise ValueError(f"{error} (or 'delayed')" if "scaling" in str(error) else error) from None
        self.group_size = group_size
        self.tensors = _roles(tensors)
        if amax_history < 1:
            raise ValueError(f"amax_history must be >= 1, got {amax_history!r}")
        self.amax_history = amax_history
        if rounding not in {"nearest", "stochastic"}:
            raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
        self.rounding = rounding
        self.seed = seed
        self._step = 1
        self._seats: list[_Seat] = []
        self._histories: dict[torch.device, AmaxHistory] = {}

    def cast(self, value: Tensor, at: Cast) -> Tensor:
        """Cast one tensor of one operator to its format and back.

        All casts of both paths go through here, eager and compiled, so a subclass can inject a fault::

            class Sixteenfold(gnmr.Simulated):
                def cast(self, value, at):
                    out = super().cast(value, at)
                    faulty = at.path == LOW and at.role == "dy" and at.unit in self.faulty
                    return out * 16 if faulty else out

        A stale scale is ``super().cast(value, dataclasses.replace(at, scale=...))``; NaN and saturation
        likewise. The result must not depend on how often it is called in a step.

        Args:
            value: the tensor, (tokens..., features) or (out, in).
            at: where this is, and how to cast.

        Returns:
            A new tensor of the same shape and dtype.
        """
        return fake_quantize(
            value,
            at.format,
            scaling=self._own_scaling,
            group_size=self.group_size,
            scale=at.scale,
            generator=self._generator(at, value.device),
            counts=at.counts,
        )

    def low(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator in the low-cost format."""
        return self._run(operator, x, LOW)

    def high(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator in the recovery format."""
        return self._run(operator, x, HIGH)

    def attach(self, units: Sequence[Unit]) -> None:
        """Replace the forward of every operator of ``units``."""
        super().attach(units)
        members = [(unit.index, operator) for unit in units for operator in unit.operators]
        sizes: dict[torch.device, int] = {}
        for unit, operator in members:
            device = operator.weight.device
            self._seats.append(_Seat(self, operator, unit, sizes.get(device, 0)))
            sizes[device] = sizes.get(device, 0) + len(ROLES)
        self._histories = {device: AmaxHistory(size, self.amax_history, device) for device, size in sizes.items()}

    def detach(self) -> None:
        """Give every operator its own forward back."""
        super().detach()
        for seat in self._seats:
            seat.leave()
        self._seats, self._histories = [], {}

    def end_step(self, step: int) -> None:
        """Roll the amax histories; the noise of stochastic rounding moves on."""
        self._step = step + 1
        if self.scaling == "delayed":
            for history in self._histories.values():
                history.roll()

    def counters(self) -> NDArray[np.int64]:
        """Return (3, N): elements that saturated, underflowed to zero, and all, cast on the low-cost path.

        Since the paths were attached, or since the run began where a state was loaded.
        """
        counts = np.zeros((3, len(self.units)), dtype=np.int64)
        for seat in self._seats:
            counts[:, seat.unit] += seat.counts.cpu().numpy()
        return counts

    def held_bytes(self) -> NDArray[np.int64]:
        """Return (2, N): bytes of the operands that are kept for backward.

        A cast weight counts, since it is kept beside the parameter; the parameter itself does not.
        """
        held = np.zeros((2, len(self.units)), dtype=np.int64)
        for seat in self._seats:
            held[LOW, seat.unit] += seat.held_bytes(LOW)
            held[HIGH, seat.unit] += seat.held_bytes(HIGH)
        return held

    def describe(self) -> dict[str, Any]:
        """Return all settings."""
        return {
            **super().describe(),
            "low": self._names[LOW],
            "high": self._names[HIGH],
            "scaling": self.scaling,
            "group_size": self.group_size,
            "tensors": list(self.tensors),
            "amax_history": self.amax_history,
            "rounding": self.rounding,
            "seed": self.seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return step, counters and amax histories by operator name, as JSON-able values."""
        operators: dict[str, dict[str, Any]] = {}
        for seat in self._seats:
            operators[seat.operator.fqn] = {"counts": seat.counts.tolist()}
            if self.scaling == "delayed":
                entries = dict(zip(ROLES, seat.history.entries(seat.place(ROLES)), strict=True))
                operators[seat.operator.fqn]["amax"] = {role: entries[role] for role in self.tensors}
        return {"step": self._step, "operators": operators}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, bit for bit.

        Warns:
            gnmr.GnmrWarning: operators without a saved history (theirs starts empty), and saved ones that the
                model does not have, by name.
        """
        self._step = int(state_dict.get("step", self._step))
        saved = dict(state_dict.get("operators", {}))
        missing = []
        for seat in self._seats:
            state = saved.pop(seat.operator.fqn, {})
            if "counts" in state:
                seat.counts = torch.tensor(state["counts"], dtype=torch.int64)
            amax = state.get("amax", {})
            if self.scaling == "delayed":
                if not set(self.tensors) <= amax.keys():
                    missing.append(seat.operator.fqn)
                seat.history.load(seat.place(ROLES), [amax.get(role, []) for role in ROLES])
        if missing:
            _warn(f"no amax history was saved for {', '.join(missing)}: theirs starts empty")
        if saved:
            _warn(f"the state has operators that the model does not: {', '.join(saved)}; ignored")

    def _run(self, operator: Operator, x: Tensor, path: int) -> Tensor:
        formats = self._formats[path]
        if formats is None and self.scaling != "delayed":
            return operator.plain(x)
        x, weight, bias = _as_autocast(x, operator.weight, operator.bias)
        grad = torch.is_grad_enabled()
        keep_x = self._keep("x", path) if grad and weight.requires_grad else _DROPPED
        keep_w = self._keep("w", path) if grad and x.requires_grad else _DROPPED
        handle = operator.module._gnmr_handle
        return _linear(handle, path, x, weight, bias, keep_x, keep_w)[0]

    def _keep(self, role: Role, path: int) -> int:
        return _INPUT if self._formats[path] is None or role not in self.tensors else _CAST

    def _generator(self, at: Cast, device: torch.device) -> torch.Generator | None:
        if self.rounding == "nearest":
            return None
        key = f"{self.seed}/{at.step}/{at.operator}/{at.role}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        return torch.Generator(device).manual_seed(seed)


class _Seat:
    """One operator under simulation: the product, and the books that its casts keep."""

    def __init__(self, paths: Simulated, operator: Operator, unit: int, first: int) -> None:
        self.paths = paths
        self.operator = operator
        self.unit = unit
        self.counts = torch.zeros(3, dtype=torch.int64)
        self._first = first
        self._device = operator.weight.device
        self._bytes = (0, 0)
        self._number = next(_numbers)
        _seats[self._number] = self
        # A tensor, not an int: a compiled graph takes it as an input and serves all operators of a shape. On
        # the module, and no parameter or buffer of it, so that no state_dict key changes.
        operator.module._gnmr_handle = torch.tensor(self._number)

    def leave(self) -> None:
        _seats.pop(self._number, None)
        del self.operator.module._gnmr_handle

    @property
    def history(self) -> AmaxHistory:
        return self.paths._histories[self._device]

    def place(self, roles: Sequence[Role]) -> slice:
        start = self._first + ROLES.index(roles[0])
        return slice(start, start + len(roles))

    def forward(
        self, path: int, x: Tensor, weight: Tensor, bias: Tensor | None, keep_x: int, keep_w: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        books = _Books(self, path, x.device)
        w_cast, x_cast = books.cast("w", weight), books.cast("x", x)
        y = books.cast("y", F.linear(x_cast, w_cast, bias))
        if keep_x or keep_w:
            self._bytes = (x.nbytes if keep_x else 0, weight.nbytes if keep_w else 0)
        kept_x = x_cast if keep_x == _CAST else x.new_empty(0)
        kept_w = w_cast if keep_w == _CAST else weight.new_empty(0)
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
        books = _Books(self, path, dy.device)
        g = books.cast("dy", dy)
        dw = dx = None
        if x is not None:
            dw = books.cast("dw", g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1]))
        if weight is not None:
            dx = books.cast("dx", g @ weight)
        if path == LOW:
            self.counts = self.counts.to(counts.device).add_(counts).add_(books.counts)
        if amax.numel():
            self.history.record(self.place(_FORWARD), amax)
            self.history.record(self.place(_BACKWARD), books.amax(_BACKWARD))
        return dx, dw

    def held_bytes(self, path: int) -> int:
        x, weight = self._bytes
        return x + (weight if self.paths._keep("w", path) == _CAST else 0)


class _Books:
    """The casts of one forward or backward, and what they say."""

    def __init__(self, seat: _Seat, path: int, device: torch.device) -> None:
        self._seat = seat
        self._path = path
        self._device = device
        self._delayed = seat.paths.scaling == "delayed"
        self._amax: dict[Role, Tensor] = {}
        self.counts = torch.zeros(3 if path == LOW else 0, dtype=torch.int64, device=device)
        if self._delayed:
            seat.history.to(device)

    def cast(self, role: Role, value: Tensor) -> Tensor:
        paths, seat = self._seat.paths, self._seat
        if role not in paths.tensors:
            return value
        scale, formats = None, paths._formats[self._path]
        if self._delayed:
            amax = self._amax[role] = absmax(value, "tensor").float()
        if formats is None:
            return value
        fmt = formats[role in _BACKWARD]
        if self._delayed:
            past = seat.history.largest[seat.place([role]).start]
            scale = scale_from(torch.where(past > 0, past, amax), fmt)
        counts = self.counts if self._path == LOW else None
        at = Cast(seat.operator.fqn, seat.unit, role, self._path, paths._step, fmt, scale, counts)
        return paths.cast(value, at)

    def amax(self, roles: Sequence[Role]) -> Tensor:
        """(3,) float32, -1 for what was not seen; (0,) without delayed scaling."""
        if not self._delayed:
            return torch.empty(0, device=self._device)
        unseen = torch.tensor(-1.0, device=self._device)
        return torch.stack([self._amax.get(role, unseen) for role in roles])


_numbers = count()
_seats: dict[int, _Seat] = {}


def _seat(handle: Tensor) -> _Seat:
    try:
        return _seats[int(handle)]
    except KeyError:
        raise PathError(
            "this forward ran under simulated paths that have been detached since: run backward before detach()"
        ) from None


@torch.library.custom_op("gnmr::simulated_linear", mutates_args=())
def _linear(
    handle: Tensor,
    path: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keep_x: int,
    keep_w: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _seat(handle).forward(path, x, weight, bias, keep_x, keep_w)


@_linear.register_fake
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
    kept_x = x.new_empty(x.shape if keep_x == _CAST else 0)
    kept_w = weight.new_empty(weight.shape if keep_w == _CAST else 0)
    amax = x.new_empty(3, dtype=torch.float32)
    return y, kept_x, kept_w, amax, x.new_empty(3, dtype=torch.int64)


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
    dx, dw = _seat(handle).backward(path, dy, x, weight, amax, counts)
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
        {_DROPPED: None, _INPUT: x, _CAST: kept_x}[keep_x],
        {_DROPPED: None, _INPUT: weight, _CAST: kept_w}[keep_w],
        amax,
        counts,
    )
    ctx.mark_non_differentiable(kept_x, kept_w, amax, counts)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    handle, x, weight, amax, counts = ctx.saved_tensors
    dx, dw = _linear_backward(handle, ctx.path, dy, x, weight, amax, counts)
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


_linear.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast casts the operands of ``F.linear``; our own operator is unknown to it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return _lower(x, dtype), _lower(weight, dtype), None if bias is None else _lower(bias, dtype)


def _lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Autocast leaves float64 alone.
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _formats(name: str) -> tuple[Format, Format] | None:
    """Return the formats of forward and backward; None for exact."""
    if name == "exact":
        return None
    if name == "hybrid-fp8":
        return get_format("e4m3"), get_format("e5m2")
    if name not in FORMATS:
        try:
            get_format(name)
        except ValueError as error:
            raise ValueError(f"{error}, hybrid-fp8, exact") from None
    return get_format(name), get_format(name)


def _roles(tensors: Sequence[Role]) -> tuple[Role, ...]:
    unknown = [role for role in tensors if role not in ROLES]
    if unknown or isinstance(tensors, str):
        raise ValueError(f"tensors must be a list of roles among {', '.join(ROLES)}, got {tensors!r}")
    if not tensors:
        raise ValueError("tensors is empty, so nothing would be cast: use low='exact' for that")
    return tuple(role for role in ROLES if role in tensors)


def _warn(message: str) -> None:
    warnings.warn(message, GnmrWarning, stacklevel=3)
