"""Arms compared seed by seed, and what that says about when the controller helps.

The runs of two arms with one seed share weights, data and faults, so their difference is free of what these do. Of the
differences over the seeds stand the mean, its standard error, the 95 % interval of Student's t, and the two-sided sign
test, which assumes nothing but is slow to be sure: with three seeds it is 0.25 or more, with eight 0.008 or more.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from gnmr.lab.arms import parse_arm
from gnmr.lab.runs import number

CONFIDENCE = 0.95


def paired_differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare the validation losses of two arms seed by seed.

    Compared are low with high, and each controller that has a matched control, or is ``gnmr`` or ``gap``, with every
    other arm.

    Args:
        rows: of a comparison.

    Returns:
        For each pair ``first``, ``second``: the ``mean`` of first minus second, its standard error ``se`` and
        ``interval`` (None for one seed), in how many seeds ``first`` is ``lower``, of how many ``seeds``, the sign
        test's ``p``, and whether ``second`` is a control ``matched`` to ``first``.
    """
    losses = {row["arm"]: row["metrics"]["eval_loss"]["per_seed"] for row in rows}
    references = {parse_arm(arm).reference for arm in losses} | {"gnmr", "gap"}
    pairs = [("low", "high")]
    pairs += [(arm, other) for arm in losses if arm in references for other in losses if other != arm]
    return [
        {
            "first": first,
            "second": second,
            "matched": parse_arm(second).reference == first,
            **_paired(losses, first, second),
        }
        for first, second in pairs
        if {first, second} <= losses.keys()
    ]


def verdicts(comparison: Mapping[str, Any]) -> list[str]:
    """Say in plain words where each controller helped, and what is missing to say it.

    Args:
        comparison: as in ``comparison.json``.
    """
    pairs = {(pair["first"], pair["second"]): pair for pair in comparison["differences"]}
    said = []
    if ("low", "high") in pairs:
        said.append(_what_low_loses(pairs["low", "high"]))
    for arm in comparison["arms"]:
        matched = [pair for pair in comparison["differences"] if pair["first"] == arm and pair["matched"]]
        if (arm, "low") in pairs:
            said.append(f"{arm} {_relation(pairs[arm, 'low'])} the low path alone.")
        said += [f"{arm} {_relation(pair)} its matched control {pair['second']}." for pair in matched]
        if arm in ("gnmr", "gap") and not matched:
            said.append(f"{arm} has no matched control here, so its choice of units is not judged.")
    return said


def is_clear(pair: Mapping[str, Any]) -> bool:
    """Return whether the interval of a difference excludes zero."""
    return pair["interval"] is not None and (float(pair["interval"][0]) > 0 or float(pair["interval"][1]) < 0)


def _paired(losses: Mapping[str, Sequence[Any]], first: str, second: str) -> dict[str, Any]:
    both = zip(losses[first], losses[second], strict=True)
    gaps = np.array([float(a) - float(b) for a, b in both if a is not None and b is not None])
    lower, n = int(np.sum(gaps < 0)), len(gaps)
    decided = int(np.sum(gaps != 0))
    found: dict[str, Any] = {"mean": None, "se": None, "interval": None, "lower": lower, "seeds": n, "p": None}
    if n:
        with np.errstate(invalid="ignore"):  # a diverged run makes NaN or Inf, and so it is shown
            found["mean"] = number(float(gaps.mean()))
        found["p"] = float(stats.binomtest(lower, decided).pvalue) if decided else 1.0
    if n > 1:
        with np.errstate(invalid="ignore"):
            se = float(gaps.std(ddof=1)) / math.sqrt(n)
        half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)) * se
        found |= {"se": number(se), "interval": [number(float(gaps.mean()) - half), number(float(gaps.mean()) + half)]}
    return found


def _what_low_loses(pair: Mapping[str, Any]) -> str:
    if is_clear(pair) and float(pair["mean"]) > 0:
        lost = f"The low path loses {float(pair['mean']):.4f} of validation loss against the high one"
        return f"{lost}: there is something to win back."
    return "The low path cannot be told from the high one: there is nothing here for a controller to win back."


def _relation(pair: Mapping[str, Any]) -> str:
    if pair["interval"] is None:
        return "has one seed, and so is not judged against"
    if not is_clear(pair):
        return "cannot be told from"
    return "is better than" if float(pair["mean"]) < 0 else "is worse than"
