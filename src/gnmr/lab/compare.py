"""All arms of a recipe over its seeds: each run in a process of its own, several at a time, resumable."""

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gnmr._io import write_text
from gnmr.errors import RunError
from gnmr.lab import runs, worker
from gnmr.lab.arms import parse_arm
from gnmr.lab.metrics import COLUMNS, SPIKE_NOTE, aggregate, measure_run
from gnmr.lab.paired import paired_differences
from gnmr.lab.recipe import Recipe
from gnmr.lab.stabilisers import describe
from gnmr.lab.tables import write_tables

SCHEMA = 1
POLL_SECONDS = 0.2
STOP_SECONDS = 120.0
"""How long a run may take to save where it is before it is killed."""

Progress = Callable[[int, int, str], None]
"""Hears (steps done, steps in all, what is running)."""


@dataclass
class _Job:
    arm: str
    seed: int
    folder: Path
    after: "_Job | None" = None
    process: BaseProcess | None = field(default=None, repr=False)
    code: int | None = None

    @property
    def name(self) -> str:
        return runs.run_name(self.arm, self.seed)

    @property
    def finished(self) -> bool:
        return (self.folder / runs.RESULT).exists()


def compare_arms(
    recipe: Recipe,
    folder: Path,
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Run what is not finished yet, and return the comparison, which is also written into the folder.

    Args:
        recipe: what to run: its arms and seeds.
        folder: the comparison's folder; each run has one inside.
        jobs: runs at a time; by default as many as there are cores for their threads.
        overwrite: drop the runs of the recipe's arms and seeds first, and begin anew.
        progress: hears how far it is.

    Returns:
        What stands in ``comparison.json``.

    Raises:
        gnmr.RunError: a run failed (the message has the end of its log; the others were finished), or the folder is in
            use or holds runs of another recipe.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the runs saved where they were, and the same command goes on.

    A script that calls this does so under ``if __name__ == "__main__"``, as :mod:`multiprocessing` asks for.
    """
    jobs = jobs or max(1, (os.cpu_count() or 1) // recipe.run.threads)
    with runs.claimed(folder), runs.kept_on_failure(folder):
        plan = _plan(recipe, folder)
        if overwrite:
            for job in plan:
                shutil.rmtree(job.folder, ignore_errors=True)
        _check_earlier(plan, recipe)
        recipe_file = folder / runs.RECIPE
        write_text(recipe_file, recipe.to_toml())
        with _sigterm_as_interrupt():
            _run_all([job for job in plan if not job.finished], recipe, recipe_file, jobs, progress)
        comparison = summarise(recipe, folder)
        write_tables(comparison, folder)
    return comparison


def summarise(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Measure the finished runs of a comparison; see :func:`compare_arms` for what may be raised."""
    rows: list[dict[str, Any]] = []
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
        "differences": paired_differences(rows),
        "notes": [SPIKE_NOTE, *describe(name for arm in recipe.arms for name in parse_arm(arm).stabilisers)],
    }


def _plan(recipe: Recipe, folder: Path) -> list[_Job]:
    """Seeds outside, arms inside; an arm that is matched to another waits for it: those come first, these last."""
    arms = [parse_arm(name) for name in recipe.arms]
    awaited = {arm.reference for arm in arms}
    arms.sort(key=lambda arm: (arm.reference is not None, arm.name not in awaited))
    found: list[_Job] = []
    for seed in recipe.run.seeds:
        of_seed: dict[str, _Job] = {}
        for arm in arms:
            after = None if arm.reference is None else of_seed[arm.reference]
            of_seed[arm.name] = _Job(arm.name, seed, folder / runs.run_name(arm.name, seed), after)
        found.extend(of_seed.values())
    return found


def _check_earlier(plan: Sequence[_Job], recipe: Recipe) -> None:
    """Refuse to mix runs of two recipes in one table."""
    from gnmr.lab.train import check_same  # torch and transformers, which a fresh folder needs in its workers only

    for job in plan:
        if (job.folder / runs.RECIPE).exists():
            check_same(recipe, job.arm, job.seed, job.folder)


def _run_all(pending: list[_Job], recipe: Recipe, recipe_file: Path, jobs: int, progress: Progress) -> None:
    waiting, running, failed = list(pending), list[_Job](), list[_Job]()
    total = len(pending) * recipe.run.steps
    server = _server(recipe) if pending else None
    try:
        while waiting or running:
            for job in [job for job in waiting if _may_start(job, pending)][: jobs - len(running)]:
                waiting.remove(job)
                job.process = _start(job, recipe, recipe_file, server)
                running.append(job)
            for job in list(running):
                assert job.process is not None  # noqa: S101 (it runs)
                job.code = job.process.exitcode
                if job.code is not None:
                    running.remove(job)
                    failed.extend([] if job.code == 0 and job.finished else [job])
            waiting = [job for job in waiting if job.after not in failed]
            progress(sum(map(_steps_done, pending)), total, ", ".join(job.name for job in running))
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        _stop(running)
    if failed:
        raise RunError("\n".join(_why(job) for job in failed))


def _may_start(job: _Job, pending: Sequence[_Job]) -> bool:
    return job.after is None or job.after not in pending or job.after.code == 0


def _start(job: _Job, recipe: Recipe, recipe_file: Path, server: Any) -> BaseProcess:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / runs.LOG).touch()
    given = (recipe_file, job.arm, job.seed, job.folder, {**os.environ, **_environment(recipe)})
    process: BaseProcess = server.Process(target=worker.run_arm, args=given, name=job.name)
    process.start()
    return process


def _server(recipe: Recipe) -> Any:
    """Return what starts the runs: forks of one process that has imported what they need, where there are forks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(worker.PRELOAD))
    before = dict(os.environ)
    os.environ.update(_environment(recipe))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _environment(recipe: Recipe) -> dict[str, str]:
    threads = str(recipe.run.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Two OpenMP programs that spin on the same cores slow each other by an order of magnitude.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # Whether there is a GPU is asked without opening it, which a process that is forked must not have done.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _stop(running: Sequence[_Job]) -> None:
    """Ask the runs to save where they are, and wait for them."""
    processes = [job.process for job in running if job.process is not None]
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(STOP_SECONDS)
        if process.is_alive():
            process.kill()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _steps_done(job: _Job) -> int:
    return 0 if job.process is None else runs.last_step(job.folder / runs.METRICS)


def _why(job: _Job) -> str:
    log = (job.folder / runs.LOG).read_text(errors="replace").splitlines()
    return f"{job.name} failed with exit code {job.code}; the end of {job.folder / runs.LOG}:\n" + "\n".join(log[-15:])
