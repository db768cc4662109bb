"""The paper's controller as two pure functions over arrays (arXiv 2606.00539, Algorithms 1 and 2).

``init`` makes a :class:`State`, ``update`` reads the gradient norms of step t and decides which units
run on the recovery path at step t + 1. Both are written once against the Python array API standard, so
that the same lines run on NumPy, on PyTorch tensors of any device without a host sync, and inside
``jax.jit``. :class:`Controller` is the stateful convenience over them.

    >>> import numpy as np
    >>> policy = Policy(max_active=1)
    >>> state = init(policy, n_units=3)
    >>> for norms in ([1.0, 2.0, 3.0], [1.0, 2.0, 9.0]):
    ...     state, decision = update(policy, state, np.array(norms))
    >>> decision.gnmr.round(6).tolist(), decision.active.tolist()
    ([1.0, 1.0, 3.0], [False, False, True])
"""

import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from gnmr.errors import GnmrWarning, StateError
from gnmr.policy import Ema, Policy, Schedule, Window, breakpoints

Array = Any
"""An array of any library that follows the Python array API standard."""

SCHEMA = 1


class State(NamedTuple):
    """What the controller remembers; N units, δ = ``policy.window``.

    The histories are tuples of rows: a push passes the old rows on and makes one new, with no copy of the whole.
    """

    step: Array  # () int64: steps seen
    count: Array  # (N,) float64, whole: norms absorbed, the unit's own clock, which the mean divides by
    mean: Array  # (N,) float64: A, the long-horizon mean of the absorbed norms; 0 before the first
    queue: tuple[Array, ...]  # δ rows (N,) float64: Q, the last GNMR values, oldest first; min(count, δ) are filled
    past: tuple[Array, ...]  # n rows (N,) float64: the last n norms under Window(n), else none
    active: Array  # (N,) bool: on the recovery path at step ``step + 1``
    lock: Array  # (N,) int32: updates that the unit stays a candidate


class Decision(NamedTuple):
    """What one step's norms led to; all arrays are (N,) but the first and the last, which are ()."""

    step: Array  # int64: 1-based number of the step whose gradients were read
    gnmr: Array  # float64: n / (A + eps)
    delta_gnmr: Array  # float64: GNMR / (mean(Q) + eps)
    risk: Array  # float64: max(GNMR / α, ΔGNMR / β), or the score of another trigger
    exceeds: Array  # bool: risk > 1
    active: Array  # bool: on the recovery path at step ``step + 1``
    lock: Array  # int32
    nonfinite: Array  # bool: observed, and NaN or Inf
    global_fault: Array  # bool: more than half of the observed units are non-finite


def init(policy: Policy, n_units: int, xp: ModuleType = np, device: Any = None) -> State:
    """Return the state before the first step: empty histories, every unit active if there is a warm-up.

    Args:
        policy: the settings, with its schedules in steps.
        n_units: N >= 1.
        xp: the array library; with JAX, 64-bit types must be enabled.
        device: where the arrays live; ``None`` is the library's default.

    Raises:
        ValueError: ``n_units`` < 1, or the policy still holds fractions of a run.
    """
    if n_units < 1:
        raise ValueError(f"n_units must be >= 1, got {n_units!r}")
    if not policy.resolved:
        raise ValueError("the policy's schedule is in fractions of a run: call policy.resolve(total_steps) first")
    xp = array_api_compat.array_namespace(xp.empty(0))
    past = policy.history.length if isinstance(policy.history, Window) else 0
    zeros = xp.zeros(n_units, dtype=xp.float64, device=device)
    return State(
        step=xp.zeros((), dtype=xp.int64, device=device),
        count=zeros,
        mean=zeros,
        queue=(zeros,) * policy.window,
        past=(zeros,) * past,
        active=xp.full(n_units, policy.warmup_steps > 0, dtype=xp.bool, device=device),
        lock=xp.zeros(n_units, dtype=xp.int32, device=device),
    )


