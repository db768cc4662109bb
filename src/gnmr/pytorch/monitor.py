"""Reads the gradient norm of each unit, in one fused pass over the buffers that the optimiser reads.

A norm here is the L2 norm of the true gradient: accumulated over the micro-batches (it reads after the
last), reduced over the ranks, and before any clipping. Per parameter it comes from ``torch._foreach_norm``;
squares are summed per unit in float64, and one vector of 2N numbers crosses to the host (and, in a
distributed run, goes through one all-reduce before).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnmr.pytorch.distributed import Group, all_sum, local_part, share
from gnmr.pytorch.units import Unit


@dataclass(frozen=True)
class Reading:
    """What one step's gradients say; N units.

    Attributes:
        norms: (N,) float64 L2 norms; NaN where ``observed`` is False.
        observed: (N,) bool, whether any parameter of the unit has a gradient.
        total_square: the sum of squares over all the units' parameters, each counted once.
    """

    norms: NDArray[np.float64]
    observed: NDArray[np.bool_]
    total_square: float


class Monitor:
    """The units' norms, and the norm of everything else for clipping.

    Args:
        model: the whole model, for :meth:`read_rest`.
        units: N units; a parameter that several of them share enters each of their norms, and once the total.
        group: the process group that shares the decision, or None.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], group: Group = None) -> None:
        self._group = group
        self._params = tuple(dict.fromkeys(p for unit in units for p in unit.params))
        inside = set(self._params)
        self._rest = tuple(p for p in model.parameters() if p.requires_grad and p not in inside)
        place = {p: i for i, p in enumerate(self._params)}
        pairs = [(place[p], unit.index) for unit in units for p in unit.params]
        # (pairs,) indices: parameter -> unit. Without a shared parameter it is one pair a parameter.
        self._of_pair = np.array([param for param, _ in pairs])
        self._unit_of_pair = np.array([unit for _, unit in pairs])
        self._n_units = len(units)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the units' parameters, without the missing ones."""
        return [g for g in map(gradient, self._params) if g is not None]

    def rest(self) -> list[Tensor]:
        """Return the gradients of the model's other parameters."""
        return [g for g in map(gradient, self._rest) if g is not None]

    def read(self, scale: float = 1.0) -> Reading:
        """Read the norms of this step's gradients, divided by ``scale`` (a live loss scale)."""
        grads = list(map(gradient, self._params))
        squares, present = _squares(grads, self._group)
        of_pair = squares[self._of_pair]
        summed = np.bincount(self._unit_of_pair, of_pair, minlength=self._n_units)
        seen = np.bincount(self._unit_of_pair, present[self._of_pair], minlength=self._n_units)
        sums = all_sum(np.concatenate([summed, seen, [squares.sum()]]), self._params[0].device, self._group)
        n = self._n_units
        observed = sums[n : 2 * n] > 0
        norms = np.where(observed, np.sqrt(sums[:n]) / scale, np.nan)
        return Reading(norms, observed, float(sums[-1]) / scale**2)

    def read_rest(self) -> float:
        """Return the sum of squares of the gradients outside the units."""
        if not self._rest:
            return 0.0
        squares, _ = _squares(list(map(gradient, self._rest)), self._group)
        return float(all_sum(squares.sum(keepdims=True), self._rest[0].device, self._group)[0])


def gradient(param: nn.Parameter) -> Tensor | None:
    """Return the buffer that the optimiser reads: Megatron's ``main_grad`` where there is one."""
    main: Tensor | None = getattr(param, "main_grad", None)
    return main if main is not None else param.grad


def by_place(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Group tensors by (device, dtype), as the fused kernels want them."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _squares(
    grads: Sequence[Tensor | None], group: Group
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (P,) squared norms (0 where missing) and (P,) presence, each this rank's share of the sum."""
    here = [i for i, grad in enumerate(grads) if grad is not None]
    locals_ = [local_part(grads[i]) for i in here]  # type: ignore[arg-type]
    shares = np.array([share(grads[i], group) for i in here])  # type: ignore[arg-type]
    norms = np.zeros(len(here))
    places: dict[Any, list[int]] = {}
    for index, tensor in enumerate(locals_):
        places.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (_, dtype), members in places.items():
        # A norm in bfloat16 has three digits; the sum is kept in float32 or better.
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        found = torch._foreach_norm([locals_[i] for i in members], 2, dtype=kind)
        norms[members] = torch.stack(found).cpu().numpy()
    squares, present = np.zeros(len(grads)), np.zeros(len(grads))
    with np.errstate(over="ignore", invalid="ignore"):
        squares[here] = norms**2 * shares
    present[here] = shares
    return squares, present
