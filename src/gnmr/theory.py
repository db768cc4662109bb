"""The paper's theory in numbers: what recovering a unit gains, and how often a threshold is passed by chance.

Notation: N units b; ``E_q`` bounds a unit's share of the one-step smoothness bound on path q (low, rec), and the gap is
``ΔE = E_low - E_rec``; GNMR = n / A with A the mean of the t - 1 norms before; α = 1 + ε.

    >>> gaps = recovery_gap(penalty(0.1, 0.02, lr=0.1), penalty(0.0, 0.001, lr=0.1))
    >>> round(float(gaps), 6)
    0.010095
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gnmr.policy import Schedule
from gnmr.trace import Trace

Floats = NDArray[np.float64]

BERNSTEIN = 1 / 20
"""A constant c for which the tail bound holds with :func:`estimate_kappa`'s κ; see :func:`false_alarm_bound`."""

_HIGHEST = 1e6
_MOMENTS = range(2, 9)


def penalty(
    bias: ArrayLike,
    variance: ArrayLike,
    *,
    lr: float,
    grad_norm: float = 1.0,
    smoothness: float = 1.0,
    noise_factor: float = 1.0,
) -> Any:
    """Return E_q of Remark 1: ``η G μ_q + (L η² / 2) Γ v_q``.

    Args:
        bias: μ, the norm of the mean perturbation of the gradient; any shape.
        variance: v, the mean squared norm of the perturbation.
        lr: η.
        grad_norm: G, a bound of the gradient's norm.
        smoothness: L of the loss.
        noise_factor: Γ, how perturbations of several units add up.

    Raises:
        ValueError: a negative number.
    """
    for name, value in (
        ("lr", lr),
        ("grad_norm", grad_norm),
        ("smoothness", smoothness),
        ("noise_factor", noise_factor),
    ):
        if not value >= 0:
            raise ValueError(f"{name} must be >= 0, got {value!r}")
    mu, v = np.asarray(bias, dtype=np.float64), np.asarray(variance, dtype=np.float64)
    if (mu < 0).any() or (v < 0).any():
        raise ValueError("bias and variance are norms, and must be >= 0")
    return lr * grad_norm * mu + smoothness * lr**2 / 2 * noise_factor * v


def recovery_gap(low: ArrayLike, rec: ArrayLike) -> Any:
    """Return ΔE = E_low - E_rec, > 0 where recovery helps the bound."""
    return np.asarray(low, dtype=np.float64) - np.asarray(rec, dtype=np.float64)


def one_step_gain(gaps: ArrayLike, active: ArrayLike) -> float:
    """Return what an active set gains in the one-step bound: the sum of its gaps (Theorem 1).

    Args:
        gaps: (N,) ΔE.
        active: (N,) bool.

    Examples:
        >>> one_step_gain([0.5, 0.25, -0.125], [True, False, True])
        0.375
    """
    return float(np.sum(np.asarray(gaps, dtype=np.float64)[np.asarray(active, dtype=np.bool_)]))


def expected_gain(probability: ArrayLike, persistence: ArrayLike, gaps: ArrayLike) -> float:
    """Return the lower bound of the expected gain at the next step: ``Σ Pr(b in S_t) π_b ΔE_b`` (Theorem 1).

    Args:
        probability: (N,) chance that a unit is selected at step t.
        persistence: (N,) π, the chance that its risk is still there at t + 1.
        gaps: (N,) ΔE at its threshold.

    Raises:
        ValueError: a chance outside [0, 1].

    Examples:
        >>> expected_gain([1.0, 0.5], [0.5, 0.5], [2.0, 4.0])
        2.0
    """
    chances = [np.asarray(value, dtype=np.float64) for value in (probability, persistence)]
    for name, value in zip(("probability", "persistence"), chances, strict=True):
        if not ((value >= 0) & (value <= 1)).all():
            raise ValueError(f"{name} must be in [0, 1], got {value[~((value >= 0) & (value <= 1))][0]}")
    return float(np.sum(chances[0] * chances[1] * np.asarray(gaps, dtype=np.float64)))


