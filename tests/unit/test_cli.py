"""The command line: light where it can be, and one line where something is wrong."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from gnmr import Controller, Policy
from gnmr.cli.main import app
from gnmr.trace import TraceWriter


@pytest.fixture
def trace(tmp_path):
    policy = Policy(max_active=2, alpha=1.2, window=2)
    units = ["layers.0.[bold]q_proj", "layers.0.k_proj", "layers.1.q_proj"]
    controller = Controller(3, policy, units)
    draw = np.random.default_rng(0)
    with TraceWriter(tmp_path / "run.arrow", {"policy": policy.to_dict(), "units": units}) as writer:
        for row in draw.lognormal(size=(30, 3)):
            writer.write(row, np.ones(3, dtype=bool), controller.update(row))
    return tmp_path / "run.parquet"


def gnmr(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_help_and_version():
    assert gnmr("--version").output.startswith("gnmr 0.")
    done = gnmr("--help")
    assert all(name in done.output for name in ("train", "compare", "replay", "report", "recipes", "tables"))


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"], ["tables"], ["tables", "1"], ["replay"]])
def test_what_needs_no_torch_imports_none(arguments, trace):
    arguments = [*arguments, str(trace)] if arguments == ["replay"] else arguments
    code = f"""
import sys
from gnmr.cli import entry
sys.argv = ["gnmr", *{arguments!r}]
try:
    entry()
finally:
    assert not {{"torch", "transformers", "plotly"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_replay_under_the_same_policy_changes_nothing(trace):
    done = gnmr("replay", trace)

    assert done.exit_code == 0
    assert "Policy: unchanged" in done.output
    assert "No decision differs." in done.output


def test_replay_says_what_another_policy_changes(trace):
    done = gnmr("replay", trace, "--alpha", "1:3,10:1.1", "--beta", "none", "--max-active", 1, "--history", "ema:0.9")

    assert done.exit_code == 0
    assert "max_active 2 -> 1" in done.output
    assert "Decisions differ from step" in done.output
    assert "layers.0.[bold]q_proj" in done.output  # a name is no markup


def test_replay_as_json(trace):
    done = gnmr("replay", trace, "--max-active", 0, "--json")
    found = json.loads(done.output)

    assert found["new"]["promotion_ratio"] == 0
    assert found["units"][1] == "layers.0.k_proj"
    assert sum(found["only_old"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alpha", "x"], "'x' is neither a number nor a schedule"),
        (["--alpha", "0"], "Policy.alpha must be a finite number > 0"),
        (["--history", "ema:2"], "--history 'ema:2': Ema(decay) must be in (0, 1)"),
        (["--history", "median"], "--history must be cumulative, ema:DECAY or window:LENGTH"),
    ],
)
def test_a_wrong_option_is_one_line(trace, arguments, message):
    done = gnmr("replay", trace, *arguments)

    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "none.parquet"], "none.parquet: there is no such file"),
        (["report", "nowhere"], "comparison.json cannot be read"),
        (["train", "dmeo"], "there is no recipe 'dmeo'; did you mean 'demo'?"),
        (["train", "tiny", "--set", "policy.max_actve=1"], "did you mean 'max_active'?"),
        (["compare", "tiny", "--arms", "high,lwo"], "did you mean 'low'?"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, message):
    done = gnmr(*arguments)

    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_recipes_are_listed():
    done = gnmr("recipes")

    assert done.exit_code == 0
    assert re.search(r"demo\s*│ Transient faults", done.output)
