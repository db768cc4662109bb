"""Another policy over the gradients of a run that is over: needs no torch and no model.

A replay asks what the controller *would have decided* on the norms that were recorded. Had it decided so in the
run, the later norms would have been others: a replay is a first look at a policy, not its result.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnmr.controller import Controller
from gnmr.policy import Policy, breakpoints
from gnmr.trace import Trace

_DECIDED = ("gnmr", "delta_gnmr", "risk", "exceeds", "active", "lock")


def replay(trace: Trace, policy: Policy | None = None) -> Trace:
    """Decide a whole trace again.

    Args:
        trace: T steps, N units.
        policy: the policy to decide under, with schedules in steps or in fractions of the trace's length; None is
            the trace's own, which gives its decisions bit for bit (where ``header["trigger"]`` is ``"gnmr"``:
            controls draw or rank otherwise).

    Returns:
        The same norms with the new decisions and the new policy in the header.

    Raises:
        ValueError: a fractional schedule that the trace is too short for.
    """
    policy = trace.policy if policy is None else policy.resolve(max(1, len(trace.steps)))
    controller = Controller(len(trace.units), policy, trace.units)
    rows: dict[str, list[Any]] = {name: [] for name in _DECIDED}
    for norms, observed in zip(trace.norm, trace.observed, strict=True):
        decision = controller.update(norms, observed)
        for name in _DECIDED:
            rows[name].append(getattr(decision, name))
    columns: dict[str, Any] = {
        name: np.array(values, dtype=getattr(trace, name).dtype).reshape(trace.norm.shape)
        for name, values in rows.items()
    }
    header = {**trace.header, "policy": policy.to_dict(), "trigger": "gnmr"}
    return replace(trace, header=header, **columns)


@dataclass(frozen=True)
class Summary:
    """What a controller did in a run; shares are of the unit-steps or steps outside the warm-up.

    Attributes:
        steps: decided steps, the warm-up's included.
        warmup_steps: of these, how many planned a step of the warm-up.
        promotion_ratio: unit-steps on the recovery path.
        exceeds_gnmr: observed unit-steps with GNMR > α.
        exceeds_delta: observed unit-steps with ΔGNMR > β; None where β is unused.
        hit_max: steps whose active set was full.
        promotions: (N,) how often each unit was moved to the recovery path.
        active_steps: (N,) how many steps each unit was planned on it.
        nonfinite: (N,) how many steps each unit's norm was NaN or Inf.
        global_faults: steps in which more than half of the observed units were non-finite.
    """

    steps: int
    warmup_steps: int
    promotion_ratio: float
    exceeds_gnmr: float
    exceeds_delta: float | None
    hit_max: float
    promotions: NDArray[np.int64]
    active_steps: NDArray[np.int64]
    nonfinite: NDArray[np.int64]
    global_faults: int


def summary(trace: Trace) -> Summary:
    """Summarise a trace.

    The first plan of a run (step 1) is no decision and is left out; the last row plans a step that may not have
    run, and is counted, since it was decided.
    """
    policy = trace.policy
    cap = min(policy.max_active, len(trace.units))
    counted = trace.steps >= policy.warmup_steps
    active, observed = trace.active[counted], trace.observed[counted]
    before = np.concatenate([np.zeros((1, len(trace.units)), dtype=np.bool_), active[:-1]])[: len(active)]
    bad = trace.observed & ~np.isfinite(trace.norm)
    seen = max(1, int(observed.sum()))
    return Summary(
        steps=len(trace.steps),
        warmup_steps=int(np.count_nonzero(~counted)),
        promotion_ratio=float(active.mean()) if active.size else 0.0,
        exceeds_gnmr=float(np.sum(observed & _over(trace.gnmr, policy.alpha, trace)[counted]) / seen),
        exceeds_delta=None
        if policy.beta is None
        else float(np.sum(observed & _over(trace.delta_gnmr, policy.beta, trace)[counted]) / seen),
        hit_max=float(np.mean(active.sum(axis=1) >= cap)) if cap and len(active) else 0.0,
        promotions=np.sum(active & ~before, axis=0),
        active_steps=active.sum(axis=0),
        nonfinite=bad.sum(axis=0),
        global_faults=int(np.sum(2 * bad.sum(axis=1) > trace.observed.sum(axis=1))),
    )


@dataclass(frozen=True)
class Difference:
    """What a second policy would have done otherwise; N units.

    Attributes:
        old: the first trace's summary.
        new: the second's.
        only_old: (N,) steps on the recovery path under the first only.
        only_new: (N,) steps on it under the second only.
        first_step: the first step whose decision differs, or None.
    """

    old: Summary
    new: Summary
    only_old: NDArray[np.int64]
    only_new: NDArray[np.int64]
    first_step: int | None


def compare(old: Trace, new: Trace) -> Difference:
    """Compare two traces over the same steps and units.

    Raises:
        ValueError: they are not over the same steps and units.
    """
    if old.units != new.units or len(old.steps) != len(new.steps):
        raise ValueError(
            f"the traces differ in steps or units: {len(old.steps)} steps of {len(old.units)} units, "
            f"{len(new.steps)} steps of {len(new.units)} units"
        )
    differs = np.flatnonzero((old.active != new.active).any(axis=1))
    return Difference(
        old=summary(old),
        new=summary(new),
        only_old=np.sum(old.active & ~new.active, axis=0),
        only_new=np.sum(new.active & ~old.active, axis=0),
        first_step=int(old.steps[differs[0]]) if len(differs) else None,
    )


def _over(values: NDArray[np.float64], threshold: Any, trace: Trace) -> NDArray[np.bool_]:
    limit = np.zeros(len(trace.steps))
    for first, value in breakpoints(threshold):
        limit[trace.steps >= first] = value
    return values > limit[:, None]
