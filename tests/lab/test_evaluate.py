"""Scores against a plain reference, item by item; what is kept when a run is stopped; what is refused."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluate_toys import llama, pretrained, rows, saved, write
from gnmr import GnmrWarning, RunError
from gnmr.lab.evaluate import run
from gnmr.lab.evaluate.encoding import Encoder
from gnmr.lab.evaluate.generation import generate
from gnmr.lab.evaluate.items import Choices, Text
from gnmr.lab.evaluate.likelihood import WORTH_SHARING, Sequences, can_share, loglikelihoods
from gnmr.lab.evaluate.run import evaluate
from gnmr.lab.evaluate.tables import as_markdown, differences
from gnmr.lab.evaluate.tasks import FileTask, TextTask

CHOICES = ["hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa", "sciq", "mmlu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for task in [*CHOICES, "gsm8k"]:
        split = "validation" if task in ("hellaswag", "piqa") else "test"
        write(folder, task, split, rows(task))
        write(folder, task, "dev" if task == "mmlu" else "train", rows(task, 12)[6:])
    (folder / "text.txt").write_text("The river ran over sand, glass and é copper.\n" * 8)
    return folder


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: saved(folder / name, seed) for seed, name in enumerate(("first", "second"))}


def plain(model, tokens, scored):
    """The log-likelihood of the last tokens, one call in float64, with nothing around it."""
    logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(dim=1)
    return float(sum(logits[place - 1, tokens[place]] for place in range(len(tokens) - scored, len(tokens))))


@pytest.mark.parametrize("shots", [0, 2])
@pytest.mark.parametrize("task", CHOICES)
def test_choices_are_scored_as_by_a_plain_loop(task, shots, data, toys, tmp_path):
    evaluate({"toy": toys["first"]}, [FileTask(task, data, shots)], tmp_path, batch_size=4)
    found = items(tmp_path / "toy")
    exact = llama().double()

    for question in FileTask(task, data, shots).questions(None):
        row, values = found[task, question.key], []
        for context, continuation in question.pairs:
            text = list((context + continuation).encode())
            values.append(plain(exact, text, len(continuation.encode())))
        assert row["loglikelihoods"] == pytest.approx(values, abs=1e-3)
        best = max(range(len(values)), key=values.__getitem__)
        norm = max(range(len(values)), key=lambda i: values[i] / len(question.answers[i]))
        assert row["metrics"]["acc"] == (best == question.gold)
        assert row["metrics"]["acc_norm"] == (norm == question.gold)
        assert row["metrics"]["gold_loglikelihood"] == row["loglikelihoods"][question.gold]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.integers(1, 2 * WORTH_SHARING),
            st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_shared_and_padded_changes_nothing(shapes):
    """Items with a common context of any length, more context of their own, and continuations of any length."""
    draw, model, batch = np.random.default_rng(len(shapes)), llama(), []
    for context, choices in shapes:
        common = draw.integers(256, size=context).tolist()
        tokens = [(*common, *draw.integers(256, size=own + scored).tolist()) for own, scored in choices]
        batch.append(Sequences(tuple(tokens), tuple(scored for _, scored in choices)))
    exact = llama().double()
    wanted = [[plain(exact, *pair) for pair in zip(each.tokens, each.scored, strict=True)] for each in batch]

    for sharing in (False, True):
        found = loglikelihoods(model, batch, sharing=sharing)
        assert [len(values) for values in found] == [len(values) for values in wanted]
        for values, others in zip(found, wanted, strict=True):
            assert values == pytest.approx(others, abs=1e-3)


def test_a_cache_is_shared_where_every_layer_sees_all():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.num_key_value_heads, config.sliding_window = 1, 4

    assert can_share(llama())
    assert not can_share(MistralForCausalLM(config))


def test_a_prefix_is_computed_once(monkeypatch):
    seen, model = [], llama()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: seen.append(given["input_ids"].shape) or forward(**given))
    monkeypatch.setattr("gnmr.lab.evaluate.likelihood._takes", lambda model, name: name != "past_key_values")
    common = tuple(range(60))
    loglikelihoods(model, [Sequences(((*common, 1), (*common, 2, 3), (*common, 4)), (1, 2, 1))], sharing=True)

    assert seen == [(1, 59), (3, 2)]


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_the_batch_size_changes_nothing(batch_size, data, toys, tmp_path):
    tasks = [*(FileTask(task, data, 1) for task in ("piqa", "arc_easy", "gsm8k")), TextTask(str(data / "text.txt"))]
    for size in (batch_size, 3):
        evaluate({f"b{size}": toys["first"]}, tasks, tmp_path, batch_size=size, window=64)
    one, other = items(tmp_path / f"b{batch_size}"), items(tmp_path / "b3")

    assert one.keys() == other.keys()
    for key, row in one.items():
        assert row.get("answer") == other[key].get("answer")
        assert row.get("loglikelihoods", []) == pytest.approx(other[key].get("loglikelihoods", []), abs=1e-3)


def test_answers_are_those_of_a_plain_greedy_loop():
    toy = pretrained()
    encoder, new = Encoder(toy.tokenizer, toy.max_length), 12
    contexts = [list(b"Question: water and fire\nAnswer:"), list(b"one"), list(b"Two are")]
    wanted = []
    for context in contexts:
        tokens = list(context)
        while len(tokens) < len(context) + new and tokens[-1] != 256:
            tokens.append(int(toy.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        wanted.append(toy.tokenizer.decode([token for token in tokens[len(context) :] if token != 256]))

    assert [answer for answer, _ in generate(toy.model, encoder, contexts, (), new)] == wanted
    stop = wanted[0][3:5]
    cut = [answer for answer, _ in generate(toy.model, encoder, contexts, (stop,), new)]
    assert cut == [answer.split(stop)[0] for answer in wanted]
    assert len(cut[0]) <= 3


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 20))
def test_windows_predict_every_token_once(text, length, stride):
    stride = min(stride, length)
    encoder, said = Encoder(pretrained().tokenizer, 32), text.encode()
    cut = list(encoder.windows(Text("t", text, len(said), 7.0), length, stride))

    assert [token for window in cut for token in window.tokens[-window.scored :]] == list(said)
    assert all(window.scored < len(window.tokens) <= length + 1 for window in cut)
    assert all(len(window.tokens) - window.scored > length - stride for window in cut[1:])
    assert sum(window.n_bytes for window in cut) == pytest.approx(len(said))
    assert sum(window.n_words for window in cut) == pytest.approx(7)
    assert cut[0].tokens[0] == 256


@pytest.mark.parametrize("stride", [None, 8, 32])
def test_perplexity_is_that_of_a_plain_loop(stride, data, toys, tmp_path):
    text = (data / "text.txt").read_bytes().rstrip(b"\n") + b"\n"
    task = TextTask(str(data / "text.txt"))
    found = evaluate({"toy": toys["first"]}, [task], tmp_path, window=32, stride=stride)["results"][0]
    exact, tokens, total, end = llama().double(), [256, *text], 0.0, 0
    while end < len(text):
        scored = min(stride or 32 if end else 32, len(text) - end)
        end += scored
        total += plain(exact, tokens[max(0, end - 32) : end + 1], scored)

    metrics = {name: each["value"] for name, each in found["metrics"].items()}
    assert found["tokens"] == len(text)
    assert metrics["nll_per_token"] == pytest.approx(-total / len(text), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(np.exp(-total / len(text)), rel=1e-4)
    assert metrics["bits_per_byte"] == pytest.approx(-total / len(text) / np.log(2), rel=1e-5)


def test_the_cut_between_context_and_continuation():
    encoder = Encoder(pretrained().tokenizer, 16)

    assert encoder.pair("ab", " cd") == ([*b"ab cd"], 3)
    assert encoder.pair("ab  ", "cd") == ([*b"ab  cd"], 4)  # spaces belong to the continuation
    assert encoder.pair("", "cd") == ([256, *b"cd"], 2)
    assert encoder.pair("<|end|>ab", "c") == ([256, *b"abc"], 1)
    assert encoder.fits(list(range(40))) == list(range(23, 40))
    with pytest.raises(ValueError, match="has 0 tokens of its own"):
        encoder.pair("ab", "")
    with pytest.raises(ValueError, match="must have between 1 and the 16"):
        encoder.pair("ab", "c" * 17)


def test_what_is_too_long_is_cut_and_said(data, tmp_path):
    short = saved(tmp_path / "short", positions=48)
    task = FileTask("sciq", data, 2)
    with pytest.warns(GnmrWarning, match="6 of 6 items of sciq are longer than the 48 tokens"):
        found = evaluate({"toy": short}, [task], tmp_path / "out")
    row, exact = items(tmp_path / "out/toy")["sciq", "0"], llama(positions=48).double()
    question = task.questions(None)[0]

    texts = [list((context + continuation).encode())[-49:] for context, continuation in question.pairs]
    wanted = [plain(exact, text, len(pair[1])) for text, pair in zip(texts, question.pairs, strict=True)]
    assert row["loglikelihoods"] == pytest.approx(wanted, abs=1e-3)
    assert "sciq: toy was given 6 of 6 items without their beginning" in differences(found)[-1]


def test_two_models_on_the_same_items(data, toys, tmp_path):
    tasks = [FileTask("piqa", data), FileTask("gsm8k", data, 0), TextTask(str(data / "text.txt"))]
    found = evaluate(toys, tasks, tmp_path, limit=5, window=64)

    assert [(each["model"], each["task"], each["n"]) for each in found["results"]] == [
        (model, task, 5) for model in toys for task in ("piqa", "gsm8k", "perplexity")
    ]
    assert {(pair["task"], pair["metric"]) for pair in found["differences"]} >= {
        ("piqa", "acc"),
        ("piqa", "gold_loglikelihood"),
        ("gsm8k", "exact_match_strict"),
        ("perplexity", "nll_per_token"),
    }
    assert all(pair["first"] == "second" and pair["second"] == "first" for pair in found["differences"])
    assert all(pair["p_holm"] >= pair["p"] for pair in found["differences"])
    assert json.loads((tmp_path / run.EVALUATION).read_text()) == found
    lines = as_markdown(found).splitlines()
    assert any(line.startswith("| piqa acc (%) | 5 |") and line.count("±") == 2 for line in lines)
    assert any(line.startswith("- perplexity nll_per_token: second minus first") for line in lines)


def test_nothing_is_computed_twice(data, toys, tmp_path, monkeypatch):
    tasks = [FileTask("piqa", data), FileTask("arc_easy", data)]
    first = evaluate({"toy": toys["first"]}, tasks[:1], tmp_path, limit=4)
    scored = []
    before = run.loglikelihoods
    monkeypatch.setattr(
        run, "loglikelihoods", lambda model, batch, **how: scored.extend(batch) or before(model, batch, **how)
    )

    assert evaluate({"toy": toys["first"]}, tasks[:1], tmp_path, limit=4)["results"] == first["results"]
    assert scored == []
    assert evaluate({"toy": toys["first"]}, tasks, tmp_path)["results"][0]["n"] == 6
    assert len(scored) == 2 + 6
    again = evaluate({"toy": toys["first"]}, tasks[:1], tmp_path, limit=4)
    assert again["results"] == first["results"]


def test_a_killed_run_goes_on(data, toys, tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from gnmr.lab.evaluate.run import evaluate
from gnmr.lab.evaluate.tasks import FileTask

def kill(done, total, what):
    if done >= 4:
        os.kill(os.getpid(), signal.SIGKILL)

evaluate({"toy": sys.argv[1]}, [FileTask("piqa", Path(sys.argv[2]))], Path(sys.argv[3]), batch_size=2, progress=kill)
"""
    killed = subprocess.run(
        [sys.executable, "-c", code, toys["first"], str(data), str(tmp_path)], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    path = tmp_path / "toy" / run.ITEMS
    kept = path.read_text()
    assert len(kept.splitlines()) == 4
    path.write_text(kept + kept.splitlines()[0][:30])  # the last line cut short

    evaluate({"toy": toys["first"]}, [FileTask("piqa", data)], tmp_path)
    evaluate({"whole": toys["first"]}, [FileTask("piqa", data)], tmp_path, batch_size=2)
    assert path.read_text().startswith(kept)
    ours, whole = items(tmp_path / "toy"), items(tmp_path / "whole")
    assert ours.keys() == whole.keys()
    for key, row in ours.items():
        assert row["loglikelihoods"] == pytest.approx(whole[key]["loglikelihoods"], abs=1e-3)


def test_a_folder_of_something_else_is_refused(data, toys, tmp_path):
    def again(model="first", task="piqa", shots=0, **given):
        return evaluate({"toy": toys[model]}, [FileTask(task, data, shots)], tmp_path, **given)

    again()
    with pytest.raises(RunError, match="holds another model's items: weights was"):
        again("second")
    with pytest.raises(RunError, match="holds items of piqa with shots = 0, and now it is 1"):
        again(shots=1)
    with pytest.raises(RunError, match="holds another model's items: dtype was 'float32'"):
        again(dtype="bfloat16")
    path = tmp_path / "toy" / run.ITEMS
    path.write_text(path.read_text().replace('"digest": "', '"digest": "x', 1))
    with pytest.raises(RunError, match="of piqa asks something else than it did"):
        again()


def test_nan_is_no_wrong_answer(data, toys, tmp_path):
    broken = llama()
    broken.lm_head.weight.data[5] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    pretrained().tokenizer.save_pretrained(tmp_path / "broken")
    tasks = [FileTask("piqa", data), FileTask("gsm8k", data, 0)]
    found = evaluate({"first": toys["first"], "broken": str(tmp_path / "broken")}, tasks, tmp_path / "out", limit=3)

    assert [each["nonfinite"] for each in found["results"]] == [0, 0, 3, 3]
    assert found["results"][2]["metrics"] == found["results"][3]["metrics"] == {}
    assert found["differences"] == []
    assert found["notes"][0] == "piqa: broken is not compared with first: NaN or Inf in 3 of 3 items"
    assert "NaN or Inf in 3 of 3" in as_markdown(found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"window": 16, "stride": 17}, "stride 17 leaves out what is between windows of 16"),
        ({"window": 1000}, "window 1000 is more than the 512 tokens"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32"),
        ({"base": "x"}, "no model is a PEFT adapter"),
    ],
)
def test_settings_that_do_not_fit(given, message, data, toys, tmp_path):
    with pytest.raises(ValueError, match=message):
        evaluate({"toy": toys["first"]}, [TextTask(str(data / "text.txt"))], tmp_path, **given)


