"""One arm of a recipe, with one seed: ``transformers.Trainer``, and the guard through its callback.

All arms run through the same guard and the same paths, on the same data from the same initial weights. They differ
only in the trigger: who decides which units are on the recovery path.
"""

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainingArguments, default_data_collator
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from gnmr import Guard, Paths, Simulated, find_units
from gnmr._io import write_json, write_text
from gnmr.errors import RecipeError, RunError
from gnmr.integrations.transformers import STATE_FILE, GuardCallback
from gnmr.lab import runs
from gnmr.lab.arms import Arm, Factory, make_trigger, parse_arm
from gnmr.lab.data import Corpus, load_corpus
from gnmr.lab.environment import environment
from gnmr.lab.model import make_model, with_adapters
from gnmr.lab.recipe import Recipe, load_recipe
from gnmr.lab.stabilisers import SETTINGS, check_fits, make_optimizer, max_grad_norm
from gnmr.lab.stress import schedule
from gnmr.lab.trainer import Progress, Recorder, RunTrainer, Say, peak_memory, perplexity_of, step_of
from gnmr.lab.zclip import ZClip
from gnmr.pytorch.gaps import MeasuredGap
from gnmr.pytorch.signals import CastError, Signal

Audit = tuple[Factory, Callable[["RunTrainer"], Callable[[Guard], Signal]]]


class InterruptedRunError(RunError):
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
    audit: Audit | None = None,
    again: str = "the same command with --resume",
    say: Say = print,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Train one arm and return its result.

    Args:
        recipe: what to run.
        arm: see :mod:`gnmr.lab.arms`.
        seed: of the weights, the data's order, the faults and the draws.
        folder: the run's folder.
        resume: go on from the last checkpoint in it.
        overwrite: begin anew, and drop what is in it.
        audit: a trigger in place of the arm's, and what makes its signal; see :mod:`gnmr.lab.audit`.
        again: how to go on, for the message of an interrupted run.
        say: where lines for the user go.
        progress: hears (steps done, steps in all).

    Returns:
        What stands in ``result.json``.

    Raises:
        gnmr.RunError: the folder is in use, holds another run, has nothing to go on from, or cannot be written.
        gnmr.lab.train.InterruptedRunError: Ctrl-C or SIGTERM; a checkpoint was saved.
    """
    chosen = parse_arm(arm)
    _check_variant(recipe, chosen)
    check_fits(arm, chosen.stabilisers, recipe.optimizer)
    transformers_logging.disable_progress_bar()
    with runs.claimed(folder), runs.kept_on_failure(folder):
        checkpoint = _prepare(recipe, arm, seed, folder, resume=resume, overwrite=overwrite)
        if (folder / runs.RESULT).exists():
            say(f"{folder} is finished already")
            return runs.read_json(folder / runs.RESULT)
        torch.set_num_threads(recipe.run.threads)
        say(f"{arm}, seed {seed}: reading {recipe.data.name}, then {recipe.run.steps} steps")
        corpus = load_corpus(recipe, seed)
        settings = {name: SETTINGS[name] for name in chosen.stabilisers}
        facts = {**environment(), "data": corpus.facts, "arm": arm, "seed": seed, "stabilisers": settings}
        write_json(folder / runs.ENVIRONMENT, facts)
        zclip = ZClip(**SETTINGS["zclip"]) if "zclip" in settings else None
        recorder = Recorder(recipe, folder, checkpoint, say, progress, zclip)
        trainer = _make_trainer(recipe, chosen, seed, folder, corpus, recorder, audit)
        with _stopping(recorder):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if recorder.stopped and trainer.state.global_step < recipe.run.steps:
            raise InterruptedRunError(
                f"stopped at step {trainer.state.global_step} of {recipe.run.steps}, and saved: go on with {again}",
                recorder.stopped,
            )
        return _finish(trainer, recipe, arm, seed, folder)


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


def _prepare(recipe: Recipe, arm: str, seed: int, folder: Path, *, resume: bool, overwrite: bool) -> Path | None:
    """Check what is in the folder, write the recipe, and return the checkpoint to go on from."""
    saved = folder / runs.RECIPE
    if overwrite:
        for path in folder.iterdir():
            if path.name not in (".lock", ".owner", runs.LOG):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    if saved.exists():
        check_same(recipe, arm, seed, folder)
        if not resume:
            raise RunError(f"{folder} holds this run already: go on with --resume, or begin anew with --overwrite")
        checkpoint = _last_checkpoint(folder)
        if checkpoint is None and not (folder / runs.RESULT).exists():
            # Killed before it saved: it begins anew, and its trace with it.
            for path in folder.glob("trace*"):
                path.unlink()
        return checkpoint
    if resume:
        raise RunError(f"{folder} holds no run to go on from: leave --resume out")
    write_text(saved, recipe.to_toml())
    return None


def check_same(recipe: Recipe, arm: str, seed: int, folder: Path) -> None:
    """Check that the run in a folder is of this recipe, arm and seed.

    Raises:
        gnmr.RunError: it is not; the message names the first key that differs.
    """
    then = "a run goes on as it began; give another folder with --out, or begin anew with --overwrite"
    facts = folder / runs.ENVIRONMENT
    if facts.exists():
        began = runs.read_json(facts)
        if (began["arm"], began["seed"]) != (arm, seed):
            raise RunError(f"{folder} holds arm {began['arm']!r} with seed {began['seed']}: {then}")
    variant = parse_arm(arm).variant
    before, after = (_flat(_of_this_run(each, variant)) for each in (load_recipe(folder / runs.RECIPE), recipe))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            raise RunError(
                f"{folder} was begun with {key} = {before.get(key)!r}, and the recipe says {after.get(key)!r}: {then}"
            )


def _of_this_run(recipe: Recipe, variant: str | None) -> dict[str, Any]:
    """Leave out what is no business of a run: the other arms, variants and seeds of a comparison."""
    others: Any = {"arms": True, "description": True, "variants": True, "run": {"seeds"}}
    return {**recipe.model_dump(mode="json", exclude=others), "variant": recipe.variants.get(variant or "")}


def _check_variant(recipe: Recipe, arm: Arm) -> None:
    try:
        recipe.check_variant(arm.variant)
    except ValueError as error:
        raise RecipeError(f"arm {arm.name!r}: {error}") from None


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for section, value in values.items():
        inner = value.items() if isinstance(value, dict) else ()
        found.update({f"{section}.{key}": each for key, each in inner} if inner else {section: value})
    return {key: value for key, value in found.items() if value is not None}


def _last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint: gnmr's state is the last file to be written into it."""
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{STATE_FILE}")]
    return max(whole, key=step_of, default=None)


