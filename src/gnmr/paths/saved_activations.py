"""Setting A of the paper: the forward is exact, and what it stores for the weight gradient is packed.

A linear operator ``y = x W^T + b`` needs its input again for ``dL/dW``. Autograd keeps ``x`` itself; here it keeps
the codes of ``x`` in the unit's low-cost or recovery format. ``y``, ``dL/dx`` and ``dL/db`` are what they were.

Several operators may read one activation (q, k, v; gate, up): it is packed once for each format in use. In eager
mode a one-entry cache in each thread knows the last input again. Under ``torch.compile`` the operators that the
common model families feed from one activation share one call, which the compiler sees as one.
"""

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.errors import PathError, StateError
from gnmr.memory import Activation
from gnmr.numerics.formats import get_format
from gnmr.numerics.packing import Packed, PackScaling, pack, packed_bytes, unpack
from gnmr.paths.base import HIGH, LOW, OperatorPaths, _Route, check_linear, first_order
from gnmr.paths.errors import ErrorMeter, of_units, sampled
from gnmr.paths.inputs import Entry, Input, LastInput, compute_dtype, is_wrapper
from gnmr.pytorch.units import Operator, Unit

_READ_TOGETHER = (
    frozenset(["q_proj", "k_proj", "v_proj"]),
    frozenset(["gate_proj", "up_proj"]),
    frozenset(["wq", "wk", "wv"]),
    frozenset(["w1", "w3"]),
)
"""Siblings that read one activation. A name that lies costs bytes in a compiled graph, never a wrong gradient."""


