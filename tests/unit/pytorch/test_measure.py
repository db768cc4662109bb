"""What is held for backward: counted on plain models by hand, and the ratio of the packed path."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import gnmr
from gnmr.pytorch.measure import held_for_backward


def llama(width=128, layers=2):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=344, num_hidden_layers=layers, num_attention_heads=4,
        vocab_size=100, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def measure(model, tokens):
    with held_for_backward(model) as held:
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    return held


@pytest.mark.parametrize(("low", "most"), [("e2m1", 0.28), ("int4", 0.28), ("e3m2", 0.41), ("int2", 0.15)])
def test_a_packed_llama_holds_the_stated_share_of_bf16(low, most):
    model = llama()
    tokens = torch.randint(0, 100, (2, 64))
    plain = measure(copy.deepcopy(model), tokens)
    # q, k, v read one tensor, o another, gate and up a third, down a fourth; two layers, two bytes each.
    assert plain.projections == 2 * 2 * 128 * (128 + 128 + 128 + 344)
    paths = gnmr.SavedActivations(low=low)
    paths.attach(gnmr.find_units(model))
    packed = measure(model, tokens)
    assert packed.projections == paths.held_bytes()[0].sum()
    assert packed.projections <= most * plain.projections
    # All that the model holds shrinks by what only the projections held, and others keep the rest.
    assert packed.model <= plain.model - (plain.projections - plain.shared) + packed.projections
    assert packed.model < plain.model


def test_group_scales_cost_more_and_stay_within_the_share():
    model = llama()
    tokens = torch.randint(0, 100, (2, 64))
    plain = measure(copy.deepcopy(model), tokens)
    gnmr.SavedActivations(scaling="group").attach(gnmr.find_units(model))
    assert measure(model, tokens).projections <= 0.28 * plain.projections


def test_casts_of_autocast_are_not_activations():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(6, 5)})])})
    module = model["layers"][0]["q_proj"]
    with held_for_backward(model) as held, torch.autocast("cpu", torch.bfloat16):
        module(torch.ones(2, 8, 6))
    assert held.projections == 16 * 6 * 2
    assert held.model >= held.projections


def test_views_count_their_storage_once_and_whole():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4)})])})
    whole = torch.ones(10, 4)
    with held_for_backward(model) as held:
        for part in (whole[:2], whole[2:4]):
            model["layers"][0]["q_proj"](part)
    assert held.projections == held.model == 160
    assert held.shared == 0


def test_the_model_is_left_as_it_was():
    model = llama(layers=1)
    with pytest.raises(KeyError), held_for_backward(model):
        raise KeyError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
