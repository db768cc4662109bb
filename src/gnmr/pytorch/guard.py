"""The guard: monitor, controller, paths and recorder, tied to a model and called once a step.

The training loop, with gnmr's place in it::

    for each step t:
        for each micro-batch:
            forward, backward             # units run on the paths of plan t
        guard.step()                      # reads the gradients of step t, sets plan t + 1
        guard.clip_grad_norm_(1.0)        # optional: reuses the norms just read
        optimizer.step()
        optimizer.zero_grad()

``guard.step()`` stands after the last backward (the gradient is accumulated and reduced), after the loss scale is
taken out, and before clipping (which turns one Inf into NaN everywhere).
"""

import copy
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnmr.controller import Controller, Decision
from gnmr.errors import GnmrWarning, GuardError, PathError, StateError, TraceError, UnitError
from gnmr.paths.base import HIGH, LOW, Paths
from gnmr.policy import Policy
from gnmr.pytorch.distributed import Group, all_sum, default_group, is_first
from gnmr.pytorch.experts import ExpertLinear
from gnmr.pytorch.ledger import Ledger
from gnmr.pytorch.monitor import Monitor, Reading, by_place
from gnmr.pytorch.outputs import OutputGradients
from gnmr.pytorch.signals import Signal, make_signal
from gnmr.pytorch.units import FilterFn, Granularity, Unit, Watch, find_units

if TYPE_CHECKING:
    from gnmr.trace import TraceWriter

SCHEMA = 1

Trigger = Callable[[int, Policy, Sequence[str]], Controller]
"""Makes the controller from (n_units, policy, unit names): the class itself, or a control."""

log = logging.getLogger("gnmr")


