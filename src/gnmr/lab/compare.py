"""All arms of a recipe over its seeds: each run in a process of its own, several at a time, resumable."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnmr._io import write_text
from gnmr.errors import RunError
from gnmr.lab import runs
from gnmr.lab.metrics import COLUMNS, aggregate, measure_run
from gnmr.lab.recipe import Recipe
from gnmr.lab.tables import write_tables

SCHEMA = 1
POLL_SECONDS = 0.2

Progress = Callable[[int, int, str], None]
"""Hears (steps done, steps in all, what is running)."""


@dataclass
class _Job:
    arm: str
    seed: int
    folder: Path
    after: "_Job | None" = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    code: int | None = None

    @property
    def name(self) -> str:
        return runs.run_name(self.arm, self.seed)


def compare_arms(
    recipe: Recipe, folder: Path, *, jobs: int | None = None, progress: Progress = lambda *_: None
) -> dict[str, Any]:
    """Run what is not finished yet, and return the comparison, which is also written into the folder.

    Args:
        recipe: what to run: its arms and seeds.
        folder: the comparison's folder; each run has one inside.
        jobs: runs at a time; by default as many as there are cores for their threads.
        progress: hears how far it is.

    Returns:
        What stands in ``comparison.json``.

    Raises:
        gnmr.RunError: a run failed (the message has the end of its log; the others were finished), the folder is in use or
            holds runs of another recipe.
        KeyboardInterrupt: Ctrl-C; the runs saved where they were, and the same command goes on.
    """
    jobs = jobs or max(1, (os.cpu_count() or 1) // recipe.run.threads)
    with runs.claimed(folder):
        recipe_file = folder / runs.RECIPE
        write_text(recipe_file, recipe.to_toml())
        pending = [job for job in _plan(recipe, folder) if not (job.folder / runs.RESULT).exists()]
        _run_all(pending, recipe, recipe_file, jobs, progress)
        comparison = summarise(recipe, folder)
        write_tables(comparison, folder)
    return comparison


def summarise(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Measure the finished runs of a comparison."""
    rows = []
    for arm in recipe.arms:
        names = [runs.run_name(arm, seed) for seed in recipe.run.seeds]
        facts = [runs.read_json(folder / name / runs.ENVIRONMENT) for name in names]
        measured = [
            measure_run(folder / name, each["data"]["vocab_size"]) for name, each in zip(names, facts, strict=True)
        ]
        metrics = {column.key: aggregate([values[column.key] for values in measured]) for column in COLUMNS}
        rows.append({"arm": arm, "runs": names, "metrics": metrics})
    return {
        "schema": SCHEMA,
        "recipe": recipe.model_dump(mode="json"),
        "environment": facts[0],
        "arms": list(recipe.arms),
        "seeds": list(recipe.run.seeds),
        "columns": [vars(column) for column in COLUMNS],
        "rows": rows,
    }


def _plan(recipe: Recipe, folder: Path) -> list[_Job]:
    """Seeds outside, arms inside; ``random`` waits for the ``gnmr`` of its seed, which therefore goes first."""
    arms = sorted(recipe.arms, key=lambda arm: arm != "gnmr")
    found = []
    for seed in recipe.run.seeds:
        of_seed = {arm: _Job(arm, seed, folder / runs.run_name(arm, seed)) for arm in arms}
        if "random" in of_seed:
            of_seed["random"].after = of_seed["gnmr"]
        found.extend(of_seed.values())
    return found


def _run_all(pending: list[_Job], recipe: Recipe, recipe_file: Path, jobs: int, progress: Progress) -> None:
    waiting, running, failed = list(pending), [], []  # type: tuple[list[_Job], list[_Job], list[_Job]]
    total = len(pending) * recipe.run.steps
    try:
        while waiting or running:
            for job in _startable(waiting, pending, failed)[: jobs - len(running)]:
                waiting.remove(job)
                job.process = _start(job, recipe, recipe_file)
                running.append(job)
            for job in list(running):
                assert job.process is not None  # noqa: S101 (it runs)
                job.code = job.process.poll()
                if job.code is not None:
                    running.remove(job)
                    failed.extend([job] if job.code else [])
            waiting = [job for job in waiting if job.after not in failed]
            progress(sum(map(_steps_done, pending)), total, ", ".join(job.name for job in running))
            time.sleep(POLL_SECONDS if running else 0)
    except KeyboardInterrupt:
        _stop(running)
        raise
    if failed:
        raise RunError("\n".join(_why(job) for job in failed))


def _startable(waiting: Sequence[_Job], pending: Sequence[_Job], failed: Sequence[_Job]) -> list[_Job]:
    return [job for job in waiting if job.after is None or job.after not in pending or job.after.code == 0]


def _start(job: _Job, recipe: Recipe, recipe_file: Path) -> subprocess.Popen[bytes]:
    job.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gnmr.lab.worker", str(recipe_file), job.arm, str(job.seed), str(job.folder)]
    threads = str(recipe.run.threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Two OpenMP programs that spin on the same cores slow each other by an order of magnitude.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    with (job.folder / runs.LOG).open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )


def _stop(running: Sequence[_Job]) -> None:
    """Ask the runs to save where they are, and wait for them."""
    for job in running:
        if job.process is not None and job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
    for job in running:
        if job.process is not None:
            job.process.wait()


def _steps_done(job: _Job) -> int:
    path = job.folder / runs.METRICS
    if job.process is None or not path.exists():
        return 0
    rows = runs.read_metrics(path)
    return int(rows[-1]["step"]) if rows else 0


def _why(job: _Job) -> str:
    log = (job.folder / runs.LOG).read_text(errors="replace").splitlines()
    return f"{job.name} failed with exit code {job.code}; the end of {job.folder / runs.LOG}:\n" + "\n".join(log[-15:])
