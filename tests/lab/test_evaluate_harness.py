"""Prompts, log-likelihoods and marks against lm-eval itself, on its own tasks with the data from a file."""

import json
import warnings
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest

from evaluate_toys import pretrained, rows, saved, write
from gnmr.lab.evaluate.harness import HarnessTask
from gnmr.lab.evaluate.items import Generation
from gnmr.lab.evaluate.run import evaluate
from gnmr.lab.evaluate.tasks import FileTask, TextTask

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'gnmr[evaluate]'")

YAML = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "sciq": "sciq/sciq.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "mmlu": "mmlu/default/mmlu_high_school_physics.yaml",
}
SPLITS = {"hellaswag": "validation", "piqa": "validation"}


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lm-eval's own
        yield


@pytest.fixture
def data(tmp_path):
    """Every task with examples, and a YAML file that is lm-eval's own but for where the data are."""
    import lm_eval

    for task, yaml in YAML.items():
        items = [row for row in rows(task, 12) if row.get("subject", "high_school_physics") != "law"]
        split = SPLITS.get(task, "test")
        shots = "dev" if task == "mmlu" else "train"
        files = {split: str(write(tmp_path, task, split, items[:5]))}
        files[shots] = str(write(tmp_path, task, shots, items[-4:]))
        lines = [
            f"include: {Path(lm_eval.__file__).parent / 'tasks' / yaml}",
            f"task: local_{task}",
            "tag: null",
            "dataset_path: json",
            "dataset_name: null",
            f"dataset_kwargs: {json.dumps({'data_files': files})}",
            f"test_split: {split if split == 'test' else 'null'}",
            f"validation_split: {split if split == 'validation' else 'null'}",
            f"training_split: {'train' if shots == 'train' else 'null'}",
            f"fewshot_split: {shots}",
        ]
        (tmp_path / f"{task}.yaml").write_text("\n".join(lines))
    return tmp_path


