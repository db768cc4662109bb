"""The GPU benchmark's logic, without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the benchmarks are in the checkout only")


def run(*arguments):
    command = [sys.executable, SCRIPT, "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_dry_run_measures_what_there_is_and_says_what_there_is_not(tmp_path):
    out = tmp_path / "gpu.md"
    done = run("--shape", "tiny", "--steps", "2", "--out", out)
    assert done.returncode == 0, done.stderr[-2000:]
    text = out.read_text()
    rows = {cells[1].strip(): cells[2:] for line in text.splitlines() if len(cells := line.split("|")) > 4}

    assert "A dry run on a CPU: these figures say nothing" in text
    for side in ("BF16", "BF16 again", "4-bit saved activations under the controller"):
        assert float(rows[side][0].split()[0]) > 0
    assert float(rows["BF16"][1]) == 1
    assert float(rows["4-bit saved activations under the controller"][7]) == 1, "the whole budget is in use"
    for side in ("static FP8", "FP8 under the controller", "TransformerEngine FP8 under the controller"):
        left_out = rows[side][0].strip().startswith("left out: ")
        assert left_out == (f"{side} is left out" in done.stdout)
        assert left_out or float(rows[side][0].split()[0]) > 0
    assert "| pack e2m1 |" in text


def test_a_side_can_have_a_process_of_its_own():
    done = run("--shape", "tiny", "--steps", "2", "--side", "BF16")

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith('{"step": ')


def test_a_dry_run_is_not_put_beside_the_results():
    done = run("--shape", "tiny")

    assert done.returncode == 1
    assert "give it --out FILE" in done.stderr
