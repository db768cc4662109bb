"""What rows add up to, and paired comparisons, against SciPy and by hand."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from gnmr.lab.evaluate.compare import differences, holm, paired, summarise


def choices(right, gold=None, digest="d"):
    gold = [-1.0] * len(right) if gold is None else gold
    return [
        {
            "kind": "choices",
            "item": str(place),
            "digest": digest,
            "finite": True,
            "cut_off": False,
            "metrics": {
                "acc": float(a),
                "acc_norm": float(a),
                "gold_loglikelihood": float(b),
                "gold_per_byte": float(b),
            },
        }
        for place, (a, b) in enumerate(zip(right, gold, strict=True))
    ]


def windows(loglikelihoods, tokens):
    return [
        {
            "kind": "window",
            "item": str(place),
            "digest": "d",
            "finite": True,
            "cut_off": False,
            "loglikelihoods": [value],
            "tokens": n,
            "bytes": 4.0 * n,
            "words": 0.5 * n,
        }
        for place, (value, n) in enumerate(zip(loglikelihoods, tokens, strict=True))
    ]


def test_means_and_their_errors():
    found = summarise(choices([1, 0, 1, 1], [-1, -2, -4, -1]))

    assert (found["n"], found["nonfinite"], found["cut_off"]) == (4, 0, 0)
    assert found["metrics"]["acc"] == {"value": 0.75, "se": pytest.approx(stats.sem([1, 0, 1, 1]))}
    assert found["metrics"]["gold_loglikelihood"] == {"value": -2.0, "se": pytest.approx(stats.sem([1, 2, 4, 1]))}
    assert summarise(choices([1]))["metrics"]["acc"] == {"value": 1.0, "se": None}


def test_perplexity_is_of_tokens_and_its_error_of_windows():
    values, tokens = np.array([-20.0, -31.0, -9.0]), [10, 10, 3]
    found = summarise(windows(values, tokens))["metrics"]

    assert found["nll_per_token"]["value"] == pytest.approx(60 / 23)
    assert found["perplexity"]["value"] == pytest.approx(math.exp(60 / 23))
    assert found["bits_per_byte"]["value"] == pytest.approx(60 / 23 / 4 / math.log(2))
    assert found["word_perplexity"]["value"] == pytest.approx(math.exp(60 / 11.5))
    assert found["perplexity"]["se"] == pytest.approx(found["nll_per_token"]["se"] * math.exp(60 / 23))
    equal = summarise(windows(values, [10, 10, 10]))["metrics"]["nll_per_token"]
    assert equal["se"] == pytest.approx(stats.sem(values / 10))  # of windows of one length it is that of a mean
    assert summarise(windows([-9e3], [10]))["metrics"]["perplexity"] == {"value": "inf", "se": None}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_accuracies_are_compared_where_they_differ(pairs):
    a, b = (np.array(each, dtype=float) for each in zip(*pairs, strict=True))
    acc = paired(choices(a), choices(b))[0]
    only_a, only_b = int(np.sum((a == 1) & (b == 0))), int(np.sum((a == 0) & (b == 1)))

    assert (acc["test"], acc["only_first"], acc["only_second"]) == ("McNemar", only_a, only_b)
    assert acc["mean"] == pytest.approx((only_a - only_b) / len(pairs))
    # The exact test by its definition: twice the smaller tail of a fair coin, at most 1.
    tail = sum(math.comb(only_a + only_b, k) for k in range(min(only_a, only_b) + 1)) / 2 ** (only_a + only_b)
    assert acc["p"] == pytest.approx(min(1.0, 2 * tail))


def test_log_likelihoods_are_compared_by_their_mean():
    a, b = np.random.default_rng(0).normal(size=(2, 9))
    gold = paired(choices([1] * 9, a), choices([1] * 9, b))[-1]
    known = stats.ttest_rel(a, b)

    assert (gold["metric"], gold["test"]) == ("gold_loglikelihood", "t")
    assert (gold["mean"], gold["p"]) == (pytest.approx((a - b).mean()), pytest.approx(known.pvalue))
    assert gold["interval"] == pytest.approx(known.confidence_interval(0.95))


def test_texts_are_compared_by_windows():
    a, b = np.random.default_rng(0).normal(size=(2, 9))
    (found,) = paired(windows(a, [8] * 9), windows(b, [8] * 9))
    known = stats.ttest_rel(-a / 8, -b / 8)

    assert (found["mean"], found["p"]) == (pytest.approx((b - a).mean() / 8), pytest.approx(known.pvalue))


def test_a_model_does_not_differ_from_itself():
    for pair in paired(choices([1, 0, 1], [-1, -2, -3]), choices([1, 0, 1], [-1, -2, -3])):
        assert (pair["mean"], pair["p"]) == (0, 1)
    assert paired(choices([1]), choices([0]))[0]["interval"] is None


def test_accuracies_that_are_the_same_numbers_are_compared_once():
    first, second = choices([1, 0, 1]), choices([1, 1, 0])
    assert [pair["metric"] for pair in paired(first, second)] == ["acc", "gold_loglikelihood"]
    first[0]["metrics"]["acc_norm"] = 0.0
    assert [pair["metric"] for pair in paired(first, second)] == ["acc", "acc_norm", "gold_loglikelihood"]


def test_other_items_are_not_compared():
    with pytest.raises(ValueError, match="have not been asked the same items"):
        paired(choices([1, 0]), choices([1, 0, 1]))
    with pytest.raises(ValueError, match="have not been asked the same items"):
        paired(choices([1, 0]), choices([1, 0], digest="other"))
    pairs, notes = differences({"a": {"piqa": choices([1])}, "b": {"piqa": choices([1], digest="other")}})
    assert pairs == []
    assert notes[0].startswith("piqa: b is not compared with a: they have not been asked the same items")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 1000).map(lambda p: p / 1000), max_size=12))
def test_holm_rejects_as_by_its_steps(values):
    found = [pair["p_holm"] for pair in holm([{"p": p} for p in values])]

    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
            if values[place] * (len(values) - rank) > level:
                break
            rejected.add(place)
        assert {place for place, p in enumerate(found) if p <= level} == rejected
    assert holm([{"p": None}, {"p": 0.02}]) == [{"p": None, "p_holm": None}, {"p": 0.02, "p_holm": 0.02}]
