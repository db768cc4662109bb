"""The recovery gap of every unit, measured during a run, and how well each trigger ranks it.

At chosen steps of one arm the gaps are measured (:mod:`gnmr.pytorch.gaps`) on the last micro-batches, beside the
training, which goes on as without. Each trigger's score of the same step is then held against them:

- *rank*: Spearman's correlation of the score with the gap.
- *precision*: of the ``max_active`` units of the highest score, the share that is among those of the largest gap.
- *gain*: the sum of squared gaps of those units over that of the oracle's. For perturbations of zero mean a squared
  gap is, but for a factor, what recovering a unit gains in the bound of Theorem 1 (paper, Remark 1).

A ranking at random has on average no rank correlation, and ``max_active`` / N of precision and (over many units) gain.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from gnmr import Guard, Paths, Simulated
from gnmr._io import write_json
from gnmr.errors import RunError
from gnmr.lab import runs
from gnmr.lab.arms import make_trigger, parse_arm
from gnmr.lab.recipe import Recipe
from gnmr.lab.train import train_arm
from gnmr.lab.trainer import RunTrainer, Say
from gnmr.pytorch.gaps import Closure, Gaps, measure_gaps
from gnmr.pytorch.signals import CastError, Jacobian, MicroBatchNoise, Signal
from gnmr.theory import persistence
from gnmr.trace import Trace, read_trace

SCHEMA = 1
FILE = "audit.json"
SCORES = ("gnmr", "delta_gnmr", "risk", "norm", "gap", "gap x gnmr", "error", "gsnr", "jacobian")
"""What is held against the gaps; gsnr only where a step has several micro-batches."""

Floats = NDArray[np.float64]


def audit_run(
    recipe: Recipe,
    folder: Path,
    *,
    at: Sequence[int],
    arm: str = "gnmr",
    seed: int = 0,
    micro_batches: int = 4,
    say: Say = print,
) -> dict[str, Any]:
    """Train one arm, and audit it at some steps.

    Args:
        recipe: what to run.
        folder: of the run; ``audit.json`` is written into it.
        at: the steps, from 1.
        arm: one whose trigger reads the norms alone.
        seed: of the run.
        micro_batches: how many of the last micro-batches the gaps are measured on.
        say: where lines for the user go.

    Returns:
        What stands in ``audit.json``: for each step and unit the gaps, the scores and what its casts say of themselves
        (their relative errors by role, and under simulated paths the shares that saturated and underflowed and
        how stale the scales are), and for each score its ranking.

    Raises:
        gnmr.RunError: a step outside the run, or an arm that has a signal of its own or no casts.
    """
    wrong = [step for step in at if not 1 <= step <= recipe.run.steps]
    if wrong or not at:
        raise RunError(f"the steps to audit must be in 1 to {recipe.run.steps}, got {list(at)}")
    if micro_batches < 1:
        raise RunError(f"micro_batches must be >= 1, got {micro_batches}")
    chosen = parse_arm(arm)
    if chosen.exact:
        raise RunError("the arm 'exact' casts nothing, so it has no gap to measure: audit another, such as gnmr")
    plain = make_trigger(chosen, recipe.triggers.get(chosen.trigger, {}), seed, folder)
    if plain(1, recipe.make_policy(chosen.variant).resolve(recipe.run.steps)).needs is not None:
        raise RunError(f"the arm {arm!r} reads a signal of its own: audit one that reads the norms alone, such as gnmr")
    auditors: list[Auditor] = []

    def signal(trainer: RunTrainer) -> Callable[[Guard], Signal]:
        def make(guard: Guard) -> Signal:
            auditors.append(Auditor(guard, trainer, sorted(set(at)), micro_batches, say))
            return auditors[-1]

        return make

    train_arm(recipe, arm, seed, folder, overwrite=True, say=say, audit=(partial(_audited, plain), signal))
    trace = read_trace((folder / runs.TRACE).with_suffix(".parquet"))
    found = _report(auditors[0], trace, recipe.run.gradient_accumulation > 1)
    found = {"schema": SCHEMA, "recipe": recipe.name, "arm": arm, "seed": seed, "micro_batches": micro_batches} | found
    write_json(folder / FILE, found)
    return found


class Auditor(Signal):
    """Measures gaps and signals at some steps; the trigger that runs does not read what it returns."""

    def __init__(self, guard: Guard, trainer: RunTrainer, at: Sequence[int], micro_batches: int, say: Say) -> None:
        assert guard.paths is not None  # noqa: S101 (every recipe has paths)
        self._guard, self._trainer, self._paths, self._say = guard, trainer, guard.paths, say
        self._at = at
        self._params = [param for param in trainer.model.parameters() if param.requires_grad]
        trainer.keep_inputs(micro_batches)
        self._errors = CastError(guard.paths, every=1)
        self._signals: dict[str, Signal] = {
            "error": self._errors,
            "jacobian": Jacobian(guard.units),
        }
        if trainer.args.gradient_accumulation_steps > 1:
            self._signals["gsnr"] = MicroBatchNoise(guard.units)
        self.gaps: dict[int, Gaps] = {}
        self.signals: dict[int, dict[str, Floats]] = {}
        self.casts: dict[int, dict[str, Floats]] = {}

    def read(self, reading: Any) -> Floats:
        """Measure, if it is time."""
        step = self._guard.controller.step + 1
        signals = {name: signal.read(reading) for name, signal in self._signals.items()}
        if step in self._at:
            self.signals[step] = signals
            self.casts[step] = self._errors.last | _ranges(self._paths)
            closures: list[Closure] = [partial(self._trainer.loss_again, kept) for kept in self._trainer.kept]
            rate = float(self._trainer.lr_scheduler.get_last_lr()[0])
            plan = self._guard.plan
            self.gaps[step] = measure_gaps(
                self._guard.units, self._params, self._paths, plan, closures, lr=rate if rate > 0 else None
            )
            self._say(f"step {step}: gaps of {len(plan)} units measured on {len(closures)} micro-batches")
        return np.full(len(self._guard.units), np.nan)

    def close(self) -> None:
        """Close the signals."""
        for signal in self._signals.values():
            signal.close()


def rank(score: Floats, gap: Floats, k: int) -> dict[str, float]:
    """Return how well a score ranks the gaps, as defined above.

    Examples:
        >>> rank(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.5, 0.4]), k=1)
        {'rank': 0.5, 'precision': 0.0, 'gain': 0.64}
    """
    score = np.where(np.isnan(score), -np.inf, score)
    mine, best = (set(np.argsort(-values, kind="stable")[:k]) for values in (score, gap))
    gains = [sum(float(gap[unit]) ** 2 for unit in chosen) for chosen in (mine, best)]
    level = np.ptp(score[np.isfinite(score)]) == 0 if np.isfinite(score).any() else True
    return {
        "rank": 0.0 if level else float(spearmanr(score, gap).statistic),
        "precision": len(mine & best) / k if k else 0.0,
        "gain": round(gains[0] / gains[1], 12) if gains[1] else 0.0,
    }


def _ranges(paths: Paths) -> dict[str, Floats]:
    """Return what simulated casts say of their ranges: shares of the run so far, and the staleness of this step."""
    if not isinstance(paths, Simulated):
        return {}
    saturated, underflowed, total = paths.counters()
    shares = {"saturated": saturated, "underflowed": underflowed}
    with np.errstate(invalid="ignore"):
        found = {name: count / total for name, count in shares.items()}
    return found | {"stale_scale": paths.stale_scales()}


def _audited(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
    controller = plain(*args, **options)
    controller.needs = "audit"
    return controller


def _report(auditor: Auditor, trace: Trace, several: bool) -> dict[str, Any]:
    k = min(trace.policy.max_active, len(trace.units))
    names = [name for name in SCORES if several or name != "gsnr"]
    ranked: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    steps = []
    for step, gaps in auditor.gaps.items():
        row = int(np.flatnonzero(trace.steps == step)[0])
        scores = _scores(trace, row, auditor.signals[step])
        for name in names:
            ranked[name].append(rank(scores[name], gaps.absolute, k))
        columns = {key: _numbers(value) for key, value in vars(gaps).items()}
        casts = {key: _numbers(value) for key, value in auditor.casts[step].items()}
        shown = {name: _numbers(scores[name]) for name in names}
        steps.append({"step": step, "gaps": columns, "casts": casts, "scores": shown})
    means = {
        name: {key: float(np.mean([each[key] for each in rows])) for key in ("rank", "precision", "gain")}
        for name, rows in ranked.items()
    }
    chance = k / len(trace.units)
    return {
        "units": list(trace.units),
        "max_active": k,
        "chance": chance,
        "persistence": runs.number(persistence(trace)[1]) if persistence(trace)[2] else None,
        "ranking": means,
        "steps": steps,
    }


def _scores(trace: Trace, row: int, signals: Mapping[str, Floats]) -> dict[str, Floats]:
    norm, gnmr = trace.norm[row], trace.gnmr[row]
    return {
        "gnmr": gnmr,
        "delta_gnmr": trace.delta_gnmr[row],
        "risk": trace.risk[row],
        "norm": norm,
        "gap": signals["error"] * norm,
        "gap x gnmr": signals["error"] * norm * gnmr,
        **signals,
    }


def _numbers(values: Floats) -> list[Any]:
    return [runs.number(float(value)) for value in values]