def reference(model, tasks, shots, data, **options):
    """Return lm-eval's samples by task."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        HFLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=1),
        tasks=tasks,
        num_fewshot=shots,
        task_manager=TaskManager(include_path=str(data), include_defaults=False),
        bootstrap_iters=10,
        **options,
    )
    return found["samples"], found["results"]


@pytest.mark.parametrize("shots", [0, 2])
@pytest.mark.parametrize("task", YAML)
def test_the_questions_are_those_of_lm_eval(task, shots, data):
    ours = FileTask(task, data, shots).questions(None)
    theirs = HarnessTask(f"lm-eval:local_{task}", shots, data).questions(None)

    assert len(ours) == len(theirs) == 5
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.digest == other.digest, (mine, other)


def test_marks_and_log_likelihoods_are_those_of_lm_eval(data, tmp_path):
    names = ["hellaswag", "piqa", "arc_easy", "sciq", "mmlu"]
    model = {"toy": saved(tmp_path / "model", positions=1024)}
    samples, results = reference(pretrained(positions=1024), [f"local_{name}" for name in names], 1, data)
    tasks = [FileTask(name, data, 1) for name in names]
    found = evaluate(model, tasks, tmp_path / "out", batch_size=3)
    mine = [json.loads(line) for line in (tmp_path / "out/toy/items.jsonl").read_text().splitlines()]

    for name in names:
        here = sorted((row for row in mine if row["task"] == name), key=lambda row: int(row["item"]))
        assert len(here) == len(samples[f"local_{name}"]) == 5
        for row, sample in zip(here, samples[f"local_{name}"], strict=True):
            wanted = [float(answer[0]) for answer in sample["filtered_resps"]]
            assert row["loglikelihoods"] == pytest.approx(wanted, abs=1e-3)
            assert row["metrics"]["acc"] == sample["acc"]
            assert row["metrics"]["acc_norm"] == sample.get("acc_norm", row["metrics"]["acc_norm"])
        (line,) = (each for each in found["results"] if each["task"] == name)
        theirs = results[f"local_{name}"]
        assert line["metrics"]["acc"]["value"] == pytest.approx(theirs["acc,none"])
        assert line["metrics"]["acc"]["se"] == pytest.approx(theirs["acc_stderr,none"])


def test_answers_are_those_of_lm_eval(data, tmp_path):
    model = pretrained(positions=1024)
    samples, _ = reference(model, ["local_gsm8k"], 1, data, gen_kwargs="max_gen_toks=24")
    saved(tmp_path / "model", positions=1024)
    task = FileTask("gsm8k", data, 1)
    short = [Generation(q.key, q.context, q.until, 24, q.mark, q.target) for q in task.questions(None)]
    task.questions = lambda limit: short
    evaluate({"toy": str(tmp_path / "model")}, [task], tmp_path / "out", batch_size=2)
    mine = [json.loads(line) for line in (tmp_path / "out/toy/items.jsonl").read_text().splitlines()]

    strict = [sample for sample in samples["local_gsm8k"] if sample["filter"] == "strict-match"]
    assert len(mine) == len(strict) == 5
    for row in mine:
        assert row["answer"] == strict[int(row["item"])]["resps"][0][0]
        assert len(row["answer"]) > 0


ANSWERS = [
    " It is 4.\n#### 4",
    "#### 1,234.",
    "so $5.00",
    "-3 and 7.\n",
    "none",
    "#### -2.5 or 3",
    "18 19 . , $",
    "#### 4 Question",
    " = 10.0",
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("target", ["#### 4", "a\n#### 1234", "5.00", "#### -2.5", "#### 7", "#### 18"])
def test_written_answers_are_marked_as_by_lm_eval(answer, target, data):
    from gnmr.lab.evaluate.tasks import mark_number

    task = HarnessTask("lm-eval:local_gsm8k", 0, data)
    question = task.questions(1)[0]
    instance = question.mark.args[2]
    instance.doc = {**instance.doc, "answer": target}
    theirs = question.mark(answer)

    assert mark_number(answer, target) == {
        "exact_match_strict": theirs["exact_match_strict-match"],
        "exact_match_flexible": theirs["exact_match_flexible-extract"],
    }


def test_perplexity_is_that_of_lm_eval(tmp_path):
    pages = ["The river ran = = over sand . \n" * 9, "Glass , and then copper wool; é." * 3]
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    (tmp_path / "pages.yaml").write_text(
        "task: pages\ndataset_path: json\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        f"dataset_kwargs: {json.dumps({'data_files': {'test': str(path)}})}\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n"
    )
    _, results = reference(pretrained(positions=64), ["pages"], 0, tmp_path)
    saved(tmp_path / "model", positions=64)
    tasks = [TextTask(str(path)), HarnessTask("lm-eval:pages", None, tmp_path)]
    found = evaluate({"toy": str(tmp_path / "model")}, tasks, tmp_path / "out")

    for line in found["results"]:
        assert line["n"] > 4
        metrics = {name: each["value"] for name, each in line["metrics"].items()}
        assert metrics["bits_per_byte"] == pytest.approx(results["pages"]["bits_per_byte,none"], rel=1e-5)
        assert metrics["word_perplexity"] == pytest.approx(results["pages"]["word_perplexity,none"], rel=1e-4)
        assert metrics["perplexity"] == pytest.approx(results["pages"]["byte_perplexity,none"], rel=1e-5)


def test_a_task_of_lm_eval_is_evaluated_like_a_file(data, tmp_path):
    saved(tmp_path / "model")
    tasks = [FileTask("piqa", data, 1), HarnessTask("lm-eval:local_piqa", 1, data)]
    found = evaluate({"toy": str(tmp_path / "model")}, tasks, tmp_path / "out", limit=4)

    first, second = found["results"]
    assert first["n"] == second["n"] == 4
    assert first["metrics"] == second["metrics"]
    assert found["tasks"]["lm-eval:local_piqa"]["tasks"]["local_piqa"]["shots"] == 1


def test_what_lm_eval_does_not_have_is_said(data):
    with pytest.raises(ValueError, match="lm-eval has no task 'piqqa'"):
        HarnessTask("lm-eval:piqqa")
    (data / "piqa/train.jsonl").unlink()
    with pytest.raises(ValueError, match="the data of lm-eval's 'local_piqa' cannot be had"):
        HarnessTask("lm-eval:local_piqa", 0, data)
