"""Adapters on a frozen, pre-trained model: what is learnt, what is saved, and how a run goes on."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gnmr import GnmrWarning, RecipeError
from gnmr.lab.data import load_corpus
from gnmr.lab.instructions import IGNORED, Instructions, encode_rows
from gnmr.lab.pretrained import byte_tokenizer, load_pretrained
from gnmr.lab.recipe import load_recipe
from gnmr.lab.sections import Data, Units
from gnmr.lab.train import InterruptedRunError, train_arm
from gnmr.trace import read_trace

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a small pre-trained LLaMA of three layers and its tokenizer, which speaks bytes."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=64, **shape)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Forty sums with their results, one JSON object a line."""
    file = tmp_path_factory.mktemp("rows") / "sums.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i} + {i}?", "answer": f"{2 * i}."}) + "\n" for i in range(40)))
    return file


def recipe_of(base, rows, *overrides):
    return load_recipe(
        "tiny",
        [
            f"model={{name_or_path='{base}'}}",
            "adapter={r=2, alpha=4}",
            f"data={{name='{rows}', format='instruction', tokenizer='model', prompt_column='question', "
            "response_column='answer', sequence_length=24}",
            "units={granularity='block', watch='adapter'}",
            "paths={kind='simulated', low='int8', high='exact', scaling='token'}",
            "policy={max_active=1, alpha=1.01, beta='none'}",
            "run.eval_every=4",
            "run.save_every=4",
            "run.log_every=2",
            *overrides,
        ],
    )


def train(recipe, folder, arm="gnmr", **options):
    return train_arm(recipe, arm, 0, folder, say=lambda line: None, **options)


@pytest.fixture(scope="module")
def finished(base, rows, tmp_path_factory):
    recipe = recipe_of(base, rows)
    folder = tmp_path_factory.mktemp("finished") / "gnmr-s0"
    train(recipe, folder)
    return recipe, folder


def adapters(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model" / "adapter_model.safetensors")


def test_adapters_alone_are_saved_and_load_without_gnmr(finished, base):
    _, folder = finished
    saved = adapters(folder)
    plain = AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(plain, folder / "model")

    assert not (folder / "model" / "model.safetensors").exists()
    assert len(saved) == 3 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in saved)
    assert any(tensor.any() for name, tensor in saved.items() if ".lora_B." in name), "it learnt something"
    ids = torch.tensor([[65, 66, 67]])
    own = load_pretrained(folder)
    assert torch.equal(loaded(ids).logits, own.model(ids).logits)
    assert not torch.equal(loaded(ids).logits, AutoModelForCausalLM.from_pretrained(base)(ids).logits)


def test_layers_are_watched_by_their_adapters(finished):
    _, folder = finished
    trace = read_trace(folder / "trace.parquet")

    assert [name.split(".")[-1] for name in trace.units] == ["0", "1", "2"]
    assert trace.observed.all()
    assert trace.active.sum(axis=1).max() == 1


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(finished, tmp_path):
    recipe, reference = finished

    def interrupt(done, total):
        if done == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    folder = tmp_path / "gnmr-s0"
    with pytest.raises(InterruptedRunError):
        train(recipe, folder, progress=interrupt)
    train(recipe, folder, resume=True)

    one, two = adapters(reference), adapters(folder)
    assert all(torch.equal(one[name], two[name]) for name in one)
    traces = [read_trace(each / "trace.parquet") for each in (reference, folder)]
    np.testing.assert_array_equal(traces[0].norm, traces[1].norm)


def test_layers_are_watched_at_their_outputs(base, rows, tmp_path):
    recipe = recipe_of(base, rows, "units.watch='output_grad'", "run.steps=4", "model.dtype='bfloat16'")
    train(recipe, tmp_path / "gnmr-s0")
    trace = read_trace(tmp_path / "gnmr-s0" / "trace.parquet")

    assert trace.observed.all()
    assert (trace.norm > 0).all()