def update(
    policy: Policy, state: State, norms: Array, observed: Array | None = None, score: Array | None = None
) -> tuple[State, Decision]:
    """Read the gradients of one step and decide the paths of the next.

    Args:
        policy: the settings, the same at every step.
        state: what :func:`init` or the last update returned; it is not changed.
        norms: (N,) float64, L2 norms of the true gradient: accumulated over micro-batches, reduced
            over ranks, unscaled, not clipped.
        observed: (N,) bool, False where the unit got no gradient this step; ``None``: all were.
        score: (N,) float64, another trigger's risk in units of its threshold, under the same budget and locks; NaN is
            no risk. ``None``: the paper's.

    Returns:
        The next state and the :class:`Decision`.
    """
    xp = array_api_compat.array_namespace(norms)
    one, infinite = xp.ones_like(norms[:1]), xp.full_like(norms[:1], xp.inf)
    step = state.step + 1

    # Algorithm 1. A norm whose ratio overflows is as useless as an Inf, and treated as one.
    fresh = state.mean == 0
    ratio = norms / (state.mean + policy.eps)
    finite = xp.isfinite(_where(xp, fresh, norms, ratio))
    observed = xp.ones_like(finite) if observed is None else observed
    ready = observed & finite
    nonfinite = observed & ~finite
    global_fault = 2 * xp.count_nonzero(nonfinite) > xp.count_nonzero(observed)

    silent = _where(xp, nonfinite, infinite, one)  # what a unit scores that has no ratio
    gnmr = _where(xp, ready & ~fresh, ratio, silent)
    usual = _sum(state.queue)
    usual /= policy.window
    usual += policy.eps
    delta = _where(xp, ready & (state.count >= policy.window), gnmr / usual, silent)
    if score is None:
        risk = _risk(xp, policy, step, gnmr, delta)
    else:
        risk = _where(xp, nonfinite, infinite, _where(xp, xp.isnan(score), 0 * one, score))
    risk = _where(xp, observed, risk, 0 * one)
    absorbed = _absorb(xp, policy, state, norms, gnmr, ready & ~global_fault)

    # Algorithm 2
    exceeds = risk > 1
    locked = state.lock > 0
    active = _top(xp, risk, exceeds | locked, policy.max_active)
    # T_lock where the risk exceeds 1, else max(lock - 1, 0): as a sum of products, which is quicker than where()
    lock = xp.astype(active & exceeds, state.lock.dtype)
    lock *= policy.lock_steps
    kept = xp.astype(active & locked & ~exceeds, state.lock.dtype)
    lock -= kept
    kept *= state.lock
    lock += kept

    # A fault everywhere blames nobody: the last choice stands. The warm-up's "everyone" is no choice.
    nobody = xp.zeros_like(active[:1])
    chosen = _where(xp, step > policy.warmup_steps, state.active, nobody)
    active = _where(xp, global_fault, chosen, active)
    lock = _where(xp, global_fault, state.lock, lock)
    warming = step < policy.warmup_steps
    active = _where(xp, warming, ~nobody, active)
    lock = _where(xp, warming, xp.zeros_like(lock[:1]), lock)

    state = absorbed._replace(step=step, active=active, lock=lock)
    return state, Decision(step, gnmr, delta, risk, exceeds, active, lock, nonfinite, global_fault)


def _where(xp: ModuleType, condition: Array, yes: Array, no: Array) -> Array:
    """Return ``xp.where``; what is returned must not be changed in place.

    On NumPy, where a look at the condition needs no sync, one that holds everywhere or nowhere costs no copy: so it
    is in an ordinary step, in which every unit is observed and finite.
    """
    if array_api_compat.is_numpy_namespace(xp) and (condition.all() or not condition.any()):
        chosen = yes if condition.flat[0] else no
        return np.broadcast_to(chosen, np.broadcast_shapes(condition.shape, yes.shape, no.shape))
    return xp.where(condition, yes, no)


def _sum(rows: tuple[Array, ...]) -> Array:
    # Row by row: the order of the sum, and so its last bit, is the same in every library.
    total = rows[0] + (rows[1] if len(rows) > 1 else 0.0)
    for row in rows[2:]:
        total += row
    return total


