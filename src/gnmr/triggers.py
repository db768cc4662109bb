"""Other choices under the same cap and timing: the matched controls of a comparison.

Each is a :class:`~gnmr.controller.Controller`: it keeps the same statistics, and differs only in which
units it makes active. None of them locks.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import array_api_compat
import numpy as np

from gnmr.controller import Array, Controller, Decision, _top
from gnmr.policy import Policy


class _Chooser(Controller):
    """A controller whose active set comes from :meth:`choose`."""

    def _decide(self, norms: Array, observed: Array | None) -> Decision:
        decision = super()._decide(norms, observed)
        xp = array_api_compat.array_namespace(norms)
        warming = decision.step < self.policy.warmup_steps
        active = self.choose(norms, observed, decision) | warming
        lock = xp.zeros_like(decision.lock)
        self.state = self.state._replace(active=active, lock=lock)
        return decision._replace(active=active, lock=lock)

    def choose(self, norms: Array, observed: Array | None, decision: Decision) -> Array:
        """Return (N,) bool: who is active at the next step."""
        raise NotImplementedError


class _Counts:
    """How many units a reference run had at each step."""

    def __init__(self, who: str, counts: Sequence[int], n_units: int) -> None:
        wrong = [count for count in counts if not 0 <= count <= n_units]
        if wrong:
            raise ValueError(f"{who}(counts) must be in [0, {n_units}], got {wrong[0]!r}")
        self._who, self._counts = who, [int(count) for count in counts]

    def at(self, step: int) -> int:
        if step > len(self._counts):
            raise ValueError(
                f"{self._who}(counts) has {len(self._counts)} steps, and this is step {step}: "
                "the reference run must be at least as long"
            )
        return self._counts[step - 1]


class AlwaysTop(_Chooser):
    """The top ``max_active`` at every step, with no threshold.

    Args:
        by: ``"risk"``, the paper's score, or ``"norm"``, the raw gradient norm. A non-finite norm
            ranks highest; a unit without a gradient is never chosen.
        counts: in place of ``max_active``, a number for each step, as in :class:`Random`.

    Examples:
        >>> AlwaysTop(3, Policy(max_active=1), by="norm").update([1.0, 5.0, 2.0]).active.tolist()
        [False, True, False]
    """

    def __init__(
        self,
        n_units: int,
        policy: Policy,
        units: Sequence[str] | None = None,
        xp: ModuleType = np,
        device: Any = None,
        *,
        by: Literal["risk", "norm"] = "risk",
        counts: Sequence[int] | None = None,
    ) -> None:
        if by not in ("risk", "norm"):
            raise ValueError(f"AlwaysTop(by) must be 'risk' or 'norm', got {by!r}")
        super().__init__(n_units, policy, units, xp, device)
        self.by = by
        self.counts = None if counts is None else _Counts("AlwaysTop", counts, n_units)

    def choose(self, norms: Array, observed: Array | None, decision: Decision) -> Array:
        """Return the top ``max_active`` of the units that were observed."""
        xp = array_api_compat.array_namespace(norms)
        seen = xp.ones_like(decision.exceeds) if observed is None else observed
        score = decision.risk
        if self.by == "norm":
            score = xp.where(decision.nonfinite, xp.full_like(norms, xp.inf), norms)
        k = self.policy.max_active if self.counts is None else self.counts.at(int(decision.step))
        return _top(xp, score, seen, k)


class Random(_Chooser):
    """As many units at each step as a reference run had, drawn at random.

    Args:
        counts: ``counts[t - 1]`` units are made active after step t.
        seed: of the draws; the draw of a step depends on nothing but (seed, step), so a resumed run
            draws as an uninterrupted one.

    Raises:
        ValueError: a count is negative or above N; or, at a step, ``counts`` has come to its end.

    Examples:
        >>> control = Random(4, Policy(max_active=2), counts=[2, 0], seed=7)
        >>> [int(control.update([1.0] * 4).active.sum()) for _ in range(2)]
        [2, 0]
    """

    def __init__(
        self,
        n_units: int,
        policy: Policy,
        units: Sequence[str] | None = None,
        xp: ModuleType = np,
        device: Any = None,
        *,
        counts: Sequence[int],
        seed: int,
    ) -> None:
        super().__init__(n_units, policy, units, xp, device)
        self.counts = _Counts("Random", counts, n_units)
        self.seed = seed

    def choose(self, norms: Array, observed: Array | None, decision: Decision) -> Array:
        """Return a draw of ``counts[step - 1]`` units, without replacement."""
        step = int(decision.step)
        draw = np.random.default_rng([self.seed, step])
        chosen = np.zeros(len(self.units), dtype=np.bool_)
        chosen[draw.choice(len(self.units), self.counts.at(step), replace=False)] = True
        return array_api_compat.array_namespace(norms).asarray(chosen, device=self._device)


class Fixed(_Chooser):
    """Every unit on one path for the whole run: the static baselines, outside any cap.

    Args:
        recover: True for the recovery path everywhere, False for the low-cost path.

    Examples:
        >>> Fixed(2, Policy(max_active=0), recover=True).active.tolist()
        [True, True]
    """

    def __init__(
        self,
        n_units: int,
        policy: Policy,
        units: Sequence[str] | None = None,
        xp: ModuleType = np,
        device: Any = None,
        *,
        recover: bool,
    ) -> None:
        super().__init__(n_units, policy, units, xp, device)
        self.recover = recover
        everyone = self.state.lock == 0
        self.state = self.state._replace(active=everyone if recover else ~everyone)

    def choose(self, norms: Array, observed: Array | None, decision: Decision) -> Array:
        """Return everyone, or no one."""
        everyone = decision.lock >= 0
        return everyone if self.recover else ~everyone
