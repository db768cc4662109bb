"""The recovery gap, measured: what a unit's low-cost path does to the gradient, on the same micro-batch.

The reference runs every unit on its recovery path. For unit b, b alone is on its low-cost path, and the difference of
the two gradients, over all parameters, is the perturbation ``rho_b`` of the paper's Theorem 1. It costs N + 1 forwards
and backwards, and changes nothing of the training: no gradient buffer, no count, no amax history, no random state.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnmr.paths.base import Paths
from gnmr.pytorch.monitor import Reading
from gnmr.pytorch.signals import Signal
from gnmr.pytorch.units import Unit

Floats = NDArray[np.float64]
Closure = Callable[[], Tensor]
"""Runs the forward of one micro-batch and returns its loss; the same numbers at every call."""


@dataclass(frozen=True)
class Gaps:
    """What the low-cost path of each of N units does, over M micro-batches.

    Attributes:
        absolute: (N,) root mean square of ``||rho_b||`` over the micro-batches: sqrt(v of Remark 1).
        relative: (N,) the same over ``||g||`` of the reference.
        bias: (N,) norm of the mean perturbation: mu of Remark 1; with one micro-batch it is ``absolute``.
        loss: (N,) mean change of the loss after one step of plain gradient descent of length ``lr`` along the
            perturbed gradient in place of the reference's: > 0 where the low-cost path does worse.
        own: (N,) root mean square of the perturbation of the unit's own gradient.
    """

    absolute: Floats
    relative: Floats
    bias: Floats
    loss: Floats
    own: Floats


def measure_gaps(
    units: Sequence[Unit],
    params: Sequence[nn.Parameter],
    paths: Paths,
    plan: NDArray[np.bool_],
    closures: Sequence[Closure],
    *,
    lr: float | None = None,
) -> Gaps:
    """Measure the gaps of all units.

    Args:
        units: N units.
        params: the trainable parameters whose gradient is meant, usually all of the model's.
        paths: the units' backend, attached.
        plan: (N,) bool, the plan that it is set to, and is left at.
        closures: M micro-batches.
        lr: the step of ``loss``; None leaves that at NaN, and saves N + 1 forwards.

    Raises:
        ValueError: no micro-batch.
    """
    if not closures:
        raise ValueError("closures is empty: there is nothing to measure the gaps on")
    n, m = len(units), len(closures)
    absolute, relative, own, loss = (np.full((m, n), np.nan) for _ in range(4))
    sums: list[tuple[Tensor, ...] | None] = [None] * n
    place = {param: i for i, param in enumerate(params)}
    with _Probe(params, paths, plan) as probe:
        for row, closure in enumerate(closures):
            best = probe.gradients(closure, low=None)
            size = _norm(best)
            after = None if lr is None else probe.loss_after(closure, best, lr)
            for b in range(n):
                found = probe.gradients(closure, low=b)
                rho = torch._foreach_sub(found, best)
                absolute[row, b] = _norm(rho)
                relative[row, b] = absolute[row, b] / size if size > 0 else np.nan
                mine = [piece for piece in units[b].pieces if piece.param in place]
                own[row, b] = _norm([piece.of(rho[place[piece.param]]) for piece in mine])
                earlier = sums[b]
                sums[b] = rho if earlier is None else torch._foreach_add(earlier, rho)
                if lr is not None and after is not None:
                    loss[row, b] = probe.loss_after(closure, found, lr) - after
    return Gaps(
        absolute=_rms(absolute),
        relative=_rms(relative),
        bias=np.array([_norm(each) / m for each in sums if each is not None]),
        loss=loss.mean(axis=0),
        own=_rms(own),
    )


class _Probe:
    """Runs a micro-batch under other plans, beside the training."""

    def __init__(self, params: Sequence[nn.Parameter], paths: Paths, plan: NDArray[np.bool_]) -> None:
        self._params, self._paths, self._plan = params, paths, np.array(plan)
        self._set = np.array(plan)

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._stack.enter_context(torch.random.fork_rng())
        self._seed = torch.initial_seed()
        self._stack.enter_context(self._paths.apart())
        self._stack.callback(self._switch, self._plan)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def gradients(self, closure: Closure, low: int | None) -> list[Tensor]:
        """Return the gradients with every unit on its recovery path, but ``low``."""
        plan = np.ones_like(self._plan)
        if low is not None:
            plan[low] = False
        self._switch(plan)
        torch.manual_seed(self._seed)  # the same dropout at every run
        loss = closure()
        grads = torch.autograd.grad(loss, self._params, allow_unused=True)
        pairs = zip(grads, self._params, strict=True)
        return [torch.zeros_like(param) if grad is None else grad.detach() for grad, param in pairs]

    @torch.no_grad()
    def loss_after(self, closure: Closure, direction: Sequence[Tensor], lr: float) -> float:
        """Return the loss after one step of gradient descent, with every unit on its recovery path."""
        self._switch(np.ones_like(self._plan))
        torch.manual_seed(self._seed)
        before = [param.detach().clone() for param in self._params]
        try:
            torch._foreach_add_(list(self._params), list(direction), alpha=-lr)
            return float(closure())
        finally:
            torch._foreach_copy_(list(self._params), before)

    def _switch(self, plan: NDArray[np.bool_]) -> None:
        for unit in np.flatnonzero(plan != self._set):
            self._paths.switch(int(unit), bool(plan[unit]))
        self._set = np.array(plan)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(np.sqrt(sum(float(norm) ** 2 for norm in torch._foreach_norm(list(tensors))))) if tensors else 0.0


def _rms(rows: Floats) -> Floats:
    return np.asarray(np.sqrt(np.mean(rows**2, axis=0)))


class MeasuredGap(Signal):
    """The oracle's signal: the absolute gap of each unit, measured every few steps and kept in between.

    Args:
        units: N units.
        params: see :func:`measure_gaps`.
        paths: the units' backend, attached.
        plan: returns the (N,) plan that the backend is set to.
        closure: the micro-batch to measure on.
        every: steps between two measurements.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        params: Sequence[nn.Parameter],
        paths: Paths,
        plan: Callable[[], NDArray[np.bool_]],
        closure: Closure,
        every: int = 1,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be >= 1 step, got {every!r}")
        self._units, self._params, self._paths = units, params, paths
        self._plan, self._closure, self._every = plan, closure, every
        self._step = 0
        self._last = np.full(len(units), np.nan)

    def read(self, reading: Reading) -> Floats:
        """Return (N,) absolute gaps."""
        if self._step % self._every == 0:
            self._last = measure_gaps(self._units, self._params, self._paths, self._plan(), [self._closure]).absolute
        self._step += 1
        return self._last

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the last gaps."""
        return {"step": self._step, "last": [None if np.isnan(gap) else gap for gap in self._last.tolist()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._step = int(state_dict["step"])
        self._last = np.array([np.nan if gap is None else gap for gap in state_dict["last"]])
