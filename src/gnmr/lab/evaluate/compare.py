"""What a task's rows add up to, and how two models differ on the same items.

Standard errors are over items, which are taken as independent draws. Two models are compared item by item, which is
free of how hard the items are: accuracies by McNemar's exact test, which looks at the items that only one of the two
has right, and log-likelihoods by Student's t of the mean difference. Every p-value of an evaluation stands beside its
correction for their number by Holm's method.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
Rows = Sequence[Mapping[str, Any]]


def summarise(rows: Rows) -> dict[str, Any]:
    """Return means and standard errors of a task's rows.

    Returns:
        ``n`` items, how many were ``cut_off`` and ``nonfinite``, and ``metrics``: by name ``value`` and ``se`` (None
        for one item). With a single non-finite item there is no value: NaN is no wrong answer.
    """
    nonfinite = sum(not row["finite"] for row in rows)
    found: dict[str, Any] = {"n": len(rows), "nonfinite": nonfinite, "cut_off": sum(row["cut_off"] for row in rows)}
    if nonfinite:
        return {**found, "metrics": {}}
    if rows[0]["kind"] != "window":
        return {**found, "metrics": {name: _mean(_column(rows, name)) for name in rows[0]["metrics"]}}
    nll = -_column(rows, "loglikelihood")
    per_token = _ratio(nll, _column(rows, "tokens"))
    metrics = {
        "nll_per_token": per_token,
        "perplexity": _exp(per_token),
        "bits_per_byte": _ratio(nll / math.log(2), _column(rows, "bytes")),
        "word_perplexity": _exp(_ratio(nll, _column(rows, "words"))),
    }
    return {**found, "tokens": int(_column(rows, "tokens").sum()), "metrics": metrics}


def differences(models: Mapping[str, Mapping[str, Rows]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare each model but the first with the first, on every task.

    Args:
        models: by label and task, the rows.

    Returns:
        The pairs, see :func:`paired`, and what could not be compared and why.
    """
    (reference, base), *others = models.items()
    pairs, notes = [], []
    for label, tasks in others:
        for task, rows in tasks.items():
            try:
                found = paired(rows, base[task])
            except ValueError as error:
                notes.append(f"{task}: {label} is not compared with {reference}: {error}")
                continue
            pairs += [{"task": task, "first": label, "second": reference, **pair} for pair in found]
    return pairs, notes


def paired(first: Rows, second: Rows) -> list[dict[str, Any]]:
    """Compare two models on the same items.

    Args:
        first: the rows of one task.
        second: of another model on the same task, in the same order.

    Returns:
        For each metric the ``mean`` of first minus second over ``n`` items, its ``se`` and ``interval`` (None for one
        item), and ``p``, two-sided, by the ``test`` named. For what is right or wrong also how many items
        ``only_first`` and ``only_second`` has right. Of accuracies that never differ one is compared.

    Raises:
        ValueError: the items are not the same, or there are non-finite ones.
    """
    if [(row["item"], row["digest"]) for row in first] != [(row["item"], row["digest"]) for row in second]:
        raise ValueError("they have not been asked the same items, or not in the same tokens")
    for rows in (first, second):
        count = sum(not row["finite"] for row in rows)
        if count:
            raise ValueError(f"NaN or Inf in {count} of {len(rows)} items")
    if first[0]["kind"] == "window":
        tokens = _column(first, "tokens")
        gaps = _column(second, "loglikelihood") - _column(first, "loglikelihood")
        # The mean a token, whose error is that of a ratio; a mean of windows would give a short one too much weight.
        return [{"metric": "nll_per_token", **_t_test(_ratio(gaps, tokens), len(gaps))}]
    found, seen = [], list[tuple[bytes, bytes]]()
    for name in _COMPARED if first[0]["kind"] == "choices" else first[0]["metrics"]:
        a, b = _column(first, name), _column(second, name)
        if (a.tobytes(), b.tobytes()) in seen:
            continue
        seen.append((a.tobytes(), b.tobytes()))
        test = _t_test(_mean(a - b), len(a))
        found.append({"metric": name, **test, **(_mcnemar(a, b) if set(a) | set(b) <= {0.0, 1.0} else {})})
    return found


_COMPARED = ("acc", "acc_norm", "gold_loglikelihood")
"""Of a choice: what is compared. The other metrics are these in other units."""


def holm(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add ``p_holm``: at which level the pair stands out among all of them.

    Examples:
        >>> [round(pair["p_holm"], 3) for pair in holm([{"p": 0.01}, {"p": 0.04}, {"p": 0.03}])]
        [0.03, 0.06, 0.06]
    """
    tested = sorted((pair["p"], place) for place, pair in enumerate(pairs) if pair["p"] is not None)
    corrected: dict[int, float] = {}
    highest = 0.0
    for rank, (p, place) in enumerate(tested):
        highest = max(highest, min(1.0, p * (len(tested) - rank)))
        corrected[place] = highest
    return [{**pair, "p_holm": corrected.get(place)} for place, pair in enumerate(pairs)]


def _column(rows: Rows, name: str) -> NDArray[np.float64]:
    if name == "loglikelihood":
        return np.array([row["loglikelihoods"][0] for row in rows], dtype=np.float64)
    return np.array([row[name] if name in row else row["metrics"][name] for row in rows], dtype=np.float64)


def _mean(values: NDArray[np.float64]) -> dict[str, float | None]:
    return {"value": float(values.mean()), "se": float(stats.sem(values)) if len(values) > 1 else None}


def _ratio(parts: NDArray[np.float64], weights: NDArray[np.float64]) -> dict[str, float | None]:
    """Return a ratio of sums, and its standard error to first order."""
    n, value = len(parts), float(parts.sum() / weights.sum())
    if n == 1:
        return {"value": value, "se": None}
    rest = float(np.square(parts - value * weights).sum())
    return {"value": value, "se": math.sqrt(n / (n - 1) * rest) / float(weights.sum())}


def _exp(logarithm: Mapping[str, float | None]) -> dict[str, float | str | None]:
    """Return the exponential, and its standard error to first order; beyond the largest float both are infinite."""
    assert logarithm["value"] is not None  # noqa: S101 (only the error may be)
    value = math.exp(logarithm["value"]) if logarithm["value"] < 709 else math.inf
    se = None if logarithm["se"] is None else logarithm["se"] * value
    return {"value": value if math.isfinite(value) else "inf", "se": se if se is None or math.isfinite(se) else "inf"}


def _t_test(mean: Mapping[str, float | None], n: int) -> dict[str, Any]:
    value, se = mean["value"], mean["se"]
    found: dict[str, Any] = {"n": n, "mean": value, "se": se, "interval": None, "test": "t", "p": None}
    if value is None or se is None:
        return found
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)) * se
    p = 2 * float(stats.t.sf(abs(value) / se, n - 1)) if se else float(value == 0)
    return {**found, "interval": [value - half, value + half], "p": p}


def _mcnemar(first: NDArray[np.float64], second: NDArray[np.float64]) -> dict[str, Any]:
    only_first, only_second = int(np.sum(first > second)), int(np.sum(second > first))
    decided = only_first + only_second
    p = float(stats.binomtest(only_first, decided).pvalue) if decided else 1.0
    return {"test": "McNemar", "p": p, "only_first": only_first, "only_second": only_second}
