"""What :class:`gnmr.Int8` knows of one operator: the codes of its weight, and what it keeps of its input."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnmr.errors import PathError
from gnmr.numerics.int8 import Rows, quantize_rows
from gnmr.paths.base import _Route
from gnmr.paths.frozen import DequantizedWeight, HostWeight, give_values
from gnmr.paths.inputs import is_wrapper
from gnmr.paths.int8_linear import Operand
from gnmr.pytorch.experts import ExpertLinear
from gnmr.pytorch.units import Operator

ROLES = ("x", "dy")
"""The roles whose errors are measured."""


class Seen(NamedTuple):
    """Bytes that an operator keeps for backward.

    Attributes:
        low: of the input, on the low-cost path; shared with other readers.
        high: of the input on the recovery path, likewise.
        own: of its weight's columns for the outliers, on the low-cost path.
    """

    low: int = 0
    high: int = 0
    own: int = 0


class Host:
    """A weight in host memory, and the units that read it."""

    def __init__(self, weight: HostWeight) -> None:
        self.weight = weight
        self.readers: set[int] = set()


class Slot:
    """One operator's place: the codes of its weight, and what it keeps of its input."""

    def __init__(self, operator: Operator, route: _Route, number: int) -> None:
        self.operator, self.route = operator, route
        self.places = slice(len(ROLES) * number, len(ROLES) * (number + 1))
        self.seen = Seen()
        self.owner: weakref.ref[Slot] | None = None
        """Which slot is charged for the input."""
        self.host: Host | None = None
        self._rows: Rows | None = None
        self._version: tuple[int, int] | None = None

    @property
    def param(self) -> nn.Parameter:
        """The parameter that holds the weight."""
        return param_of(self.operator)

    @property
    def is_sharded(self) -> bool:
        """Whether the weight is a tensor that is more than one, and none of ours."""
        return is_wrapper(self.param) and not isinstance(self.param, DequantizedWeight)

    @property
    def trains(self) -> bool:
        """Whether this forward is to give the weight a gradient."""
        if self.param.requires_grad and self.host is not None:
            raise PathError(
                f"the weight of {self.operator.fqn!r} was unfrozen while its full precision is in host memory: detach "
                "the guard, unfreeze, and attach it again"
            )
        return torch.is_grad_enabled() and self.param.requires_grad

    @property
    def known_rows(self) -> Rows | None:
        """The codes, if there are any now."""
        return self.param.rows if isinstance(self.param, DequantizedWeight) else self._rows

    def place(self, role: str) -> int:
        """Return where the meter has an error of this operator."""
        return self.places.start + ROLES.index(role)

    def see(self, operand: Operand, kept_weight: Tensor | None, *, trains: bool) -> None:
        """Note what a forward on the low-cost path keeps."""
        columns = 0 if operand.columns is None else operand.columns.nbytes
        own = 0 if kept_weight is None else kept_weight.nbytes + (0 if trains else columns)
        low = operand.rows.nbytes + columns + (0 if operand.kept is None else operand.kept.nbytes)
        self.seen = self.seen._replace(low=low if trains else 0, own=own)

    def rows(self) -> Rows:
        """Return the weight's codes, made anew where it has changed."""
        param = self.param
        if isinstance(param, DequantizedWeight):
            return param.rows
        # What is computed at each forward (a parametrization, PEFT's adapter of a parameter) has no version to go by.
        told = isinstance(param, nn.Parameter) and not param.is_inference()
        # Frozen ones move between host and device, and are the same.
        version = (param._version, param.data_ptr() if param.requires_grad else 0) if told else None
        if self._rows is None or version is None or version != self._version:
            self._rows, self._version = quantize_rows(self.operator.weight.detach()), version
        return self._rows

    def columns(self, columns: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (out, c): the weight's columns for outliers."""
        if self.host is None and not isinstance(self.param, DequantizedWeight):
            return self.operator.weight.detach()[:, columns].to(dtype)
        codes, scale = self.rows()
        return Rows(codes[:, columns], scale).dequantize(dtype)

    def evaluate(self, x: Tensor) -> Tensor:
        """Run the operator as it ran before; a weight in the host's memory comes and goes."""
        weight = self.operator.weight
        if self.host is None or weight.device == x.device:
            return self.operator.plain(x)
        return nn.functional.linear(x, weight.to(x.device), self.operator.bias)

    def end_step(self) -> None:
        """Forget the codes of a weight that the optimiser is about to change."""
        if self.param.requires_grad:
            self._rows = None

    def give_back(self) -> None:
        """Leave the weight on the device, in full precision."""
        if self.host is not None:
            self.host.weight.give_back()
        give_values(self.param)


def param_of(operator: Operator) -> nn.Parameter:
    """Return the parameter that holds an operator's weight."""
    module: Any = operator.module
    return module.stacked if isinstance(module, ExpertLinear) else module.weight
