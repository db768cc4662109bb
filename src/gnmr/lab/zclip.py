"""ZClip (Kumar et al., arXiv 2504.02507): the gradient norm is bounded where it is an outlier among those before it."""

import math
from typing import Any

import torch
from transformers import TrainerCallback

EPS = 1e-6
"""Keeps the z-score finite where the norms do not vary."""


class ZClip(TrainerCallback):
    """Bounds the global L2 norm of the gradients by their history.

    Of the norms ``g`` of the first ``warmup_steps`` steps the mean ``μ`` and the variance ``σ²`` are taken. From then
    on ``z = (g - μ) / σ``, and where ``z > z_threshold`` the gradients are scaled down to the norm
    ``μ + z_threshold² / z · σ``: the further out, the closer to the mean. Then ``μ`` and, with it, ``σ²`` move towards
    the norm that was let through by exponential averages. (The paper's Algorithm 1, with reciprocal clipping.)

    A norm that is not finite tells nothing about what is usual: it is left as it is, and out of the averages.

    Args:
        alpha: what the averages keep in a step.
        z_threshold: how many standard deviations above the mean are an outlier.
        warmup_steps: norms that make the first mean and variance, unbounded.

    Examples:
        >>> zclip = ZClip(alpha=0.97, z_threshold=2.5, warmup_steps=2)
        >>> [zclip.bound(norm) for norm in (0.9, 1.1, 1.0)]
        [None, None, None]
        >>> zclip.bound(50.0) < 1.1
        True
    """

    def __init__(self, *, alpha: float, z_threshold: float, warmup_steps: float) -> None:
        self._alpha, self._z_threshold, self._warmup_steps = alpha, z_threshold, int(warmup_steps)
        self._first: list[float] = []
        self._mean = self._variance = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bound the gradients of this update, which the guard has seen."""
        parameters = [parameter for parameter in kwargs["model"].parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        bound = self.bound(float(norm))
        if bound is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, bound, norm)

    def bound(self, norm: float) -> float | None:
        """Take a step's norm into account, and return what to scale it down to, or None to leave it."""
        if not math.isfinite(norm):
            return None
        if len(self._first) < self._warmup_steps:
            self._first.append(norm)
            if len(self._first) == self._warmup_steps:
                self._mean = sum(self._first) / self._warmup_steps
                self._variance = sum((each - self._mean) ** 2 for each in self._first) / self._warmup_steps
            return None
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / (deviation + EPS)
        bound = self._mean + self._z_threshold**2 / z * deviation if z > self._z_threshold else None
        passed = norm if bound is None else bound
        self._mean = self._alpha * self._mean + (1 - self._alpha) * passed
        self._variance = self._alpha * self._variance + (1 - self._alpha) * (passed - self._mean) ** 2
        return bound

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint carries on, as JSON takes it."""
        return {"first": self._first, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._first, self._mean, self._variance = list(saved["first"]), saved["mean"], saved["variance"]
