"""The memory model of the paper's Appendix D: what a decision costs, and what it can cost at most.

With ``A_b`` saved activation elements of unit b and ``p`` bits an element, the active set S adds

    ΔM = (p_high - p_low) / 8 · Σ_{b ∈ S} A_b
       ≤ (p_high - p_low) / 8 · Σ_{top-maxO by A_b} A_b
       ≤ (p_high - p_low) / 8 · maxO · A_max        bytes.

The appendix takes each unit to have activations of its own. Where several units read one (q, k, v; gate, up), it is
stored once for all while they are on one path, and once for each path while they are not: promoting one of them
alone costs ``p_high / 8`` an element, not the difference, and that is what is counted here. Scales are stored beside
the elements on either path and cancel, but for that second copy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Activation(NamedTuple):
    """One saved activation.

    Attributes:
        readers: indices of the units whose operators read it, each once.
        elements: how many numbers it has.
        scale_bytes: bytes of the scales that are stored beside it, in either format.
    """

    readers: tuple[int, ...]
    elements: int
    scale_bytes: int = 0


def extra_bytes(active: ArrayLike, activations: Sequence[Activation], *, low_bits: int, high_bits: int) -> float:
    """Return the predicted extra bytes of an active set, over none active.

    Args:
        active: (N,) bool.
        activations: what the units save; see :meth:`gnmr.SavedActivations.activations`.
        low_bits: of an element on the low-cost path.
        high_bits: of an element on the recovery path.

    Raises:
        ValueError: a reader that is no unit, a negative size, or not ``0 < low_bits <= high_bits``.

    Examples:
        >>> mine, shared = Activation((0,), 1000), Activation((1, 2), 1000)
        >>> extra_bytes([True, False, False], [mine, shared], low_bits=4, high_bits=8)
        500.0
        >>> extra_bytes([False, True, False], [mine, shared], low_bits=4, high_bits=8)  # stored twice
        1000.0
        >>> extra_bytes([False, True, True], [mine, shared], low_bits=4, high_bits=8)
        500.0
    """
    plan = np.asarray(active, dtype=np.bool_)
    _check(activations, len(plan), low_bits, high_bits)
    total = 0.0
    for activation in activations:
        on_recovery = [bool(plan[unit]) for unit in activation.readers]
        if any(on_recovery):
            total += _cost(activation, low_bits, high_bits, alone=not all(on_recovery))
    return total


def worst_case_bytes(max_active: int, activations: Sequence[Activation], *, low_bits: int, high_bits: int) -> float:
    """Return what no active set under the cap can exceed: the ``max_active`` dearest units, each taken alone.

    Args:
        max_active: maxO >= 0.
        activations: what the units save.
        low_bits: of an element on the low-cost path.
        high_bits: of an element on the recovery path.

    Raises:
        ValueError: see :func:`extra_bytes`; or a negative cap.

    Examples:
        >>> worst_case_bytes(1, [Activation((0,), 1000), Activation((1,), 4000)], low_bits=4, high_bits=8)
        2000.0
    """
    costs = _unit_costs(max_active, activations, low_bits, high_bits)
    return float(np.sort(costs)[::-1][:max_active].sum())


def loose_bound_bytes(max_active: int, activations: Sequence[Activation], *, low_bits: int, high_bits: int) -> float:
    """Return the looser bound ``maxO · max_b``, which needs only the dearest unit; see :func:`worst_case_bytes`."""
    return max_active * float(_unit_costs(max_active, activations, low_bits, high_bits).max(initial=0.0))


def _unit_costs(max_active: int, activations: Sequence[Activation], low_bits: int, high_bits: int) -> np.ndarray:
    if max_active < 0:
        raise ValueError(f"max_active must be >= 0, got {max_active!r}")
    n = 1 + max((unit for each in activations for unit in each.readers), default=-1)
    _check(activations, n, low_bits, high_bits)
    costs = np.zeros(n)
    for activation in activations:
        cost = _cost(activation, low_bits, high_bits, alone=len(activation.readers) > 1)
        costs[list(activation.readers)] += cost
    return costs


def _cost(activation: Activation, low_bits: int, high_bits: int, *, alone: bool) -> float:
    """Return the cost of a copy in the high format: beside the low one, or in its place."""
    if alone:
        return activation.elements * high_bits / 8 + activation.scale_bytes
    return activation.elements * (high_bits - low_bits) / 8


def _check(activations: Sequence[Activation], n_units: int, low_bits: int, high_bits: int) -> None:
    if not 0 < low_bits <= high_bits:
        raise ValueError(f"bits must be 0 < low <= high, got low_bits={low_bits!r}, high_bits={high_bits!r}")
    for activation in activations:
        if activation.elements < 0 or activation.scale_bytes < 0:
            raise ValueError(f"an activation cannot have a negative size: {activation!r}")
        if not activation.readers or not all(0 <= unit < n_units for unit in activation.readers):
            raise ValueError(f"the readers of {activation!r} must be units 0 to {n_units - 1}, at least one")
