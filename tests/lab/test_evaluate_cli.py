"""The command, from its arguments to its tables."""

import json

import pytest
from typer.testing import CliRunner

from evaluate_toys import rows, saved, write
from gnmr.cli.main import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("cli")
    for seed, name in enumerate(("first", "second")):
        saved(found / name, seed)
    for split in ("validation", "train"):
        write(found / "data", "piqa", split, rows("piqa"))
    write(found / "data", "gsm8k", "test", rows("gsm8k"))
    (found / "text.txt").write_text("The river ran over sand. " * 20)
    return found


def gnmr(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)], env={"COLUMNS": "200"})


def test_two_models_and_what_is_said_of_them(folder, tmp_path):
    done = gnmr(
        *(
            folder / "first",
            f"other={folder / 'second'}",
            "--tasks",
            "piqa,gsm8k,perplexity",
            "--data",
            folder / "data",
        ),
        *("--text", folder / "text.txt", "--shots", "piqa=2,gsm8k=0", "--limit", 4, "--window", 40, "--out", tmp_path),
    )

    assert done.exit_code == 0, done.output
    assert "piqa  acc (%)" in done.output
    assert "perplexity  bits_per_byte" in done.output
    assert "piqa acc: other minus first" in done.output
    assert "Items are paired. p: McNemar's exact test for shares" in done.output
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert list(found["models"]) == ["first", "other"]
    assert [found["tasks"][task].get("shots") for task in ("piqa", "gsm8k", "perplexity")] == [2, 0, None]
    assert (tmp_path / "evaluation.md").read_text().startswith("| ± standard errors over items | n | first | other |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "piqqa", "--data", "{}/data"], "there is no task 'piqqa'; did you mean 'piqa'?"),
        (["--tasks", "piqa"], "piqa is read from the folder of --data, which is not given; lm-eval:piqa fetches it"),
        (["--tasks", "piqa", "--data", "{}/none"], "is no folder"),
        (["--tasks", "sciq", "--data", "{}/data"], "has no data of sciq"),
        (["--tasks", "perplexity"], "perplexity needs a text: --text FILE"),
        (["--tasks", "piqa", "--data", "{}/data", "--text", "embedded"], "--text is for the task perplexity"),
        (["--tasks", "piqa", "--data", "{}/data", "--shots", "x"], "--shots takes a number, or TASK=NUMBER"),
        (["--tasks", "piqa", "--data", "{}/data", "--shots", "sciq=1"], "each must be a task of --tasks"),
        (["--tasks", "piqa", "--data", "{}/data", "--shots", "-1"], "and at least 0"),
        (["--tasks", "piqa", "--data", "{}/data", "--base", "x"], "no model is a PEFT adapter"),
        (["--tasks", "piqa,piqa", "--data", "{}/data"], "tasks must be distinct"),
        (["{}/first", "--tasks", "piqa", "--data", "{}/data"], "two models are called 'first'"),
        (["./none", "--tasks", "piqa", "--data", "{}/data"], "the model './none' is not there"),
        (["--tasks", "piqa", "--data", "{}/data", "--device", "nodevice"], "the device 'nodevice' cannot be used"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, message, folder, tmp_path):
    given = [argument.replace("{}", str(folder)) for argument in arguments]
    done = gnmr(folder / "first", *given, "--out", tmp_path)

    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
