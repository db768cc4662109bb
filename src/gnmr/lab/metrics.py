"""What a comparison says of a run, and of the runs of an arm.

Definitions, where a word could mean several things:

- *promotion ratio*: unit-steps planned on the recovery path, over all unit-steps outside the warm-up.
- *share over a threshold*: observed unit-steps with GNMR > α (ΔGNMR > β), as in the paper's Table 3.
- *hit-maxO*: steps whose active set was full (paper, Table 11).
- *diverged*: a training or validation loss was not finite, or the last validation loss is above that of guessing
  uniformly, ln(vocabulary).
- *spike score* of the losses and of the gradient norms: the share of the values that are at least 7 standard deviations
  away from the average of the last 1000 values before them (OLMo 2, arXiv 2501.00656, paragraph "Spike score"). In a
  run of fewer than 10,000 values the window is a tenth of the run, at least 20 values, so that the fall of the loss
  itself does not hide a spike. A value with fewer than 20 before it is not judged; one that is not finite is a spike,
  and in no average.
- *gradient norm*: the L2 norm over all units of the gradients as they came, before any clipping.
- *decision*: the guard's part in a step, from reading the norms to setting the paths; what a trigger measures during
  forward and backward is in the step.
- *saturated*, *underflowed*: shares of the elements that simulated paths cast on the low-cost path.
- *coverage*: faulty unit-steps that ran on the recovery path. *False alarms*: unit-steps on the recovery path that
  were not faulty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gnmr.lab import runs
from gnmr.lab.stress import Fault, faulty
from gnmr.replay import summary
from gnmr.trace import Trace, read_trace


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        key: its name in files.
        label: its heading.
        unit: ``""``, ``"%"`` (a share, shown in per cent), ``"ms"``, ``"MiB"`` or ``"tok/s"``.
        better: which way is better.
    """

    key: str
    label: str
    unit: Literal["", "%", "ms", "MiB", "tok/s"] = ""
    better: Literal["lower", "higher", "none"] = "none"


COLUMNS = (
    Column("perplexity", "validation perplexity", better="lower"),
    Column("eval_loss", "validation loss", better="lower"),
    Column("diverged", "diverged runs", better="lower"),
    Column("loss_spikes", "loss spike score", "%", better="lower"),
    Column("grad_spikes", "gradient spike score", "%", better="lower"),
    Column("promotion_ratio", "promotion ratio", "%"),
    Column("exceeds_gnmr", "GNMR > α", "%"),
    Column("exceeds_delta", "ΔGNMR > β", "%"),
    Column("hit_max", "hit maxO", "%"),
    Column("saturated", "saturated", "%"),
    Column("underflowed", "underflowed", "%"),
    Column("fault_coverage", "faults covered", "%", better="higher"),
    Column("false_alarms", "false alarms", "%", better="lower"),
    Column("step_seconds", "median step", "ms", better="lower"),
    Column("decision_seconds", "of it, decision", "ms", better="lower"),
    Column("tokens_per_second", "throughput", "tok/s", better="higher"),
    Column("held_bytes_units", "held by units", "MiB", better="lower"),
    Column("held_bytes_model", "held by model", "MiB", better="lower"),
    Column("peak_memory", "peak memory", "MiB", better="lower"),
)
"""Every column, in the order of the table."""

SPIKE_WINDOW, SPIKE_SHARE, SPIKE_LEAST, SPIKE_SIGMAS = 1000, 10, 20, 7.0
"""The window of a spike score in values, the share of the run that it may be, its least size; the deviations."""

SPIKE_NOTE = (
    "Spike score: share of values at least 7 standard deviations away from the rolling average before them, as in "
    "OLMo 2 (arXiv 2501.00656); the window is a tenth of the run, 20 to 1000 values."
)
"""What a table says of its spike scores."""

Values = dict[str, float | None]


