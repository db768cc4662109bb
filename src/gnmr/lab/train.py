"""One arm of a recipe, with one seed: ``transformers.Trainer``, and the guard through its callback.

All arms run through the same guard and the same paths, on the same data from the same initial weights. They differ
only in the trigger: who decides which units are on the recovery path.
"""

import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from gnmr import Controller
from gnmr._io import write_json, write_text
from gnmr.errors import RunError
from gnmr.integrations.transformers import STATE_FILE, GuardCallback
from gnmr.lab import runs
from gnmr.lab.data import Corpus, load_corpus
from gnmr.lab.environment import environment
from gnmr.lab.model import make_model
from gnmr.lab.recipe import Recipe, load_recipe
from gnmr.lab.stress import schedule, stressed
from gnmr.pytorch.measure import held_for_backward
from gnmr.trace import read_trace
from gnmr.triggers import AlwaysTop, Fixed, Random

Say = Callable[[str], None]


class Interrupted(RunError):
    """The run was asked to stop, and saved where it was.

    Attributes:
        signal: the signal's number.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


def train_arm(
    recipe: Recipe,
    arm: str,
    seed: int,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    again: str = "the same command with --resume",
    say: Say = print,
) -> dict[str, Any]:
    """Train one arm and return its result.

    Args:
        recipe: what to run.
        arm: ``high``, ``low``, ``gnmr``, ``random``, ``always`` or ``norm``.
        seed: of the weights, the data's order, the faults and the draws.
        folder: the run's folder.
        resume: go on from the last checkpoint in it.
        overwrite: begin anew, and drop what is in it.
        again: how to go on, for the message of an interrupted run.
        say: where lines for the user go.

    Returns:
        What stands in ``result.json``.

    Raises:
        gnmr.RunError: the folder is in use, holds another run, has nothing to go on from, or cannot be written.
        gnmr.lab.train.Interrupted: Ctrl-C or SIGTERM; a checkpoint was saved.
    """
    transformers_logging.disable_progress_bar()
    with runs.claimed(folder):
        checkpoint = _prepare(recipe, folder, resume=resume, overwrite=overwrite)
        if (folder / runs.RESULT).exists():
            say(f"{folder} is finished already")
            return runs.read_json(folder / runs.RESULT)  # type: ignore[no-any-return]
        torch.set_num_threads(recipe.run.threads)
        corpus = load_corpus(recipe, seed)
        write_json(folder / runs.ENVIRONMENT, {**environment(), "data": corpus.facts, "arm": arm, "seed": seed})
        trainer = _make_trainer(recipe, arm, seed, folder, corpus, checkpoint, say)
        try:
            with _stopping(trainer.recorder):
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written: {error}. The checkpoints before are kept: make room, and go on with "
                "--resume"
            ) from error
        if trainer.recorder.stopped:
            raise Interrupted(
                f"stopped at step {trainer.state.global_step} of {recipe.run.steps}, and saved: go on with {again}",
                trainer.recorder.stopped,
            )
        return _finish(trainer, recipe, arm, seed, folder)


class RunTrainer(Trainer):
    """The Trainer, which also hands each step's loss to the recorder and measures one forward."""

    recorder: "Recorder"
    guard_callback: GuardCallback
    held: dict[str, int] | None = None

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Measure what the first forward holds for backward; otherwise the Trainer's own."""
        if self.held is not None or not model.training:
            return super().compute_loss(model, *args, **kwargs)
        assert self.guard_callback.guard is not None  # noqa: S101 (attached when training begins)
        with held_for_backward(model, self.guard_callback.guard.units) as held:
            loss = super().compute_loss(model, *args, **kwargs)
            self.held = {"units": held.projections, "shared": held.shared, "model": held.model}
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Record the loss of each micro-batch."""
        loss = super().training_step(*args, **kwargs)
        self.recorder.losses.append(loss.detach())
        return loss


class Recorder(TrainerCallback):
    """Writes the metrics, prints a line an evaluation, and stops the run when it is asked to."""

    def __init__(self, recipe: Recipe, metrics: runs.Metrics, say: Say) -> None:
        self._recipe, self._metrics, self._say = recipe, metrics, say
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.evaluated: tuple[int, float] | None = None
        self.stopped = 0
        self._recent: list[float] = []
        self._began = self._start = 0.0
        self._first = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began, self._first = time.perf_counter(), state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Time the step without what stands between the steps."""
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a line every ``log_every`` steps; the loss is the mean since the last one, NaN included."""
        self.seconds.append(time.perf_counter() - self._start)
        self._recent.append(float(torch.stack(self.losses).sum()))
        self.losses.clear()
        step, run = state.global_step, self._recipe.run
        if step % run.log_every == 0 or step == run.steps:
            tokens = run.batch_size * run.gradient_accumulation * self._recipe.data.sequence_length
            rate = kwargs["lr_scheduler"].get_last_lr()[0]
            self._metrics.add(
                step=step,
                loss=float(np.mean(self._recent)),
                lr=float(rate),
                tokens=step * tokens,
                seconds=self.seconds[-1],
            )
            self._recent.clear()
        if self.stopped:
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        """Write and print the validation loss."""
        step, loss = state.global_step, float(metrics["eval_loss"])
        self.evaluated = (step, loss)
        perplexity = _perplexity(loss)
        self._metrics.add(step=step, eval_loss=loss, eval_perplexity=perplexity)
        left = (time.perf_counter() - self._began) / max(1, step - self._first) * (self._recipe.run.steps - step)
        self._say(
            f"step {step}/{self._recipe.run.steps}: validation loss {loss:.4f}, perplexity {perplexity:.3f}; "
            f"{left:.0f} s to go"
        )


@contextmanager
def _stopping(recorder: Recorder) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the run after its step; a second one acts at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: Any) -> None:
        recorder.stopped = number
        for each, handler in before.items():
            signal.signal(each, handler)

    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare(recipe: Recipe, folder: Path, *, resume: bool, overwrite: bool) -> Path | None:
    """Check what is in the folder, write the recipe, and return the checkpoint to go on from."""
    saved = folder / runs.RECIPE
    if overwrite:
        for path in folder.iterdir():
            if path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    if saved.exists():
        _check_same(load_recipe(saved), recipe, folder)
        if not resume:
            raise RunError(f"{folder} holds this run already: go on with --resume, or begin anew with --overwrite")
        found = _last_checkpoint(folder)
        if found is not None or (folder / runs.RESULT).exists():
            return found
    elif resume:
        raise RunError(f"{folder} holds no run to go on from: leave --resume out")
    write_text(saved, recipe.to_toml())
    return None


def _check_same(old: Recipe, new: Recipe, folder: Path) -> None:
    before, after = (each.model_dump(mode="json", exclude={"arms", "description"}) for each in (old, new))
    for section, value in after.items():
        if before[section] == value:
            continue
        keys = sorted(set(value) | set(before[section] or {})) if isinstance(value, dict) else []
        for key in keys:
            was, now = (before[section] or {}).get(key), value.get(key)
            if was != now and (section, key) != ("run", "seeds"):
                raise RunError(
                    f"{folder} was begun with {section}.{key} = {was!r}, and the recipe says {now!r}: a run goes on "
                    "as it began; give another folder with --out, or begin anew with --overwrite"
                )
        if not keys:
            raise RunError(f"{folder} was begun with {section} = {before[section]!r}, and the recipe says {value!r}")


def _last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint: gnmr's state is the last file to be written into it."""
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{STATE_FILE}")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def _make_trainer(
    recipe: Recipe, arm: str, seed: int, folder: Path, corpus: Corpus, checkpoint: Path | None, say: Say
) -> RunTrainer:
    model = make_model(recipe.model, corpus.vocab_size, recipe.data.sequence_length, seed)
    trainer = RunTrainer(
        model=model,
        args=_arguments(recipe, seed, folder),
        train_dataset=corpus.train,
        eval_dataset=corpus.validation,
        data_collator=default_data_collator,
    )
    for chatty in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(chatty)
    done = 0 if checkpoint is None else int(checkpoint.name.partition("-")[2])
    trainer.recorder = Recorder(recipe, runs.Metrics(folder / runs.METRICS, done), say)
    trainer.guard_callback = GuardCallback(
        trainer,
        _paths(recipe, seed, folder, model),
        recipe.make_policy(),
        trigger=_trigger(recipe, arm, seed, folder),
        record=folder / runs.TRACE,
        header={"arm": arm, "seed": seed, "recipe": recipe.name},
        **_units(recipe),
    )
    trainer.add_callback(trainer.guard_callback)
    trainer.add_callback(trainer.recorder)
    return trainer


