"""Paired comparisons, and the words for them."""

import numpy as np
import pytest
from scipy import stats

from gnmr.lab.metrics import aggregate
from gnmr.lab.paired import is_clear, paired_differences, verdicts


def row(arm, values):
    return {"arm": arm, "metrics": {"eval_loss": aggregate(values)}}


def comparison(**losses):
    rows = [row(arm.replace("_at_", "@"), values) for arm, values in losses.items()]
    return {"arms": [each["arm"] for each in rows], "differences": paired_differences(rows)}


def test_differences_are_paired_by_seed():
    rows = [row("high", [1.0, 2.0, 1.5]), row("gnmr", [1.5, 1.9, 1.8]), row("low", [3.0, 3.0, 3.0])]
    found = {(pair["first"], pair["second"]): pair for pair in paired_differences(rows)}

    assert set(found) == {("low", "high"), ("gnmr", "high"), ("gnmr", "low")}
    pair, gaps = found["gnmr", "high"], np.array([0.5, -0.1, 0.3])
    assert pair["mean"] == pytest.approx(gaps.mean())
    assert pair["se"] == pytest.approx(stats.sem(gaps))
    assert pair["interval"] == pytest.approx(stats.t.interval(0.95, 2, gaps.mean(), stats.sem(gaps)))
    assert (pair["lower"], pair["seeds"]) == (1, 3)
    assert pair["p"] == pytest.approx(stats.binomtest(1, 3).pvalue)


def test_every_arm_with_a_matched_control_is_compared():
    losses = {"gap": [1.0, 1.1], "norm_at_gap": [1.2, 1.3], "always": [1.0, 1.0], "norm": [2.0, 2.0]}
    found = {(pair["first"], pair["second"]): pair["matched"] for pair in comparison(**losses)["differences"]}

    assert found == {("gap", "norm@gap"): True, ("gap", "always"): False, ("gap", "norm"): False}


def test_one_seed_is_no_evidence():
    found = comparison(low=[2.0], high=[1.0], gnmr=[1.5], random=[1.7])

    assert all(pair["se"] is None and pair["interval"] is None for pair in found["differences"])
    assert "gnmr has one seed, and so is not judged against its matched control random." in verdicts(found)


def test_what_is_said():
    clear = comparison(
        low=[2.0, 2.1, 2.2], high=[1.0, 1.1, 1.2], gnmr=[1.5, 1.6, 1.71], random=[1.4, 1.7, 1.7], gap=[1.1, 1.2, 1.31]
    )
    assert verdicts(clear) == [
        "The low path loses 1.0000 of validation loss against the high one: there is something to win back.",
        "gnmr is better than the low path alone.",
        "gnmr cannot be told from its matched control random.",
        "gap is better than the low path alone.",
        "gap has no matched control here, so its choice of units is not judged.",
    ]
    nothing = comparison(low=[1.0, 1.1, 1.0], high=[1.0, 1.0, 1.1])
    assert "there is nothing here for a controller to win back" in verdicts(nothing)[0]


def test_a_diverged_run_is_shown_and_is_not_clear():
    found = comparison(low=[float("inf"), 2.0], high=[1.0, 1.0])["differences"][0]

    assert found["mean"] == "inf"
    assert not is_clear(found)