def test_an_answer_needs_room(data, tmp_path):
    short = saved(tmp_path / "short", positions=200)

    with pytest.raises(ValueError, match="an answer of gsm8k has up to 256 tokens, which leaves no room"):
        evaluate({"toy": short}, [FileTask("gsm8k", data, 0)], tmp_path / "out")


def test_all_models_are_looked_for_first(data, toys, tmp_path):
    models = {"toy": toys["first"], "lost": str(tmp_path / "lost")}

    with pytest.raises(ValueError, match="lost' is not there"):
        evaluate(models, [FileTask("piqa", data)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="a model's label is the name of its folder"):
        evaluate({"../toy": toys["first"]}, [FileTask("piqa", data)], tmp_path / "out")


def items(folder: Path):
    lines = (folder / run.ITEMS).read_text().splitlines()
    return {(row["task"], row["item"]): row for row in map(json.loads, lines)}


def test_an_item_is_known_by_what_it_asks():
    item = Choices("0", (("a", " b"), ("a", " c")), ("b", "c"), 0)

    assert item.digest == Choices("1", item.pairs, item.answers, 0).digest
    assert item.digest != Choices("0", item.pairs, item.answers, 1).digest
    assert item.digest != Choices("0", (("a", " b"), ("a ", "c")), item.answers, 0).digest
