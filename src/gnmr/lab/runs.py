"""A run's folder: who may write to it, what stands in it, and how to read it."""

import json
import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from gnmr._io import write_text
from gnmr.errors import RunError

RECIPE, ENVIRONMENT, METRICS, TRACE = "recipe.toml", "environment.json", "metrics.jsonl", "trace.arrow"
FAULTS, RESULT, MODEL, LOG = "faults.json", "result.json", "model", "run.log"
PROGRESS = "lab.json"
"""In a checkpoint: what the lab measured until then."""


def run_name(arm: str, seed: int) -> str:
    """Return the name of a run's folder; a variant's colon, which some file systems lack, becomes a dot.

    Examples:
        >>> run_name("gnmr:half", 0)
        'gnmr.half-s0'
    """
    return f"{arm.replace(':', '.')}-s{seed}"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder.

    Raises:
        gnmr.RunError: another process has it, or it cannot be made.
    """
    owner = folder / ".owner"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0)
        lock.acquire()
        owner.write_text(f"process {os.getpid()} on {platform.node()}")
    except Timeout:
        who = owner.read_text() if owner.exists() else "another process"
        raise RunError(f"{folder} is in use by {who}: wait for it, or give another folder with --out") from None
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error}") from error
    try:
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


@contextmanager
def kept_on_failure(folder: Path) -> Iterator[None]:
    """Turn what a full or failing disk raises into one error that says how to go on.

    Raises:
        gnmr.RunError: the block could not write.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{folder} cannot be written: {error}. What was written before is kept: make room, and go on with --resume"
        ) from error
    except RuntimeError as error:
        # torch.save has no exception of its own for a failed write.
        if "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        raise RunError(
            f"{folder} cannot be written: {error}. What was written before is kept: make room, and go on with --resume"
        ) from error


def read_json(path: Path) -> Any:
    """Read a JSON file of a run.

    Raises:
        gnmr.RunError: it is missing or damaged.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is not there: the run has not come to its end") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def number(value: float) -> float | str:
    """Return a float as JSON takes it: NaN and Inf become strings that ``float`` reads."""
    return value if math.isfinite(value) else str(value)


class Metrics:
    """The run's measurements, one JSON object a line, each on the disk before training goes on.

    Args:
        path: ``metrics.jsonl``.
        keep_through_step: for a run that goes on: later lines are dropped.
    """

    def __init__(self, path: Path, keep_through_step: int) -> None:
        self._path = path
        kept = [row for row in read_metrics(path) if row["step"] <= keep_through_step] if path.exists() else []
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, **row: Any) -> None:
        """Add a line; floats that JSON lacks become strings."""
        plain = {key: number(value) if isinstance(value, float) else value for key, value in row.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(plain, allow_nan=False) + "\n")


def last_step(path: Path) -> int:
    """Return the step of the last whole line of ``metrics.jsonl``, without reading the rest; 0 without one."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        if line.startswith(b'{"step": '):
            return int(json.loads(line)["step"])
    return 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``; a last line that a kill cut short is left out.

    Raises:
        gnmr.RunError: it is missing, or a line before the last is damaged.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    rows = []
    for place, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if place < len(lines):
                raise RunError(f"{path}, line {place}: {error}") from error
    return rows
