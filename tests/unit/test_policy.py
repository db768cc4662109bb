"""A policy is checked when it is made, and says what is wrong."""

import json

import pytest

from gnmr import Ema, Policy, Window

WRONG = [
    ({"max_active": -1}, "Policy.max_active must be an int >= 0, got -1"),
    ({"max_active": 2.5}, "Policy.max_active must be an int >= 0, got 2.5"),
    ({"max_active": True}, "Policy.max_active must be an int >= 0, got True"),
    ({"alpha": 0}, "Policy.alpha must be a finite number > 0"),
    ({"alpha": float("nan")}, "Policy.alpha must be a finite number > 0"),
    ({"alpha": "1.5"}, "Policy.alpha must be a number or a schedule"),
    ({"beta": -1.0}, "Policy.beta must be a finite number > 0"),
    ({"window": 0}, "Policy.window must be an int >= 1, got 0"),
    ({"lock_steps": -1}, "Policy.lock_steps must be an int >= 0, got -1"),
    ({"lock_steps": 2**31}, "Policy.lock_steps must be <= 2147483647"),
    ({"window": 10**12}, "Policy.window must be <= 100000"),
    ({"warmup_steps": 1.0}, "Policy.warmup_steps must be an int >= 0, got 1.0"),
    ({"eps": 0.0}, "Policy.eps must be a finite number > 0, got 0.0"),
    ({"history": "ema"}, "Policy.history must be 'cumulative', Ema"),
    ({"alpha": ((2, 1.5),)}, "must at step 1 or fraction 0.0"),
    ({"alpha": ((1, 1.5), (1, 1.1))}, "its firsts must strictly increase"),
    ({"alpha": ((0.0, 1.5), (5, 1.1))}, "steps (ints) and fractions (floats) are not mixed"),
    ({"alpha": ((0.0, 1.5), (1.0, 1.1))}, "a fraction must be below 1"),
    ({"alpha": ((1, 1.5), (9, 0.0))}, "the value 0.0 must be > 0"),
    ({"alpha": ((1, 1.5, 3),)}, "is not a pair"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[str(fields) for fields, _ in WRONG])
def test_a_wrong_value_is_named_with_the_rule(fields, message):
    with pytest.raises(ValueError) as error:
        Policy(**{"max_active": 4} | fields)

    assert message in str(error.value)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1, "x"])
def test_ema_decay_is_inside_0_and_1(bad):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\)"):
        Ema(bad)


def test_window_length_is_at_least_1():
    with pytest.raises(ValueError, match="int in 1 to 100000, got 0"):
        Window(0)


def test_fractions_become_steps():
    policy = Policy(max_active=1, alpha=((0.0, 1.5), (0.025, 1.1)), beta=((0.0, 2.0), (0.5, 1.0)))

    assert not policy.resolved
    resolved = policy.resolve(1000)
    assert resolved.resolved
    assert resolved.alpha == ((1, 1.5), (26, 1.1))
    assert resolved.beta == ((1, 2.0), (501, 1.0))


def test_a_run_too_short_for_its_schedule_is_refused():
    with pytest.raises(ValueError, match="two pieces that begin at step 1 of a run of 10 steps"):
        Policy(max_active=1, alpha=((0.0, 1.5), (0.025, 1.1))).resolve(10)


@pytest.mark.parametrize("history", ["cumulative", Ema(0.9), Window(7)])
def test_a_policy_survives_json(history):
    policy = Policy(max_active=3, alpha=((1, 1.5), (21, 1.1)), beta=None, history=history, warmup_steps=2)

    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_actve": 3}, "no field 'max_actve'"),
        ({"alpha": 2.0}, "Policy.max_active is required"),
        ({"max_active": 1, "history": {"emma": 0.9}}, "must be 'cumulative', {'ema': decay}"),
    ],
)
def test_from_dict_names_what_is_wrong(values, message):
    with pytest.raises(ValueError) as error:
        Policy.from_dict(values)

    assert message in str(error.value)
