"""gnmr in ``transformers.Trainer``: one callback.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.add_callback(GuardCallback(trainer, gnmr.SavedActivations(), gnmr.Policy(max_active=4)))
    trainer.train()

Where it stands in the Trainer's loop::

    on_train_begin            the guard is attached; a resumed run's state is loaded
    for each update:
        forward, backward     for each micro-batch
        clip_grad_norm_       the callback's: unscale, guard.step(), then clip with the guard's norms
        on_pre_optimizer_step too late to look: the Trainer has clipped by now. Only checks that it looked
                          (or looks, in versions of transformers that do not clip with max_grad_norm=0)
        optimizer.step
    on_save                   the guard's state goes into the checkpoint folder, as gnmr.json
    on_train_end              the trace is closed

The Trainer clips (or measures, with ``max_grad_norm=0``) through ``trainer.accelerator.clip_grad_norm_`` once an
update, after accumulation and reduction. The callback takes that call's place, so that it sees the gradient
unscaled and unclipped, and the clipping costs no second pass.
"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from gnmr._io import write_json
from gnmr.errors import GuardError, StateError
from gnmr.paths.base import Paths
from gnmr.policy import Policy
from gnmr.pytorch.guard import Guard

STATE_FILE = "gnmr.json"


class GuardCallback(TrainerCallback):
    """Attaches a :class:`gnmr.Guard` to a ``transformers.Trainer``.

    Args:
        trainer: the trainer, which must be given since callbacks are not told of it.
        paths: the backend; see :class:`gnmr.Guard`.
        policy: the settings; a schedule in fractions is resolved with the trainer's number of steps.
        resume_from: a checkpoint folder whose ``gnmr.json`` to load; by default the folder in
            ``args.output_dir`` of the step that the Trainer resumes from.
        **guard: further arguments of :class:`gnmr.Guard`.

    Attributes:
        guard: the guard, from the beginning of training on.

    Raises:
        gnmr.GuardError: at the beginning of training, under DeepSpeed (it steps inside ``backward``, so that there
            is no moment to look).
        gnmr.StateError: a resumed run without a readable ``gnmr.json``.
    """

    def __init__(
        self,
        trainer: Any,
        paths: Paths | None,
        policy: Policy,
        *,
        resume_from: str | Path | None = None,
        **guard: Any,
    ) -> None:
        self.guard: Guard | None = None
        self._trainer, self._paths, self._policy = trainer, paths, policy
        self._resume_from, self._options = resume_from, guard
        self._looked = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the guard to the prepared model, and load its state if the run is resumed."""
        accelerator = self._trainer.accelerator
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise GuardError(
                "under DeepSpeed the Trainer's optimiser steps inside backward(), so the gradients cannot be read "
                "in between: train with DDP or FSDP, or call gnmr.Guard in your own loop"
            )
        if self.guard is not None:
            self.guard.detach()
        resumed = state.global_step > 0
        options = {"total_steps": state.max_steps, "resume_record": resumed} | self._options
        saved = _read_state(self._state_file(args, state)) if resumed else None
        self.guard = Guard(kwargs["model"], self._paths, self._policy, **options)
        if saved is not None:
            self.guard.load_state_dict(saved)
        self._looked = False
        self._take_over(accelerator)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the guard saw the gradients of this update."""
        if not self._looked and not args.max_grad_norm:
            self._look()
        if not self._looked:
            raise GuardError(
                "the Trainer reached its optimiser without clip_grad_norm_ of its accelerator, so the gradients "
                "were not read: this Trainer (mixed device meshes, or a subclass with its own clipping) is not "
                "supported"
            )
        self._looked = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the guard's state into the checkpoint."""
        if self.guard is not None and state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(folder / STATE_FILE, self.guard.state_dict())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the trace and give the accelerator its own clipping back."""
        self._trainer.accelerator.__dict__.pop("clip_grad_norm_", None)
        if self.guard is not None:
            self.guard.close()

    def _take_over(self, accelerator: Any) -> None:
        accelerator.__dict__.pop("clip_grad_norm_", None)

        def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
            if norm_type != 2:
                raise ValueError(f"gnmr clips by the L2 norm only, got norm_type={norm_type!r}")
            return self._look().clip_grad_norm_(max_norm)

        accelerator.clip_grad_norm_ = clip

    def _look(self) -> Guard:
        assert self.guard is not None  # noqa: S101 (set when training begins)
        accelerator = self._trainer.accelerator
        accelerator.unscale_gradients()
        self.guard.step(scaler=accelerator.scaler)
        self._looked = True
        return self.guard

    def _state_file(self, args: Any, state: Any) -> Path:
        folder = self._resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}"
        return Path(folder) / STATE_FILE


def _read_state(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise StateError(
            f"the run is resumed and {path} is not there: the checkpoint was saved without gnmr, or lies "
            "elsewhere (pass resume_from=its folder)"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StateError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise StateError(f"{path} holds no guard state, but a JSON {type(value).__name__}")
    return value
