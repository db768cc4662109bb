"""The amax history of delayed scaling: what the last steps say about the range of the next.

A tensor that is cast in step t takes its scale from the largest of the last H per-step amaxes of the same
operator and role, so that no pass over the tensor stands before the cast. The history rolls at step
boundaries only: all micro-batches of a step, and a recompute of activation checkpointing, see one scale.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class AmaxHistory:
    """Per-step amaxes of n tensors, the last H steps of each, on one device.

    An amax that is NaN or Inf never enters, and a tensor that a step did not see keeps its history.

    Args:
        n: how many tensors.
        length: H, the number of steps that are remembered.
        device: where the amaxes live.

    Examples:
        >>> amaxes = AmaxHistory(2, length=16)
        >>> amaxes.record(slice(0, 2), torch.tensor([3.0, torch.inf]))
        >>> amaxes.roll()
        >>> amaxes.largest
        tensor([3., 0.])
    """

    def __init__(self, n: int, length: int, device: torch.device | None = None) -> None:
        self._current = torch.full((n,), -1.0, device=device)  # -1: not seen in this step
        self._history = torch.zeros((n, length), device=device)
        self.largest = torch.zeros(n, device=device)
        """(n,) float32: the largest amax of the history; 0 where it is empty or all zeros."""

    def to(self, device: torch.device) -> None:
        """Move to the device where the tensors are."""
        if self.largest.device != device:
            self._current, self._history = self._current.to(device), self._history.to(device)
            self.largest = self.largest.to(device)

    def record(self, where: slice, amax: Tensor) -> None:
        """Add float32 amaxes of this step; over micro-batches the largest counts."""
        current = self._current[where]
        torch.maximum(current, amax, out=current)

    def roll(self) -> None:
        """End the step: what it saw becomes the newest entry of the histories."""
        seen = (self._current >= 0) & torch.isfinite(self._current)
        rolled = torch.cat([self._history[:, 1:], self._current[:, None]], dim=1)
        self._history = torch.where(seen[:, None], rolled, self._history)
        self.largest = self._history.amax(dim=1)
        self._current.fill_(-1.0)

    @property
    def stale(self) -> Tensor:
        """(n,) float32: the amax of this step over the one that its scale comes from; NaN without either.

        Above 1 the largest values saturate; far below 1 small values underflow that a fresh scale would keep.
        """
        known = (self._current >= 0) & (self.largest > 0)
        return torch.where(known, self._current / self.largest, torch.nan)

    def entries(self, where: slice) -> list[list[float]]:
        """Return the histories as numbers, the oldest step first."""
        return self._history[where].tolist()

    def load(self, where: slice, entries: Sequence[Sequence[float]]) -> None:
        """Set histories from :meth:`entries`; of a longer history the newest are kept."""
        length = self._history.shape[1]
        for row, values in zip(range(where.start, where.stop), entries, strict=True):
            newest = list(values)[-length:]
            padded = [0.0] * (length - len(newest)) + newest
            self._history[row] = torch.tensor(padded, device=self._history.device)
        self.largest = self._history.amax(dim=1)
        self._current[where] = -1.0
