"""The Trainer of the lab, and what it writes down: losses, evaluations, times and memory."""

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import Trainer, TrainerCallback

from gnmr._io import write_json
from gnmr.integrations.transformers import GuardCallback
from gnmr.lab import runs
from gnmr.lab.recipe import Recipe
from gnmr.lab.zclip import ZClip
from gnmr.pytorch.measure import held_for_backward

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


class RunTrainer(Trainer):
    """The Trainer, which also hands each step's loss to the recorder and measures one forward."""

    recorder: "Recorder"
    guard_callback: GuardCallback
    kept: "deque[Any]"

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Measure what the first forward holds for backward; otherwise the Trainer's own."""
        if self.recorder.measured["held"] is not None or not model.training:
            return super().compute_loss(model, *args, **kwargs)
        assert self.guard_callback.guard is not None  # noqa: S101 (attached when training begins)
        with held_for_backward(model, self.guard_callback.guard.units) as held:
            loss = super().compute_loss(model, *args, **kwargs)
            found = {"units": held.projections, "shared": held.shared, "model": held.model}
        self.recorder.measured["held"] = found
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Record the loss of each micro-batch."""
        self.kept.append(args[1])
        loss = super().training_step(*args, **kwargs)
        self.recorder.losses.append(loss.detach())
        return loss

    def keep_inputs(self, micro_batches: int) -> None:
        """Keep the inputs of the last micro-batches, for :meth:`loss_again`."""
        self.kept = deque(maxlen=micro_batches)

    def loss_again(self, inputs: Any = None) -> torch.Tensor:
        """Run the forward of a micro-batch again, by default of the last one."""
        with self.compute_loss_context_manager():
            return self.model(**self._prepare_inputs(self.kept[-1] if inputs is None else inputs)).loss


class Recorder(TrainerCallback):
    """Writes the metrics, prints a line an evaluation, and stops the run when it is asked to.

    Attributes:
        measured: what a checkpoint carries on: ``seconds`` of each step and of the guard's part in it (``decisions``),
            ``recent`` losses since the last line, ``held`` bytes, ``evaluated`` (step, loss) and ``peak`` memory.
        losses: of the micro-batches of this step.
        zclip: of an arm that has it, whose state is carried on likewise.
        stopped: the signal that asked for the end, or 0.
        watch: the callback whose guard is timed.
    """

    watch: GuardCallback | None = None

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        checkpoint: Path | None,
        say: Say,
        progress: Progress,
        zclip: ZClip | None = None,
    ) -> None:
        self._recipe, self._say, self._progress, self.zclip = recipe, say, progress, zclip
        self._metrics = runs.Metrics(folder / runs.METRICS, 0 if checkpoint is None else step_of(checkpoint))
        self.measured: dict[str, Any] = {"seconds": [], "decisions": [], "recent": []}
        self.measured |= {"held": None, "evaluated": None, "peak": 0}
        if checkpoint is not None:
            saved = runs.read_json(checkpoint / runs.PROGRESS)
            if zclip is not None:
                zclip.load_state_dict(saved.pop("zclip"))
            self.measured = saved | {"recent": [float(loss) for loss in saved["recent"]]}
        self.losses: list[torch.Tensor] = []
        self.stopped = 0
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
        seconds, recent = self.measured["seconds"], self.measured["recent"]
        seconds.append(time.perf_counter() - self._start)
        if self.watch is not None and self.watch.guard is not None:
            self.measured["decisions"].append(self.watch.guard.step_seconds)
        recent.append(float(torch.stack(self.losses).sum()))
        self.losses.clear()
        step, run = state.global_step, self._recipe.run
        if step % run.log_every == 0 or step == run.steps:
            tokens = step * run.batch_size * run.gradient_accumulation * self._recipe.data.sequence_length
            rate = float(kwargs["lr_scheduler"].get_last_lr()[0])
            loss = float(np.mean(recent))
            self._metrics.add(step=step, loss=loss, lr=rate, tokens=tokens, seconds=seconds[-1])
            recent.clear()
        self._progress(step, run.steps)
        if self.stopped:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put what was measured into the checkpoint."""
        self.measured["peak"] = max(self.measured["peak"], peak_memory())
        saved = self.measured | {"recent": [runs.number(loss) for loss in self.measured["recent"]]}
        if self.zclip is not None:
            saved["zclip"] = self.zclip.state_dict()
        write_json(Path(args.output_dir) / f"checkpoint-{state.global_step}" / runs.PROGRESS, saved)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        """Write and print the validation loss."""
        step, loss = state.global_step, float(metrics["eval_loss"])
        self.measured["evaluated"] = [step, runs.number(loss)]
        perplexity = perplexity_of(loss)
        self._metrics.add(step=step, eval_loss=loss, eval_perplexity=perplexity)
        left = (time.perf_counter() - self._began) / max(1, step - self._first) * (self._recipe.run.steps - step)
        self._say(
            f"step {step}/{self._recipe.run.steps}: validation loss {loss:.4f}, perplexity {perplexity:.3f}; "
            f"{left:.0f} s to go"
        )


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(checkpoint.name.partition("-")[2])


def perplexity_of(loss: float) -> float:
    """Return exp(loss), Inf where that is beyond a float."""
    return float("inf") if loss >= 700 else float(np.exp(loss))


def peak_memory() -> int:
    """Return the most bytes that the process, or the GPU, has held."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
