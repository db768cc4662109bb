"""The matched controls differ from the controller in the choice only."""

import numpy as np
import pytest

from gnmr import Controller, Policy
from gnmr.triggers import AlwaysTop, Fixed, Random, edge_units

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
    with pytest.raises(ValueError, match="'risk' or 'norm', got 'loss'"):
        AlwaysTop(2, POLICY, by="loss")
