"""Real INT8 as the low-cost path: the forward multiplies INT8 by INT8, and recovery is what the model runs in.

Activations are quantised by tokens as they come, weights by output channels: a trainable one once an optimiser step, a
frozen one (LoRA's base) once. Where the full precision of frozen weights is meanwhile, :mod:`gnmr.paths.frozen` says;
what is computed, :mod:`gnmr.paths.int8_linear`.
"""

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnmr.errors import PathError, StateError, UnitError
from gnmr.numerics.int8 import int8_matmul, quantize_rows
from gnmr.paths.base import HIGH, LOW, OperatorPaths, _Route, check_linear
from gnmr.paths.errors import ErrorMeter, of_units, sampled
from gnmr.paths.frozen import DequantizedWeight, HostWeight, PlainState, give_values, keep_codes, warn_restored
from gnmr.paths.inputs import Entry, Input, LastInput, compute_dtype, is_wrapper
from gnmr.paths.int8_linear import Int8Linear, Operand, quantize_input, scaled_gradient
from gnmr.paths.int8_slot import ROLES, Host, Seen, Slot, param_of
from gnmr.pytorch.experts import ExpertLinear
from gnmr.pytorch.units import Operator, Unit


class Int8(OperatorPaths):
    """Linear operators in INT8; recovery runs them as the model would, in BF16 under autocast or with BF16 weights.

    The forward is ``torch._int_mm`` on codes, with a scale for each token of x and each output channel of W. What is
    kept for the weight gradient are the codes of x, which several operators that read one activation share. Nothing is
    kept for a frozen weight. In ``eval`` mode the operators run as they did before.

    A trainable weight is quantised once a step: anew after :meth:`end_step`, or where it was changed in place since.
    A frozen one is quantised when the paths are attached, and again where it was changed in place; writing through
    ``.data`` between two steps (PEFT's ``merge``) goes unseen, so detach the guard for that.

    Where the full-precision weights of frozen operators are (``frozen``):

    - ``"resident"``: beside the INT8 ones. Recovery is exact and at once.
    - ``"offload"``: in host memory, and on the device for the units on recovery only, which are brought there at the
      end of the step before: the INT8 model and at most ``max_active`` units (all of them in a high-fidelity
      warm-up). On a CPU the host memory is a memory-mapped file: what is saved is memory that the system cannot drop,
      and with ``offload_dir`` on a RAM disk nothing is. ``state_dict`` and ``detach`` have the exact weights. On an
      accelerator the weights are on the CPU meanwhile: ``model.to(device)`` would bring all of them back.
    - ``"dequantize"``: nowhere. Recovery multiplies by the dequantised weight, and so undoes the error of the
      activations only, and so does ``eval`` mode; ``state_dict`` and ``detach`` give dequantised weights, and warn.
      With both of the last two a weight that others read too (a tied one) is gone for them as well.

    Off the CPU, operands are padded to what ``torch._int_mm`` takes there (more than 16 rows, multiples of 8). Under
    ``torch.compile`` the operators run eagerly between compiled pieces: layers may be compiled, not with ``fullgraph``.
    Gradients of gradients are an error.

    Args:
        outliers: columns of x with a magnitude at or above it are multiplied in high precision, as LLM.int8 does
            (arXiv 2208.07339, where it is 6.0), by the weight's own columns where those are in memory, else by the
            dequantised ones; None: none.
        backward: ``"high"``: in the dtype of the gradient, with dequantised operands; ``"int8"``: the products of the
            backward multiply INT8 by INT8 too.
        frozen: see above.
        offload_dir: the folder of the mapped files under ``frozen="offload"`` on a CPU; None: where temporary files go.

    Raises:
        ValueError: a setting that is none of these.

    Examples:
        >>> import gnmr
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(2, 1, bias=False)})])})
        >>> q_proj = model["layers"][0]["q_proj"]
        >>> with torch.no_grad():
        ...     _ = q_proj.weight.copy_(torch.tensor([[1.0, 0.3]]))
        >>> paths = gnmr.Int8()
        >>> paths.attach(gnmr.find_units(model))
        >>> x = torch.tensor([[127.0, 127.0]])
        >>> round(q_proj(x).item(), 4)  # 0.3 became 38/127
        165.0
        >>> paths.switch(0, recover=True)
        >>> round(q_proj(x).item(), 4)
        165.1
        >>> paths.detach()
    """

    def __init__(
        self,
        *,
        outliers: float | None = None,
        backward: Literal["high", "int8"] = "high",
        frozen: Literal["resident", "offload", "dequantize"] = "resident",
        offload_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if outliers is not None and not outliers > 0:
            raise ValueError(f"outliers must be > 0 (LLM.int8 has 6.0), or None for no such columns, got {outliers!r}")
        if backward not in {"high", "int8"}:
            raise ValueError(f"backward must be 'high' or 'int8', got {backward!r}")
        if frozen not in {"resident", "offload", "dequantize"}:
            raise ValueError(f"frozen must be 'resident', 'offload' or 'dequantize', got {frozen!r}")
        self.outliers, self.backward, self.frozen = outliers, backward, frozen
        self.offload_dir = None if offload_dir is None else Path(offload_dir)
        if self.offload_dir is not None and not (frozen == "offload" and self.offload_dir.is_dir()):
            raise ValueError(f"offload_dir must be a folder, and belongs to frozen='offload', got {offload_dir!r}")
        self.step = 1
        self._slots: list[Slot] = []
        self._slot_of: dict[Operator, Slot] = {}
        self._hooks: list[Any] = []
        self._cache = LastInput()
        self._apart = False
        self._watch = 0
        self._meter = ErrorMeter(0)

    def attach(self, units: Sequence[Unit]) -> None:
        """Replace the forward of every operator of ``units``, and put the weights of frozen ones where they go.

        Raises:
            gnmr.UnitError: an operator has a forward that is not its class's, or not ``nn.Linear``'s; or a frozen
                weight that cannot leave.
            gnmr.PathError: attached already, or the model has another guard; a device without INT8 products; no room
                for what is put away.
        """
        operators = [operator for unit in units for operator in unit.operators]
        for operator in operators:
            check_linear(operator, type(self).__name__)
            self._check_frozen(operator)
        for device in {operator.device for operator in operators}:
            _check_device(device)
        super().attach(units)
        try:
            self._put_away()
        except BaseException:
            self.detach()
            raise

    def forward_of(self, operator: Operator, route: _Route) -> "partial[Tensor]":
        """Return the operator's switched forward."""
        slot = Slot(operator, route, len(self._slots))
        self._slots.append(slot)
        self._slot_of[operator] = slot
        return partial(_forward, self, slot)

    def detach(self) -> None:
        """Give every operator its own forward and weight back; only ``"dequantize"`` cannot give the weight it took.

        Warns:
            gnmr.GnmrWarning: frozen weights are dequantised ones now.
        """
        super().detach()
        for hook in self._hooks:
            hook.remove()
        lost = False
        for slot in self._slots:
            lost = lost or isinstance(slot.param, DequantizedWeight)
            slot.give_back()
        self._slots, self._slot_of, self._hooks = [], {}, []
        self._cache, self._watch, self._meter = LastInput(), 0, ErrorMeter(0)
        if lost:
            warn_restored()

    def switch(self, unit: int, recover: bool) -> None:
        """Move one unit to its recovery path, or back."""
        super().switch(unit, recover)
        if not recover:
            for host in self._hosts_of(unit):
                if not any(self._routes[other].recover for other in host.readers):
                    host.weight.drop()

    def end_step(self, step: int) -> None:
        """Forget the codes of trainable weights, and bring the frozen weights that the next step recovers."""
        self.step = step + 1
        self._cache = LastInput()
        for slot in self._slots:
            slot.end_step()
            if slot.host is not None and slot.route.recover:
                slot.host.weight.fetch()

    def low(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator in INT8."""
        slot = self._slot_of[operator]
        dtype, trains = compute_dtype(x), slot.trains
        entry = self._entry(slot, x, dtype, trains)
        operand: Operand | None = entry.made.get(dtype)
        if operand is None:
            operand = quantize_input(x.detach().reshape(-1, x.shape[-1]), self.outliers, dtype)
            entry.made[dtype] = operand
        measure = None
        if self._watch and not self._apart:
            self._meter.add(slot.place("x"), sampled(x.detach()).float(), operand.sample())
            measure = partial(self._meter.add, slot.place("dy"))
        kept_weight = None if operand.columns is None else slot.columns(operand.columns, dtype)
        slot.see(operand, kept_weight if x.requires_grad else None, trains=trains)
        rows, bias, weight = slot.rows(), operator.bias, operator.weight if trains else None
        how = (dtype, self.backward, measure, weakref.ref(entry))
        y: Tensor = Int8Linear.apply(x, weight, bias, operand, rows, kept_weight, *how)
        return y

    def high(self, operator: Operator, x: Tensor) -> Tensor:
        """Run the operator as the model would; under ``"dequantize"`` a frozen one with its dequantised weight."""
        slot = self._slot_of[operator]
        self._entry(slot, x, compute_dtype(x), slot.trains)
        if slot.host is not None:
            slot.host.weight.use()
        y = operator.plain(x)
        if self._watch and not self._apart and self.step % self._watch == 0:
            self._measure_on_recovery(slot, x.detach(), y)
        return y

    def _entry(self, slot: "Slot", x: Tensor, dtype: torch.dtype, trains: bool) -> Entry:
        """Return what is known of an input, and charge what is held of it to the operator that reads it first."""
        if is_wrapper(x) or slot.is_sharded:
            raise PathError(
                f"{slot.operator.fqn!r} runs on {type(x).__name__} and {type(slot.param).__name__}, which Int8 cannot "
                "quantise: leave tensor-parallel operators out with exclude=..."
            )
        key = Input.of(x)
        entry = self._cache.find(key, x) or self._cache.put(key, x)
        if trains:
            entry.owner = entry.owner or slot
            slot.owner = weakref.ref(entry.owner)  # type: ignore[arg-type]
            high = x.numel() * dtype.itemsize
            if high != slot.seen.high:  # without outliers, until the low-cost path has seen some
                slot.seen = Seen(x.numel() + 4 * x.shape[:-1].numel(), high)
        return entry

    def _measure_on_recovery(self, slot: "Slot", x: Tensor, y: Tensor) -> None:
        """Book the errors that the low-cost path would have made of a sample."""
        operand = quantize_input(sampled(x), self.outliers, torch.float32)
        self._meter.add(slot.place("x"), sampled(x).float(), operand.sample())
        if self.backward == "high" or not y.requires_grad:
            return
        flat = x.reshape(-1, x.shape[-1])
        trains = slot.trains
        scale = quantize_rows(flat).scale if trains else slot.rows().scale

        def see(grad: Tensor) -> None:
            rows = grad.detach().reshape(-1, grad.shape[-1])
            rows = sampled(scaled_gradient(rows.t() if trains else rows, scale))
            self._meter.add(slot.place("dy"), rows, Operand(quantize_rows(rows)).sample())

        y.register_hook(see)

    def held_bytes(self) -> NDArray[np.int64]:
        """Return (2, N): bytes of what is kept of a unit's inputs on both paths, for the shapes last seen.

        An input that several operators read counts once, for the one that reads it first. Weights do not count: see
        :meth:`weight_bytes`.
        """
        held = np.zeros((2, len(self.units)), dtype=np.int64)
        for slot in self._slots:
            held[LOW, slot.route.unit] += slot.seen.own
            if slot.owner is not None and slot.owner() is slot:
                held[LOW, slot.route.unit] += slot.seen.low
                held[HIGH, slot.route.unit] += slot.seen.high
        return held

    def extra_bytes(self, active: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return (N,): what an active set holds beyond none, weights that are brought back from the host among it.

        A second copy of an input, for its readers on the other path, is charged to the first active one, and so is a
        weight that several units have.
        """
        extra = np.zeros(len(self.units), dtype=np.int64)
        readers: dict[Slot, list[Slot]] = {}
        for slot in self._slots:
            if slot.owner is not None and (owner := slot.owner()) is not None:
                readers.setdefault(owner, []).append(slot)
            if active[slot.route.unit]:
                extra[slot.route.unit] -= slot.seen.own
        for owner, slots in readers.items():
            on_recovery = [slot.route.unit for slot in slots if active[slot.route.unit]]
            if on_recovery:
                all_of_them = len(on_recovery) == len(slots)
                extra[on_recovery[0]] += owner.seen.high - (owner.seen.low if all_of_them else 0)
        for host in self._hosts:
            first = next((unit for unit in sorted(host.readers) if active[unit]), None)
            if first is not None:
                extra[first] += host.weight.home.nbytes
        return extra

    def weight_bytes(self) -> dict[str, int]:
        """Return what the weights of all units take now, in bytes.

        Returns:
            ``"int8"``: codes and scales. ``"full"``: full precision on the device, of trainable and of frozen weights.
            ``"host"``: full precision in host memory, or a mapped file, under ``frozen="offload"``.
        """
        params = {slot.param: slot for slot in self._slots}
        full = 0
        for param, slot in params.items():
            if slot.host is not None:
                full += slot.host.weight.nbytes
            elif not isinstance(param, DequantizedWeight):
                full += param.nbytes
        codes = {rows.codes.data_ptr(): rows.nbytes for slot in self._slots if (rows := slot.known_rows) is not None}
        host = sum(host.weight.home.nbytes for host in self._hosts)
        return {"int8": sum(codes.values()), "full": full, "host": host}

    def ready(self) -> tuple[str, ...]:
        """Return the operators whose full precision ``frozen="offload"`` has on the device, or on its way."""
        return tuple(slot.operator.fqn for slot in self._slots if slot.host is not None and slot.host.weight.here)

    def watch_errors(self, every: int) -> None:
        """Measure the errors of the casts of x, and of dy in an INT8 backward, from now on.

        That of dy is the one of the weight gradient's product; of a frozen weight, the one of dx.
        """
        if every < 1:
            raise ValueError(f"every must be >= 1 step, got {every!r}")
        self._watch = every
        self._meter = ErrorMeter(len(ROLES) * len(self._slots))

    def errors(self) -> dict[str, NDArray[np.float64]]:
        """Return (N,) relative errors of the low-cost path's casts of this step, by role."""
        found = self._meter.read().reshape(-1, len(ROLES)).T
        units = np.array([slot.route.unit for slot in self._slots])
        by_role = {role: of_units(row, units, len(self.units)) for role, row in zip(ROLES, found, strict=True)}
        return by_role if self.backward == "int8" else {"x": by_role["x"]}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run what is inside without a trace in counts, shapes and errors."""
        before = [(slot.seen, slot.owner) for slot in self._slots]
        self._apart, self._cache = True, LastInput()
        try:
            with super().apart():
                yield
        finally:
            self._apart, self._cache = False, LastInput()
            for slot, (seen, owner) in zip(self._slots, before, strict=True):
                slot.seen, slot.owner = seen, owner

    def describe(self) -> dict[str, Any]:
        """Return the settings, but for the folder, which is the machine's."""
        return {**super().describe(), "outliers": self.outliers, "backward": self.backward, "frozen": self.frozen}

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the errors where they are measured; codes are made anew."""
        errors = {slot.operator.fqn: self._meter.state(slot.places) for slot in self._slots} if self._watch else {}
        return {"step": self.step, **({"errors": errors} if errors else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            gnmr.StateError: it has no step.
        """
        if "step" not in state_dict:
            raise StateError(f"this is no state of Int8: {sorted(state_dict)} without 'step'")
        self.step = int(state_dict["step"])
        errors = state_dict.get("errors", {})
        for slot in self._slots:
            if self._watch and slot.operator.fqn in errors:
                self._meter.load(slot.places, errors[slot.operator.fqn])

    def __repr__(self) -> str:
        return f"Int8(outliers={self.outliers!r}, backward={self.backward!r}, frozen={self.frozen!r})"

    @property
    def _hosts(self) -> "list[Host]":
        return list(dict.fromkeys(slot.host for slot in self._slots if slot.host is not None))

    def _hosts_of(self, unit: int) -> "list[Host]":
        return [host for host in self._hosts if unit in host.readers]

    def _check_frozen(self, operator: Operator) -> None:
        param = param_of(operator)
        if self.frozen == "resident" or param.requires_grad:
            return
        sharded = is_wrapper(param) and not isinstance(param, DequantizedWeight)
        if sharded or isinstance(operator.module, ExpertLinear):
            what = type(param).__name__ if sharded else "one of several that are stacked in one parameter"
            raise UnitError(
                f"the frozen weight of {operator.fqn!r} is {what}, and cannot leave the device by itself: use "
                "frozen='resident', or leave it out with exclude=..."
            )

    def _put_away(self) -> None:
        """Quantise the frozen weights, and put their full precision where it goes."""
        hosts: dict[nn.Parameter, Host] = {}
        hook = PlainState()
        for slot in self._slots:
            param = slot.param
            if param.requires_grad or slot.is_sharded:
                continue
            if self.frozen == "offload":
                give_values(param)  # of a copy of a model that had codes only
            rows = slot.rows()
            if self.frozen == "offload":
                slot.host = hosts[param] = hosts.get(param) or Host(HostWeight(param, self.offload_dir))
                slot.host.readers.add(slot.route.unit)
            elif self.frozen == "dequantize":
                if not isinstance(param, DequantizedWeight):
                    keep_codes(param, rows, transposed=slot.operator.transposed)
                self._hooks.append(slot.operator.module.register_state_dict_post_hook(hook))


def _forward(paths: Int8, slot: "Slot", x: Tensor) -> Tensor:
    if not slot.operator.module.training:
        return slot.evaluate(x)
    return _run(paths, slot, x)


@torch.compiler.disable  # the codes that are known, the plan and the counts are Python's
def _run(paths: Int8, slot: "Slot", x: Tensor) -> Tensor:
    path = HIGH if slot.route.recover else LOW
    slot.route.tick(path)
    return paths.high(slot.operator, x) if path == HIGH else paths.low(slot.operator, x)


def _check_device(device: torch.device) -> None:
    try:
        int8_matmul(*(torch.zeros(8, 8, dtype=torch.int8, device=device),) * 2)
    except (RuntimeError, NotImplementedError) as error:
        raise PathError(
            f"torch._int_mm, the product of Int8, does not run on {device} ({error}): use gnmr.Simulated(low='int8') "
            "to study it there"
        ) from error
