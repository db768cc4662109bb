"""Write docs/evidence.md and its plot from the comparisons under runs/evidence (``make evidence``).

The share of the gap that an arm closes is ``(low - arm) / (low - high)`` in validation loss, each seed's own loss over
the regime's mean gap, so that regimes can be pooled: the pooled difference of two arms is the mean over the regimes of
their mean paired differences, and its standard error the root of the summed squares of theirs, over their number.
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt

from common import written
from gnmr._io import write_text
from gnmr.lab.runs import read_json
from gnmr.lab.tables import machine

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "evidence"
DOCS = ROOT / "docs"
REGIMES = ("fg", "fo", "d8", "d6c", "b4c", "m6")
SUBJECTS = {"gnmr": ("random",), "gap": ("gnmr", "random@gap", "norm@gap", "oracle")}
"""Each trigger, and what it is compared with."""


class Regime:
    """One finished comparison."""

    def __init__(self, name: str) -> None:
        self.comparison = read_json(RUNS / name / "comparison.json")
        self.name = name.upper()
        self.about = self.comparison["recipe"]["description"].partition(", ")[2]
        rows = {row["arm"]: row["metrics"] for row in self.comparison["rows"]}
        self.loss = {arm: np.array(row["eval_loss"]["per_seed"], dtype=float) for arm, row in rows.items()}
        self.ratio = {arm: row["promotion_ratio"]["mean"] for arm, row in rows.items()}
        self.seconds = {arm: row["step_seconds"]["mean"] for arm, row in rows.items()}
        self.width = float(np.mean(self.loss["low"] - self.loss["high"]))

    def closed(self, arm: str) -> np.ndarray:
        """Return the share of the gap that an arm closes, for each seed."""
        return (self.loss["low"] - self.loss[arm]) / self.width

    def difference(self, first: str, second: str) -> tuple[float, float, int, int]:
        """Return mean and standard error of a paired difference in closed shares, and how many of the seeds are > 0."""
        gaps = self.closed(first) - self.closed(second)
        return float(gaps.mean()), error(gaps), int(np.sum(gaps > 0)), len(gaps)


def error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def main() -> None:
    there = [name for name in REGIMES if (RUNS / name / "comparison.json").exists()]
    if not there:
        sys.exit(f"{RUNS} holds no finished comparison: run make evidence, which goes on where it was stopped")
    missing = [name.upper() for name in REGIMES if name not in there]
    regimes = [Regime(name) for name in there]
    seeds = max(len(regime.loss["low"]) for regime in regimes)
    fewer = [f"{len(r.loss['low'])} in {r.name}" for r in regimes if len(r.loss["low"]) < seeds]
    draw(regimes, DOCS / "evidence.svg")
    parts = [
        HEAD.format(seeds=seeds, but=f" ({', '.join(fewer)})" if fewer else "", machine=machine(regimes[0].comparison)),
        *([f"**Not finished yet**: {', '.join(missing)}; what is pooled below is without."] if missing else []),
        "![Share of the gap closed](evidence.svg)",
    ]
    parts += ["## Regime by regime", *map(table, regimes)]
    parts += ["## What the choice of units is worth", ABOUT_PAIRS]
    for subject, others in SUBJECTS.items():
        parts.append(pairs(subject, others, regimes))
    parts += ["## What was wanted of `gap`, and what was found", goals(regimes)]
    parts.append(written("finetune.py", DOCS / "evidence.md"))
    write_text(DOCS / "evidence.md", "\n\n".join(filter(None, parts)) + "\n")
    print(f"{DOCS / 'evidence.md'} is rewritten")


def table(regime: Regime) -> str:
    lines = [
        f"### {regime.name}: {regime.about}",
        "",
        "| arm | validation loss | gap closed (%) | promotion ratio (%) |",
        "|---|---:|---:|---:|",
    ]
    for arm, loss in regime.loss.items():
        share = regime.closed(arm)
        lines.append(
            f"| {arm} | {loss.mean():.4f} ± {error(loss):.4f} | {100 * share.mean():.0f} ± {100 * error(share):.0f} | "
            f"{100 * regime.ratio[arm]:.1f} |"
        )
    return "\n".join(lines)


def pairs(subject: str, others: tuple[str, ...], regimes: list[Regime]) -> str:
    lines = [
        f"| {subject} minus | " + " | ".join(regime.name for regime in regimes) + " | pooled | standard errors |",
        "|---|" + "---:|" * (len(regimes) + 2),
    ]
    for other in others:
        found = [regime.difference(subject, other) for regime in regimes]
        cells = [f"{100 * mean:+.0f} ± {100 * se:.0f} ({wins}/{n})" for mean, se, wins, n in found]
        mean, se = pooled(found)
        lines.append(
            f"| {other} | " + " | ".join(cells) + f" | {100 * mean:+.1f} ± {100 * se:.1f} | {mean / se:+.1f} |"
        )
    return "\n".join(lines)


def pooled(found: list[tuple[float, float, int, int]]) -> tuple[float, float]:
    """Return mean and standard error over the regimes of paired differences."""
    se = float(np.sqrt(np.sum([each[1] ** 2 for each in found]))) / len(found)
    return float(np.mean([each[0] for each in found])), se


def goals(regimes: list[Regime]) -> str:
    """Hold `gap` against what it was made for."""
    mine, best = (float(np.mean([regime.closed(arm).mean() for regime in regimes])) for arm in ("gap", "oracle"))
    lines = [
        "| wanted | found | |",
        "|---|---|---|",
        f"| at least 80 % of what the oracle closes | {100 * mine:.0f} % of the gap against {100 * best:.0f} %: "
        f"{100 * mine / best:.0f} % of it | {verdict(mine >= 0.8 * best)} |",
    ]
    for other in ("gnmr", "random@gap", "norm@gap"):
        mean, se = pooled([regime.difference("gap", other) for regime in regimes])
        worse = [regime.name for regime in regimes if regime.difference("gap", other)[0] < 0]
        lines += [
            f"| better than `{other}`, by more than 3 standard errors pooled | {mean / se:+.1f} | "
            f"{verdict(mean > 3 * se)} |",
            f"| worse than `{other}` in no regime | {'worse in ' + ', '.join(worse) if worse else 'in none'} | "
            f"{verdict(not worse)} |",
        ]
    return "\n".join(lines)


def verdict(held: bool) -> str:
    return "yes" if held else "**no**"


def draw(regimes: list[Regime], path: Path) -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "gnmr", "font.size": 9, "svg.fonttype": "none"})
    arms = [arm for arm in regimes[0].loss if arm not in ("high", "low")]
    figure, axes = plt.subplots(1, len(regimes), figsize=(2.3 * len(regimes), 3.2), sharey=True, layout="constrained")
    for axis, regime in zip(np.atleast_1d(axes), regimes, strict=True):
        shares = [100 * regime.closed(arm) for arm in arms]
        colours = ["#d1495b" if arm == "gnmr" else "#00798c" if arm == "gap" else "#b8b8b8" for arm in arms]
        axis.barh(arms, [each.mean() for each in shares], xerr=[error(each) for each in shares], color=colours)
        axis.axvline(0, color="black", linewidth=0.6)
        axis.set_title(regime.name)
        axis.set_xlabel("gap closed (%)")
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(axes)[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


HEAD = """# Evidence

Written by `make evidence`; do not edit. {seeds} paired seeds a regime{but}: arms of one seed share weights, data and
faults. Machine: {machine}.

A regime is a model of 28 operators (LLaMA, hidden 64, 4 layers, bytes of Python source) under a low path that harms it;
all of it is small, so this shows what a trigger sees, not what a large run would gain. The share of the gap that an arm
closes is (low - arm) / (low - high) in validation loss; errors are standard errors over the seeds. At most 5 of the 28
units are on the recovery path. `random@gap` and `norm@gap` take as many units as `gap` at the same steps: drawn at
random, and by gradient norm. `oracle` fills the budget by the measured perturbation, every fourth step anew. In FG and
M6 the fault is in a cast, which is what `gap` measures: there it sees the cause, the other triggers the effect. In FO
the fault comes before the casts, and their errors do not show it."""

ABOUT_PAIRS = """Differences in the share of the gap closed, in percentage points, paired by seed, with the seeds in
which the first is better; pooled over the regimes, and the pooled difference in its standard errors."""

if __name__ == "__main__":
    main()
