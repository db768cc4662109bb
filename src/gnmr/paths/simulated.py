"""Simulated low-precision matrix products (paper, setting B), on any device.

A linear operator of a unit computes, with a cast ``Q`` to the number format of its path::

    forward    y  = Q(Q(x) Q(w)^T + b)
    backward   g  = Q(dL/dy),  dL/dw = Q(g^T Q(x)),  dL/dx = Q(g Q(w)),  dL/db = sum of dL/dy

Products and sums run in the tensors' own dtype. Every cast is :meth:`Simulated.cast`.

Under ``torch.compile`` one graph serves every plan; where one of the paths is exact, that graph keeps copies of
its operands.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnmr.errors import GnmrWarning
from gnmr.numerics.formats import FORMATS, Format, ScalingName, get_format
from gnmr.numerics.rounding import check_scaling, fake_quantize
from gnmr.paths.amax import AmaxHistory
from gnmr.paths.base import HIGH, LOW, OperatorPaths
from gnmr.paths.errors import ErrorMeter, of_units
from gnmr.paths.product import (
    CAST,
    DROPPED,
    INPUT,
    MEASURED,
    PLANNED,
    ROLES,
    Cast,
    EagerLinear,
    Role,
    Seat,
    as_autocast,
    linear,
)
from gnmr.pytorch.units import Operator, Unit


class Simulated(OperatorPaths):
    """Fake-quantised linear operators: a low-cost and a recovery number format.

    Args:
        low: format of the low-cost path: a number format (``e2m1 e2m3 e3m2 e4m3 e5m2 int2 int4 int6 int8
            bf16``), ``"hybrid-fp8"`` (E4M3 forward, E5M2 backward), or ``"exact"`` (or None): no cast.
        high: format of the recovery path.
        scaling: what shares a scale: ``"token"`` (a row of the last dimension), ``"group"`` (of a row), ``"block"``
            (as DeepSeek-V3: groups of a row, and square tiles of a weight), ``"mx"`` (MX: groups of 32 under a power of
            two), ``"tensor"``, or ``"delayed"``: one for the tensor, from the largest amax of the last steps. Both
            paths feed the amax histories, so that a unit comes back to a fresh scale. Groups are those of a tensor as
            it is stored: hardware that needs them along the dimension of a product casts some operands twice.
        group_size: elements in a group; None is 128, and 32 under ``"mx"``, which has no other.
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
        scaling: Literal["token", "group", "block", "mx", "tensor", "delayed"] = "token",
        group_size: int | None = None,
        tensors: Sequence[Role] = ROLES,
        amax_history: int = 16,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._names = (low or "exact", high or "exact")
        self.formats = tuple(_formats(name) for name in self._names)
        if scaling not in _SCALINGS:
            raise ValueError(f"scaling must be one of {', '.join(_SCALINGS)}, got {scaling!r}")
        self.scaling = scaling
        self.group_size = (_MX_GROUP if scaling == "mx" else 128) if group_size is None else group_size
        check_scaling("group", self.group_size)
        if scaling == "mx" and self.group_size != _MX_GROUP:
            raise ValueError(f"group_size must be {_MX_GROUP} under scaling='mx', got {group_size!r}: leave it out")
        self.tensors = _roles(tensors)
        if not isinstance(amax_history, int) or amax_history < 1:
            raise ValueError(f"amax_history must be an int >= 1, got {amax_history!r}")
        self.amax_history = amax_history
        if rounding not in {"nearest", "stochastic"}:
            raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
        self.rounding = rounding
        self.seed = seed
        self.step = 1
        self.booking = True
        """Whether casts enter counters, amax histories and errors; not within :meth:`apart`."""
        self._seats: list[Seat] = []
        self._watch = 0
        self._meters: dict[torch.device, ErrorMeter] = {}
        self.histories: dict[torch.device, AmaxHistory] = {}

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
            scaling=_SCALINGS[self.scaling][at.role == "w"],
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
            device = operator.device
            self._seats.append(Seat(self, operator, unit, sizes.get(device, 0), len(self._seats)))
            sizes[device] = sizes.get(device, 0) + len(ROLES)
        self.histories = {device: AmaxHistory(size, self.amax_history, device) for device, size in sizes.items()}

    def forward_of(self, operator: Operator, route: Any) -> "partial[Tensor]":
        """Return what replaces an operator's forward; one compiled graph serves every plan."""
        return partial(_forward, self, operator, super().forward_of(operator, route))

    @property
    def routes(self) -> Sequence[Any]:
        """The switches of the units."""
        return self._routes

    def detach(self) -> None:
        """Give every operator its own forward back."""
        super().detach()
        for seat in self._seats:
            seat.leave()
        self._seats, self.histories, self._meters, self._watch = [], {}, {}, 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run what is inside without a trace in counts, counters, amax histories and errors."""
        self.booking = False
        try:
            with super().apart():
                yield
        finally:
            self.booking = True

    def watch_errors(self, every: int) -> None:
        """Measure the errors of the casts of x, w, dy and dw from now on; see :meth:`gnmr.Paths.watch_errors`."""
        if every < 1:
            raise ValueError(f"every must be >= 1 step, got {every!r}")
        self._watch = every
        devices = {seat.operator.device for seat in self._seats}
        self._meters = {device: ErrorMeter(len(self._seats) * len(MEASURED)) for device in devices}

    def meter(self, seat: Seat, role: Role, path: int) -> ErrorMeter | None:
        """Return where the error of this cast goes, or None: weights, which move slowly, are not read at every step."""
        if not self._watch or not self.booking or role not in MEASURED:
            return None
        if (path == HIGH or role == "w") and self.step % self._watch:
            return None
        return self._meter_of(seat)

    def _meter_of(self, seat: Seat) -> ErrorMeter:
        return self._meters[seat.operator.device]

    def errors(self) -> dict[str, NDArray[np.float64]]:
        """Return (N,) relative errors of the low-cost path's casts of this step, by role."""
        found = np.full(len(self._seats) * len(MEASURED), np.nan)
        for meter in self._meters.values():
            known = meter.read()
            found = np.where(np.isnan(known), found, known)
        units = np.array([seat.unit for seat in self._seats])
        roles = zip(MEASURED, found.reshape(len(self._seats), len(MEASURED)).T, strict=True)
        return {role: of_units(row, units, len(self.units)) for role, row in roles if role in self.tensors}

    def stale_scales(self) -> NDArray[np.float64]:
        """Return (N,): how far this step's tensors are from the scales that they were cast with.

        The largest ratio of a tensor's amax to the amax that its delayed scale comes from, over the unit's tensors, on
        either path, since the last :meth:`end_step`: above 1 something saturates. NaN where nothing was cast, where a
        history is empty, and under any other scaling.
        """
        found = np.full(len(self.units), np.nan)
        for seat in self._seats:
            ratios = seat.history.stale[seat.place(ROLES)].tolist()
            found[seat.unit] = np.fmax.reduce([found[seat.unit], *ratios])
        return found

    def end_step(self, step: int) -> None:
        """Roll the amax histories; the noise of stochastic rounding moves on."""
        self.step = step + 1
        if self.scaling == "delayed":
            for history in self.histories.values():
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
            if self._watch:
                operators[seat.operator.fqn]["errors"] = self._meter_of(seat).state(seat.measured)
        return {"step": self.step, "operators": operators}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, bit for bit.

        Warns:
            gnmr.GnmrWarning: operators without a saved history (theirs starts empty), and saved ones that the
                model does not have, by name.
        """
        self.step = int(state_dict.get("step", self.step))
        saved = dict(state_dict.get("operators", {}))
        missing = []
        for seat in self._seats:
            state = saved.pop(seat.operator.fqn, {})
            if "counts" in state:
                seat.counts = torch.tensor(state["counts"], dtype=torch.int64)
            if self._watch and "errors" in state:
                self._meter_of(seat).load(seat.measured, state["errors"])
            amax = state.get("amax", {})
            if self.scaling == "delayed":
                if not set(self.tensors) <= amax.keys():
                    missing.append(seat.operator.fqn)
                seat.history.load(seat.place(ROLES), [amax.get(role, []) for role in ROLES])
        if missing:
            _warn(f"no amax history was saved for {', '.join(missing)}: theirs starts empty")
        if saved:
            _warn(f"the state has operators that the model does not: {', '.join(saved)}; ignored")

    def planned(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator on the path that its unit is on when the product runs, and count it."""
        return self._product(operator, x, PLANNED)

    def _run(self, operator: Operator, x: Tensor, path: int) -> Tensor:
        if self.formats[path] is None and self.scaling != "delayed" and not self._watch:
            return operator.plain(x)
        return self._product(operator, x, path)

    def _product(self, operator: Operator, x: Tensor, path: int) -> Tensor:
        x, weight, bias = as_autocast(x, operator.weight, operator.bias)
        grad = torch.is_grad_enabled()
        keep_x = self.keep("x", path) if grad and weight.requires_grad else DROPPED
        keep_w = self.keep("w", path) if grad and x.requires_grad else DROPPED
        handle = operator.module._gnmr_handle
        product = linear if torch.compiler.is_compiling() else EagerLinear.apply
        return product(handle, path, x, weight, bias, keep_x, keep_w)[0]

    def keep(self, role: Role, path: int) -> int:
        """What a product keeps of an operand for backward."""
        formats = self.formats if path == PLANNED else (self.formats[path],)
        exact = all(pair is None for pair in formats)
        return INPUT if exact or role not in self.tensors else CAST

    def _generator(self, at: Cast, device: torch.device) -> torch.Generator | None:
        if self.rounding == "nearest":
            return None
        key = f"{self.seed}/{at.step}/{at.operator}/{at.role}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        return torch.Generator(device).manual_seed(seed)


def _forward(paths: Simulated, operator: Operator, eager: "partial[Tensor]", x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return eager(x)
    return paths.planned(operator, x) if operator.module.training else operator.plain(x)


_SCALINGS: dict[str, tuple[ScalingName, ScalingName]] = {
    "token": ("token", "token"),
    "group": ("group", "group"),
    "block": ("group", "tile"),
    "mx": ("mx", "mx"),
    "tensor": ("tensor", "tensor"),
    "delayed": ("tensor", "tensor"),
}
"""What shares a scale in activations and gradients, and in weights."""

_MX_GROUP = 32


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
    listed = isinstance(tensors, Sequence) and not isinstance(tensors, str)
    if not listed or any(role not in ROLES for role in tensors):
        raise ValueError(f"tensors must be a list of roles among {', '.join(ROLES)}, got {tensors!r}")
    if not tensors:
        raise ValueError("tensors is empty, so nothing would be cast: use low='exact' for that")
    return tuple(role for role in ROLES if role in tensors)


def _warn(message: str) -> None:
    warnings.warn(message, GnmrWarning, stacklevel=3)
