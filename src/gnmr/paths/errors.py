"""The errors of the casts of a low-cost path, measured while it casts.

For each operator and role (x, w, dy, dw) the relative error of a cast Q is ``||Q(v) - v|| / ||v||``, over the
micro-batches of a step. A sample of the rows says enough: it costs two dot products of at most :data:`ROWS` rows. Of a
unit on its recovery path it is what the low-cost path would have done, an extra cast of the sample every few steps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROWS = 64
"""Rows of a tensor that are looked at; they are spread over all of it."""


def sampled(value: Tensor) -> Tensor:
    """Return at most :data:`ROWS` rows of a tensor, evenly spread.

    They are copied together: on rows that lie apart a CPU's reductions are three times as slow.

    Examples:
        >>> sampled(torch.zeros(4, 1000, 8)).shape
        torch.Size([64, 8])
    """
    rows = value.reshape(-1, value.shape[-1])
    return rows[:: -(-rows.shape[0] // ROWS)].contiguous() if rows.shape[0] > ROWS else rows


class ErrorMeter:
    """Squared errors and squares of (operator, role) pairs, on their device until they are read.

    Args:
        n: how many pairs.

    Examples:
        >>> meter = ErrorMeter(2)
        >>> meter.add(0, torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]]))
        >>> meter.read().tolist()
        [0.2, nan]
    """

    def __init__(self, n: int) -> None:
        self._last = np.full(n, np.nan)
        self._places: list[int] = []
        self._squares: list[Tensor] = []

    def add(self, place: int, value: Tensor, cast: Tensor) -> None:
        """Add one cast; ``value`` and ``cast`` have the same shape."""
        error, value = (cast - value).float().reshape(-1), value.float().reshape(-1)
        self._places.append(place)
        self._squares += [torch.dot(error, error), torch.dot(value, value)]

    def read(self) -> NDArray[np.float64]:
        """Return (n,) relative errors, and begin anew: the last known where this step saw none, NaN before the first.

        A cast that put NaN or Inf where there was none has the error Inf; a tensor of zeros has none.
        """
        sums = np.zeros((len(self._last), 2))
        if self._squares:
            np.add.at(sums, self._places, torch.stack(self._squares).cpu().numpy().reshape(-1, 2))
        self._places, self._squares = [], []
        error, size = sums.T
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


def of_units(errors: NDArray[np.float64], units: NDArray[np.int64], n_units: int) -> NDArray[np.float64]:
    """Return (N,) root mean squares over the errors of each unit; NaN where none is known.

    Args:
        errors: (n,), NaN where unknown.
        units: (n,), whose they are.
        n_units: N.

    Examples:
        >>> of_units(np.array([3.0, 4.0, np.nan]), np.array([0, 0, 1]), 2).round(3).tolist()
        [3.536, nan]
    """
    known = ~np.isnan(errors)
    squares = np.bincount(units[known], errors[known] ** 2, minlength=n_units)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(squares / np.bincount(units[known], minlength=n_units)))
