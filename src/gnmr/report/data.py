"""What a report shows, read from a comparison's folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnmr.errors import RunError
from gnmr.trace import Trace, read_trace


@dataclass(frozen=True)
class RunData:
    """One run of the comparison.

    Attributes:
        arm: its arm.
        seed: its seed.
        losses: (steps, values) of the training loss.
        evaluations: (steps, values) of the validation loss.
        trace: its trace, or None where none was recorded.
        faulty: (T, N) bool, or None where no faults were injected.
        by_tokens: (tokens, values) of the training loss; empty where the metrics have no tokens.
    """

    arm: str
    seed: int
    losses: tuple[list[int], list[float]]
    evaluations: tuple[list[int], list[float]]
    trace: Trace | None
    faulty: NDArray[np.bool_] | None
    by_tokens: tuple[list[int], list[float]] = ([], [])

    @property
    def static(self) -> bool:
        """Whether every unit is on one path for the whole run."""
        return self.trace is not None and self.trace.header.get("trigger") == "fixed"


def read_comparison(folder: Path) -> tuple[dict[str, Any], list[RunData]]:
    """Read ``comparison.json`` and the runs that it names.

    Raises:
        gnmr.RunError: a file is missing or damaged; with its path.
        gnmr.TraceError: likewise, for a trace.
    """
    path = folder / "comparison.json"
    comparison = _json(path)
    if not isinstance(comparison, dict) or comparison.get("schema") != 1:
        raise RunError(f"{path} is no comparison of schema 1")
    try:
        named = [
            (folder / name, row["arm"], seed)
            for row in comparison["rows"]
            for name, seed in zip(row["runs"], comparison["seeds"], strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged: {error!r}; gnmr compare writes it again") from error
    return comparison, [_read_run(*each) for each in named]


def _read_run(folder: Path, arm: str, seed: int) -> RunData:
    rows = [_parsed(folder, line) for line in _text(folder / "metrics.jsonl").splitlines()]
    trace_file = folder / "trace.parquet"
    trace = read_trace(trace_file) if trace_file.exists() else None
    faults_file = folder / "faults.json"
    faulty = None
    if trace is not None and faults_file.exists():
        faulty = np.zeros((len(trace.steps), len(trace.units)), dtype=np.bool_)
        try:
            for fault in _json(faults_file):
                faulty[fault["first"] - 1 : fault["last"], fault["unit"]] = True
        except (KeyError, TypeError, IndexError) as error:
            raise RunError(f"{faults_file} is damaged: {error!r}") from error
    return RunData(
        arm, seed, _curve(rows, "loss"), _curve(rows, "eval_loss"), trace, faulty, _curve(rows, "loss", "tokens")
    )


def _curve(rows: list[dict[str, Any]], key: str, over: str = "step") -> tuple[list[int], list[float]]:
    found = [(int(row[over]), float(row[key])) for row in rows if key in row and over in row]
    return [step for step, _ in found], [value for _, value in found]


def _parsed(folder: Path, line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise RunError(f"{folder / 'metrics.jsonl'} is damaged: {error}") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}; it is written by gnmr compare") from error
