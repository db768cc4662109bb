"""The matched controls differ from the controller in the choice only."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnmr import Controller, Policy, StateError
from gnmr.triggers import AlwaysTop, Fixed, Gap, Random, Static, edge_units

POLICY = Policy(max_active=2, alpha=1.2, window=2)
ROWS = np.random.default_rng(0).lognormal(size=(20, 5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: AlwaysTop(5, POLICY),
        lambda: AlwaysTop(5, POLICY, by="norm"),
        lambda: Random(5, POLICY, counts=[1] * 20, seed=0),
        lambda: Fixed(5, POLICY, recover=True),
    ],
)
def test_statistics_are_the_controllers(make):
    control, reference = make(), Controller(5, POLICY)

    for row in ROWS:
        mine, theirs = control.update(row), reference.update(row)
        np.testing.assert_array_equal(mine.gnmr, theirs.gnmr)
        np.testing.assert_array_equal(mine.risk, theirs.risk)


@pytest.mark.parametrize("by", ["risk", "norm"])
def test_always_top_is_always_full_and_takes_the_largest(by):
    control = AlwaysTop(5, POLICY, by=by)
    for row in ROWS:
        decision = control.update(row)
        score = decision.risk if by == "risk" else row
        assert decision.active.sum() == 2
        assert score[decision.active].min() >= score[~decision.active].max()


def test_always_top_takes_the_numbers_of_a_reference():
    counts = [0, 1, 2, 3, 2] * 4
    control = AlwaysTop(5, POLICY, by="norm", counts=counts)
    for row, count in zip(ROWS, counts, strict=True):
        active = control.update(row).active
        assert set(np.flatnonzero(active)) == set(np.argsort(row)[len(row) - count :])
    with pytest.raises(ValueError, match=r"AlwaysTop\(counts\) has 20 steps"):
        control.update(ROWS[0])


def test_a_nonfinite_norm_ranks_highest_and_the_unobserved_are_left_out():
    control = AlwaysTop(3, Policy(max_active=1), by="norm")

    assert control.update([1.0, np.nan, 5.0]).active.tolist() == [False, True, False]
    assert control.update([1.0, 9.0, 5.0], [True, False, True]).active.tolist() == [False, False, True]


def test_random_draws_as_many_and_depends_on_seed_and_step_only():
    counts = [0, 1, 2, 3, 2] * 4
    one, two = (Random(5, POLICY, counts=counts, seed=3) for _ in range(2))
    drawn = [one.update(row).active for row in ROWS]

    assert [int(active.sum()) for active in drawn] == counts
    for row in ROWS[:10]:
        two.update(row * 7)
    resumed = Random(5, POLICY, counts=counts, seed=3)
    resumed.load_state_dict(two.state_dict())
    for row, wanted in zip(ROWS[10:], drawn[10:], strict=True):
        np.testing.assert_array_equal(resumed.update(row).active, wanted)
    other = Random(5, POLICY, counts=counts, seed=4)
    assert any((other.update(row).active != wanted).any() for row, wanted in zip(ROWS, drawn, strict=True))


def test_random_says_when_its_reference_is_too_short_or_wrong():
    control = Random(2, POLICY, counts=[1], seed=0)
    control.update([1.0, 1.0])

    with pytest.raises(ValueError, match="has 1 steps, and this is step 2"):
        control.update([1.0, 1.0])
    with pytest.raises(ValueError, match=r"must be in \[0, 2\], got 3"):
        Random(2, POLICY, counts=[3], seed=0)


@pytest.mark.parametrize("recover", [True, False])
def test_fixed_is_fixed_from_the_first_step_on(recover):
    control = Fixed(5, POLICY, recover=recover)

    assert control.active.tolist() == [recover] * 5
    assert all(control.update(row).active.tolist() == [recover] * 5 for row in ROWS)


def test_fixed_takes_units_by_name():
    control = Fixed(3, POLICY, ["a", "b", "c"], recover=["c", "a"])

    assert control.active.tolist() == [True, False, True]
    assert all(control.update(row[:3]).active.tolist() == [True, False, True] for row in ROWS)
    with pytest.raises(ValueError, match=r"Fixed\(recover\) must name units, and 'd' is none: a, b, c"):
        Fixed(3, POLICY, ["a", "b", "c"], recover=["a", "d"])


@pytest.mark.parametrize(
    ("units", "edges"),
    [
        (["model.layers.2.a", "model.layers.10.a", "model.layers.0.a"], ["model.layers.10.a", "model.layers.0.a"]),
        (["h.0.experts.7.w", "h.1.experts.0.w", "h.2.experts.3.w"], ["h.0.experts.7.w", "h.2.experts.3.w"]),
        (["layers.3.a", "layers.3.b", "lm_head"], ["layers.3.a", "layers.3.b"]),
    ],
)
def test_edges_are_the_first_and_the_last_layer(units, edges):
    assert edge_units(units) == edges


def test_without_numbered_layers_there_are_no_edges():
    with pytest.raises(ValueError, match=r"no unit is in a numbered layer.*: fc1, fc2"):
        edge_units(["fc1", "fc2"])


def test_an_unknown_ranking_is_refused():
    with pytest.raises(ValueError, match="one of risk, norm, gap, gsnr, jacobian, oracle, got 'loss'"):
        AlwaysTop(2, POLICY, by="loss")


def test_gap_is_the_error_times_the_share_of_the_gradient():
    gap = Gap(3, Policy(max_active=1), threshold=0.1)
    decision = gap.update([3.0, 0.0, 4.0], signal=[0.5, 9.0, np.nan])

    np.testing.assert_allclose(decision.risk, [0.5 * 3 / 5 / 0.1, 0.0, 0.0])
    assert decision.active.tolist() == [True, False, False]


def test_gap_spends_nothing_where_little_is_harmed_and_keeps_cap_and_lock():
    gap = Gap(4, Policy(max_active=2, lock_steps=2), threshold=0.1)
    norms = np.ones(4)

    assert not gap.update(norms, signal=np.full(4, 0.1)).active.any()
    assert gap.update(norms, signal=[0.5, 0.3, 0.4, 0.0]).active.tolist() == [True, False, True, False]
    assert gap.update(norms, signal=np.zeros(4)).active.tolist() == [True, False, True, False]
    assert gap.update(norms, signal=np.zeros(4)).active.tolist() == [True, False, True, False]
    assert not gap.update(norms, signal=np.zeros(4)).active.any()


def test_gap_with_change_weighs_with_gnmr():
    gap = Gap(2, Policy(max_active=1), threshold=0.1, change=True)
    gap.update([1.0, 1.0], signal=[0.1, 0.1])
    decision = gap.update([3.0, 4.0], signal=[0.1, 0.1])

    np.testing.assert_allclose(decision.risk, [0.1 * 3 / 5 / 0.1 * 3, 0.1 * 4 / 5 / 0.1 * 4])


def test_gap_takes_a_nonfinite_unit_first_and_the_unobserved_never():
    gap = Gap(3, Policy(max_active=1), threshold=0.1)
    assert gap.update([1.0, np.inf, 1.0], signal=[0.9, 0.0, 0.9]).active.tolist() == [False, True, False]
    assert gap.update([1.0, np.nan, 1.0], [True, False, False], [0.9, 5.0, 9.9]).active.tolist() == [True, False, False]


@pytest.mark.parametrize("make", [Gap, partial(AlwaysTop, by="gap"), partial(AlwaysTop, by="gsnr")])
def test_a_missing_signal_is_named(make):
    with pytest.raises(ValueError, match="needs the signal '(error|noise)' at every update"):
        make(2, POLICY).update([1.0, 1.0])


def test_always_top_by_a_signal_leaves_out_what_is_unknown():
    top = AlwaysTop(3, Policy(max_active=2), by="jacobian")
    assert top.update([1.0, 1.0, 1.0], signal=[np.nan, 1.0, np.nan]).active.tolist() == [False, True, False]
    by_gap = AlwaysTop(3, Policy(max_active=1), by="gap")
    assert by_gap.update([9.0, 1.0, 2.0], signal=[0.1, 1.0, 0.6]).active.tolist() == [False, False, True]


def test_random_at_a_rate():
    control = Random(1000, Policy(max_active=1), rate=0.2, seed=0)
    shares = [control.update(np.ones(1000)).active.mean() for _ in range(20)]
    assert np.mean(shares) == pytest.approx(0.2, abs=0.02)
    assert len(set(shares)) > 1
    for wrong in ({}, {"rate": 0.1, "counts": [1]}, {"rate": 1.5}):
        with pytest.raises(ValueError, match="rate"):
            Random(3, POLICY, seed=0, **wrong)


def test_static_is_the_profile_of_the_warm_up_and_stays():
    policy = Policy(max_active=1, warmup_steps=3)
    static = Static(4, policy, share=0.5)
    rows = [[1, 1, 1, 1], [1, 4, 1, 2], [1, 4, 1, 3], [9, 1, 9, 1], [9, 1, 9, 1]]
    plans = [static.update(np.array(row, dtype=float)).active.tolist() for row in rows]

    assert plans[:2] == [[True] * 4] * 2
    assert plans[2:] == [[False, True, False, True]] * 3
    resumed = Static(4, policy, share=0.5)
    resumed.load_state_dict(static.state_dict())
    assert resumed.update(np.ones(4)).active.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("policy", "share", "message"),
    [
        (Policy(max_active=1), 0.25, "policy.warmup_steps run, which must be >= 2, got 0"),
        (Policy(max_active=1, warmup_steps=5), 0.0, r"Static\(share\) must be in \(0, 1\]"),
    ],
)
def test_what_static_refuses(policy, share, message):
    with pytest.raises(ValueError, match=message):
        Static(4, policy, share=share)


def test_static_refuses_a_state_that_is_not_its_own():
    with pytest.raises(StateError, match="no state of Static over these 4 units"):
        Static(4, Policy(max_active=1, warmup_steps=2)).load_state_dict(Controller(4, POLICY).state_dict())


@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=6, max_size=6), min_size=1, max_size=12),
    st.integers(0, 6),
    st.integers(0, 3),
)
def test_no_score_passes_the_cap(rows, k, lock):
    gap = Gap(6, Policy(max_active=k, lock_steps=lock), threshold=1e-6)
    for row in rows:
        assert gap.update(np.ones(6), signal=row).active.sum() <= k