def _make_trainer(
    recipe: Recipe, arm: Arm, seed: int, folder: Path, corpus: Corpus, recorder: Recorder, audit: Audit | None
) -> RunTrainer:
    model = make_model(recipe.model, corpus.vocab_size, recipe.data.sequence_length, seed)
    if recipe.adapter is not None:
        model = with_adapters(model, recipe.adapter, seed)
    trainer = RunTrainer(
        model=model,
        args=_arguments(recipe, arm, seed, folder),
        train_dataset=corpus.train,
        eval_dataset=corpus.validation,
        data_collator=default_data_collator,
        optimizer_cls_and_kwargs=make_optimizer(arm.stabilisers, recipe.optimizer),
    )
    trainer.keep_inputs(1)
    for chatty in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(chatty)
    trainer.recorder = recorder
    if audit is None:
        trigger = make_trigger(arm, recipe.triggers.get(arm.trigger, {}), seed, folder)
        signal = _signal(recipe, arm, trainer)
    else:
        trigger, signal = audit[0], audit[1](trainer)
    trainer.guard_callback = GuardCallback(
        trainer,
        _paths(recipe, arm, seed, folder, model),
        recipe.make_policy(arm.variant),
        trigger=trigger,
        signal=signal,
        record=folder / runs.TRACE,
        header={"arm": arm.name, "seed": seed, "recipe": recipe.name},
        **_units(recipe),
    )
    recorder.watch = trainer.guard_callback
    # The guard's is the last that writes: once its file is in a checkpoint, the checkpoint is whole.
    trainer.add_callback(recorder)
    trainer.add_callback(trainer.guard_callback)
    if recorder.zclip is not None:
        trainer.add_callback(recorder.zclip)  # after the guard, which sees the gradients as they came
    return trainer


