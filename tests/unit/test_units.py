"""Which parts of real model families are units, and how a user names others."""

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gnmr import GnmrWarning, UnitError, find_units
from gnmr.pytorch.monitor import Monitor
from gnmr.pytorch.units import canonical_fqn
from toys import Toy

SIZE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEPARATE = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]
FAMILIES = {
    "Llama": ("LlamaConfig", {}, "model.layers", SEPARATE),
    "Mistral": ("MistralConfig", {}, "model.layers", SEPARATE),
    "Qwen2": ("Qwen2Config", {}, "model.layers", SEPARATE),
    "Qwen3": ("Qwen3Config", {}, "model.layers", SEPARATE),
    "Gemma2": ("Gemma2Config", {}, "model.layers", SEPARATE),
    "Gemma3": ("Gemma3TextConfig", {}, "model.layers", SEPARATE),
    "Phi": (
        "PhiConfig",
        {"num_key_value_heads": 2},
        "model.layers",
        [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "dense")] + ["mlp.fc1", "mlp.fc2"],
    ),
    "Phi3": (
        "Phi3Config",
        {},
        "model.layers",
        ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"],
    ),
    "GPT2": (
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 2},
        "transformer.h",
        ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    ),
    "GPTNeoX": (
        "GPTNeoXConfig",
        {},
        "gpt_neox.layers",
        ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    ),
    "OPT": (
        "OPTConfig",
        {"ffn_dim": 24, "word_embed_proj_dim": 8},
        "model.decoder.layers",
        [f"self_attn.{n}" for n in ("k_proj", "v_proj", "q_proj", "out_proj")] + ["fc1", "fc2"],
    ),
}


def make(family):
    config, extra, *_ = FAMILIES[family]
    torch.manual_seed(0)
    kind = getattr(transformers, config)
    return transformers.AutoModelForCausalLM.from_config(kind(**SIZE | extra))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_units_are_the_projections_of_the_decoder_layers(family):
    _, _, layers, projections = FAMILIES[family]

    units = find_units(make(family))

    wanted = {f"{layers}.{i}.{name}" for i in range(2) for name in projections}
    assert {unit.name for unit in units} == wanted
    assert [unit.index for unit in units] == list(range(len(units)))
    assert all(len(unit.operators) == 1 for unit in units)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_an_operator_computes_as_its_module(family):
    for unit in find_units(make(family)):
        operator = unit.operators[0]
        x = torch.randn(3, operator.weight.shape[1])

        torch.testing.assert_close(operator.linear(x), operator.module(x))
        torch.testing.assert_close(operator.plain(x), operator.module(x))
        assert operator.transposed == (family == "GPT2")


@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT"])
def test_a_block_unit_is_a_decoder_layer_with_all_its_projections(family):
    _, _, layers, projections = FAMILIES[family]

    units = find_units(make(family), granularity="block")

    assert [unit.name for unit in units] == [f"{layers}.0", f"{layers}.1"]
    assert {op.fqn for op in units[1].operators} == {f"{layers}.1.{name}" for name in projections}


def test_granularity_by_function_and_by_mapping():
    by_function = find_units(Toy(), granularity=lambda fqn: fqn.split(".")[-1])
    by_mapping = find_units(Toy(), granularity={"down": "*.down_proj", "up": ["*.up_proj"]})

    assert [unit.name for unit in by_function] == ["up_proj", "down_proj"]
    assert [unit.name for unit in by_mapping] == ["up", "down"], "in forward order, not the mapping's"
    assert [op.fqn for op in by_mapping[1].operators] == ["layers.0.down_proj", "layers.1.down_proj"]


def test_a_mapping_may_leave_operators_out():
    units = find_units(Toy(), granularity={"first": "layers.0.*"})

    assert [op.fqn for op in units[0].operators] == ["layers.0.up_proj", "layers.0.down_proj"]


@pytest.mark.parametrize(
    ("granularity", "message"),
    [
        ({"a": "*.up_proj", "b": "layers.0.*"}, "'layers.0.up_proj' is in two groups, 'a' and 'b'"),
        ({"a": "*.q_proj"}, r"group 'a' matches no eligible operator: \['\*.q_proj'\]"),
        ("layer", "granularity must be 'operator', 'expert', 'block', a function.*got 'layer'"),
    ],
)
def test_a_wrong_granularity_is_named(granularity, message):
    with pytest.raises(ValueError, match=message):
        find_units(Toy(), granularity=granularity)


def test_a_linear_outside_every_block_has_no_block():
    with pytest.raises(UnitError, match=r"'embed' is in no block"):
        find_units(Toy(), include="*", granularity="block")


def test_globs_filter_and_exclude():
    model = Toy()

    assert [u.name for u in find_units(model, include="head")] == ["head"]
    assert [u.name for u in find_units(model, include=["*.0.*", "embed"])] == [
        "embed",
        "layers.0.up_proj",
        "layers.0.down_proj",
    ]
    assert [u.name for u in find_units(model, exclude="*.down_proj")] == ["layers.0.up_proj", "layers.1.up_proj"]
    wide = find_units(model, filter_fn=lambda module, fqn: module.out_features == 16)
    assert [u.name for u in wide] == ["layers.0.up_proj", "layers.1.up_proj"]
    both = find_units(model, filter_fn=lambda module, fqn: module.out_features == 16, include="layers.1.*")
    assert [u.name for u in both] == ["layers.1.up_proj"]


