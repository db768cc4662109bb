"""Reads the gradient norm of each unit, in one fused pass over the buffers that the optimiser reads.

A norm here is the L2 norm of the true gradient: accumulated over the micro-batches (it reads after the
last), reduced over the ranks, and before any clipping. Per parameter it comes from ``torch._foreach_norm``, and per
row of a parameter in which experts are stacked; squares are summed per unit in float64 on the host. One small vector
crosses to the host for each device, and, in a distributed run, one goes through one all-reduce.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnmr.pytorch.distributed import Group, all_sum, first_row, local_part, share
from gnmr.pytorch.outputs import OutputGradients
from gnmr.pytorch.units import Unit

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """What one step's gradients say; N units.

    Attributes:
        norms: (N,) float64 L2 norms; NaN where ``observed`` is False.
        observed: (N,) bool, whether any parameter of the unit has a gradient, on any rank. A row of stacked experts
            has one where it is not all zeros: an expert without a token gets zeros.
        total: the L2 norm over all of the model's gradients; None where only the units were read.
        fresh: whether a backward came before it, on any rank.
    """

    norms: Floats
    observed: NDArray[np.bool_]
    total: float | None
    fresh: bool


class Monitor:
    """The units' norms, and the norm of all gradients for clipping.

    Args:
        model: the whole model.
        units: N units; a parameter that several of them share enters each of their norms, and once the total.
        group: the process group that shares the decision, or None.
        outputs: of units that are watched at their outputs, in place of their parameters.

    Examples:
        >>> from gnmr.pytorch.units import find_units
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"fc1": nn.Linear(2, 1, False)})])})
        >>> _ = model["layers"][0]["fc1"](torch.tensor([3.0, 4.0])).backward()
        >>> Monitor(model, find_units(model)).read().norms.tolist()
        [5.0]
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], group: Group = None, outputs: OutputGradients | None = None
    ) -> None:
        self._group, self._outputs = group, outputs
        self.device = next(model.parameters()).device
        self._params = tuple(dict.fromkeys(p for unit in units for p in unit.params))
        inside = set(self._params)
        # Frozen ones too: they have no gradient, until somebody unfreezes them.
        self._rest = tuple(p for p in model.parameters() if p not in inside)
        places = (
            (module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None
        )
        self._places = [(module._parameters, name, p) for module, name, p in places if p in inside]
        self._stacked = {piece.param for unit in units for piece in unit.pieces if piece.row is not None}
        rows = [p.shape[0] if p in self._stacked else 1 for p in (*self._params, *self._rest)]
        first = np.cumsum([0, *rows])
        self._first: list[int] = first.tolist()
        position = {p: i for i, p in enumerate(model.parameters())}
        order = np.argsort([position[p] for p in (*self._params, *self._rest)])
        self._order = np.concatenate([np.arange(first[i], first[i + 1]) for i in order])
        place = {p: int(first[i]) for i, p in enumerate(self._params)}
        pairs = [(place[piece.param] + (piece.row or 0), unit.index) for unit in units for piece in unit.pieces]
        # (pairs,) indices: row of a parameter -> unit. Without a shared parameter it is one pair a row.
        self._of_pair = np.array([row for row, _ in pairs], dtype=np.int64)
        self._unit_of_pair = np.array([unit for _, unit in pairs], dtype=np.int64)
        self._n_units = len(units)

    def replaced(self) -> str | None:
        """Return the name of a unit's parameter that is not the module's any more, or None."""
        return next((name for params, name, param in self._places if params.get(name) is not param), None)

    def has_gradient(self) -> bool:
        """Return whether any unit has a gradient on this rank."""
        if self._outputs is not None:
            return self._outputs.heard
        return any(gradient(param) is not None for param in self._params)

    def gradients(self) -> list[Tensor]:
        """Return what this rank holds of all gradients of the model."""
        grads = map(gradient, (*self._params, *self._rest))
        return [local_part(grad) for grad in grads if grad is not None]

    def read(self, scale: float = 1.0, *, at_outputs: float = 1.0, total: bool = False, fresh: bool = True) -> Reading:
        """Read the norms of this step's gradients.

        Args:
            scale: a live loss scale of the parameters' gradients, to divide by.
            at_outputs: the loss scale of the gradients at outputs, which nobody unscales.
            total: read the parameters outside the units too, in the same pass.
            fresh: whether this rank saw a backward since the last reading.
        """
        params = (*self._params, *self._rest) if total else self._params
        parts, shares = self._parts(params)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.square(parts, where=shares > 0, out=np.zeros_like(parts)) * shares
        n = self._n_units
        of_units = (self._sums(squares), self._sums(shares)) if self._outputs is None else self._outputs.read()
        mine = np.concatenate([*of_units, [squares.sum(), float(fresh)]])
        sums = all_sum(mine, self.device, self._group)
        observed = sums[n : 2 * n] > 0
        norms = np.where(observed, np.sqrt(sums[:n]) / (scale if self._outputs is None else at_outputs), np.nan)
        whole = None
        if total:
            whole = float(np.sqrt(sums[-2]) if self._group is not None else self._as_torch(parts, shares)) / scale
        return Reading(norms, observed, whole, bool(sums[-1] > 0))

    def _sums(self, of_rows: Floats) -> Floats:
        """Return (N,) sums over the units' pieces."""
        found = np.bincount(self._unit_of_pair, of_rows[self._of_pair], minlength=self._n_units)
        return np.asarray(found, dtype=np.float64)

    def _parts(self, params: Sequence[nn.Parameter]) -> tuple[Floats, Floats]:
        """Return (Q,) norms of what this rank holds, and (Q,) its shares in the sums, 0 where there is nothing."""
        parts, shares = np.zeros(self._first[len(params)]), np.zeros(self._first[len(params)])
        grads = [(i, p, grad) for i, p in enumerate(params) if (grad := gradient(p)) is not None]
        whole = [(i, grad) for i, p, grad in grads if p not in self._stacked]
        stacked = [(i, grad) for i, p, grad in grads if p in self._stacked]
        norms = _norms([local_part(grad) for _, grad in whole], [local_part(grad) for _, grad in stacked])
        here = [self._first[i] for i, _ in whole]
        parts[here], shares[here] = norms[: len(here)], [share(grad, self._group) for _, grad in whole]
        begin = len(here)
        for i, grad in stacked:
            rows = len(local_part(grad))
            place = slice(first := self._first[i] + first_row(grad), first + rows)
            parts[place] = norms[begin : begin + rows]
            shares[place] = np.where(parts[place] != 0, share(grad, self._group), 0.0)
            begin += rows
        return parts, shares

    def _as_torch(self, parts: Floats, shares: Floats) -> float:
        """Sum the parts as ``clip_grad_norm_`` does: the same to the last bit, but for the rows of stacked experts."""
        there = self._order[shares[self._order] > 0]
        return float(torch.linalg.vector_norm(torch.from_numpy(parts[there]).to(torch.float32)))


def gradient(param: nn.Parameter) -> Tensor | None:
    """Return the buffer that the optimiser reads: Megatron's ``main_grad`` where there is one."""
    main: Tensor | None = getattr(param, "main_grad", None)
    return main if main is not None else param.grad


def by_place(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Group tensors by (device, dtype), as the fused kernels want them; returns their indices."""
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    return groups


def _norms(whole: Sequence[Tensor], stacked: Sequence[Tensor]) -> Floats:
    """Return the L2 norm of each tensor, then of each row of the stacked ones; one copy to the host for each device."""
    # A norm in bfloat16 has three digits; the sum is kept in float32 or better.
    sums_in = lambda dtype: torch.float64 if dtype == torch.float64 else torch.float32  # noqa: E731
    by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    for (device, dtype), members in by_place(whole).items():
        found = torch._foreach_norm([whole[i] for i in members], 2, dtype=sums_in(dtype))
        indices, stacks = by_device.setdefault(device, ([], []))
        indices.extend(members)
        stacks.append(torch.stack(found))
    n = len(whole)
    for tensor in stacked:
        indices, stacks = by_device.setdefault(tensor.device, ([], []))
        indices.extend(range(n, n + len(tensor)))
        stacks.append(torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=sums_in(tensor.dtype)))
        n += len(tensor)
    norms = np.zeros(n)
    for indices, stacks in by_device.values():
        norms[indices] = torch.cat(stacks).cpu().numpy()
    return norms
