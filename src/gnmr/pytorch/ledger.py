"""What was promoted, when, for how long, and what it cost."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Span(NamedTuple):
    """One stay of a unit on the recovery path.

    Attributes:
        unit: the unit's name.
        first: the first step that ran on the recovery path.
        last: the last one; None while it goes on.
        extra_bytes: what the stay held for backward beyond the low-cost path, at its most.
    """

    unit: str
    first: int
    last: int | None
    extra_bytes: int


class Ledger:
    """The record of all promotions of a run; a high-fidelity warm-up is no promotion.

    Attributes:
        promotions: (N,) int64: how often each unit was moved to the recovery path.
        active_steps: (N,) int64: how many steps each unit was planned on it.
        steps: how many steps were decided.
    """

    def __init__(self, units: Sequence[str]) -> None:
        self._units = tuple(units)
        self.promotions = np.zeros(len(units), dtype=np.int64)
        self.active_steps = np.zeros(len(units), dtype=np.int64)
        self.steps = 0
        self._first = np.zeros(len(units), dtype=np.int64)  # 0: not on the recovery path
        self._bytes = np.zeros(len(units), dtype=np.int64)
        self._closed: list[Span] = []

    @property
    def spans(self) -> list[Span]:
        """All stays on the recovery path, the finished ones first, then those that go on."""
        going_on = [
            Span(self._units[i], int(self._first[i]), None, int(self._bytes[i])) for i in np.flatnonzero(self._first)
        ]
        return [*self._closed, *going_on]

    @property
    def promotion_ratio(self) -> float:
        """Share of unit-steps on the recovery path."""
        return float(self.active_steps.sum() / max(1, self.steps * len(self._units)))

    def add(self, step: int, active: NDArray[np.bool_], extra_bytes: NDArray[np.int64]) -> None:
        """Hear that ``active`` is the plan from step ``step + 1`` on.

        Args:
            step: whose gradients were read.
            active: (N,) bool.
            extra_bytes: (N,) int64: what each unit's recovery path holds beyond its low-cost path.
        """
        was = self._first > 0
        self.steps += 1
        self.active_steps += active
        for i in np.flatnonzero(was & ~active):
            self._closed.append(Span(self._units[i], int(self._first[i]), step, int(self._bytes[i])))
        self.promotions += active & ~was
        self._first = np.where(active, np.where(was, self._first, step + 1), 0)
        self._bytes = np.where(active, np.maximum(np.where(was, self._bytes, 0), extra_bytes), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the record as JSON-able values."""
        return {
            "units": list(self._units),
            "promotions": self.promotions.tolist(),
            "active_steps": self.active_steps.tolist(),
            "steps": self.steps,
            "first": self._first.tolist(),
            "bytes": self._bytes.tolist(),
            "spans": [list(span) for span in self._closed],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; units are matched by name."""
        saved = {name: i for i, name in enumerate(state_dict["units"])}
        mine = [i for i, name in enumerate(self._units) if name in saved]
        theirs = [saved[self._units[i]] for i in mine]
        for name in ("promotions", "active_steps", "first", "bytes"):
            attribute = name if hasattr(self, name) else f"_{name}"
            getattr(self, attribute)[mine] = np.array(state_dict[name], dtype=np.int64)[theirs]
        self.steps = int(state_dict["steps"])
        self._closed = [Span(*span) for span in state_dict["spans"]]
