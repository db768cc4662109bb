"""The bounds hold where their assumptions do, and the choices are the best."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gnmr import Controller, Policy
from gnmr.cli.main import app
from gnmr.theory import (
    empirical_threshold,
    estimate_kappa,
    expected_gain,
    false_alarm_bound,
    one_step_gain,
    oracle_choice,
    penalty,
    persistence,
    suggest_alpha,
    two_stage,
)
from gnmr.trace import TraceWriter, read_trace

gaps = st.lists(st.floats(-10, 10), min_size=1, max_size=7)

DISTRIBUTIONS = {
    "gamma": lambda draw, shape: draw.gamma(16.0, 1 / 16.0, shape),
    "exponential": lambda draw, shape: draw.exponential(1.0, shape),
    "half-normal": lambda draw, shape: np.abs(draw.standard_normal(shape)),
    "lognormal": lambda draw, shape: draw.lognormal(0.0, 0.3, shape),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("t", [20, 120])
def test_the_tail_bound_holds_on_norms_that_fit(name, t):
    draw, units = np.random.default_rng(7), 20_000
    rows = DISTRIBUTIONS[name](draw, (t, units))
    kappa = estimate_kappa(DISTRIBUTIONS[name](draw, 200_000))
    controller = Controller(units, Policy(max_active=1, beta=None))
    for row in rows:
        decision = controller.update(row)

    informative = 0
    for alpha in (1.2, 1.5, 2.0, 4.0, 8.0, 32.0):
        bound = float(false_alarm_bound(alpha, t, kappa=kappa))
        measured = float(np.mean(decision.gnmr >= alpha))
        assert measured <= bound
        informative += bound < 0.9
    assert informative  # at some alpha the bound says something


def test_a_norm_that_does_not_fit_can_break_the_bound():
    # One unit in two sees a norm a hundred times its mean: no kappa of healthy norms covers that.
    kappa = estimate_kappa(np.random.default_rng(0).gamma(16.0, 1 / 16.0, 10_000))
    controller = Controller(2, Policy(max_active=1))
    for _ in range(50):
        controller.update([1.0, 1.0])
    decision = controller.update([1.0, 100.0])

    assert np.mean(decision.gnmr >= 50) > false_alarm_bound(50.0, 51, kappa=kappa)


@given(st.floats(1.01, 50), st.floats(1.01, 50), st.integers(2, 500), st.integers(2, 500), st.floats(0.01, 2))
def test_the_bound_falls_with_alpha_and_history(alpha, other, t, later, kappa):
    low, high = sorted((alpha, other))
    short, long = sorted((t, later))

    assert false_alarm_bound(high, t, kappa=kappa) <= false_alarm_bound(low, t, kappa=kappa)
    assert 0 <= false_alarm_bound(alpha, long, kappa=kappa) <= false_alarm_bound(alpha, short, kappa=kappa) <= 1


@given(st.floats(1e-6, 0.5), st.integers(200, 5000), st.floats(0.01, 0.2))
def test_the_suggested_alpha_is_the_smallest(rate, t, kappa):
    alpha = suggest_alpha(rate, t, kappa=kappa)

    assert false_alarm_bound(alpha, t, kappa=kappa) <= rate
    assert false_alarm_bound(1 + (alpha - 1) * 0.999, t, kappa=kappa) > rate


def test_a_history_that_is_too_short_is_named():
    with pytest.raises(ValueError, match="no alpha bounds the false alarms by 0.001 at step 2.*the mean of 1 norms"):
        suggest_alpha(0.001, 2, kappa=1.0)


def test_two_stages_make_a_policy():
    schedule = two_stage(0.01, 20, 1000, kappa=0.05)
    policy = Policy(max_active=1, alpha=schedule)

    assert schedule[0][1] > schedule[1][1] > 1
    assert policy.resolve(1000).alpha == schedule
    with pytest.raises(ValueError, match="first must be in 4 to 10"):
        two_stage(0.01, 20, 10, kappa=0.05)


@given(gaps, st.integers(0, 7))
def test_the_oracle_choice_is_the_best_of_all_sets(values, k):
    chosen = oracle_choice(values, k)
    sets = [s for size in range(min(k, len(values)) + 1) for s in itertools.combinations(range(len(values)), size)]
    best = max(sum(values[i] for i in each) for each in sets)

    assert chosen.sum() <= k
    assert one_step_gain(values, chosen) == pytest.approx(best)


@given(gaps, st.floats(-3, 3))
def test_the_expected_gain_is_linear(values, factor):
    chance = np.linspace(0, 1, len(values))
    once = expected_gain(chance, chance, values)

    assert expected_gain(chance, chance, np.array(values) * factor) == pytest.approx(once * factor, abs=1e-9)
    with pytest.raises(ValueError, match=r"persistence must be in \[0, 1\], got 1.5"):
        expected_gain(chance, chance * 0 + 1.5, values)


def test_the_penalty_is_remark_1():
    found = penalty([0.5, 0.0], [2.0, 4.0], lr=0.1, grad_norm=3.0, smoothness=5.0, noise_factor=2.0)
    np.testing.assert_allclose(found, [0.1 * 3 * 0.5 + 5 * 0.01 / 2 * 2 * 2, 5 * 0.01 / 2 * 2 * 4])
    for wrong in ({"lr": -1.0}, {"lr": 0.1, "smoothness": -1.0}):
        with pytest.raises(ValueError, match="must be >= 0"):
            penalty(1.0, 1.0, **wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: false_alarm_bound(1.0, 5, kappa=0.1), "alpha must be > 1"),
        (lambda: false_alarm_bound(2.0, 1, kappa=0.1), "t must be >= 2"),
        (lambda: false_alarm_bound(2.0, 5, kappa=0.0), "kappa and c must be > 0"),
        (lambda: suggest_alpha(1.0, 5, kappa=0.1), r"rate must be in \(0, 1\)"),
        (lambda: estimate_kappa([1.0] * 9), "at least 10 finite numbers"),
        (lambda: empirical_threshold([1.0] * 9, 0.1), "takes 10 unit-steps or more to be read off, and there are 9"),
        (lambda: oracle_choice([1.0], -1), "k must be >= 0"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture
def trace(tmp_path):
    policy = Policy(max_active=1, alpha=1.5, beta=None, lock_steps=0)
    controller = Controller(2, policy, ["a", "b"])
    header = {"policy": policy.to_dict(), "units": ["a", "b"], "trigger": "gnmr"}
    norms = np.ones((60, 2))
    norms[[20, 21, 22, 40], 0] = 30.0
    observed = np.ones((60, 2), dtype=bool)
    observed[23] = False
    with TraceWriter(tmp_path / "trace.arrow", header) as writer:
        for row, seen in zip(norms, observed, strict=True):
            writer.write(row, seen, controller.update(row, seen))
    return tmp_path / "trace.parquet"


def test_persistence_is_how_often_a_risk_stays(trace):
    by_unit, pooled, events = persistence(read_trace(trace))

    # Steps 21, 22, 23 and 41 exceed; the third's next step was not observed, the last's is healthy.
    assert (pooled, events) == (pytest.approx(2 / 3), 3)
    assert by_unit[0] == pytest.approx(2 / 3)
    assert np.isnan(by_unit[1])


def test_the_command_suggests_what_replay_takes(trace):
    done = CliRunner().invoke(app, ["suggest", str(trace), "--false-alarm-rate", "0.05"])

    assert done.exit_code == 0, done.output
    for words in (
        "observed unit-steps of 2 units",
        "alpha",
        "Theorem 2",
        "persistence π: 0.67 over 3 risks",
        "gnmr replay",
    ):
        assert words in done.output
    again = done.output.strip().splitlines()[-1].partition("gnmr ")[2].split()
    assert CliRunner().invoke(app, again).exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--false-alarm-rate", "0.0001"], "a rate of 0.0001 takes 10000 unit-steps or more"),
        (["--false-alarm-rate", "2"], "rate must be in (0, 1), got 2.0"),
    ],
)
def test_the_command_says_what_is_wrong(trace, args, message):
    done = CliRunner().invoke(app, ["suggest", str(trace), *args])

    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
