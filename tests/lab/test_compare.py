"""A comparison: every run in a process of its own, one table from what they left."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gnmr import RunError
from gnmr.cli.main import app
from gnmr.lab.compare import compare_arms
from gnmr.lab.tables import as_markdown, as_rich
from gnmr.trace import read_trace

pytestmark = pytest.mark.slow

SMALL = ("run.steps=6", "run.seeds=[0]", "arms=['high', 'gnmr', 'random']")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    from gnmr.lab.recipe import load_recipe

    recipe = load_recipe("tiny", [f"data.name={text}", "run.eval_every=3", "run.save_every=3", *SMALL])
    folder = tmp_path_factory.mktemp("comparison")
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNMR_CACHE", str(tmp_path_factory.getbasetemp() / "gnmr-cache"))
        comparison = compare_arms(recipe, folder, progress=lambda *each: heard.append(each))
    return recipe, folder, comparison, heard


def test_the_table_has_every_arm_and_is_written_three_times(finished):
    _, folder, comparison, heard = finished

    assert [row["arm"] for row in comparison["rows"]] == ["high", "gnmr", "random"]
    assert json.loads((folder / "comparison.json").read_text()) == json.loads(json.dumps(comparison))
    metrics = {row["arm"]: row["metrics"] for row in comparison["rows"]}
    assert metrics["high"]["promotion_ratio"]["mean"] == 1.0
    assert metrics["gnmr"]["promotion_ratio"] == metrics["random"]["promotion_ratio"]
    assert metrics["gnmr"]["held_bytes_units"]["mean"] < metrics["high"]["held_bytes_units"]["mean"]
    assert metrics["gnmr"]["underflowed"]["mean"] is None, "saved activations count no casts"
    lines = list(csv.DictReader((folder / "comparison.csv").read_text().splitlines()))
    assert [(line["arm"], line["seed"]) for line in lines] == [("high", "0"), ("gnmr", "0"), ("random", "0")]
    assert float(lines[1]["perplexity"]) == metrics["gnmr"]["perplexity"]["mean"]
    assert (folder / "comparison.md").read_text() == as_markdown(comparison)
    assert "gnmr minus random" in as_markdown(comparison)
    assert "as in OLMo 2 (arXiv 2501.00656)" in as_markdown(comparison)
    assert heard[-1][0] == heard[-1][1] == 18


def test_arms_that_do_not_fit_beside_the_others_stand_below(finished):
    _, _, comparison, _ = finished
    row = comparison["rows"][0]
    names = ["low", "gnmr", "low+stable-spam", "random@gnmr+stable-spam", "norm@gnmr+stable-spam"]
    many = {**comparison, "rows": [{**row, "arm": name} for name in names]}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(as_rich(many))
    text = console.export_text()

    assert all(name in text for name in names)
    assert "…" not in text
    assert text.count("validation perplexity") == 2


def test_random_followed_its_reference(finished):
    _, folder, _, _ = finished
    gnmr, random = (read_trace(folder / f"{arm}-s0" / "trace.parquet") for arm in ("gnmr", "random"))

    assert gnmr.active.sum(axis=1).tolist() == random.active.sum(axis=1).tolist()


def test_finished_runs_are_not_run_again(finished):
    recipe, folder, comparison, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}

    assert compare_arms(recipe, folder) == comparison
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")} == before


def test_runs_of_another_recipe_are_not_taken_for_this_one(finished):
    recipe, folder, _, _ = finished
    other = recipe.model_copy(update={"policy": {**recipe.policy, "max_active": 1}})

    with pytest.raises(RunError, match=r"gnmr-s0 was begun with policy.max_active = 2, and the recipe says 1"):
        compare_arms(other, folder)


def test_the_command_prints_table_and_report(finished, text):
    _, folder, _, _ = finished
    command = ["compare", "tiny", "--out", str(folder), "--seeds", "1", "--arms", "high,gnmr,random"]
    for override in (f"data.name={text}", "run.eval_every=3", "run.save_every=3", "run.steps=6"):
        command += ["--set", override]
    done = CliRunner().invoke(app, command)

    assert done.exit_code == 0, done.output
    assert "validation perplexity" in done.output
    assert "gnmr minus random" in done.output
    assert (folder / "report.html").stat().st_size > 1_000_000


def test_a_run_that_fails_shows_the_end_of_its_log(recipe, tmp_path):
    broken = recipe(*SMALL, "units.include=['nothing.*']", "arms=['high', 'gnmr']")

    with pytest.raises(RunError) as error:
        compare_arms(broken, tmp_path)

    assert "gnmr-s0 failed with exit code 2" in str(error.value)
    assert "high-s0 failed with exit code 2" in str(error.value)  # the others went on
    assert "no linear operator matches" in str(error.value)


def test_a_comparison_that_is_stopped_saves_and_goes_on(recipe, tmp_path):
    long = recipe(
        "run.steps=100000", "run.eval_every=100000", "run.save_every=100000", "arms=['gnmr']", "run.seeds=[0]"
    )
    (tmp_path / "long.toml").write_text(long.to_toml())
    folder = tmp_path / "out"
    command = [sys.executable, "-c", "from gnmr.cli import entry; entry()", "compare", str(tmp_path / "long.toml")]
    process = subprocess.Popen([*command, "--out", str(folder)], stdout=subprocess.PIPE, start_new_session=True)
    while not (folder / "gnmr-s0" / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal's Ctrl-C does
    output = process.communicate(timeout=60)[0].decode()

    assert process.returncode == 130, output
    assert "the same command goes on" in output
    assert list((folder / "gnmr-s0").glob("checkpoint-*/gnmr.json"))
    assert "stopped at step" in (folder / "gnmr-s0" / "run.log").read_text()
