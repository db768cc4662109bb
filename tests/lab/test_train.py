"""Real runs of the real Trainer: what they leave, what stops them, and how they go on."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gnmr import RecipeError, RunError, StateError, UnitError
from gnmr.lab import runs
from gnmr.lab.train import InterruptedRunError, train_arm
from gnmr.trace import read_trace

EXACT = ("norm", "observed", "gnmr", "delta_gnmr", "risk", "exceeds", "active", "lock")


def run(recipe, folder, arm="gnmr", **options):
    return train_arm(recipe, arm, 0, folder, say=lambda line: None, **options)


def assert_same(one, two):
    """Two runs ended in the same weights, decisions and losses, to the last bit."""
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (one, two)]
    assert weights[0] == weights[1]
    traces = [read_trace(folder / "trace.parquet") for folder in (one, two)]
    for column in EXACT:
        np.testing.assert_array_equal(getattr(traces[0], column), getattr(traces[1], column), column)
    rows = [runs.read_metrics(folder / "metrics.jsonl") for folder in (one, two)]
    assert [r.get("loss", r.get("eval_loss")) for r in rows[0]] == [r.get("loss", r.get("eval_loss")) for r in rows[1]]
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, two)]
    assert results[0]["eval_loss"] == results[1]["eval_loss"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """An uninterrupted run of the arm gnmr, on delayed scales with faults, which have the most to resume."""
    from gnmr.lab.recipe import load_recipe

    recipe = load_recipe("tiny", [f"data.name={text}", *STATEFUL])
    folder = tmp_path_factory.mktemp("whole") / "gnmr-s0"
    run(recipe, folder)
    return recipe, folder


STATEFUL = (
    "run.eval_every=4",
    "run.save_every=4",
    "run.steps=10",
    "run.log_every=3",
    "paths={kind='simulated', low='hybrid-fp8', high='exact', scaling='delayed', tensors=['w', 'x', 'dy']}",
    "stress={kind='gradient_scale', first_step=3, every=3, duration=2}",
    "run.gradient_accumulation=2",
)


def test_a_run_leaves_what_it_says(whole):
    _, folder = whole

    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert names == {
        "recipe.toml", "environment.json", "metrics.jsonl", "trace.parquet", "faults.json", "result.json", "model",
    }  # fmt: skip
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["data"]["sha256"]
    assert environment["versions"]["torch"]
    assert environment["machine"]["cores"] == os.cpu_count()
    rows = runs.read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [3, 6, 9, 10]
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8, 10]
    assert read_trace(folder / "trace.parquet").header["arm"] == "gnmr"


@pytest.mark.parametrize("arm", ["random", "norm@gnmr"])
def test_a_matched_arm_has_as_many_units_as_its_reference(whole, arm):
    recipe, folder = whole
    other = folder.parent / f"{arm}-s0"
    run(recipe, other, arm=arm)

    active = [read_trace(each / "trace.parquet").active for each in (folder, other)]
    assert active[0].sum() > 0
    np.testing.assert_array_equal(active[0].sum(axis=1), active[1].sum(axis=1))
    assert (active[0] != active[1]).any()


@pytest.mark.parametrize("step", [2, 6, 9])
def test_a_run_that_was_asked_to_stop_goes_on_bit_for_bit(whole, tmp_path, step):
    recipe, reference = whole
    folder = tmp_path / "gnmr-s0"

    def interrupt(done, total):
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(InterruptedRunError, match=f"stopped at step {step} of 10, and saved: go on with this") as stop:
        run(recipe, folder, progress=interrupt, again="this")
    assert stop.value.signal == signal.SIGTERM
    with pytest.raises(RunError, match="holds this run already: go on with --resume"):
        run(recipe, folder)
    run(recipe, folder, resume=True)

    assert_same(reference, folder)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_for_bit(whole, tmp_path):
    recipe, reference = whole
    folder = tmp_path / "gnmr-s0"
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    folder.mkdir()
    script = (
        "from pathlib import Path; from gnmr.lab.worker import run_arm; "
        f"run_arm(Path({str(file)!r}), 'gnmr', 0, Path({str(folder)!r}), {{}})"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        while runs.last_step(folder / "metrics.jsonl") < 6 and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert not (folder / "result.json").exists()

    run(recipe, folder, resume=True)

    assert_same(reference, folder)


def test_a_run_that_lacks_only_its_result_is_finished(whole, tmp_path, monkeypatch):
    recipe, reference = whole
    folder = tmp_path / "gnmr-s0"
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"save_every": 5})})
    with monkeypatch.context() as patch:
        patch.setattr("gnmr.lab.train._finish", lambda *_: None)
        run(recipe, folder)
    assert (folder / "checkpoint-10").exists()

    result = run(recipe, folder, resume=True)

    assert result["held_bytes_units"] > 0
    assert_same(reference, folder)


def test_a_full_disk_loses_nothing(whole, tmp_path, monkeypatch):
    recipe, reference = whole
    folder = tmp_path / "gnmr-s0"
    add = runs.Metrics.add

    def full(self, **row):
        if row["step"] > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, **row)

    with monkeypatch.context() as patch:
        patch.setattr(runs.Metrics, "add", full)
        with pytest.raises(RunError, match="No space left on device.*make room, and go on with --resume"):
            run(recipe, folder)
    run(recipe, folder, resume=True)

    assert_same(reference, folder)


@pytest.mark.parametrize("file", ["lab.json", "gnmr.json"])
def test_a_damaged_checkpoint_is_named(whole, tmp_path, file):
    recipe, _ = whole
    folder = tmp_path / "gnmr-s0"

    def interrupt(done, total):
        if done == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(InterruptedRunError):
        run(recipe, folder, progress=interrupt)
    path = folder / "checkpoint-5" / file
    path.write_text(path.read_text()[:40])

    with pytest.raises((RunError, StateError)) as error:
        run(recipe, folder, resume=True)
    assert str(path) in str(error.value)


def test_what_a_folder_holds_is_not_mixed_with_another_run(whole):
    recipe, folder = whole
    other = recipe.model_copy(update={"policy": {**recipe.policy, "max_active": 1}})

    with pytest.raises(RunError, match=r"begun with policy.max_active = 2, and the recipe says 1"):
        run(other, folder, resume=True)
    with pytest.raises(RunError, match="holds arm 'gnmr' with seed 0"):
        run(recipe, folder, arm="high", resume=True)
    with pytest.raises(RunError, match="holds this run already"):
        run(recipe, folder)
    assert run(recipe, folder, resume=True)["arm"] == "gnmr"  # finished: its result is read


def test_a_folder_in_use_is_left_alone(recipe, tmp_path):
    folder = tmp_path / "gnmr-s0"

    with runs.claimed(folder), pytest.raises(RunError, match=f"in use by process {os.getpid()} on "):
        run(recipe(), folder)


def test_resume_needs_something_to_go_on_from(recipe, tmp_path):
    with pytest.raises(RunError, match="holds no run to go on from"):
        run(recipe(), tmp_path / "new", resume=True)


def test_overwrite_begins_anew(recipe, tmp_path):
    folder = tmp_path / "low-s0"
    run(recipe("run.steps=2"), folder, arm="low")
    run(recipe("run.steps=3"), folder, arm="low", overwrite=True)

    assert read_trace(folder / "trace.parquet").steps.tolist() == [1, 2, 3]


def test_a_damaged_result_is_named(whole, tmp_path):
    import shutil

    recipe, reference = whole
    folder = tmp_path / "gnmr-s0"
    shutil.copytree(reference, folder)
    (folder / "result.json").write_text("{")

    with pytest.raises(RunError, match="result.json cannot be read"):
        run(recipe, folder, resume=True)


def test_random_without_its_reference_and_an_unknown_arm(recipe, tmp_path):
    with pytest.raises(RunError, match=r"run --arm gnmr --seed 0 first"):
        run(recipe(), tmp_path / "random-s0", arm="random")
    with pytest.raises(RecipeError, match="unknown arm 'hihg'; did you mean 'high'"):
        run(recipe(), tmp_path / "hihg-s0", arm="hihg")


def test_a_model_without_eligible_units_lists_its_linears(recipe, tmp_path):
    with pytest.raises(UnitError, match=r"model\.layers\.\*\.self_attn\.q_proj"):
        run(recipe("units.include=['nothing.*']"), tmp_path / "gnmr-s0")


def test_a_folder_that_is_no_model_is_named(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"model.name_or_path = '.*' cannot be loaded"):
        run(recipe(f"model.name_or_path={tmp_path}"), tmp_path / "gnmr-s0")


def test_a_pretrained_model_is_trained(recipe, whole, tmp_path):
    _, folder = whole
    result = run(recipe(f"model.name_or_path={folder}/model", "run.steps=2"), tmp_path / "gnmr-s0")

    assert result["steps"] == 2


def test_a_nan_is_written_down(recipe, tmp_path):
    folder = tmp_path / "low-s0"
    stress = "stress={kind='nan', first_step=2, every=50, duration=1}"
    result = run(recipe(stress, "run.steps=4", "run.eval_every=4"), folder, arm="low")
    rows = runs.read_metrics(folder / "metrics.jsonl")

    # The gradient of step 2 is NaN, so the loss of step 3 is; with it the forward of every unit.
    assert [row["loss"] == "nan" for row in rows if "loss" in row] == [False, False, True, True]
    assert result["perplexity"] == "nan"
    assert not np.isfinite(read_trace(folder / "trace.parquet").norm[1:]).all()


def test_a_run_that_was_killed_before_it_saved_begins_anew(whole, tmp_path):
    recipe, reference = whole
    folder = tmp_path / "gnmr-s0"
    folder.mkdir()
    for name in ("recipe.toml", "environment.json"):
        shutil.copy(reference / name, folder)
    (folder / "trace.arrow").write_bytes(b"half a header")

    run(recipe, folder, resume=True)

    one, two = (read_trace(each / "trace.parquet") for each in (folder, reference))
    np.testing.assert_array_equal(one.norm, two.norm)


def test_resuming_a_finished_run_leaves_it_as_it_is(whole):
    recipe, folder = whole
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    run(recipe, folder, resume=True)

    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
