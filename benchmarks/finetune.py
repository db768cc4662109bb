"""Put the fine-tuned arms of the recipe `finetune` side by side, in docs/evidence.md (``make finetune-demo``).

Per arm, the mean over the seeds of a task's metric; its standard error has two parts that do not mix: over the seeds,
and over the items, which all runs share. Arms are compared with `high` by the items that they share, seed by seed.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from common import write
from gnmr.lab.runs import read_json
from gnmr.lab.tables import machine

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "finetune"
EVALUATION = RUNS / "evaluation"
BASE = "base"
SHOWN = {"acc": "accuracy", "exact_match_flexible": "exact match", "perplexity": "perplexity"}
Values = Mapping[tuple[str, str], list[float]]


def main() -> None:
    comparison, evaluation = read_json(RUNS / "comparison.json"), read_json(EVALUATION / "evaluation.json")
    arms = comparison["arms"]
    found: dict[tuple[str, str, str], dict[str, tuple[float, float]]] = defaultdict(dict)
    items: dict[str, int] = {}
    for result in evaluation["results"]:
        items[result["task"]] = result["n"]
        for metric, each in result["metrics"].items():
            found[result["task"], metric, arm_of(result["model"])][result["model"]] = (each["value"], each["se"] or 0.0)
    shown = [(task, metric) for task in items for metric in SHOWN if any(key[:2] == (task, metric) for key in found)]
    head = ["arm", *(f"{task} {SHOWN[metric]}, {items[task]}" for task, metric in shown)]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * len(shown)]
    for arm in (BASE, *arms):
        cells = [cell(list(found[task, metric, arm].values())) for task, metric in shown]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    ratio = {row["arm"]: 100 * row["metrics"]["promotion_ratio"]["mean"] for row in comparison["rows"]}
    seeds = len(comparison["seeds"])
    about = ABOUT.format(
        seeds=seeds, steps=comparison["recipe"]["run"]["steps"], machine=machine(comparison), ratio=ratio["gnmr"]
    )
    write(
        "finetune.py", "\n\n".join([about, "\n".join(lines), differences(arms, items)]), ROOT / "docs" / "evidence.md"
    )
    print(f"{ROOT / 'docs' / 'evidence.md'}: the table of the fine-tuned model is rewritten")


def arm_of(label: str) -> str:
    return label if label == BASE else label.rpartition("-s")[0]


def cell(values: list[tuple[float, float]]) -> str:
    """Print mean, standard error over seeds, and that over items (the mean of the runs', which share their items)."""
    means = np.array([value for value, _ in values])
    over_items = float(np.mean([se for _, se in values]))
    over_seeds = f" ± {means.std(ddof=1) / np.sqrt(len(means)):.3f}" if len(means) > 1 else ""
    return f"{means.mean():.3f}{over_seeds} (items ± {over_items:.3f})"


def differences(arms: list[str], items: Mapping[str, int]) -> str:
    """Compare the arms by the log-likelihood of what is right, item by item, the seeds' mean for each item."""
    lines = ["| minus high, log-likelihood an item | " + " | ".join(items) + " |", "|---|" + "---:|" * len(items)]
    gold = {arm: of_items(arm) for arm in arms}
    for arm in arms:
        if arm == "high":
            continue
        cells = []
        for task in items:
            keys = sorted(gold["high"].get(task, {}).keys() & gold[arm].get(task, {}).keys())
            if not keys:
                cells.append("-")
                continue
            gaps = np.array([gold[arm][task][key] - gold["high"][task][key] for key in keys])
            cells.append(f"{gaps.mean():+.4f} ± {gaps.std(ddof=1) / np.sqrt(len(gaps)):.4f}")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_items(arm: str) -> dict[str, dict[str, float]]:
    """Return by task and item the log-likelihood of the right answer, or of a window of text; the mean of the seeds."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for folder in sorted(EVALUATION.glob(f"{arm}-s*")):
        for line in (folder / "items.jsonl").read_text().splitlines():
            row = json.loads(line)
            known = row["metrics"].get("gold_loglikelihood") if row["kind"] != "window" else row["loglikelihoods"][0]
            if known is not None:
                values[row["task"]][row["item"]].append(known)
    return {task: {item: float(np.mean(each)) for item, each in rows.items()} for task, rows in values.items()}


ABOUT = """## A real model, fine-tuned

`make finetune-demo`: SmolLM2-135M-Instruct (Q4_1, dequantised: its values are 4-bit ones) under LoRA as in the paper's
setting C, {steps} steps of 512 tokens of Python source, {seeds} seeds, linear operators in real INT8 with BF16 recovery
of at most 7 of 30 layers; gnmr promotes {ratio:.1f} % of the layer-steps. Machine: {machine}.

A cell: mean over the seeds, its standard error, and the standard error over the items, which all arms share. MMLU by
answer letters is at chance for a model of this size."""

if __name__ == "__main__":
    if not (EVALUATION / "evaluation.json").exists():
        sys.exit(f"{EVALUATION} holds no evaluation: run make finetune-demo, which goes on where it was stopped")
    main()
