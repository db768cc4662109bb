"""Appendix D: predicted, bounded, and against what autograd really holds."""

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gnmr
from gnmr.memory import Activation, extra_bytes, loose_bound_bytes, worst_case_bytes
from gnmr.pytorch.measure import held_for_backward
from gnmr.triggers import Fixed

OWN = [Activation((0,), 100), Activation((1,), 1000), Activation((2,), 300)]
BITS = {"low_bits": 4, "high_bits": 8}


def test_the_appendix_by_hand():
    assert extra_bytes([True, False, True], OWN, **BITS) == 200
    assert worst_case_bytes(2, OWN, **BITS) == 650
    assert loose_bound_bytes(2, OWN, **BITS) == 1000


def test_a_shared_activation_is_stored_twice_while_its_readers_differ():
    shared = [Activation((0, 1, 2), 1000, scale_bytes=8)]

    assert extra_bytes([True, False, False], shared, **BITS) == 1008
    assert extra_bytes([True, True, False], shared, **BITS) == 1008
    assert extra_bytes([True, True, True], shared, **BITS) == 500
    assert worst_case_bytes(1, shared, **BITS) == 1008


@pytest.mark.parametrize("max_active", range(6))
def test_no_plan_under_the_cap_exceeds_the_bounds(max_active):
    activations = [*OWN, Activation((0, 3), 500, 4), Activation((3, 4), 700, 4)]
    worst = worst_case_bytes(max_active, activations, **BITS)

    for units in itertools.combinations(range(5), max_active):
        plan = np.isin(np.arange(5), units)
        assert extra_bytes(plan, activations, **BITS) <= worst <= loose_bound_bytes(max_active, activations, **BITS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low_bits": 8, "high_bits": 4}, "bits must be 0 < low <= high"),
        ({"activations": [Activation((0,), -1)]}, "negative size"),
        ({"activations": [Activation((7,), 1)]}, "must be units 0 to 2"),
        ({"activations": [Activation((), 1)]}, "at least one"),
    ],
)
def test_wrong_input_is_named(change, message):
    arguments = {"active": [True, False, True], "activations": OWN, **BITS} | change

    with pytest.raises(ValueError) as error:
        extra_bytes(arguments.pop("active"), arguments.pop("activations"), **arguments)
    assert message in str(error.value)


def test_a_negative_cap_is_refused():
    with pytest.raises(ValueError, match="max_active must be >= 0"):
        worst_case_bytes(-1, OWN, **BITS)


@pytest.mark.parametrize("granularity", ["operator", "block"])
def test_measured_bytes_are_what_the_model_predicts_and_within_its_bound(granularity):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(0, 64, (2, 32))
    paths = gnmr.SavedActivations(low="e2m1", high="e4m3")
    policy = gnmr.Policy(max_active=3)

    def held(plan):
        for unit, recover in enumerate(plan):
            paths.switch(unit, bool(recover))
        with held_for_backward(model, guard.units) as counted:
            model(input_ids=ids, labels=ids).loss  # noqa: B018 (its graph is what is counted)
        for unit in range(len(plan)):
            paths.switch(unit, recover=False)
        return counted.projections

    def trigger(n_units, policy, units):
        return Fixed(n_units, policy, units, recover=False)

    with gnmr.Guard(model, paths, policy, granularity=granularity, trigger=trigger) as guard:
        n = len(guard.units)
        nobody = held(np.zeros(n, dtype=bool))
        activations = paths.activations()
        worst = worst_case_bytes(3, activations, **BITS)
        draw = np.random.default_rng(0)
        for _ in range(12):
            plan = np.zeros(n, dtype=bool)
            plan[draw.choice(n, min(n, 3), replace=False)] = True
            measured = held(plan) - nobody

            assert measured == extra_bytes(plan, activations, **BITS) == paths.extra_bytes(plan).sum()
            assert 0 < measured <= worst