def test_a_whole_model_that_was_trained_on_keeps_its_tokenizer(base, rows, tmp_path):
    recipe = recipe_of(base, rows, "run.steps=2", "run.eval_every=2")
    recipe = recipe.model_copy(update={"adapter": None, "units": Units()})
    train(recipe, tmp_path / "gnmr-s0")
    loaded = load_pretrained(tmp_path / "gnmr-s0")

    assert loaded.tokenizer.encode("1 + 1?") == byte_tokenizer().encode("1 + 1?")
    assert (tmp_path / "gnmr-s0" / "model" / "model.safetensors").exists()


def test_the_same_seed_begins_with_the_same_adapters(base, rows):
    from gnmr.lab.model import make_model, with_adapters

    recipe = recipe_of(base, rows)
    make = lambda seed: with_adapters(make_model(recipe.model, 257, 24, seed), recipe.adapter, seed)  # noqa: E731
    one, same, other = (dict(make(seed).named_parameters()) for seed in (0, 0, 1))
    trained = [name for name, param in one.items() if param.requires_grad]

    assert len(trained) == 3 * 7 * 2
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in trained)


def test_the_loss_is_on_the_responses(base, rows):
    corpus = load_corpus(recipe_of(base, rows), seed=0)
    sample = corpus.validation[0]
    learnt = sample["input_ids"][sample["labels"] != IGNORED]

    assert bytes(learnt[:-1].tolist()) == b"0."
    assert learnt[-1] == 256, "and the end of text"
    assert bytes(sample["input_ids"][:7].tolist()) == b"0 + 0?\n"
    assert sample["attention_mask"].sum() == 10
    assert corpus.facts["train_rows"] == 38
    assert len(corpus.validation) == 2


def test_each_epoch_has_every_row_once_and_a_seed_its_order():
    rows = [([i, i], 1) for i in range(5)]
    firsts = lambda seed: [int(s["input_ids"][0]) for s in Instructions(rows, 3, 12, seed, 0)]  # noqa: E731

    assert sorted(firsts(0)[:5]) == sorted(firsts(0)[5:10]) == list(range(5))
    assert firsts(0) == firsts(0) != firsts(1)
    assert firsts(0)[:5] != firsts(0)[5:10]


def test_a_chat_template_writes_the_row():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    data = Data(name="x", format="instruction", tokenizer="model", sequence_length=64)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    answer = {"role": "assistant", "content": "a"}
    [(ids, prompt)] = encode_rows([{"messages": [*messages, answer]}], data, "x", tokenizer)

    assert bytes(ids[:prompt]) == b"<system>s\n<user>u\n<assistant>"
    assert bytes(ids[prompt:]) == b"a\n"


def test_rows_that_cannot_be_learnt_are_named(base):
    tokenizer = byte_tokenizer()
    data = Data(name="x", format="instruction", tokenizer="model", sequence_length=8)
    good, long = {"prompt": "p", "response": "r"}, {"prompt": "p" * 9, "response": "r"}

    with pytest.warns(GnmrWarning, match="1 of 2 rows of 'x' are left out: their prompt alone"):
        assert len(encode_rows([good, long], data, "x", tokenizer)) == 1
    with pytest.raises(RecipeError, match=r"no column 'prompt'; its columns are text: set data.prompt_column"):
        encode_rows([{"text": "t"}], data, "x", tokenizer)
    with pytest.raises(RecipeError, match="'x', row 1: it must have a prompt, and end with a response"):
        encode_rows([good, {"prompt": "p", "response": None}], data, "x", tokenizer)
    with pytest.raises(RecipeError, match="row 0: it must"):
        encode_rows([{"messages": [{"role": "user", "content": "u"}]}], data, "x", tokenizer)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("units.watch='weight'", "set units.watch to 'adapter' or 'output_grad'"),
        ("adapter.target_modules=['nothing']", "adapter.target_modules"),
        ("data.tokenizer='bytes'", "needs a pre-trained tokenizer"),
        ("data.name='embedded'", "needs rows with a prompt and a response"),
        ("data.streaming=true", "is read whole"),
        ("adapter.dropout=1.0", "adapter.dropout"),
        ("model={}", "names no pre-trained model"),
    ],
)
def test_what_does_not_fit_is_refused(base, rows, tmp_path, override, message):
    with pytest.raises(RecipeError, match=message):
        train(recipe_of(base, rows, override), tmp_path / "run")
