"""The memory model of the paper's Appendix D: what a decision costs, and what it can cost at most.

With ``A_b`` saved activation elements of unit b and ``p`` bits an element, the active set S adds

    ΔM = (p_high - p_low) / 8 · Σ_{b ∈ S} A_b
       ≤ (p_high - p_low) / 8 · Σ_{top-maxO by A_b} A_b
       ≤ (p_high - p_low) / 8 · maxO · A_max        bytes.

Scales are stored beside the elements on either path, so they cancel in the difference; where only the low path has
scales (a 16-bit recovery path needs none), the model bounds the cost from above.
"""

import numpy as np
from numpy.typing import ArrayLike


def extra_bytes(active: ArrayLike, elements: ArrayLike, *, low_bits: int, high_bits: int) -> float:
    """Return the predicted extra bytes of an active set.

    Args:
        active: (N,) bool.
        elements: (N,) saved activation elements of each unit.
        low_bits: of an element on the low-cost path.
        high_bits: of an element on the recovery path.

    Raises:
        ValueError: shapes differ, a negative number of elements, or ``high_bits < low_bits``.

    Examples:
        >>> extra_bytes([True, False], [1000, 4000], low_bits=4, high_bits=8)
        500.0
    """
    active, sizes = np.asarray(active, dtype=np.bool_), _elements(elements)
    if active.shape != sizes.shape:
        raise ValueError(f"active and elements must have one shape, got {active.shape} and {sizes.shape}")
    return _rate(low_bits, high_bits) * float(sizes[active].sum())


def worst_case_bytes(max_active: int, elements: ArrayLike, *, low_bits: int, high_bits: int) -> float:
    """Return the most that any active set under the cap can add: the ``max_active`` largest units.

    Args:
        max_active: maxO >= 0.
        elements: (N,) saved activation elements of each unit.
        low_bits: of an element on the low-cost path.
        high_bits: of an element on the recovery path.

    Raises:
        ValueError: see :func:`extra_bytes`; or a negative cap.

    Examples:
        >>> worst_case_bytes(1, [1000, 4000], low_bits=4, high_bits=8)
        2000.0
    """
    if max_active < 0:
        raise ValueError(f"max_active must be >= 0, got {max_active!r}")
    largest = np.sort(_elements(elements))[::-1][:max_active]
    return _rate(low_bits, high_bits) * float(largest.sum())


def loose_bound_bytes(max_active: int, elements: ArrayLike, *, low_bits: int, high_bits: int) -> float:
    """Return the bound ``maxO · A_max``, which needs only the largest unit's size; see above."""
    sizes = _elements(elements)
    return _rate(low_bits, high_bits) * max_active * float(sizes.max(initial=0.0))


def _elements(values: ArrayLike) -> np.ndarray:
    sizes = np.asarray(values, dtype=np.float64)
    if (sizes < 0).any():
        raise ValueError(f"a unit cannot save {sizes.min()} elements: the number must be >= 0")
    return sizes


def _rate(low_bits: int, high_bits: int) -> float:
    if not 0 < low_bits <= high_bits:
        raise ValueError(f"bits must be 0 < low <= high, got low_bits={low_bits!r}, high_bits={high_bits!r}")
    return (high_bits - low_bits) / 8