def _signal(recipe: Recipe, arm: Arm, trainer: RunTrainer) -> Callable[[Guard], Signal] | None:
    """Return what makes the signal of an arm's trigger, where the guard cannot know how."""
    every = recipe.triggers.get(arm.trigger, {}).get("every")
    if arm.trigger == "gap" and every is not None:
        return lambda guard: CastError(_paths_of(guard), every)
    if arm.trigger != "oracle":
        return None

    def measured(guard: Guard) -> MeasuredGap:
        params = [param for param in trainer.model.parameters() if param.requires_grad]
        return MeasuredGap(guard.units, params, _paths_of(guard), lambda: guard.plan, trainer.loss_again, every or 1)

    return measured


def _paths_of(guard: Guard) -> Paths:
    assert guard.paths is not None  # noqa: S101 (every recipe has paths)
    return guard.paths


def _arguments(recipe: Recipe, arm: Arm, seed: int, folder: Path) -> TrainingArguments:
    run, optimizer = recipe.run, recipe.optimizer
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=run.steps,
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=_eval_batch(recipe),
        gradient_accumulation_steps=run.gradient_accumulation,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=max_grad_norm(arm.stabilisers, optimizer),
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


def _eval_batch(recipe: Recipe) -> int:
    """Return how many sequences are evaluated at once: no backward, but logits of a vocabulary for every token."""
    batch = recipe.run.batch_size
    return min(8 * batch, max(batch, 16384 // recipe.data.sequence_length))


def _units(recipe: Recipe) -> dict[str, Any]:
    return recipe.units.model_dump()


def _paths(recipe: Recipe, arm: Arm, seed: int, folder: Path, model: Any) -> Any:
    paths, stress = recipe.make_paths(seed, exact=arm.exact), recipe.stress
    if stress is None:
        return paths
    faults = schedule(
        n_units=len(find_units(model, **_units(recipe))),
        steps=recipe.run.steps,
        first_step=stress.first_step,
        every=stress.every,
        duration=stress.duration,
        seed=seed,
    )
    write_json(folder / runs.FAULTS, [fault._asdict() for fault in faults])
    if not arm.exact:
        paths.faults = faults
    return paths


def _ranges(guard: Guard | None) -> dict[str, float]:
    """Return the shares of the elements cast on the low-cost path that saturated and underflowed, if any were."""
    if guard is None or not isinstance(guard.paths, Simulated):
        return {}
    saturated, underflowed, total = guard.paths.counters().sum(axis=1).tolist()
    return {"saturated": saturated / total, "underflowed": underflowed / total} if total else {}


def _finish(trainer: RunTrainer, recipe: Recipe, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    measured, run = trainer.recorder.measured, recipe.run
    if measured["evaluated"] is None or measured["evaluated"][0] != run.steps:
        trainer.evaluate()
    loss = float(measured["evaluated"][1])
    tokens = run.batch_size * run.gradient_accumulation * recipe.data.sequence_length
    step_seconds = median(measured["seconds"])
    trainer.save_model(str(folder / runs.MODEL))
    result = {
        "arm": arm,
        "seed": seed,
        "steps": run.steps,
        "eval_loss": runs.number(loss),
        "perplexity": runs.number(perplexity_of(loss)),
        "step_seconds": step_seconds,
        "decision_seconds": median(measured["decisions"]),
        "tokens_per_second": tokens / step_seconds,
        "held_bytes_units": measured["held"]["units"],
        "held_bytes_shared": measured["held"]["shared"],
        "held_bytes_model": measured["held"]["model"],
        "peak_memory": max(measured["peak"], peak_memory()),
        **_ranges(trainer.guard_callback.guard),
    }
    write_json(folder / runs.RESULT, result)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)  # the run is over, and its model is saved
    return result
