"""The gradient at the units' outputs, for units whose parameters are frozen."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnmr.pytorch.units import Unit


class OutputGradients:
    """Squared L2 norms of dL/dy, summed over a unit's outputs and over the micro-batches of a step.

    The rows of a batch lie side by side in y, and so do those of micro-batches: the sum is that of one large batch.

    Args:
        units: N units.
        on_backward: is called whenever a gradient arrives.
    """

    def __init__(self, units: Sequence[Unit], on_backward: Callable[[], None]) -> None:
        self._on_backward = on_backward
        self._squares: list[Tensor | None] = [None] * len(units)
        self._hooks = [
            module.register_forward_hook(_Hook(self, unit.index)) for unit in units for module in unit.outputs
        ]

    @torch.compiler.disable
    def follow(self, unit: int, output: Any) -> None:
        """Hear of the gradient of what a unit returned."""
        # Under activation checkpointing one of the two forwards has no backward: its hook, if any, never runs.
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._see, unit))

    def _see(self, unit: int, grad: Tensor) -> None:
        wide = torch.float32 if grad.device.type == "mps" else torch.float64
        new = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).to(wide).square()
        earlier = self._squares[unit]
        self._squares[unit] = new if earlier is None else earlier + new.to(earlier.device)
        self._on_backward()

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (N,) sums of squares, 0 where nothing came, and (N,) 1 or 0: whether something came; and forget."""
        heard = np.array([square is not None for square in self._squares], dtype=np.float64)
        found = np.zeros(len(self._squares))
        by_device: dict[torch.device, list[int]] = {}
        for i, square in enumerate(self._squares):
            if square is not None:
                by_device.setdefault(square.device, []).append(i)
        for members in by_device.values():
            found[members] = torch.stack([self._squares[i] for i in members]).cpu().numpy()  # type: ignore[misc]
        self.forget()
        return found, heard

    def forget(self) -> None:
        """Drop what came since the last reading."""
        self._squares = [None] * len(self._squares)

    @property
    def heard(self) -> bool:
        """Whether a gradient came since the last reading."""
        return any(square is not None for square in self._squares)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class _Hook:
    """What runs after a unit's forward; a copy of a module (an average of the weights, a saved model) hears nothing."""

    def __init__(self, listener: OutputGradients | None = None, unit: int = 0) -> None:
        self._listener, self._unit = listener, unit

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._listener is not None:
            self._listener.follow(self._unit, output)

    def __reduce__(self) -> "tuple[type[_Hook], tuple[()]]":
        return (_Hook, ())