def measure_run(folder: Path, vocab_size: int | None = None) -> Values:
    """Return a finished run's metrics by column key; None where one does not apply.

    Raises:
        gnmr.RunError: the run is not finished, or one of its files is damaged.
        gnmr.TraceError: likewise, for its trace.
    """
    result = runs.read_json(folder / runs.RESULT)
    trace = read_trace((folder / runs.TRACE).with_suffix(".parquet"))
    rows = runs.read_metrics(folder / runs.METRICS)
    losses = [float(row["loss"]) for row in rows if "loss" in row]
    evaluations = [float(row["eval_loss"]) for row in rows if "eval_loss" in row]
    done = summary(trace)
    static = trace.header.get("trigger") == "fixed"
    measured = {key: float(result[key]) for key in _MEASURED}
    # A run of an earlier gnmr has no decision time; other paths than simulated ones count no casts.
    perhaps = {key: result.get(key) for key in ("decision_seconds", "saturated", "underflowed")}
    return {
        **measured,
        **{key: None if value is None else float(value) for key, value in perhaps.items()},
        "diverged": float(diverged(losses, evaluations, vocab_size)),
        "loss_spikes": spike_score(losses),
        "grad_spikes": spike_score(global_norms(trace)),
        "promotion_ratio": done.promotion_ratio,
        "exceeds_gnmr": done.exceeds_gnmr,
        "exceeds_delta": done.exceeds_delta,
        "hit_max": None if static else done.hit_max,
        **_against_faults(folder / runs.FAULTS, trace),
    }


def diverged(losses: Sequence[float], evaluations: Sequence[float], vocab_size: int | None) -> bool:
    """Return whether a run diverged, as defined above; without a vocabulary only by what is not finite."""
    if not all(map(math.isfinite, [*losses, *evaluations])):
        return True
    return vocab_size is not None and bool(evaluations) and evaluations[-1] > math.log(vocab_size)


def spike_score(values: Sequence[float]) -> float | None:
    """Return the share of spikes, as defined above, among the values that can be judged; None without such.

    Args:
        values: of a run, one a step or a log line, in order.

    Examples:
        >>> spike_score([2.0, 2.1] * 10 + [9.0] + [2.0, 2.1, 2.0])
        0.25
        >>> spike_score([2.0, 9.0]) is None
        True
    """
    series = np.asarray(values, dtype=np.float64)
    window = min(SPIKE_WINDOW, max(SPIKE_LEAST, len(series) // SPIKE_SHARE))
    finite = series[np.isfinite(series)]
    judged = count = len(series) - len(finite)
    for i in range(SPIKE_LEAST, len(finite)):
        before = finite[max(0, i - window) : i]
        away = abs(finite[i] - before.mean())
        count += bool(away > 0 and away >= SPIKE_SIGMAS * before.std())
        judged += 1
    return count / judged if judged else None


def global_norms(trace: Trace) -> Sequence[float]:
    """Return the L2 norm over the units that had a gradient, at each step."""
    with np.errstate(over="ignore"):  # norms near the largest number overflow to Inf, which is a spike
        squares = np.where(trace.observed, trace.norm.astype(np.float64), 0.0) ** 2
    norms: list[float] = np.sqrt(squares.sum(axis=1)).tolist()
    return norms


def aggregate(per_seed: Sequence[float | None]) -> dict[str, Any]:
    """Return mean, standard error (None for one seed) and the values of the seeds, as JSON takes them."""
    values = [value for value in per_seed if value is not None]
    if not values:
        return {"mean": None, "se": None, "per_seed": list(per_seed)}
    with np.errstate(invalid="ignore"):  # a diverged run makes both NaN or Inf, and so they are shown
        mean = float(np.mean(values))
        se = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return {
        "mean": runs.number(mean),
        "se": None if se is None else runs.number(se),
        "per_seed": [None if value is None else runs.number(value) for value in per_seed],
    }


_MEASURED = (
    "perplexity",
    "eval_loss",
    "step_seconds",
    "tokens_per_second",
    "held_bytes_units",
    "held_bytes_model",
    "peak_memory",
)


def _against_faults(path: Path, trace: Trace) -> Values:
    if not path.exists():
        return {"fault_coverage": None, "false_alarms": None}
    faults = [Fault(**fault) for fault in runs.read_json(path)]
    bad = faulty(faults, len(trace.steps), len(trace.units))
    planned = trace.planned
    covered = planned & bad
    return {
        "fault_coverage": float(covered.sum() / bad.sum()) if bad.any() else None,
        "false_alarms": float((planned & ~bad).sum() / planned.sum()) if planned.any() else None,
    }
