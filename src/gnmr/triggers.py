"""Other triggers under the same budget, locks and timing.

Each is a :class:`~gnmr.controller.Controller`, keeps the same statistics, and is one of two kinds:

- a *score* takes the place of the paper's risk in Algorithm 2, threshold, lock and all: :class:`Gap`;
- a *choice* makes units active without threshold or lock: :class:`AlwaysTop`, :class:`Random`, :class:`Static`,
  :class:`Fixed`.

What a trigger reads beside the gradient norms is its signal (:attr:`Controller.needs`), which the guard provides:
see :mod:`gnmr.pytorch.signals`. ``docs/triggers.md`` has a card of each.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, get_args

import array_api_compat
import numpy as np

from gnmr.controller import Array, Controller, Decision, _top
from gnmr.errors import StateError
from gnmr.policy import Policy

By = Literal["risk", "norm", "gap", "gsnr", "jacobian", "oracle"]

_NEEDS: dict[str, str | None] = {
    "risk": None,
    "norm": None,
    "gap": "error",
    "gsnr": "noise",
    "jacobian": "jacobian",
    "oracle": "measured",
}


class Gap(Controller):
    """Damage: the error of a unit's casts times its gradient norm, as a share of the model's gradient.

    With ``e_b`` the relative error of what unit b casts on its low-cost path (the signal ``error``), ``e_b n_b``
    estimates the perturbation of its gradient that Remark 1 of the paper penalises, and ::

        R_b = e_b n_b / (threshold * sqrt(sum of n²))

    takes the place of the paper's risk. It ranks by damage where GNMR ranks by change, and a model whose low-cost path
    harms little promotes nothing.

    Args:
        threshold: the share of the whole gradient that a unit's perturbation may be.
        change: weigh the damage with GNMR, the unit's norm against its own history: ``e_b n_b GNMR_b``.

    Raises:
        ValueError: a threshold that is not > 0.

    Examples:
        >>> gap = Gap(2, Policy(max_active=1), threshold=0.1)
        >>> decision = gap.update([3.0, 4.0], signal=[0.25, 0.01])
        >>> decision.risk.round(6).tolist(), decision.active.tolist()
        ([1.5, 0.08], [True, False])
    """

    needs = "error"

    def __init__(
        self,
        n_units: int,
        policy: Policy,
        units: Sequence[str] | None = None,
        xp: ModuleType = np,
        device: Any = None,
        *,
        threshold: float = 0.02,
        change: bool = False,
    ) -> None:
        if not threshold > 0:
            raise ValueError(f"Gap(threshold) must be > 0, got {threshold!r}")
        super().__init__(n_units, policy, units, xp, device)
        self.threshold, self.change = threshold, change

    def score(self, norms: Array, observed: Array | None, signal: Array | None) -> Array:
        """Return R above."""
        xp = array_api_compat.array_namespace(norms)
        whole = xp.sqrt(xp.sum(xp.where(_seen(xp, norms, observed), norms, xp.zeros_like(norms)) ** 2))
        damage = signal * norms / (self.threshold * whole + self.policy.eps)
        if self.change:
            mean = self.state.mean
            damage = damage * xp.where(mean == 0, xp.ones_like(norms), norms / (mean + self.policy.eps))
        return damage


class _Chooser(Controller):
    """A controller whose active set comes from :meth:`choose`."""

    def _decide(self, norms: Array, observed: Array | None, signal: Array | None) -> Decision:
        decision = super()._decide(norms, observed, signal)
        xp = array_api_compat.array_namespace(norms)
        warming = decision.step < self.policy.warmup_steps
        active = self.choose(norms, observed, signal, decision) | warming
        lock = xp.zeros_like(decision.lock)
        self.state = self.state._replace(active=active, lock=lock)
        return decision._replace(active=active, lock=lock)

    def choose(self, norms: Array, observed: Array | None, signal: Array | None, decision: Decision) -> Array:
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
        by: what ranks the units. A non-finite norm ranks highest; a unit without a gradient, or without a signal, is
            never chosen.

            - ``"risk"``: the paper's score.
            - ``"norm"``: the raw gradient norm.
            - ``"gap"``: the error of the casts times the norm, as in :class:`Gap`.
            - ``"gsnr"``: the noise-to-signal ratio of the micro-batches' gradients.
            - ``"jacobian"``: the spectral norm of the unit's weights.
            - ``"oracle"``: the measured perturbation of the gradient (Corollary 1), for study.
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
        by: By = "risk",
        counts: Sequence[int] | None = None,
    ) -> None:
        if by not in get_args(By):
            raise ValueError(f"AlwaysTop(by) must be one of {', '.join(get_args(By))}, got {by!r}")
        super().__init__(n_units, policy, units, xp, device)
        self.by = by
        self.needs = _NEEDS[by]
        self.counts = None if counts is None else _Counts("AlwaysTop", counts, n_units)

    def choose(self, norms: Array, observed: Array | None, signal: Array | None, decision: Decision) -> Array:
        """Return the highest of the units that were observed."""
        xp = array_api_compat.array_namespace(norms)
        seen = xp.ones_like(decision.exceeds) if observed is None else observed
        score = decision.risk if self.by == "risk" else norms
        if _NEEDS[self.by] is not None and signal is not None:
            score = signal * norms if self.by == "gap" else signal
            seen = seen & (decision.nonfinite | ~xp.isnan(score))
        score = xp.where(decision.nonfinite, xp.full_like(norms, xp.inf), score)
        score = xp.where(seen, score, xp.zeros_like(norms))
        k = self.policy.max_active if self.counts is None else self.counts.at(int(decision.step))
        return _top(xp, score, seen, k)


class Random(_Chooser):
    """Units drawn at random: as many at each step as a reference run had, or at a rate.

    Args:
        counts: ``counts[t - 1]`` units are made active after step t.
        rate: in place of ``counts``, the chance of each unit, whatever the cap.
        seed: of the draws; the draw of a step depends on nothing but (seed, step), so a resumed run
            draws as an uninterrupted one.

    Raises:
        ValueError: both or neither of ``counts`` and ``rate``; a count that is negative or above N, or a rate outside
            [0, 1]; or, at a step, ``counts`` has come to its end.

    Examples:
        >>> control = Random(4, Policy(max_active=2), counts=[2, 0], seed=7)
        >>> [int(control.update([1.0] * 4).active.sum()) for _ in range(2)]
        [2, 0]
    """

    uncapped = True

    def __init__(
        self,
        n_units: int,
        policy: Policy,
        units: Sequence[str] | None = None,
        xp: ModuleType = np,
        device: Any = None,
        *,
        counts: Sequence[int] | None = None,
        rate: float | None = None,
        seed: int,
    ) -> None:
        super().__init__(n_units, policy, units, xp, device)
        if (counts is None) == (rate is None):
            raise ValueError(f"Random takes either counts or a rate, got counts={counts!r} and rate={rate!r}")
        if rate is not None and not 0 <= rate <= 1:
            raise ValueError(f"Random(rate) must be in [0, 1], got {rate!r}")
        self.counts = None if counts is None else _Counts("Random", counts, n_units)
        self.rate = rate
        self.seed = seed

    def choose(self, norms: Array, observed: Array | None, signal: Array | None, decision: Decision) -> Array:
        """Return a draw, without replacement."""
        step, n = int(decision.step), len(self.units)
        draw = np.random.default_rng([self.seed, step])
        chosen = draw.random(n) < (self.rate or 0.0)
        if self.counts is not None:
            chosen = np.zeros(n, dtype=np.bool_)
            chosen[draw.choice(n, self.counts.at(step), replace=False)] = True
        return array_api_compat.array_namespace(norms).asarray(chosen, device=self._device)


class Static(_Chooser):
    """A profile: the units of the largest mean GNMR during the warm-up, fixed after it (paper, Table 10).

    The warm-up is the policy's: all units run on the recovery path for ``warmup_steps``, whose norms make the profile.
    As in the paper the share is its own budget, and ``max_active`` does not bound it.

    Args:
        share: of the units, in (0, 1]; rounded to the nearest whole number of them, at least one.

    Raises:
        ValueError: a policy without a warm-up of two steps or more, or a share outside (0, 1].

    Examples:
        >>> static = Static(4, Policy(max_active=1, warmup_steps=2), share=0.25)
        >>> for norms in ([1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 2.0], [9.0, 1.0, 1.0, 1.0]):
        ...     decision = static.update(norms)
        >>> decision.active.tolist()
        [False, True, False, False]
    """

    uncapped = True

    def __init__(
        self,
        n_units: int,
        policy: Policy,
        units: Sequence[str] | None = None,
        xp: ModuleType = np,
        device: Any = None,
        *,
        share: float = 0.25,
    ) -> None:
        if policy.warmup_steps < 2:
            raise ValueError(
                f"Static profiles the units while policy.warmup_steps run, which must be >= 2, got "
                f"{policy.warmup_steps!r}"
            )
        if not 0 < share <= 1:
            raise ValueError(f"Static(share) must be in (0, 1], got {share!r}")
        super().__init__(n_units, policy, units, xp, device)
        self.share = share
        self._total = self.state.mean

    def choose(self, norms: Array, observed: Array | None, signal: Array | None, decision: Decision) -> Array:
        """Return the profile's top, once the warm-up is over."""
        xp = array_api_compat.array_namespace(norms)
        here = _seen(xp, norms, observed) & (decision.step <= self.policy.warmup_steps)
        self._total = self._total + xp.where(here, decision.gnmr, xp.zeros_like(norms))
        k = max(1, round(self.share * len(self.units)))
        return _top(xp, self._total, xp.ones_like(decision.exceeds), k)

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state and the profile."""
        return {**super().state_dict(), "profile": self._total.tolist()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, allow_policy_change: bool = False) -> None:
        """Go on from a saved state.

        Raises:
            StateError: see :meth:`Controller.load_state_dict`; or it has no profile of these units.
        """
        profile = state_dict.get("profile", ())
        if len(profile) != len(self.units) or list(state_dict.get("units", ())) != list(self.units):
            raise StateError(f"this is no state of Static over these {len(self.units)} units")
        super().load_state_dict(state_dict, allow_policy_change=allow_policy_change)
        self._total = self._xp.asarray(profile, dtype=self._xp.float64, device=self._device)


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

    uncapped = True

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

    def choose(self, norms: Array, observed: Array | None, signal: Array | None, decision: Decision) -> Array:
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


def _seen(xp: ModuleType, norms: Array, observed: Array | None) -> Array:
    """(N,) bool: observed, and finite."""
    finite = xp.isfinite(norms)
    return finite if observed is None else finite & observed