def test_nothing_matches_lists_the_candidates_and_guesses():
    with pytest.raises(
        UnitError, match=r"include=.*did you mean 'layers\.\*\.up_proj'\?.*The model's linears are"
    ) as error:
        find_units(Toy(), include="layers.*.upproj")
    assert all(name in str(error.value) for name in ("embed", "layers.*.down_proj", "head"))

    with pytest.raises(UnitError, match="no linear operator matches the default projections.*: 0, 1"):
        find_units(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(UnitError, match="has no nn.Linear"):
        find_units(nn.Sequential(nn.Embedding(2, 2)))
    with pytest.raises(UnitError, match=r"matches filter_fn without exclude=\('\*',\)"):
        find_units(Toy(), filter_fn=lambda module, fqn: True, exclude="*")


def test_a_frozen_unit_is_an_error_that_says_what_to_do():
    model = Toy()
    model.layers[0].up_proj.requires_grad_(False)

    with pytest.raises(UnitError, match=r"'layers.0.up_proj' has no trainable parameter \(1 of 4 units\).*exclude"):
        find_units(model)
    assert len(find_units(model, granularity="block")) == 2, "its block still learns"


def test_names_are_free_of_wrappers():
    plain = [unit.name for unit in find_units(Toy())]
    wrapped = Toy()
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    wrapped.layers[1] = torch.compile(wrapped.layers[1], backend="eager")

    assert [unit.name for unit in find_units(torch.compile(wrapped, backend="eager"))] == plain
    assert [unit.name for unit in find_units(nn.ModuleDict({"module": Toy()}))] == plain


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("module._orig_mod.layers.0._checkpoint_wrapped_module.fc1", "layers.0.fc1"),
        ("layers.0.q_proj.base_layer", "layers.0.q_proj"),
        ("database_layer.0.fc1", "database_layer.0.fc1"),
        ("my_module.0.fc1", "my_module.0.fc1"),
    ],
)
def test_canonical_fqn(name, canonical):
    assert canonical_fqn(name) == canonical


def lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(make("Llama"), config)


def test_a_frozen_base_under_lora_is_an_error_that_names_the_adapters():
    with pytest.raises(UnitError, match=r"q_proj' has no trainable parameter.*pass watch='adapter'"):
        find_units(lora())


def test_lora_adapters_are_units_where_asked():
    units = find_units(lora(), include="*.lora_[AB].*")
    pairs = find_units(lora(), include="*.lora_[AB].*", granularity=lambda fqn: fqn.split(".lora_")[0])

    assert len(units) == 2 * 2 * 2
    assert units[0].name == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"
    assert [unit.name.removeprefix("base_model.model.model.") for unit in pairs] == [
        f"layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")
    ]
    assert all(len(unit.params) == 2 for unit in pairs)


def test_a_block_of_a_lora_model_runs_its_frozen_base_and_is_watched_by_its_adapters():
    units = find_units(lora(), granularity="block", filter_fn=lambda module, fqn: "layers" in fqn)

    assert len(units) == 2
    assert len(units[0].operators) == 7 + 4
    assert len(units[0].params) == 4


def test_tied_parameters_are_counted_once():
    model = Toy()
    model.layers[1].up_proj.weight = model.layers[0].up_proj.weight
    model.layers[0].up_proj.weight.grad = torch.ones_like(model.layers[0].up_proj.weight)

    units = find_units(model)
    reading = Monitor(model, units).read(total=True)

    assert units[0].params[0] is units[2].params[0]
    assert reading.norms[0] == reading.norms[2] == pytest.approx(128**0.5)
    assert reading.total == pytest.approx(128**0.5)
    assert len(find_units(model, granularity={"up": "*.up_proj"})[0].params) == 3, "one weight and two biases"


@pytest.mark.parametrize(("kind", "key"), [("experts", "down_proj"), ("experts", "weights"), ("mlp", "w1")])
def test_weights_outside_any_linear_operator_are_named(kind, key):
    model = Toy()
    setattr(model.layers[1], kind, nn.Module())
    setattr(getattr(model.layers[1], kind), key, nn.Parameter(torch.zeros(2, 8, 8)))
    fqn = rf"layers\.1\.{kind}\.{key}"

    with pytest.warns(GnmrWarning, match=rf"'{fqn}' is a weight outside any linear operator.*\(1 such"):
        units = find_units(model)
    assert len(units) == 4
    with pytest.warns(GnmrWarning, match=fqn), pytest.raises(UnitError, match="no linear operator matches"):
        find_units(model, include=f"*.{kind}.*")
    # Nothing is said where they were not asked for.
    assert len(find_units(model, include="*.up_proj")) == 2
    assert len(find_units(model, exclude=f"*.{kind}.*")) == 4


def test_a_module_used_twice_is_one_unit():
    model = Toy()
    model.layers[1] = model.layers[0]

    assert [unit.name for unit in find_units(model)] == ["layers.0.up_proj", "layers.0.down_proj"]