def _arguments(recipe: Recipe, seed: int, folder: Path) -> TrainingArguments:
    run, optimizer = recipe.run, recipe.optimizer
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=run.steps,
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=run.batch_size * 8,
        gradient_accumulation_steps=run.gradient_accumulation,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": optimizer.min_lr_ratio},
        warmup_steps=int(optimizer.warmup_fraction * run.steps),
        train_sampling_strategy="sequential",  # the windows are drawn in order already
        eval_strategy="steps",
        eval_steps=run.eval_every,
        save_strategy="steps",
        save_steps=run.save_every,
        save_total_limit=2,  # one whole checkpoint stays while the next is written
        logging_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        seed=seed,
        bf16=run.bf16_autocast,
        use_cpu=not torch.cuda.is_available(),
    )


def _units(recipe: Recipe) -> dict[str, Any]:
    return recipe.units.model_dump()


def _paths(recipe: Recipe, seed: int, folder: Path, model: Any) -> Any:
    stress = recipe.stress
    if stress is None:
        return recipe.make_paths(seed)
    from gnmr import find_units

    n_units = len(find_units(model, **_units(recipe)))
    paths = recipe.make_paths(seed, wrap=partial(stressed, fault=stress.kind, factor=stress.factor))
    paths.faults = schedule(
        n_units=n_units,
        steps=recipe.run.steps,
        first_step=stress.first_step,
        every=stress.every,
        duration=stress.duration,
        seed=seed,
    )
    write_json(folder / runs.FAULTS, [fault._asdict() for fault in paths.faults])
    return paths