def oracle_choice(gaps: ArrayLike, k: int) -> NDArray[np.bool_]:
    """Return (N,) bool: the k largest positive gaps, the best choice under a cap (Corollary 1).

    Examples:
        >>> oracle_choice([0.5, -1.0, 2.0], k=2).tolist()
        [True, False, True]
    """
    if k < 0:
        raise ValueError(f"k must be >= 0, got {k!r}")
    values = np.asarray(gaps, dtype=np.float64)
    chosen = np.zeros(values.shape, dtype=np.bool_)
    chosen[np.argsort(-values, kind="stable")[:k]] = True
    return chosen & (values > 0)


def persistence(trace: Trace) -> tuple[Floats, float, int]:
    """Return π of Theorem 1 as a trace has it: how often a risk above 1 is above 1 again at the next step.

    Returns:
        (N,) π of each unit and π over all of them, NaN where there was no such risk, and the number of unit-steps
        that they come from. A unit that was not observed at the next step is not counted.
    """
    before = trace.exceeds[:-1] & trace.observed[1:]
    again = before & trace.exceeds[1:]
    events, repeats = before.sum(axis=0), again.sum(axis=0)
    by_unit = np.where(events > 0, repeats / np.maximum(events, 1), np.nan)
    total = int(events.sum())
    return by_unit, float(repeats.sum() / total) if total else math.nan, total


def false_alarm_bound(alpha: ArrayLike, t: ArrayLike, *, kappa: float, c: float = BERNSTEIN) -> Any:
    """Bound the chance that a healthy unit's GNMR is α or more at step t (Theorem 2).

    ``exp(-c min(ε²/κ², ε/κ)) + 2 exp(-c (t - 1) min((ε/α)²/κ², (ε/α)/κ))`` with ε = α - 1, and no more than 1, since it
    bounds a probability. It holds for independent norms whose deviation from their mean, over the mean, is
    sub-exponential with scale κ. The first term is the norm itself, the second the mean of its history, which fades
    with t. A bound, and far above the true rate: :func:`empirical_threshold` reads that off a trace.

    The paper names no c; 1/20 is one. With the norms over their mean, ``n >= α A`` needs ``n - 1 >= ε / 2`` or
    ``1 - A >= ε / (2 α)``. For centred X with ``E|X|^p <= p! κ^p`` (what :func:`estimate_kappa` asks for) Bernstein's
    inequality (Boucheron, Lugosi and Massart, Concentration Inequalities, corollary 2.11) bounds the chance that the
    mean of m of them is s or more by ``exp(-m s² / (4 κ² + 2 κ s))``; with s = x / 2 that is at most
    ``exp(-m min(x²/κ², x/κ) / 20)``.

    Args:
        alpha: α > 1; any shape that goes with ``t``.
        t: the step, >= 2.
        kappa: κ > 0, relative to the mean norm.
        c: the constant.

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> round(float(false_alarm_bound(4.0, 200, kappa=0.2)), 4)
        0.4724
    """
    a, step = np.asarray(alpha, dtype=np.float64), np.asarray(t, dtype=np.float64)
    if not (a > 1).all():
        raise ValueError(f"alpha must be > 1 for a bound to exist, got {alpha!r}")
    if not (step >= 2).all():
        raise ValueError(f"t must be >= 2: a first step has no history, got {t!r}")
    if not (kappa > 0 and c > 0):
        raise ValueError(f"kappa and c must be > 0, got {kappa!r} and {c!r}")
    eps = a - 1

    def exponent(x: Any) -> Any:
        return np.minimum((x / kappa) ** 2, x / kappa)

    return np.minimum(1.0, np.exp(-c * exponent(eps)) + 2 * np.exp(-c * (step - 1) * exponent(eps / a)))


