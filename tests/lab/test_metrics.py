"""The figures of the table, by hand."""

import json
import math

import numpy as np
import pytest

from gnmr import Controller, Policy, RunError
from gnmr.lab import runs
from gnmr.lab.metrics import aggregate, diverged, global_norms, measure_run, paired_differences, spike_score
from gnmr.trace import TraceWriter, read_trace
from gnmr.triggers import Fixed

CALM = [2.0 + 0.01 * (i % 3) for i in range(40)]  # a standard deviation of 0.0082


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (CALM, 0.0),
        ([*CALM, 2.01 + 6.8 * 0.0082], 0.0),
        ([*CALM, 2.01 + 7.2 * 0.0082], 1 / 21),
        ([*CALM, 2.01 - 7.2 * 0.0082], 1 / 21),  # away means either way
        ([*CALM, 5.0, *CALM[1:]], 1 / 60),  # what follows is judged with the spike among it
        ([*CALM, math.nan, math.inf, 2.0], 2 / 23),  # not finite: a spike, and in no average
        ([1.0] * 25, 0.0),
        ([math.nan, *CALM[:5]], 1.0),
        (CALM[:20], None),  # none of them has enough before it
    ],
)
def test_the_spike_score(values, expected):
    assert spike_score(values) == (None if expected is None else pytest.approx(expected))


def test_the_window_of_a_spike_score_is_a_tenth_of_the_run_and_at_most_a_thousand_values():
    noise = np.random.default_rng(0).normal(scale=0.01, size=12_000)
    falling = np.linspace(6.0, 2.0, 600) + noise[:600]
    falling[400] += 1.5  # seen over 60 values; over all of those before it, the fall would hide it
    assert spike_score(falling.tolist()) == 1 / 580
    assert falling[400] < falling[:400].mean() + 7 * falling[:400].std()

    steps = noise + np.repeat([0.0, 1.0], [10_500, 1_500])
    steps[11_600] += 0.5  # with the last 1000 values, the jump at 10,500 is past
    found = round(spike_score(steps.tolist()) * (12_000 - 20))
    one_less = steps.copy()
    one_less[11_600] -= 0.5
    assert found - round(spike_score(one_less.tolist()) * (12_000 - 20)) == 1


def test_the_global_norm_is_over_the_units_that_were_observed(tmp_path):
    controller = Controller(3, Policy(max_active=1), ["a", "b", "c"])
    header = {"policy": controller.policy.to_dict(), "units": ["a", "b", "c"], "trigger": "gnmr"}
    with TraceWriter(tmp_path / "trace.arrow", header) as writer:
        for norms, observed in (([3.0, 4.0, 9.0], [True, True, False]), ([np.inf, 4.0, 0.0], [True, True, True])):
            writer.write(np.array(norms), np.array(observed), controller.update(norms, observed))

    assert global_norms(read_trace(tmp_path / "trace.parquet")) == [5.0, np.inf]


@pytest.mark.parametrize(
    ("losses", "evaluations", "expected"),
    [
        ([3.0, 2.0], [2.0], False),
        ([3.0, float("nan")], [2.0], True),
        ([3.0], [float("inf")], True),
        ([3.0], [6.0], True),
        ([3.0], [6.0, 2.0], False),
    ],
)
def test_diverged(losses, evaluations, expected):
    assert diverged(losses, evaluations, vocab_size=257) is expected


def test_aggregates():
    assert aggregate([1.0, 3.0]) == {"mean": 2.0, "se": 1.0, "per_seed": [1.0, 3.0]}
    assert aggregate([5.0]) == {"mean": 5.0, "se": None, "per_seed": [5.0]}
    assert aggregate([None, None]) == {"mean": None, "se": None, "per_seed": [None, None]}
    assert json.loads(json.dumps(aggregate([1.0, float("inf")]), allow_nan=False))["mean"] == "inf"


def test_differences_are_paired_by_seed():
    def row(arm, values):
        return {"arm": arm, "metrics": {"eval_loss": aggregate(values)}}

    rows = [row("high", [1.0, 2.0]), row("gnmr", [1.5, 1.9]), row("low", [3.0, 3.0])]
    found = {(pair["first"], pair["second"]): pair for pair in paired_differences(rows)}

    assert set(found) == {("low", "high"), ("gnmr", "high"), ("gnmr", "low")}
    assert found["gnmr", "high"]["mean"] == pytest.approx(0.2)
    assert found["gnmr", "high"]["lower"] == 1
    assert found["gnmr", "high"]["se"] == pytest.approx(0.3)


def test_faults_against_what_ran(tmp_path):
    policy = Policy(max_active=2, alpha=1.5, beta=None, lock_steps=0)
    controller = Fixed(2, policy, ["a", "b"], recover=False)
    header = {"policy": policy.to_dict(), "units": ["a", "b"], "trigger": "gnmr"}
    plans = [[False, True], [True, True], [False, False], [False, True]]  # of steps 2, 3, 4 and 5
    with TraceWriter(tmp_path / "trace.arrow", header) as writer:
        for plan in plans:
            decision = controller.update([1.0, 1.0])._replace(active=np.array(plan))
            writer.write(np.ones(2), np.ones(2, dtype=bool), decision)
    (tmp_path / "faults.json").write_text(json.dumps([{"first": 2, "last": 4, "unit": 1}]))
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n{"step": 4, "eval_loss": 2.0}\n')
    result = dict.fromkeys(
        ("eval_loss", "perplexity", "step_seconds", "tokens_per_second", "held_bytes_units", "held_bytes_model"), 1.0
    )
    (tmp_path / "result.json").write_text(json.dumps(result | {"peak_memory": 5}))
    found = measure_run(tmp_path, vocab_size=257)

    # Faulty: unit b at steps 2, 3, 4. On recovery: b at 2; a and b at 3; nobody at 4.
    assert found["fault_coverage"] == pytest.approx(2 / 3)
    assert found["false_alarms"] == pytest.approx(1 / 3)
    assert found["diverged"] == 0.0
    assert found["loss_spikes"] is None  # too short


def test_metrics_survive_a_cut_line_and_name_a_damaged_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert runs.read_metrics(path) == [{"step": 1, "loss": 2.0}]
    assert runs.last_step(path) == 1
    path.write_text('{"step": 1, "lo\n{"step": 2, "loss": 2.0}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl, line 1"):
        runs.read_metrics(path)