def _threshold(xp: ModuleType, value: float | Schedule, step: Array, like: Array) -> Array:
    pieces = breakpoints(value)
    found = pieces[0][1] if len(pieces) == 1 else xp.full_like(like[:1], pieces[0][1])
    for first, number in pieces[1:]:
        found = xp.where(step >= first, xp.full_like(found, number), found)
    return found


def _risk(xp: ModuleType, policy: Policy, step: Array, gnmr: Array, delta: Array) -> Array:
    risk = gnmr / _threshold(xp, policy.alpha, step, gnmr)
    if policy.beta is None:
        return risk
    return xp.maximum(risk, delta / _threshold(xp, policy.beta, step, delta))


def _absorb(xp: ModuleType, policy: Policy, state: State, norms: Array, gnmr: Array, ready: Array) -> State:
    """Add this step's norms to the histories of the units in ``ready``."""
    own_clock = state.count + 1
    past = state.past
    if isinstance(policy.history, Window):
        past = _push(xp, past, norms, ready)
        filled = xp.clip(own_clock, 1.0, float(policy.history.length))
        # Divided before it is summed: the sum of two norms near the largest float64 is none.
        mean = _sum(tuple(row / filled for row in past))
    else:
        clock = own_clock
        if isinstance(policy.history, Ema):
            clock = xp.clip(clock, 1.0, 1 / (1 - policy.history.decay))
        mean = norms - state.mean
        mean /= clock
        mean += state.mean
    return state._replace(
        count=_where(xp, ready, own_clock, state.count),
        mean=_where(xp, ready, mean, state.mean),
        queue=_push(xp, state.queue, gnmr, ready),
        past=past,
    )


def _push(xp: ModuleType, rows: tuple[Array, ...], newest: Array, where: Array) -> tuple[Array, ...]:
    """Drop the oldest row and add ``newest`` at the end, in the columns of ``where``."""
    pushed = (*rows[1:], newest)
    if array_api_compat.is_numpy_namespace(xp) and where.all():
        return pushed
    return tuple(xp.where(where, new, old) for old, new in zip(rows, pushed, strict=True))


def _top(xp: ModuleType, risk: Array, candidate: Array, k: int) -> Array:
    """Mark the k candidates of highest risk, without a data-dependent shape.

    Equal finite risks: the lower index first. Equal infinite risks: the higher index first, since a
    non-finite gradient spreads to every unit before the one it was born in.
    """
    k = min(k, risk.shape[0])
    if k == 0:
        return xp.zeros_like(candidate)
    # Half the risk, and its negative for who is no candidate: distinct values, which selection is quick with.
    score = xp.astype(candidate, risk.dtype)
    score -= 0.5
    score *= risk
    least = 2 * _kth_largest(xp, score, k)
    above = candidate & (risk > least)
    tied = candidate & (risk == least)
    return above | _some(xp, tied, k - xp.count_nonzero(above), backwards=xp.isinf(least))


def _some(xp: ModuleType, mask: Array, most: Array, backwards: Array) -> Array:
    """Keep the first ``most`` of a mask, or the last."""
    total = xp.count_nonzero(mask)
    if array_api_compat.is_numpy_namespace(xp) and total <= most:
        return mask
    rank = xp.cumulative_sum(xp.astype(mask, xp.int32))
    return mask & xp.where(backwards, rank > total - most, rank <= most)


def _kth_largest(xp: ModuleType, values: Array, k: int) -> Array:
    """Return the k-th largest value; the array may be reordered."""
    # The standard has only a full sort; a library's own selection is several times faster.
    place = values.shape[0] - k
    if array_api_compat.is_numpy_namespace(xp):
        values.partition(place)
        return values[place]
    if hasattr(xp, "kthvalue"):
        return xp.kthvalue(values, place + 1).values
    return xp.sort(values)[place]