class Guard:
    """A runtime controller around a model in training.

    Attaching renames no parameter and changes no ``state_dict`` key: checkpoints load without gnmr. Attach after
    FSDP's ``fully_shard`` and after PEFT, before ``torch.compile``.

    Args:
        model: the model that is trained.
        paths: the backend, such as :class:`gnmr.SavedActivations`; None (only with ``monitor_only``) watches a
            model that has no second path.
        policy: the controller's settings.
        filter_fn: which linears are units; with ``include``, ``exclude`` and ``granularity`` as in
            :func:`gnmr.find_units`.
        include: see there.
        exclude: see there.
        granularity: see there.
        watch: see there; ``"adapter"`` and ``"output_grad"`` are for frozen operators under PEFT.
        total_steps: the length of the run, for a policy whose schedule is in fractions of it.
        monitor_only: decide and record, and switch nothing.
        trigger: makes the controller; the default is the paper's, :mod:`gnmr.triggers` has others.
        signal: ``signal(guard)`` makes what the trigger reads beside the norms, where units and paths alone do not
            (:class:`gnmr.pytorch.gaps.MeasuredGap`).
        record: path of a trace to write (``"run.arrow"``; it becomes ``run.parquet`` when closed). Written
            by rank 0 only.
        resume_record: whether ``record`` goes on from a run that was interrupted: load the guard's state first
            thing, and rows after the loaded step are dropped.
        header: JSON-able values for the trace's header, such as the run's seed.
        process_group: the ranks that share the decision; None takes all, where there are several.

    Raises:
        gnmr.UnitError: see :func:`gnmr.find_units`; or experts are watched at their outputs without a backend.
        ValueError: no paths without ``monitor_only``, or a policy in fractions without ``total_steps``.
        gnmr.PathError: the backend, or the model, has another guard; or it lacks what the trigger needs.
        gnmr.TraceError: ``record`` is the stream of a run that is not finished.

    Warns:
        gnmr.GnmrWarning: the model is compiled as a whole, so that new plans recompile it.

    Examples:
        >>> import torch, gnmr
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(8, 8)})])})
        >>> guard = gnmr.Guard(model, gnmr.SavedActivations(), gnmr.Policy(max_active=1))
        >>> model["layers"][0]["q_proj"](torch.ones(2, 8)).sum().backward()
        >>> decision = guard.step()
        >>> guard.active
        ()
        >>> guard.detach()
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Paths | None,
        policy: Policy,
        *,
        filter_fn: FilterFn | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        granularity: Granularity = "operator",
        watch: Watch = "weight",
        total_steps: int | None = None,
        monitor_only: bool = False,
        trigger: Trigger = Controller,
        signal: "Callable[[Guard], Signal] | None" = None,
        record: str | os.PathLike[str] | None = None,
        resume_record: bool = False,
        header: Mapping[str, Any] | None = None,
        process_group: Group = None,
    ) -> None:
        if paths is None and not monitor_only:
            raise ValueError(
                "paths=None can switch nothing: give a backend such as gnmr.SavedActivations(), "
                "or pass monitor_only=True"
            )
        self.units: tuple[Unit, ...] = find_units(
            model, filter_fn=filter_fn, include=include, exclude=exclude, granularity=granularity, watch=watch
        )
        if paths is None:
            _check_outputs_run(self.units)
        names = [unit.name for unit in self.units]
        self.policy = policy if total_steps is None else policy.resolve(total_steps)
        self.controller = trigger(len(names), self.policy, names)
        self.paths = paths
        self.monitor_only = monitor_only
        self.ledger = Ledger(names)
        self.events: list[dict[str, Any]] = []
        self.step_seconds = 0.0
        """How long the last :meth:`step` took, the wait for the gradients on an accelerator included."""
        self._group = default_group() if process_group is None else process_group
        at_outputs = any(unit.outputs for unit in self.units)
        self._outputs = OutputGradients(self.units, self._on_backward) if at_outputs else None
        self._monitor = Monitor(model, self.units, self._group, self._outputs)
        self._plan = np.zeros(len(names), dtype=np.bool_)
        self._last: tuple[Reading, Decision] | None = None
        self._reading: Reading | None = None
        self._detached = False
        self._skipped = False
        self._fresh = False
        self._clips = False
        self._record = None if record is None or not is_first(self._group) else Path(record)
        self._resume_record = resume_record
        self._header = dict(header or {})
        self._check_record()
        self._writer: TraceWriter | None = None
        if signal is not None and self.controller.needs is None:
            raise ValueError(f"signal was given, and {type(self.controller).__name__} reads none")
        if not monitor_only and _is_compiled_whole(model):
            warnings.warn(_WHOLE, GnmrWarning, stacklevel=2)
        if paths is not None:
            paths.attach(self.units)
        self._signal: Signal | None = None
        if signal is not None:
            self._signal = signal(self)
        elif self.controller.needs is not None:
            self._signal = make_signal(self.controller.needs, self.units, paths)
        params = dict.fromkeys(param for unit in self.units for param in unit.params)
        self._hooks = [param.register_post_accumulate_grad_hook(self._on_backward) for param in params]
        self._follow(self.controller.active)

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the units on the recovery path at the next step (under ``monitor_only``: that would be)."""
        return tuple(self.units[i].name for i in np.flatnonzero(self.controller.active))

    @property
    def plan(self) -> NDArray[np.bool_]:
        """(N,) bool: the units whose paths are set to recovery; a copy."""
        return self._plan.copy()

    def _check_record(self) -> None:
        """Refuse what could not be written, before any work is lost."""
        own = sorted(_HEADER & self._header.keys())
        if own:
            raise ValueError(f"header must not hold {own[0]!r}, which the guard writes itself")
        if self._record is None:
            return
        if self._record.suffix != ".arrow":
            raise ValueError(f"record must be a file named *.arrow, got {str(self._record)!r}")
        if self._record.exists() and not self._resume_record:
            raise TraceError(
                f"{self._record} is there already: another run writes it, or was not finished. Go on with it "
                "(resume_record=True, and load the guard's state), read it with gnmr replay, or remove it"
            )

    def step(
        self,
        *,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Decision | None:
        """Read the gradients of this step and set the paths of the next.

        Call it after the last backward of the step, before clipping and the optimiser. A second call without a
        new backward does nothing, and warns.

        Args:
            scaler: a live loss scaler. With ``optimizer`` its gradients are unscaled in place
                (``scaler.unscale_``); without, only the norms are, unless they were unscaled before. A step that
                the scaler is about to skip, right after one that it did not, changes nothing and is an event:
                that is how a loss scale finds its height. If the next step is non-finite again, it is a fault.
            optimizer: the optimiser of the scaler.

        Returns:
            The decision, or None for a step that the scaler skips.

        Raises:
            gnmr.GuardError: no unit has a gradient.
            gnmr.PathError: the forward did not run on the planned paths.
        """
        began = time.perf_counter()
        try:
            return self._step(scaler, optimizer)
        finally:
            self.step_seconds = time.perf_counter() - began

    def _step(self, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer | None) -> Decision | None:
        if self._detached:
            raise GuardError("the guard is detached: it watches nothing any more; make another one")
        replaced = self._monitor.replaced()
        if replaced is not None:
            raise GuardError(
                f"the parameter {replaced!r} of a unit was replaced by another since the guard was attached, so its "
                "gradient would go unseen: attach the guard after what replaces parameters"
            )
        if self._group is None and not self._fresh:
            return self._not_fresh(self._monitor.has_gradient())
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        scale = 1.0 if scaler is None else _unscale(scaler, optimizer)
        # Where the gradients are clipped as well, all norms come from one pass and one all-reduce.
        total = self._clips or scaler is not None
        at_outputs = 1.0 if scaler is None else float(scaler.get_scale())
        reading = self._monitor.read(scale, at_outputs=at_outputs, total=total, fresh=self._fresh)
        if not reading.fresh or not reading.observed.any():
            return self._not_fresh(bool(reading.observed.any()))
        self._fresh = False
        reading = self._read_back(reading)
        self._reading = reading if scale == 1.0 else None
        if not reading.norms[reading.observed].any():
            warnings.warn(_ALL_ZERO, GnmrWarning, stacklevel=4)
        if scaler is not None and self._scaler_skips(reading):
            return None
        signal = () if self._signal is None else (self._signal_of(self._signal, reading),)
        self._forget_probes()
        decision = self.controller.update(reading.norms, reading.observed, *signal)
        self._last = (reading, decision)
        self._note(decision)
        self._write(reading, decision)
        self._enter(decision)
        self._follow(decision.active)
        if self.paths is not None:
            self.paths.end_step(int(decision.step))
        return decision

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip all of the model's gradients, as ``torch.nn.utils.clip_grad_norm_`` does (L2), reusing the norms.

        As there, a non-finite total spoils every gradient: an Inf becomes NaN and the rest 0, and a NaN (or an
        Inf under ``max_norm=inf``) becomes NaN everywhere.

        Args:
            max_norm: the largest total norm to let through; inf changes no finite gradient.
            error_if_nonfinite: raise where the total norm is NaN or Inf.

        Returns:
            () float32: the total norm before clipping.

        Raises:
            ValueError: ``max_norm`` is not > 0.
            RuntimeError: a non-finite total norm under ``error_if_nonfinite``.
            gnmr.GuardError: ``guard.step()`` was not called since the last backward, or the gradients still carry a
                loss scale.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {max_norm!r}")
        if self._reading is None or self._fresh:
            raise GuardError(
                "clip_grad_norm_ needs guard.step() before it in this step, with unscaled gradients: "
                "guard.step(scaler=scaler, optimizer=optimizer) unscales them"
            )
        self._clips = True
        reading = self._reading
        if reading.total is None:
            reading = self._monitor.read(total=True)
        total = torch.tensor(reading.total, dtype=torch.float32)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the total norm of the gradients is {total.item()}, so it cannot be clipped")
        factor = float(max_norm / (total + 1e-6))
        if not factor >= 1:  # NaN too
            grads = self._monitor.gradients()
            for group in by_place(grads).values():
                torch._foreach_mul_([grads[i] for i in group], factor)
        self._reading = None
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides and was recorded, as JSON-able values.

        The trace is flushed first: a run that goes on from this state finds every step before it there.
        """
        if self._writer is not None:
            self._writer.flush()
        return {
            "schema": SCHEMA,
            "kind": "gnmr.Guard",
            "backend": None if self.paths is None else self.paths.describe()["kind"],
            "controller": self.controller.state_dict(),
            "paths": {} if self.paths is None else self.paths.state_dict(),
            "ledger": self.ledger.state_dict(),
            "events": copy.deepcopy(self.events),
            "skipped": self._skipped,
            "signal": {} if self._signal is None else self._signal.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, allow_policy_change: bool = False) -> None:
        """Go on from :meth:`state_dict`: the next step runs on the paths that were planned then.

        Raises:
            gnmr.StateError: not a guard's state, one with a part missing, another schema, or another policy (see
                :meth:`gnmr.Controller.load_state_dict`).
            gnmr.GuardError: the trace has begun.
        """
        if state_dict.get("kind") != "gnmr.Guard" or state_dict.get("schema") != SCHEMA:
            raise StateError(
                f"this is no guard state of schema {SCHEMA}: kind {state_dict.get('kind')!r}, "
                f"schema {state_dict.get('schema')!r}"
            )
        missing = sorted({"backend", "controller", "paths", "ledger", "events", "skipped", "signal"} - set(state_dict))
        if missing:
            raise StateError(f"the guard's state is damaged: it has no {missing[0]!r}")
        if self._writer is not None:
            raise GuardError("load the state before the first step: the trace has begun")
        backend = None if self.paths is None else self.paths.describe()["kind"]
        known = state_dict["backend"]  # None of a guard that only watched
        if None not in (known, backend) and known != backend:
            raise StateError(f"the state is of a guard on {known} paths, and this one is on {backend}")
        self.controller.load_state_dict(state_dict["controller"], allow_policy_change=allow_policy_change)
        if self.paths is not None:
            if known is not None:
                self.paths.load_state_dict(state_dict["paths"])
            self.paths.ran()  # what ran before belongs to no step of this run
        self.ledger.load_state_dict(state_dict["ledger"])
        self.events = copy.deepcopy(list(state_dict["events"]))
        self._skipped = bool(state_dict["skipped"])
        if self._signal is not None and state_dict["signal"]:
            self._signal.load_state_dict(state_dict["signal"])
        self._follow(self.controller.active)

    def close(self) -> None:
        """Finish the trace; the model stays guarded."""
        if self._writer is None and self._record is not None and self._resume_record and self.controller.step:
            self._writer = self._open_trace(self.controller.step)  # no step was left to a resumed run
        if self._writer is not None:
            self._writer.close()
            self._writer, self._record = None, None

    def detach(self) -> None:
        """Leave the model as it was, and finish the trace."""
        self._detached = True
        try:
            self.close()
        finally:  # a full disk does not keep the model
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            if self._outputs is not None:
                self._outputs.close()
            if self._signal is not None:
                self._signal.close()
            if self.paths is not None:
                self.paths.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        mode = ", monitor_only" if self.monitor_only else ""
        return f"Guard({len(self.units)} units, {self.paths!r}, {self.policy!r}{mode})"

    def _on_backward(self, param: Tensor | None = None) -> None:
        self._fresh = True

    def _not_fresh(self, has_gradient: bool) -> Decision | None:
        if not has_gradient:
            raise GuardError(_NO_GRADIENT)
        warnings.warn(
            "guard.step() was called again without a new backward: nothing was done. Call it once a step, after "
            "the last backward",
            GnmrWarning,
            stacklevel=4,
        )
        return None if self._last is None else self._last[1]

    def _read_back(self, reading: Reading) -> Reading:
        """Compare what ran with what was planned; a unit that did not run and has a gradient of zeros has none."""
        if self.paths is None:
            return reading
        ran = self.paths.ran()
        wrong = np.where(self._plan, ran[LOW], ran[HIGH]) > 0
        if wrong.any():
            unit = int(np.argmax(wrong))
            planned, other = ("recovery", "low-cost") if self._plan[unit] else ("low-cost", "recovery")
            raise PathError(
                f"unit {self.units[unit].name!r} was planned on its {planned} path and ran on its {other} path: "
                "the switch of this backend does nothing"
            )
        silent = reading.observed & (ran.sum(axis=0) == 0)
        # zero_grad(set_to_none=False) leaves zeros to a unit that this step did not use.
        unused = silent & (reading.norms == 0)
        silent &= ~unused
        if silent.any() and self._group is None:
            names = [self.units[i].name for i in np.flatnonzero(silent)]
            raise PathError(
                f"{names[0]!r} got a gradient, and its path did not run ({len(names)} of {len(self.units)} "
                "units): its forward was replaced after the guard was attached, it is called without its "
                "forward, it trains in eval mode, or a CUDA graph replays it. Attach the guard last, before "
                "torch.compile"
            )
        if self._group is not None or not unused.any() or unused[reading.observed].all():
            return reading
        return replace(reading, observed=reading.observed & ~unused, norms=np.where(unused, np.nan, reading.norms))

    def _signal_of(self, source: Signal, reading: Reading) -> NDArray[np.float64]:
        """Return the trigger's signal, the mean of the ranks that know it."""
        signal = source.read(reading)
        if self._group is None:
            return signal
        known = ~np.isnan(signal)
        mine = np.concatenate([np.where(known, signal, 0.0), known])
        total, count = np.split(all_sum(mine, self._monitor.device, self._group), 2)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def _forget_probes(self) -> None:
        """Drop what a signal's own backwards left at the outputs."""
        if self._outputs is not None and self._outputs.heard:
            self._outputs.forget()
            self._fresh = False

    def _scaler_skips(self, reading: Reading) -> bool:
        bad = reading.observed & ~np.isfinite(reading.norms)
        # The scaler also looks at the parameters that are no unit's.
        skips = reading.total is not None and not math.isfinite(reading.total)
        first, self._skipped = skips and not self._skipped, skips
        if first:
            self._event("skipped", bad, self.controller.step + 1)
        return first

    def _note(self, decision: Decision) -> None:
        step = int(decision.step)
        if decision.global_fault:
            self._event("global_fault", decision.nonfinite, step)
        elif decision.nonfinite.any():
            self._event("nonfinite", decision.nonfinite, step)

    def _event(self, kind: str, units: NDArray[np.bool_], step: int) -> None:
        names = [self.units[i].name for i in np.flatnonzero(units)]
        on_recovery = [self.units[i].name for i in np.flatnonzero(units & self._plan)]
        self.events.append({"step": step, "kind": kind, "units": names, "on_recovery": on_recovery})
        log.warning("step %d: %s gradient in %d units: %s", step, kind, len(names), ", ".join(names[:8]))

    def _write(self, reading: Reading, decision: Decision) -> None:
        if self._record is None:
            return
        if self._writer is None:
            self._writer = self._open_trace(int(decision.step) - 1)
        self._writer.write(reading.norms, reading.observed, decision)

    def _open_trace(self, steps_before: int) -> "TraceWriter":
        from gnmr.trace import TraceWriter, versions

        assert self._record is not None  # noqa: S101 (asked before)
        header = {
            "policy": self.policy.to_dict(),
            "units": [unit.name for unit in self.units],
            "trigger": _trigger_name(self.controller),
            "paths": None if self.paths is None else self.paths.describe(),
            "monitor_only": self.monitor_only,
            "versions": versions("torch"),
            **self._header,
        }
        if self._resume_record:
            if steps_before == 0 and self._record.exists():
                raise GuardError(
                    f"resume_record=True, and no state was loaded: every row of {self._record} would be dropped. Call "
                    "guard.load_state_dict(...) first, or begin a new trace without resume_record"
                )
            return TraceWriter.resume(self._record, header, keep_through_step=steps_before)
        return TraceWriter(self._record, header)

    def _follow(self, active: NDArray[np.bool_]) -> None:
        """Switch the units whose path changes."""
        if self.monitor_only or self.paths is None:
            return
        for unit in np.flatnonzero(active != self._plan):
            self.paths.switch(int(unit), bool(active[unit]))
        self._plan = np.array(active)

    def _enter(self, decision: Decision) -> None:
        """Put the new plan into the ledger; the high-fidelity warm-up is none of its business."""
        if decision.step < self.policy.warmup_steps:
            return
        extra = np.zeros(len(self.units), dtype=np.int64)
        if self.paths is not None and decision.active.any():
            extra = self.paths.extra_bytes(decision.active)
        self.ledger.add(int(decision.step), decision.active, extra)


