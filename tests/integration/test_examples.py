"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are in the checkout only")
@pytest.mark.parametrize("name", ["plain_loop.py", "trainer.py"])
def test_an_example_runs(name, tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(tmp_path.iterdir())  # what each leaves: a trace, a checkpoint