def _trigger(recipe: Recipe, arm: str, seed: int, folder: Path) -> Callable[..., Controller]:
    if arm == "random":
        reference = folder.parent / runs.run_name("gnmr", seed) / "trace.parquet"
        if not reference.exists():
            raise RunError(
                f"the arm 'random' draws as many units as the gnmr arm had, and {reference} is not there: run "
                f"--arm gnmr --seed {seed} first"
            )
        counts = read_trace(reference).active.sum(axis=1).tolist()
        return partial(Random, counts=counts, seed=seed)
    arms: dict[str, Callable[..., Controller]] = {
        "gnmr": Controller,
        "high": partial(Fixed, recover=True),
        "low": partial(Fixed, recover=False),
        "always": partial(AlwaysTop, by="risk"),
        "norm": partial(AlwaysTop, by="norm"),
    }
    if arm not in arms:
        raise RunError(f"unknown arm {arm!r}: it must be one of random, {', '.join(arms)}")
    return arms[arm]


def _finish(trainer: RunTrainer, recipe: Recipe, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    recorder = trainer.recorder
    if recorder.evaluated is None or recorder.evaluated[0] != recipe.run.steps:
        trainer.evaluate()
    assert recorder.evaluated is not None and trainer.held is not None  # noqa: S101, PT018 (both just happened)
    loss = recorder.evaluated[1]
    run = recipe.run
    tokens = run.batch_size * run.gradient_accumulation * recipe.data.sequence_length
    step_seconds = median(recorder.seconds)
    trainer.save_model(str(folder / runs.MODEL))
    result = {
        "arm": arm,
        "seed": seed,
        "steps": run.steps,
        "eval_loss": runs.number(loss),
        "perplexity": runs.number(_perplexity(loss)),
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "held_bytes_units": trainer.held["units"],
        "held_bytes_shared": trainer.held["shared"],
        "held_bytes_model": trainer.held["model"],
        "peak_memory": _peak_memory(),
    }
    write_json(folder / runs.RESULT, result)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)  # the run is over, and its model is saved
    return result


def _perplexity(loss: float) -> float:
    return float(np.exp(np.float64(loss))) if loss < 700 else float("inf")


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