class SavedActivations(OperatorPaths):
    """Stores the inputs of a unit's operators in few bits for backward; the forward is exact (paper, setting A).

    Nothing is stored for a frozen weight, nor without grad mode. Gradients through the gradient (double backward)
    are an error. In-place changes of an input after the forward do not matter, since its codes are kept; but a
    bfloat16 input in format ``bf16`` is kept itself, and changing it is autograd's usual error.

    Under ``torch.compile`` the switch is a tensor: one graph serves every plan and every layer of a shape. Compile
    decoder layers (or the model), since operators compiled one by one store a shared input once each.

    How shared inputs are counted: :meth:`held_bytes` charges an activation that several operators read to the unit
    that reads it first, and the others nothing. Units that share an input and run on different paths hold both
    formats, so promoting one of them alone costs more than the difference that this table shows:
    :meth:`extra_bytes` has the cost of a plan.

    Args:
        low: format of the low-cost path: a name of :data:`gnmr.numerics.formats.FORMATS`.
        high: format of the recovery path.
        scaling: one scale for each token (``"token"``) or each group within it (``"group"``).
        group_size: elements in a group.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"``. Its noise is a function of the seed, the step
            and the place in the model, so that a recompute draws it again; micro-batches of a step share it.
            A compiled graph draws the noise of the eager one.
        seed: of the stochastic rounding.

    Raises:
        ValueError: an unknown format, scaling or rounding, or a group size below 1.

    Examples:
        >>> import torch
        >>> from gnmr import find_units
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(64, 64)})])})
        >>> paths = SavedActivations(low="e2m1", high="e4m3")
        >>> paths.attach(find_units(model))
        >>> y = model["layers"][0]["q_proj"](torch.ones(8, 64))
        >>> paths.held_bytes().tolist()  # 8 x 64 codes of 4 or 8 bits, and 8 float32 scales
        [[288], [544]]
        >>> paths.detach()
    """

    def __init__(
        self,
        low: str = "e2m1",
        high: str = "e4m3",
        *,
        scaling: PackScaling = "token",
        group_size: int = 128,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if rounding not in {"nearest", "stochastic"}:
            raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
        self.formats = (get_format(low).name, get_format(high).name)
        packed_bytes((1, 1), 1, low, scaling, group_size)  # raises for a scaling that cannot be
        self.scaling: PackScaling = scaling
        self.group_size = group_size
        self.rounding = rounding
        self.seed = seed
        self._slots: list[_Slot] = []
        self._slot_of: dict[Operator, _Slot] = {}
        self._step = torch.zeros((), dtype=torch.int64)  # a tensor: a compiled graph reads it
        self._cache = LastInput()
        self._apart = False
        self._watch = 0
        self._place: dict[_Share, int] = {}
        self._meter = ErrorMeter(0)

    def attach(self, units: Sequence[Unit]) -> None:
        """Replace the forward of every operator of ``units``.

        Raises:
            gnmr.UnitError: an operator has a forward that is not its class's, or not ``nn.Linear``'s.
            gnmr.PathError: attached already, or the model has another guard.
        """
        for operator in (operator for unit in units for operator in unit.operators):
            check_linear(operator, type(self).__name__)
        super().attach(units)
        # Packed sizes follow the switch, so a compiled graph must hold operators whose output size is not known
        # when it is made. Dynamo breaks the graph there unless told; the setting is one for the process.
        torch._dynamo.config.capture_dynamic_output_shape_ops = True

    def detach(self) -> None:
        """Give every operator its own forward back."""
        super().detach()
        self._cache = LastInput()
        self._slots, self._slot_of = [], {}
        self._watch, self._place, self._meter = 0, {}, ErrorMeter(0)

    def forward_of(self, operator: Operator, route: _Route) -> "partial[Tensor]":
        """Return the operator's switched forward."""
        group = _group_name(operator.fqn)
        share = next((slot.share for slot in self._slots if slot.share.name == group), None)
        slot = _Slot(self, operator, route, share or _Share(group), first=share is None)
        self._slots.append(slot)
        self._slot_of[operator] = slot
        slot.share.follow(self._slots)
        return partial(_forward, self, slot)

    def switch(self, unit: int, recover: bool) -> None:
        """Move one unit to its recovery path, or back."""
        super().switch(unit, recover)
        for operator in self.units[unit].operators:
            slot = self._slot_of[operator]
            slot.flag.fill_(int(recover))
            slot.share.follow(self._slots)

    def low(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator and store its input in the low-cost format."""
        return self._run(self._slot_of[operator], x, LOW)

    def high(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator and store its input in the recovery format."""
        return self._run(self._slot_of[operator], x, HIGH)

    def ran(self) -> NDArray[np.int64]:
        """Return and reset the (2, N) forward counts of both paths."""
        counts = super().ran()
        for slot in self._slots:
            counts[:, slot.route.unit] += slot.seen[:2]
            slot.seen[:2] = 0
        return counts

    def held_bytes(self) -> NDArray[np.int64]:
        """Return (2, N): bytes of a unit's packed inputs on both paths, for the shapes last seen.

        An input that several operators read counts once, for the unit that reads it first. Under
        ``torch.compile`` that holds for what one graph reads: operators compiled one by one store it each.
        """
        held = np.zeros((2, len(self.units)), dtype=np.int64)
        for slot in self._slots:
            rows, width, itemsize, shared = (int(value) for value in slot.seen[2:])
            if not shared:
                for path, fmt in enumerate(self.formats):
                    held[path, slot.route.unit] += self._packed_bytes(rows, width, itemsize, fmt)
        return held

    def activations(self) -> list[Activation]:
        """Return what is stored, by whom it is read and how large it is, for the shapes last seen.

        The input of :mod:`gnmr.memory`.
        """
        return [
            Activation(tuple(dict.fromkeys(slot.route.unit for slot in slots)), rows * width, scale_bytes)
            for slots, rows, width, _, scale_bytes in self._stored()
        ]

    def extra_bytes(self, active: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return (N,): what an active set holds beyond none.

        A second copy of an input, for its readers on the other path, is charged to the first active one.
        """
        extra = np.zeros(len(self.units), dtype=np.int64)
        for slots, rows, width, itemsize, _ in self._stored():
            on_recovery = [slot.route.unit for slot in slots if active[slot.route.unit]]
            if on_recovery:
                low, high = (self._packed_bytes(rows, width, itemsize, fmt) for fmt in self.formats)
                extra[on_recovery[0]] += high - (low if len(on_recovery) == len(slots) else 0)
        return extra

    def _stored(self) -> "list[tuple[list[_Slot], int, int, int, int]]":
        """Return each stored input: its readers, rows, width, bytes of an element, and bytes of its scales."""
        found: dict[str, tuple[list[_Slot], int, int, int, int]] = {}
        for slot in self._slots:
            rows, width, itemsize, shared = (int(value) for value in slot.seen[2:])
            name = slot.share.name if shared or slot.share.name not in found else slot.operator.fqn
            high = self.formats[HIGH]
            scales = self._packed_bytes(rows, width, itemsize, high) - self._packed_bytes(rows, width, 0, high)
            found.setdefault(name, ([], rows, width, itemsize, scales))[0].append(slot)
        return list(found.values())

    def _packed_bytes(self, rows: int, width: int, itemsize: int, fmt: str) -> int:
        return packed_bytes((rows, width), itemsize, fmt, self.scaling, self.group_size)

    def watch_errors(self, every: int) -> None:
        """Measure the error of the stored inputs from now on, every few steps on both paths."""
        if every < 1:
            raise ValueError(f"every must be >= 1 step, got {every!r}")
        self._watch = every
        shares = list(dict.fromkeys(slot.share for slot in self._slots))
        self._place = {share: place for place, share in enumerate(shares)}
        self._meter = ErrorMeter(len(shares))

    def errors(self) -> dict[str, NDArray[np.float64]]:
        """Return (N,) relative errors of the low-cost format, as ``"x"``."""
        places = [self._place[slot.share] for slot in self._slots]
        units = np.array([slot.route.unit for slot in self._slots])
        return {"x": of_units(self._meter.read()[places], units, len(self.units))}

    def measure(self, slot: "_Slot", x: Tensor) -> None:
        """Book the error that the low-cost format makes of a sample of an input, if it is time."""
        if self._watch and not self._apart and int(self._step) % self._watch == 0:
            rows = sampled(x.detach())
            low = pack(rows, self.formats[LOW], self.scaling, self.group_size)
            self._meter.add(self._place[slot.share], rows, unpack(low))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run what is inside without a trace in counts, shapes and errors."""
        seen = [slot.seen.copy() for slot in self._slots]
        self._apart, self._cache = True, LastInput()
        try:
            with super().apart():
                yield
        finally:
            self._apart, self._cache = False, LastInput()
            for slot, before in zip(self._slots, seen, strict=True):
                slot.seen[:] = before

    def end_step(self, step: int) -> None:
        """Take the noise of the next step."""
        self._step.fill_(step)
        self._cache = LastInput()

    def describe(self) -> dict[str, Any]:
        """Return the settings."""
        return {
            "kind": type(self).__name__,
            "low": self.formats[LOW],
            "high": self.formats[HIGH],
            "scaling": self.scaling,
            "group_size": self.group_size,
            "rounding": self.rounding,
            "seed": self.seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the step that the noise is drawn for, and the errors where they are measured."""
        errors = {share.name: self._meter.state(slice(place, place + 1)) for share, place in self._place.items()}
        return {"step": int(self._step), **({"errors": errors} if errors else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            gnmr.StateError: it has no step.
        """
        if "step" not in state_dict:
            raise StateError(f"this is no state of SavedActivations: {sorted(state_dict)} without 'step'")
        self._step.fill_(int(state_dict["step"]))
        for share, place in self._place.items():
            self._meter.load(slice(place, place + 1), state_dict.get("errors", {}).get(share.name, [None]))

    def __repr__(self) -> str:
        settings = {key: value for key, value in self.describe().items() if key != "kind"}
        return f"SavedActivations({', '.join(f'{key}={value!r}' for key, value in settings.items())})"

    def _run(self, slot: "_Slot", x: Tensor, path: int) -> Tensor:
        weight, bias = slot.weight, slot.bias
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return slot.operator.plain(x)
        if is_wrapper(x) or is_wrapper(weight):
            raise PathError(
                f"{slot.operator.fqn!r} runs on {type(x).__name__} and {type(weight).__name__}, which "
                "SavedActivations cannot pack: leave tensor-parallel operators out with exclude=..."
            )
        key = Input.of(x)
        dtype = compute_dtype(x)
        fmt = self.formats[path]
        entry = self._cache.find(key, x)
        shared = entry is not None
        entry = entry or self._cache.put(key, x)
        packed: Packed | None = entry.made.get((fmt, dtype))
        if packed is None:
            generator = None
            if self.rounding == "stochastic":
                generator = _generator(self.seed, int(self._step), int(slot.share.key), x.device)
            packed = pack(x.detach().to(dtype), fmt, self.scaling, self.group_size, generator)
            entry.made[fmt, dtype] = packed
            self.measure(slot, x)
        width = x.shape[-1]
        # An input that this operator itself packed before (a second call on it) stays its own.
        shared = shared and entry.owner is not slot
        entry.owner = entry.owner or slot
        slot.seen[2:] = (x.shape[:-1].numel(), width, dtype.itemsize, int(shared))
        how = (packed, slot.transposed, weakref.ref(entry))
        y: Tensor = _PackedLinear.apply(x, weight, bias, packed.data, packed.absmax, *how)
        return y

    def _run_compiled(self, slot: "_Slot", x: Tensor) -> Tensor:
        """The same without Python state: the switch is a tensor, and one graph serves every plan."""
        rows, width = x.shape[:-1].numel(), x.shape[-1]
        dtype = compute_dtype(x)
        _saw(slot.counts, slot.flag, rows, width, dtype.itemsize)
        weight, bias = slot.weight, slot.bias
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return slot.operator.plain(x)
        if self._watch and slot.first:
            _measure_input(slot.counts, slot.handle, x.detach())
        seed = self.seed if self.rounding == "stochastic" else None
        held = _pack_input(
            x.detach().to(dtype), slot.share.wanted, self._step, slot.share.key, *self.formats,
            self.scaling, self.group_size, seed,
        )  # fmt: skip
        how = (*self.formats, self.scaling, self.group_size)
        y: Tensor = _GatedLinear.apply(x, weight, bias, slot.flag, *held, how, slot.transposed)
        return y


def _forward(paths: SavedActivations, slot: "_Slot", x: Tensor) -> Tensor:
    if not slot.module.training:
        return slot.operator.plain(x)
    if torch.compiler.is_compiling():
        return paths._run_compiled(slot, x)
    path = HIGH if slot.route.recover else LOW
    slot.route.tick(path)
    return paths._run(slot, x, path)


class _Share:
    """Operators that read one activation: their noise, and the formats that any of them wants."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = torch.tensor(_digest(name))
        self.wanted = torch.zeros(2, dtype=torch.bool)

    def follow(self, slots: "list[_Slot]") -> None:
        plans = {bool(slot.flag) for slot in slots if slot.share is self}
        self.wanted.copy_(torch.tensor([False in plans, True in plans]))


class _Slot:
    """One operator's place: its switch as a tensor, and the shape that it saw last."""

    def __init__(
        self, paths: SavedActivations, operator: Operator, route: _Route, share: _Share, *, first: bool
    ) -> None:
        self.paths = paths
        self.operator = operator
        self.module: nn.Module = operator.module
        self.transposed = operator.transposed
        self.route = route
        self.share = share
        self.first = first
        """Whether it is charged for the input that its share reads."""
        number = next(_numbers)
        _slots[number] = self
        self.handle = torch.tensor(number)
        # Tensors, so that one compiled graph serves every plan and every layer.
        self.flag = torch.zeros((), dtype=torch.int64)
        # Compiled forwards on either path; rows, width, bytes of an element, whether another unit is charged.
        self.counts = torch.tensor([0, 0, 0, 0, 0, int(not first)])

    @property
    def seen(self) -> NDArray[np.int64]:
        return self.counts.numpy()

    @property
    def weight(self) -> Tensor:
        return self.module.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias  # type: ignore[return-value]


_numbers = count()
_slots: "weakref.WeakValueDictionary[int, _Slot]" = weakref.WeakValueDictionary()
"""Slots by number, which a compiled graph can hold."""


class _PackedLinear(torch.autograd.Function):
    """``x W^T + b`` that keeps the codes of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        data: Tensor,
        absmax: Tensor,
        packed: Packed,
        transposed: bool,
        entry: "weakref.ref[Entry]",
    ) -> Tensor:
        ctx.save_for_backward(weight, data, absmax)
        ctx.entry = entry
        ctx.transposed = transposed
        ctx.dtypes = (x.dtype, None if bias is None else bias.dtype)
        # Not the packed tensor itself: what autograd keeps must be what it frees.
        ctx.how = (packed.shape, packed.dtype, packed.format, packed.scaling, packed.group_size)
        return _linear(x, weight, bias, transposed)

    @staticmethod
    @first_order
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, data, absmax = ctx.saved_tensors
        entry = ctx.entry()
        if entry is not None:
            # After a backward the input may be filled anew behind its version counter, as NumPy does.
            entry.made.clear()
        grads = _input_and_bias(ctx, grad, weight)
        if not ctx.needs_input_grad[1]:
            return grads[0], None, grads[1], None, None, None, None, None
        x = unpack(Packed(data, absmax, *ctx.how)).to(grad.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        x = x.reshape(-1, x.shape[-1])
        by_weight = x.t() @ rows if ctx.transposed else rows.t() @ x
        return grads[0], by_weight.to(weight.dtype), grads[1], None, None, None, None, None


class _GatedLinear(torch.autograd.Function):
    """The same in a compiled graph, with both formats' codes (one of them, or none, is empty)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        flag: Tensor,
        low: Tensor,
        low_absmax: Tensor,
        high: Tensor,
        high_absmax: Tensor,
        how: tuple[str, str, PackScaling, int],
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(weight, flag, low, low_absmax, high, high_absmax)
        ctx.transposed = transposed
        ctx.dtypes = (x.dtype, None if bias is None else bias.dtype)
        ctx.how = how
        ctx.width = x.shape[-1]
        return _linear(x, weight, bias, transposed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *held = ctx.saved_tensors
        by_input, by_bias = _input_and_bias(ctx, grad, weight)
        by_weight = None
        if ctx.needs_input_grad[1]:
            rows = grad.reshape(-1, grad.shape[-1])
            by_weight = _weight_gradient(rows, *held, ctx.width, *ctx.how, ctx.transposed).to(weight.dtype)
        return by_input, by_weight, by_bias, None, None, None, None, None, None, None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Compute what the module computes, with the same kernels; casts as autocast would."""
    dtype = compute_dtype(x)
    if dtype != x.dtype or torch.is_autocast_enabled(x.device.type):
        # Cast by hand: autocast would keep the casts of the parameters, and here they carry no gradient.
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if not transposed:
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def _input_and_bias(ctx: Any, grad: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_dtype, bias_dtype = ctx.dtypes
    by_input = by_bias = None
    if ctx.needs_input_grad[0]:
        weight = weight.to(grad.dtype)
        by_input = (grad @ (weight.t() if ctx.transposed else weight)).to(x_dtype)
    if ctx.needs_input_grad[2]:
        by_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(bias_dtype)
    return by_input, by_bias


def _group_name(fqn: str) -> str:
    parent, _, name = fqn.rpartition(".")
    for place, names in enumerate(_READ_TOGETHER):
        if name in names:
            return f"{parent}/{place}"
    return fqn


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _generator(seed: int, step: int, key: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(_digest(f"{seed}/{step}/{key}"))


@torch.library.custom_op("gnmr::saw", mutates_args={"counts"})
def _saw(counts: Tensor, flag: Tensor, rows: int, width: int, itemsize: int) -> None:
    counts[int(flag)] += 1
    counts[2:5] = torch.tensor([rows, width, itemsize])


@_saw.register_fake
def _(counts: Tensor, flag: Tensor, rows: int, width: int, itemsize: int) -> None:
    return None


@torch.library.custom_op("gnmr::measure_input", mutates_args={"counts"})
def _measure_input(counts: Tensor, handle: Tensor, x: Tensor) -> None:
    # It changes nothing in the counts, but an operator that changes nothing is left out of a graph.
    slot = _slots.get(int(handle))
    if slot is not None:  # the guard may be gone, and its graph run once more
        slot.paths.measure(slot, x)


@_measure_input.register_fake
def _(counts: Tensor, handle: Tensor, x: Tensor) -> None:
    return None


@torch.library.custom_op("gnmr::pack_input", mutates_args=())
def _pack_input(
    x: Tensor,
    wanted: Tensor,
    step: Tensor,
    key: Tensor,
    low: str,
    high: str,
    scaling: str,
    group_size: int,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    held: list[Tensor] = []
    for fmt, want in zip((low, high), wanted.tolist(), strict=True):
        part = x if want else x.flatten()[:0].view(0, 1)
        generator = None if seed is None else _generator(seed, int(step), int(key), x.device)
        packed = pack(part, fmt, scaling, group_size, generator)  # type: ignore[arg-type]
        # An operator's result may be neither its input nor a view.
        held += [packed.data.flatten().clone() if fmt == "bf16" else packed.data, packed.absmax.flatten()]
    return held[0], held[1], held[2], held[3]


@_pack_input.register_fake
def _(
    x: Tensor,
    wanted: Tensor,
    step: Tensor,
    key: Tensor,
    low: str,
    high: str,
    scaling: str,
    group_size: int,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # The sizes are not in the graph: they follow the switch.
    size = torch.library.get_ctx().new_dynamic_size
    codes = [torch.bfloat16 if fmt == "bf16" else torch.uint8 for fmt in (low, high)]
    return (
        x.new_empty(size(), dtype=codes[0]),
        x.new_empty(size()),
        x.new_empty(size(), dtype=codes[1]),
        x.new_empty(size()),
    )


@torch.library.custom_op("gnmr::weight_gradient", mutates_args=())
def _weight_gradient(
    grad: Tensor,
    flag: Tensor,
    low: Tensor,
    low_absmax: Tensor,
    high: Tensor,
    high_absmax: Tensor,
    width: int,
    low_format: str,
    high_format: str,
    scaling: str,
    group_size: int,
    transposed: bool,
) -> Tensor:
    # One operator, and it reads the gradient: else a compiler could unpack in the forward and keep that.
    recover = bool(flag)
    data, absmax = (high, high_absmax) if recover else (low, low_absmax)
    shape = (grad.shape[0], width)
    fmt = get_format(high_format if recover else low_format)
    if fmt.scaled:
        absmax = absmax.view(shape[0], -1) if absmax.numel() else absmax.view(shape[0], 1)
    else:
        data = data.view(shape)
    x = unpack(Packed(data, absmax, shape, grad.dtype, fmt, scaling, group_size))  # type: ignore[arg-type]
    return x.t() @ grad if transposed else grad.t() @ x


@_weight_gradient.register_fake
def _(
    grad: Tensor,
    flag: Tensor,
    low: Tensor,
    low_absmax: Tensor,
    high: Tensor,
    high_absmax: Tensor,
    width: int,
    low_format: str,
    high_format: str,
    scaling: str,
    group_size: int,
    transposed: bool,
) -> Tensor:
    out = grad.shape[-1]
    return grad.new_empty((width, out) if transposed else (out, width))
