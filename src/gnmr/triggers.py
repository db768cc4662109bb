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
        recover: True for the recovery path everywhere, False for the low-cost path, or the names of the units that
            are on the recovery path, the others staying on the low-cost one.

    Raises:
        ValueError: a name that is no unit's.

    Examples:
        >>> Fixed(2, Policy(max_active=0), recover=True).active.tolist()
        [True, True]
        >>> Fixed(2, Policy(max_active=0), ["a", "b"], recover=["b"]).active.tolist()
        [False, True]
    """

    def __init__(
        self,
        n_units: int,
        policy: Policy,
        units: Sequence[str] | None = None,
        xp: ModuleType = np,
        device: Any = None,
        *,
        recover: bool | Sequence[str],
    ) -> None:
        super().__init__(n_units, policy, units, xp, device)
        self.recover = recover
        if isinstance(recover, bool):
            chosen = np.full(n_units, recover)
        else:
            unknown = [name for name in recover if name not in self.units]
            if unknown:
                raise ValueError(f"Fixed(recover) must name units, and {unknown[0]!r} is none: {', '.join(self.units)}")
            chosen = np.isin(self.units, list(recover))
        self._chosen = xp.asarray(chosen, device=device)
        self.state = self.state._replace(active=self._chosen)

    def choose(self, norms: Array, observed: Array | None, decision: Decision) -> Array:
        """Return the units that were chosen when the run began."""
        return self._chosen


def edge_units(units: Sequence[str]) -> list[str]:
    """Return the units of the first and the last decoder layer: those that a static mix keeps in high precision.

    Which layer a unit is in is the first number in its name; units outside the layers (a head, embeddings) are in none.

    Args:
        units: all of them, by name.

    Returns:
        Those in the layers of the lowest and the highest number, in the order of ``units``.

    Raises:
        ValueError: no unit's name has a number.

    Examples:
        >>> edge_units(["layers.0.mlp", "layers.1.mlp", "layers.2.attn", "layers.2.mlp", "lm_head"])
        ['layers.0.mlp', 'layers.2.attn', 'layers.2.mlp']
    """
    layers = {name: next((int(part) for part in name.split(".") if part.isdecimal()), None) for name in units}
    numbers = {layer for layer in layers.values() if layer is not None}
    if not numbers:
        raise ValueError(
            f"no unit is in a numbered layer, such as layers.0.mlp, so none is first or last: {', '.join(units)}"
        )
    return [name for name, layer in layers.items() if layer in (min(numbers), max(numbers))]
