"""The last input of each thread, known again: operators that read one activation make what they keep of it once."""

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class Input:
    """What tells one tensor from another while it is alive."""

    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int

    @classmethod
    def of(cls, x: Tensor) -> "Input | None":
        """Return a tensor's key, or None for one that cannot be told."""
        if x.is_inference():
            return None  # it has no version, so a change would go unseen
        return cls(x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)


class Entry:
    """What was made of one input, dropped with it.

    Attributes:
        made: packings by a key of the backend's own.
        owner: the operator that is charged for what it holds.
    """

    def __init__(self, key: Input | None, x: Tensor, cell: "_Cell") -> None:
        self.key = key
        self.made: dict[Any, Any] = {}
        self.owner: object | None = None
        owner = weakref.ref(cell)

        def forget(dead: object) -> None:
            # May run in any thread. The entry clears itself: the cell may hold another by now.
            self.made.clear()
            place = owner()
            if place is not None and place.entry is self:
                place.entry = None

        self.input = weakref.ref(x, forget)


class _Cell:
    __slots__ = ("__weakref__", "entry")

    def __init__(self) -> None:
        self.entry: Entry | None = None


class LastInput(threading.local):
    """The last input of each thread. While its input lives, its memory is not another's."""

    def __init__(self) -> None:
        self.cell = _Cell()

    def __reduce__(self) -> "tuple[type[LastInput], tuple[()]]":
        return (LastInput, ())  # the copy of a model starts with none

    def find(self, key: Input | None, x: Tensor) -> Entry | None:
        """Return the entry of an input if it is the last one, unchanged."""
        entry = self.cell.entry
        if entry is None or key is None or entry.key != key or entry.input() is None:
            return None
        return entry

    def put(self, key: Input | None, x: Tensor) -> Entry:
        """Make the entry of an input; one that cannot be told is not kept."""
        entry = Entry(key, x, self.cell)
        self.cell.entry = entry if key is not None else None
        return entry


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a linear operator computes in: that of the input, or autocast's."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def is_wrapper(x: object) -> bool:
    """Whether a tensor is made of others, as a DTensor is."""
    return is_traceable_wrapper_subclass(x)