_NO_GRADIENT = (
    "no unit has a gradient: call guard.step() between backward() and optimizer.step(), before zero_grad(). "
    "If the parameters were replaced since the guard was attached (fully_shard, .to() of a new dtype), "
    "attach it after that"
)


_ALL_ZERO = (
    "all gradients of the units are zero: if zero_grad(set_to_none=False) came before guard.step(), call step() "
    "between backward() and optimizer.step(), before zero_grad()"
)

_HEADER = frozenset(["schema", "policy", "units", "trigger", "paths", "monitor_only", "versions"])
"""What the guard puts into a trace's header."""

_WHOLE = (
    "the model is compiled as a whole: each plan that is new compiles it again, and beyond torch's recompile "
    "limit it runs uncompiled. Compile its layers one by one (for layer in model.layers: layer.compile()), or "
    "pass monitor_only=True"
)


def _check_outputs_run(units: Sequence[Unit]) -> None:
    """Refuse to watch at outputs that there are not: stacked experts run one by one for a backend only."""
    unseen = [unit.name for unit in units if any(isinstance(module, ExpertLinear) for module in unit.outputs)]
    if unseen:
        raise UnitError(
            f"unit {unseen[0]!r} is an expert of a stack ({len(unseen)} such units), and without a backend one kernel "
            "runs them all, so that it has no output of its own to watch: give paths, pass granularity='block', or "
            "leave them out with exclude='*.experts.*'"
        )


def _is_compiled_whole(model: nn.Module) -> bool:
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def _unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None) -> float:
    """Unscale the optimiser's gradients if there is one; return the scale that they still carry."""
    if optimizer is not None and not _is_unscaled(scaler, optimizer):
        scaler.unscale_(optimizer)
    return 1.0 if _is_unscaled(scaler, optimizer) else float(scaler.get_scale())


def _is_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None) -> bool:
    # GradScaler has no public way to ask. Its per-optimiser stage is READY (0), UNSCALED (1) or STEPPED (2).
    states = scaler._per_optimizer_states
    asked = states.values() if optimizer is None else [states[id(optimizer)]] if id(optimizer) in states else []
    return any(state["stage"].value == 1 for state in asked)


def _trigger_name(controller: Controller) -> str:
    kind = type(controller)
    return "gnmr" if kind is Controller else kind.__name__.lower()
