"""Experts of the real transformers families, stacked in one parameter, as units."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gnmr import Guard, Int8, Policy, SavedActivations, Simulated, UnitError, find_units
from gnmr.pytorch.gaps import measure_gaps
from gnmr.pytorch.signals import Jacobian, MicroBatchNoise
from toys import Toy, ToyPaths

EXPERTS, LAYERS = 4, 2
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=EXPERTS)),
    "qwen": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=EXPERTS, moe_intermediate_size=24, head_dim=8)
    ),
    # Transposed, with biases, and a gate of its own.
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SHAPE, num_local_experts=EXPERTS, head_dim=8)),
}
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def make(family="mixtral", seed=0):
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.copy_(0.2 * torch.randn_like(param))
            elif not param.any():
                param.copy_(0.1 * torch.randn_like(param))
    return model


def tokens(seed=0, rows=2):
    return torch.randint(32, (rows, 12), generator=torch.Generator().manual_seed(seed))


def backward(model, seed=0, rows=2):
    ids = tokens(seed, rows)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def gradients(model):
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def starve(model, layer, expert):
    """Send no token of a layer to one expert: it loses to every other, whatever the token."""
    mlp = model.model.layers[layer].mlp
    router = mlp.router if hasattr(mlp, "router") else mlp.gate
    original = router.forward

    def route(hidden):
        logits = original(hidden)[0].clone()
        logits[:, expert] = -1e9
        top, index = torch.topk(torch.softmax(logits.float(), dim=-1), 2, dim=-1)
        return logits, top / top.sum(dim=-1, keepdim=True), index

    router.forward = route


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_run_one_by_one_compute_what_they_computed(family):
    plain, guarded = make(family), make(family)
    wanted = backward(plain)
    guard = Guard(guarded, ToyPaths(), Policy(max_active=2), granularity="expert", include="*.experts.*")

    found = backward(guarded)
    decision = guard.step()

    assert torch.allclose(found, wanted, atol=1e-6)
    mine = gradients(guarded)
    for name, grad in gradients(plain).items():
        assert torch.allclose(mine[name], grad, rtol=1e-4, atol=1e-6), name
    assert len(guard.units) == EXPERTS * LAYERS
    assert decision.gnmr[~np.isnan(decision.gnmr)].size >= EXPERTS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_units_norm_is_that_of_its_rows(family):
    model = make(family)
    starve(model, 0, 1)
    guard = Guard(model, ToyPaths(), Policy(max_active=2), granularity="expert", include="*.experts.*")
    backward(model)

    reading = guard._monitor.read(total=True)

    stacked = {name: param.grad.double() for name, param in model.named_parameters() if ".experts." in name}
    for unit in guard.units:
        prefix, row = unit.name.rsplit(".", 1)
        mine = [grad[int(row)] for name, grad in stacked.items() if name.startswith(f"{prefix}.")]
        assert len(mine) == (4 if family == "gpt-oss" else 2)
        norm = sum(float(part.square().sum()) for part in mine) ** 0.5
        assert reading.observed[unit.index] == (norm > 0)
        if norm > 0:
            assert reading.norms[unit.index] == pytest.approx(norm, rel=1e-5)
    assert not reading.observed[1], "nobody asked this expert"
    whole = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert reading.total == pytest.approx(float(whole), rel=1e-6)


def test_an_expert_without_tokens_keeps_its_history_and_takes_no_budget():
    model = make()
    guard = Guard(model, ToyPaths(), Policy(max_active=1, alpha=0.1), granularity="expert", include="*.experts.*")
    backward(model)
    guard.step()
    before = guard.controller.state
    assert before.mean[2] > 0
    model.zero_grad()
    starve(model, 0, 2)

    backward(model, seed=1)
    decision = guard.step()

    assert not decision.active[2]
    assert decision.active.sum() == 1
    assert guard.controller.state.mean[2] == before.mean[2]
    assert guard.controller.state.count[2] == before.count[2]


@pytest.mark.parametrize("paths", [Simulated("int4", "exact"), SavedActivations("int2", "bf16"), Int8(backward="int8")])
def test_each_expert_is_on_its_own_path(paths):
    exact, model = make(), make()
    backward(exact)
    guard = Guard(model, paths, Policy(max_active=4), include="*.experts.*", granularity="expert")
    for unit in guard.units:
        paths.switch(unit.index, unit.index != 1)

    backward(model)

    wanted, found = gradients(exact)[GATE_UP], gradients(model)[GATE_UP]
    error = (found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    others = [0, 2, 3]
    assert error[1] > (0.005 if isinstance(paths, Int8) else 0.02)
    assert (error[others] < error[1] / 2).all()
    ran = paths.ran()
    assert ran[0].tolist() == [0, 2] + [0] * 6, "two operators of one expert"
    assert paths.held_bytes()[0, 1] > 0


@pytest.mark.parametrize("frozen", ["offload", "dequantize"])
def test_frozen_experts_of_one_parameter_cannot_leave_one_by_one(frozen):
    model = make()
    for name, param in model.named_parameters():
        param.requires_grad_("gate_up" not in name)

    with pytest.raises(UnitError, match=r"is one of several that are stacked in one parameter.*frozen='resident'"):
        Guard(model, Int8(frozen=frozen), Policy(max_active=1), include="*.experts.*", granularity="expert")
    guard = Guard(model, Int8(), Policy(max_active=1), include="*.experts.*", granularity="expert")
    backward(model)
    guard.step()
    assert guard.paths.weight_bytes()["int8"] > 0


def test_nothing_is_renamed_and_detaching_leaves_no_trace():
    model = make()
    names = list(model.state_dict())
    modules = [name for name, _ in model.named_modules()]
    wanted = backward(model)
    model.zero_grad()
    guard = Guard(model, Simulated("int4", "exact"), Policy(max_active=1), granularity="expert")
    experts = model.model.layers[0].mlp.experts

    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == modules
    assert backward(model) != wanted
    model.eval()
    ids = tokens()
    assert model(input_ids=ids, labels=ids).loss.detach() == wanted
    model.train()
    guard.detach()

    assert "forward" not in experts.__dict__
    assert backward(model) == wanted


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301 (our own)
def test_a_copy_is_not_guarded(copied):
    model = make()
    guard = Guard(model, Simulated("int4", "exact"), Policy(max_active=1), granularity="expert")
    twin = copied(model)
    plain = make()

    assert torch.allclose(backward(twin), backward(plain), atol=1e-6)
    assert guard.paths.ran().sum() == 0
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad is None
    own = Guard(twin, Simulated("int4", "exact"), Policy(max_active=1), granularity="expert")
    backward(twin)
    assert own.paths.ran().sum() > 0
    assert guard.paths.ran().sum() == 0


def test_units_of_every_granularity():
    model = make()
    by_operator = [unit.name for unit in find_units(model)]
    by_expert = [unit.name for unit in find_units(model, granularity="expert")]
    by_block = find_units(model, granularity="block")

    first = "model.layers.0.mlp.experts.0"
    assert by_operator[4:6] == [f"{first}.gate_up_proj", f"{first}.down_proj"]
    assert by_expert[3:6] == ["model.layers.0.self_attn.o_proj", first, "model.layers.0.mlp.experts.1"]
    assert len(by_block) == LAYERS
    assert len(by_block[0].params) == 6, "four of attention, two stacked"
    backward(model)
    guard = Guard(model, None, Policy(max_active=1), granularity="block", monitor_only=True)
    norms = guard._monitor.read().norms
    wanted = sum(float(param.grad.double().square().sum()) for param in by_block[0].params) ** 0.5
    assert norms[0] == pytest.approx(wanted, rel=1e-5)


def test_experts_in_modules_of_their_own_are_units_too():
    layer = nn.ModuleDict(
        {"experts": nn.ModuleList([Toy(4, 1).layers[0] for _ in range(2)]), "q_proj": nn.Linear(4, 4)}
    )
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})

    names = [unit.name for unit in find_units(model, granularity="expert")]

    assert names == ["layers.0.experts.0", "layers.0.experts.1", "layers.0.q_proj"]


def test_a_model_without_experts_has_no_expert_units():
    with pytest.raises(UnitError, match=r"no operator is in experts\.N: layers\.\*\.up_proj"):
        find_units(Toy(), granularity="expert")


def test_experts_whose_forward_was_replaced_are_refused_and_left_alone():
    model = make()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.forward = partial(type(second).forward, second)

    with pytest.raises(UnitError, match="has a forward of its own: leave them out"):
        Guard(model, ToyPaths(), Policy(max_active=1))

    assert "forward" not in first.__dict__
    assert isinstance(second.forward, partial)
    Guard(model, ToyPaths(), Policy(max_active=1), exclude="*.experts.*")


# Dynamo looks at the gradient of what it guards.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_and_checkpointing():
    plain, compiled, repeated = make(), make(), make()
    guards = [
        Guard(each, Simulated("int6", "exact"), Policy(max_active=1), granularity="expert")
        for each in (plain, compiled, repeated)
    ]
    for layer in compiled.model.layers:
        layer.compile(backend="eager")
    renamed = getattr(
        repeated, "activation_checkpointing_enable", None
    )  # an old name warns, and an old release has no other
    (renamed or repeated.gradient_checkpointing_enable)({"use_reentrant": False})

    wanted = backward(plain)

    for model, guard in zip((compiled, repeated), guards[1:], strict=True):
        assert torch.allclose(backward(model), wanted, atol=1e-6)
        mine = gradients(model)
        for name, grad in gradients(plain).items():
            assert torch.allclose(mine[name], grad, rtol=1e-3, atol=1e-5), name
        assert guard.step() is not None


def test_the_noise_of_micro_batches_is_of_rows():
    model = make()
    units = find_units(model, granularity="expert", include="*.experts.*")
    noise = MicroBatchNoise(units)
    shares = []
    for seed in range(3):
        before = {name: param.grad.clone() if seed else 0.0 for name, param in model.named_parameters()}
        backward(model, seed)
        shares.append({name: (param.grad - before[name]).double() for name, param in model.named_parameters()})
    guard = Guard(model, None, Policy(max_active=1), granularity="expert", include="*.experts.*", monitor_only=True)

    found = noise.read(guard._monitor.read())

    names = [name for name in shares[0] if name.startswith("model.layers.1.mlp.experts.")]
    squares = sum(float(share[name][3].square().sum()) for share in shares for name in names)
    size = sum(float(sum(share[name][3] for share in shares).square().sum()) for name in names)
    assert found[EXPERTS + 3] == pytest.approx((3 * squares - size) / size, rel=1e-3)
    assert Jacobian(units).read(None).shape == (EXPERTS * LAYERS,)


def test_the_own_gap_of_an_expert_is_that_of_its_rows():
    model = make()
    paths = Simulated("int4", "exact")
    guard = Guard(model, paths, Policy(max_active=1), granularity="expert", include="*.experts.*")
    params = [param for param in model.parameters() if param.requires_grad]
    ids = tokens(rows=8)

    gaps = measure_gaps(guard.units, params, paths, guard.plan, [lambda: model(input_ids=ids, labels=ids).loss])

    assert (gaps.own > 0).all()
    assert (gaps.own <= gaps.absolute * (1 + 1e-6)).all()
    assert np.unique(gaps.own.round(9)).size == EXPERTS * LAYERS


def lora_of_parameters():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(make(), config)


def test_stacked_experts_have_no_outputs_without_a_backend():
    watched = {"granularity": "expert", "include": "*.experts.*", "watch": "output_grad"}

    with pytest.raises(UnitError, match="is an expert of a stack .8 such units.*give paths"):
        Guard(make(), None, Policy(max_active=1), monitor_only=True, **watched)

    model = make()
    with Guard(model, Simulated(low="int8"), Policy(max_active=1), **watched) as guard:
        backward(model)
        guard.step()
        assert guard._last[0].observed.any(), "and with one they have"


def test_one_adapter_of_all_experts_says_nothing_of_one():
    model = lora_of_parameters()

    with pytest.raises(UnitError, match="is one with that of all experts of its layer.*granularity='block'"):
        find_units(model, granularity="expert", include="*.experts.*.down_proj", watch="adapter")
    layers = find_units(model, granularity="block", include="*.experts.*.down_proj", watch="adapter")
    assert [len(unit.params) for unit in layers] == [2] * LAYERS


def test_the_factors_of_a_parameters_adapter_are_no_operators():
    with pytest.raises(UnitError, match="no linear operator matches"):
        find_units(lora_of_parameters(), include="*.lora_[AB].*")
