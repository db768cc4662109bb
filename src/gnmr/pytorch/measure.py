"""What autograd holds for backward, in bytes that are really there.

A storage that several saved tensors look at counts once, and whole: a view keeps all of it alive. Parameters and
buffers do not count, since they stay anyway, nor does a cast of an operator's weight (autocast's) count for its
projection.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.pytorch.units import Operator, Unit, find_units


@dataclass
class Held:
    """Bytes held for backward, and by whom.

    *Held by the projections* is what autograd saved while an eligible operator ran, its weight apart: the input
    itself in a plain model, the packed codes and their scales under :class:`gnmr.SavedActivations`. Others may
    hold the same storage (attention keeps its output, ``o_proj``'s input), and then packing it frees nothing:
    :attr:`shared` says how many of the bytes that is, and :attr:`model` what all of it comes to.

    Compiled graphs save all at once and run no module's hooks: :attr:`model` counts them, :attr:`projections`
    cannot. What checkpointing recomputes is not held, and not counted.
    """

    _storages: dict[int, int] = field(default_factory=dict)
    _by_projection: set[int] = field(default_factory=set)
    _by_others: set[int] = field(default_factory=set)

    @property
    def model(self) -> int:
        """Bytes held by the whole model."""
        return sum(self._storages.values())

    @property
    def projections(self) -> int:
        """Bytes held by the eligible projections."""
        return sum(self._storages[key] for key in self._by_projection)

    @property
    def shared(self) -> int:
        """Bytes held by the eligible projections that others hold too."""
        return sum(self._storages[key] for key in self._by_projection & self._by_others)


@contextmanager
def held_for_backward(model: nn.Module, units: Sequence[Unit] | None = None) -> Iterator[Held]:
    """Count the bytes that autograd holds for backward after the forward inside.

    Run one forward inside, and keep its result: what is saved is counted as it is saved. To keep the count of
    storages exact, all of them stay alive until the context ends, and what is saved is saved without its history:
    gradients through the gradient are not for inside.

    Args:
        model: whose parameters and buffers do not count.
        units: whose operators are the eligible projections; by default those of :func:`gnmr.find_units`.

    Yields:
        The counts so far.

    Raises:
        gnmr.UnitError: no unit is given, and none is found.

    Examples:
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4)})])})
        >>> with held_for_backward(model) as held:
        ...     y = model["layers"][0]["q_proj"](torch.ones(8, 4)).sigmoid()
        >>> held.projections, held.model  # 8 x 4 float32: the input, and the output of sigmoid
        (128, 256)
    """
    units = find_units(model) if units is None else units
    held = Held()
    own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    alive: list[Tensor] = []
    running: list[tuple[Operator, Any]] = []

    def save(tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key in own:
            return tensor
        if key not in held._storages:
            held._storages[key] = tensor.untyped_storage().nbytes()
            alive.append(tensor.detach())  # so that its memory is not another's while we count
        if not running:
            held._by_others.add(key)
        elif not _is_weight(tensor, *running[-1]):
            held._by_projection.add(key)
        return tensor.detach()

    hooks = []
    for operator in (operator for unit in units for operator in unit.operators):

        def enter(module: nn.Module, args: tuple[Any, ...], operator: Operator = operator) -> None:
            running.append((operator, args[0].shape))

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            running.pop()

        hooks.append(operator.module.register_forward_pre_hook(enter))
        hooks.append(operator.module.register_forward_hook(leave, always_call=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            yield held
    finally:
        for hook in hooks:
            hook.remove()
        alive.clear()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_weight(tensor: Tensor, operator: Operator, input_shape: torch.Size) -> bool:
    """Whether a saved tensor is autocast's copy of the weight: of its shape, and not of the input's."""
    shape = operator.weight.shape
    rows = torch.Size([input_shape[:-1].numel(), input_shape[-1]])
    return tensor.shape in {shape, shape[::-1]} and tensor.shape not in {input_shape, rows}
