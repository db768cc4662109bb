"""The errors of the casts of a low-cost path, measured while it casts.

For each operator and role (x, w, dy, dw) the relative error of a cast Q is ``||Q(v) - v|| / ||v||``, over the
micro-batches of a step. A sample of the rows says enough: it costs two norms of at most :data:`ROWS` rows. Of a unit
on its recovery path it is what the low-cost path would have done, an extra cast of the sample every few steps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROWS = 256
"""Rows of a tensor that are looked at; they are spread over all of it."""


def sampled(value: Tensor) -> Tensor:
    """Return at most :data:`ROWS` rows of a tensor, evenly spread, without a copy.

    Examples:
        >>> sampled(torch.zeros(4, 1000, 8)).shape
        torch.Size([250, 8])
    """
    rows = value.reshape(-1, value.shape[-1])
    return rows[:: -(-rows.shape[0] // ROWS)] if rows.shape[0] > ROWS else rows


class ErrorMeter:
    """Squared errors and squares of (operator, role) pairs, on one device, until they are read.

    Args:
        n: how many pairs.
        device: where they are summed.

    Examples:
        >>> meter = ErrorMeter(2)
        >>> meter.add(0, torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]]))
        >>> meter.read().tolist()
        [0.2, nan]
    """

    def __init__(self, n: int, device: torch.device | None = None) -> None:
        self._sums = torch.zeros((n, 2), device=device)
        self._last = np.full(n, np.nan)

    def add(self, place: int, value: Tensor, cast: Tensor) -> None:
        """Add one cast; ``value`` and ``cast`` have the same shape."""
        if self._sums.device != value.device:
            self._sums = self._sums.to(value.device)
        parts = torch.stack(torch._foreach_norm([(cast - value).float(), value.float()]))
        self._sums[place] += parts * parts

    def read(self) -> NDArray[np.float64]:
        """Return (n,) relative errors, and begin anew: the last known where this step saw none, NaN before the first.

        A cast that put NaN or Inf where there was none has the error Inf; a tensor of zeros has none.
        """
        error, size = self._sums.cpu().numpy().astype(np.float64).T
        self._sums.zero_()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.sqrt(error / size)
        ratio[(error == 0) & np.isfinite(size)] = 0.0
        ratio[np.isnan(ratio) & np.isfinite(size)] = np.inf
        seen = (size > 0) | (error > 0) | np.isnan(size)
        self._last = np.where(seen, ratio, self._last)
        return self._last.copy()

    def state(self, places: slice) -> list[float | None]:
        """Return what was last known, as JSON takes it."""
        return [None if np.isnan(value) else float(value) for value in self._last[places]]

    def load(self, places: slice, values: Sequence[float | None]) -> None:
        """Go on from :meth:`state`."""
        self._last[places] = [np.nan if value is None else value for value in values]


def of_units(errors: NDArray[np.float64], members: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return (N,) root mean squares over the places of each unit; NaN where none is known.

    Examples:
        >>> of_units(np.array([3.0, 4.0, np.nan]), [[0, 1], [2]]).round(3).tolist()
        [3.536, nan]
    """
    found = np.full(len(members), np.nan)
    for unit, places in enumerate(members):
        known = errors[list(places)]
        known = known[~np.isnan(known)]
        if known.size:
            found[unit] = np.sqrt(np.mean(known**2))
    return found