class Controller:
    """The controller with its state held for you.

    Args:
        n_units: N >= 1.
        policy: the settings, with its schedules in steps.
        units: N unit names in forward order; ``None`` names them "0", "1", ...
        xp: the array library of the norms.
        device: where the state lives.

    Raises:
        ValueError: see :func:`init`; or the names are not N distinct strings.

    Examples:
        >>> controller = Controller(2, Policy(max_active=1), units=["a", "b"])
        >>> controller.update([1.0, 1.0]).active.tolist()
        [False, False]
        >>> controller.update([4.0, 1.0]).active.tolist()
        [True, False]
    """

    def __init__(
        self,
        n_units: int,
        policy: Policy,
        units: Sequence[str] | None = None,
        xp: ModuleType = np,
        device: Any = None,
    ) -> None:
        names = [str(i) for i in range(n_units)] if units is None else list(units)
        if len(names) != n_units or len(set(names)) != n_units:
            raise ValueError(f"units must be {n_units} distinct names, got {names!r}")
        self.policy = policy
        self.units = tuple(names)
        self.state = init(policy, n_units, xp, device)
        self._xp, self._device = xp, device

    @property
    def active(self) -> Array:
        """(N,) bool: the units on the recovery path at the next step."""
        return self.state.active

    @property
    def step(self) -> int:
        """How many steps have been seen (a host sync on an accelerator)."""
        return int(self.state.step)

    uncapped: bool = False
    """Whether the active set is a baseline outside the cap."""

    needs: str | None = None
    """The signal that a trigger reads beside the norms: a key of :data:`gnmr.pytorch.signals.SIGNALS`."""

    def score(self, norms: Array, observed: Array | None, signal: Array | None) -> Array | None:
        """Return a trigger's (N,) risk in units of its threshold; None is the paper's."""
        return None

    def update(self, norms: Array, observed: Array | None = None, signal: Array | None = None) -> Decision:
        """Read the norms of one step; see :func:`update`. Lists are taken as NumPy arrays.

        Args:
            norms: (N,).
            observed: (N,) bool, or None.
            signal: (N,) what the trigger :attr:`needs` beside; NaN where it is not known.

        Raises:
            ValueError: a wrong shape, a signal that is missing, or (on NumPy, where looking costs no sync) a
                negative norm.
        """
        if self.needs is not None and signal is None:
            raise ValueError(f"{type(self).__name__} needs the signal {self.needs!r} at every update")
        if self._xp is np:
            norms = np.asarray(norms, dtype=np.float64)
            observed = None if observed is None else np.asarray(observed, dtype=np.bool_)
            signal = None if signal is None else np.asarray(signal, dtype=np.float64)
        shape = (len(self.units),)
        for name, value in (("norms", norms), ("observed", observed), ("signal", signal)):
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
        if self._xp is np:
            if (norms < 0).any():
                worst = int(np.nanargmin(norms))
                raise ValueError(f"norms must be >= 0, got {norms[worst]} for unit {self.units[worst]!r}")
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                return self._decide(norms, observed, signal)
        return self._decide(norms, observed, signal)

    def _decide(self, norms: Array, observed: Array | None, signal: Array | None) -> Decision:
        score = self.score(norms, observed, signal)
        self.state, decision = update(self.policy, self.state, norms, observed, score)
        return decision

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides, as one flat dict of JSON-able values.

        Floats survive JSON bit for bit, and ``torch.load(weights_only=True)`` takes it.
        """
        lists = {
            name: [row.tolist() for row in value] if isinstance(value, tuple) else value.tolist()
            for name, value in self.state._asdict().items()
        }
        return {"schema": SCHEMA, "policy": self.policy.to_dict(), "units": list(self.units), **lists}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, allow_policy_change: bool = False) -> None:
        """Go on from a saved state; units that only one side knows are warned about by name.

        Units are matched by name: what matches keeps its history, the rest starts fresh.

        Raises:
            StateError: not a controller state, another schema, or another policy (the message says
                which field) unless ``allow_policy_change``.
        """
        _check(state_dict, self.policy, allow_policy_change)
        saved = {name: i for i, name in enumerate(state_dict["units"])}
        mine = [i for i, name in enumerate(self.units) if name in saved]
        theirs = [saved[self.units[i]] for i in mine]
        fresh = init(self.policy, len(self.units))
        step = np.asarray(state_dict["step"], dtype=np.int64)
        # A new unit starts with the others, not in a warm-up of its own.
        values = fresh._replace(step=step, active=fresh.active & (step < self.policy.warmup_steps))._asdict()
        names = ["active", "lock"]
        if all(len(state_dict[name]) == len(values[name]) for name in ("queue", "past")):
            names += ["count", "mean"]
            for name in ("queue", "past"):
                rows = zip(values[name], state_dict[name], strict=True)
                values[name] = tuple(_carried(new, old, mine, theirs) for new, old in rows)
        else:
            _warn("the saved histories have another length than the policy asks for: statistics start fresh")
        for name in names:
            values[name] = _carried(values[name], state_dict[name], mine, theirs)
        if step >= self.policy.warmup_steps:
            values["active"], values["lock"] = self._capped(values["active"], values["lock"])
        _warn_of_strangers(self.units, tuple(saved))
        xp = array_api_compat.array_namespace(self._xp.empty(0))

        def there(value: Array) -> Array:
            return xp.asarray(value, device=self._device)

        self.state = State(**{k: tuple(map(there, v)) if isinstance(v, tuple) else there(v) for k, v in values.items()})

    def _capped(self, active: Array, lock: Array) -> tuple[Array, Array]:
        """Bring a state that was saved under another policy within this one's cap and lock."""
        lock = np.minimum(lock, self.policy.lock_steps)
        most, held = self.policy.max_active, int(np.count_nonzero(active))
        if held <= most or self.uncapped:
            return active, lock
        _warn(f"{held} units were active, and the cap is {most} now: the {most} that were locked longest stay")
        kept = np.zeros_like(active)
        order = np.lexsort((np.arange(len(lock)), -lock, ~active))
        kept[order[:most]] = True
        return kept, np.where(kept, lock, 0)