def suggest_alpha(rate: float, t: int, *, kappa: float, c: float = BERNSTEIN) -> float:
    """Return the smallest α whose false-alarm bound at step t is ``rate`` or less.

    Args:
        rate: the wanted false alarms a unit and step, in (0, 1).
        t: the step; the longer the history, the lower the threshold.
        kappa: see :func:`false_alarm_bound`.
        c: see there.

    Raises:
        ValueError: a rate outside (0, 1), or a history too short for any α.

    Examples:
        >>> [round(suggest_alpha(0.01, t, kappa=0.05), 2) for t in (10, 1000)]
        [5.73, 5.61]
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate must be in (0, 1), got {rate!r}")
    if false_alarm_bound(_HIGHEST, t, kappa=kappa, c=c) > rate:
        raise ValueError(
            f"no alpha bounds the false alarms by {rate} at step {t} with kappa = {kappa}: the mean of {t - 1} norms "
            "is too uncertain; ask for a later step or a higher rate"
        )
    low, high = 1.0, _HIGHEST
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        below = middle > 1 and false_alarm_bound(middle, t, kappa=kappa, c=c) <= rate
        low, high = (low, middle) if below else (middle, high)
    return high


def two_stage(rate: float, first: int, total_steps: int, *, kappa: float, c: float = BERNSTEIN) -> Schedule:
    """Return a schedule of two thresholds: one for the short history until step ``first``, a lower one after.

    The first is the α of the middle of its stage, the second that of step ``first``, when its stage begins.

    Args:
        rate: see :func:`suggest_alpha`.
        first: the step that the second stage begins at.
        total_steps: of the run.
        kappa: see :func:`false_alarm_bound`.
        c: see there.

    Raises:
        ValueError: see :func:`suggest_alpha`; or ``first`` is outside the run.

    Examples:
        >>> [(step, round(alpha, 2)) for step, alpha in two_stage(0.01, 20, 1000, kappa=0.05)]
        [(1, 5.73), (20, 5.61)]
    """
    if not 3 < first <= total_steps:
        raise ValueError(f"first must be in 4 to {total_steps}, got {first!r}")
    early, late = (suggest_alpha(rate, step, kappa=kappa, c=c) for step in (first // 2, first))
    return ((1, early), (first, late))


def estimate_kappa(norms: ArrayLike) -> float:
    """Estimate κ from a unit's norms: the smallest with ``E|X|^p <= p! κ^p`` for p = 2 to 8, X = n / mean - 1.

    That is the moment form of a sub-exponential variable (Vershynin, High-Dimensional Probability, proposition 2.7.1).
    The estimate is of the norms as they are: a mean that drifts is in it.

    Args:
        norms: (T,) finite norms, T >= 10.

    Raises:
        ValueError: too few, one that is not finite, or a mean of 0.

    Examples:
        >>> round(estimate_kappa([0.5, 1.5] * 10), 3)
        0.354
    """
    values = np.asarray(norms, dtype=np.float64).ravel()
    if len(values) < 10 or not np.isfinite(values).all() or not values.mean() > 0:
        raise ValueError(f"norms must be at least 10 finite numbers of a mean > 0, got {len(values)}")
    deviation = np.abs(values / values.mean() - 1)
    return float(max((np.mean(deviation**p) / math.factorial(p)) ** (1 / p) for p in _MOMENTS))


def empirical_threshold(values: ArrayLike, rate: float) -> float:
    """Return the threshold that a share ``rate`` of observed values lies above: of GNMR for α, of ΔGNMR for β.

    Args:
        values: observed values of healthy steps, any shape; NaN and Inf are left out.
        rate: in (0, 1).

    Raises:
        ValueError: a rate outside (0, 1), or fewer values than one above the threshold needs.

    Examples:
        >>> empirical_threshold(range(1000), 0.01)
        989.0
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate must be in (0, 1), got {rate!r}")
    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if len(found) * rate < 1:
        raise ValueError(
            f"a rate of {rate} takes {math.ceil(1 / rate)} unit-steps or more to be read off, and there are "
            f"{len(found)}"
        )
    return float(np.quantile(found, 1 - rate, method="lower"))


def kappas(trace: Trace, skip: int = 0) -> Floats:
    """Return (N,) κ of each unit of a trace, from step ``skip`` + 1 on; NaN for a unit with too few norms."""
    found = np.full(len(trace.units), np.nan)
    for unit in range(len(trace.units)):
        norms = trace.norm[skip:, unit]
        norms = norms[np.isfinite(norms)]
        if len(norms) >= 10 and norms.mean() > 0:
            found[unit] = estimate_kappa(norms)
    return found


def suggestions(trace: Trace, rate: float, steps: Sequence[int]) -> dict[int, float | None]:
    """Return the theory's α at some steps for the median κ of a trace's units; None where the history is too short."""
    kappa = float(np.nanmedian(kappas(trace)))
    found: dict[int, float | None] = {}
    for step in steps:
        try:
            found[step] = suggest_alpha(rate, step, kappa=kappa)
        except ValueError:
            found[step] = None
    return found