def _carried(new: Array, old: Sequence[Any], mine: list[int], theirs: list[int]) -> Array:
    """Return ``new`` with the saved values of the units that both sides know."""
    found = new.copy()
    found[mine] = np.asarray(old, dtype=new.dtype)[theirs]
    return found


def _warn(message: str) -> None:
    warnings.warn(message, GnmrWarning, stacklevel=4)


def _check(saved: Mapping[str, Any], policy: Policy, allow_policy_change: bool) -> None:
    wanted = {"schema", "policy", "units", *State._fields}
    missing = sorted(wanted - set(saved))
    if missing:
        raise StateError(f"this is no controller state: it has no {missing[0]!r}")
    n = len(saved["units"])
    rows = {name: [saved[name]] for name in ("count", "mean", "active", "lock")} | {
        "queue": saved["queue"],
        "past": saved["past"],
    }
    for name, values in rows.items():
        if any(len(row) != n for row in values):
            raise StateError(f"the state is damaged: {name!r} does not have {n} values, one for each unit")
    if not np.isfinite(np.asarray(saved["mean"], dtype=np.float64)).all():
        raise StateError("the state is damaged: 'mean' holds a number that is not finite")
    if saved["schema"] != SCHEMA:
        raise StateError(
            f"the state has schema {saved['schema']!r}, and this gnmr reads {SCHEMA}; "
            "load it with the version that wrote it"
        )
    mine = policy.to_dict()
    changed = [name for name in mine if saved["policy"].get(name) != mine[name]]
    if changed and not allow_policy_change:
        name = changed[0]
        raise StateError(
            f"the state was saved under policy.{name} = {saved['policy'].get(name)!r}, and now it is "
            f"{mine[name]!r}; go on with the old value, or pass allow_policy_change=True"
        )


def _warn_of_strangers(mine: tuple[str, ...], saved: tuple[str, ...]) -> None:
    new = [name for name in mine if name not in set(saved)]
    gone = [name for name in saved if name not in set(mine)]
    if new:
        _warn(f"no saved history for {_names(new)}: they start fresh")
    if gone:
        _warn(f"the saved history of {_names(gone)} fits no unit and is dropped")


def _names(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
