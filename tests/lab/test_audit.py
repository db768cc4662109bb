"""The audit: what it measures, and that it disturbs nothing."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from gnmr import RunError
from gnmr.cli.main import app
from gnmr.lab.audit import SCORES, audit_run, rank
from gnmr.lab.metrics import measure_run
from gnmr.lab.recipe import load_recipe
from gnmr.lab.train import train_arm
from gnmr.trace import read_trace

SETTINGS = ["run.steps=6", "run.eval_every=6", "stress.first_step=4", "data.eval_sequences=8"]
SETTINGS += ["model.num_hidden_layers=1", "model.hidden_size=32"]


def silent(line):
    pass


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit") / "gnmr-s0"
    recipe = load_recipe("demo", [*SETTINGS, "run.gradient_accumulation=2"])
    return recipe, folder, audit_run(recipe, folder, at=[3, 6], micro_batches=2, say=silent)


def test_every_unit_and_score_is_there(audited):
    _, folder, found = audited

    assert [step["step"] for step in found["steps"]] == [3, 6]
    assert set(found["ranking"]) == set(SCORES)
    for step in found["steps"]:
        gaps = {key: np.array(values) for key, values in step["gaps"].items()}
        assert all(len(values) == 7 for values in (*gaps.values(), *step["scores"].values()))
        assert (gaps["absolute"] > 0).all()
        assert (gaps["bias"] <= gaps["absolute"] * (1 + 1e-6)).all()
    assert json.loads((folder / "audit.json").read_text()) == json.loads(json.dumps(found))


def test_the_faulty_unit_has_the_largest_gap(audited):
    _, folder, found = audited
    fault = json.loads((folder / "faults.json").read_text())[0]
    assert fault["first"] == 4
    before, during = (step["gaps"]["relative"] for step in found["steps"])

    assert int(np.argmax(during)) == fault["unit"]
    assert during[fault["unit"]] > 10 * before[fault["unit"]]


def test_the_casts_say_how_they_fare(audited):
    _, folder, found = audited
    unit = json.loads((folder / "faults.json").read_text())[0]["unit"]
    before, during = (step["casts"] for step in found["steps"])

    assert set(during) == {"x", "w", "dy", "saturated", "underflowed", "stale_scale"}
    assert all(len(values) == 7 for values in during.values())
    assert during["dy"][unit] > 10 > 1 > before["dy"][unit], "sixteen times too large"
    assert 0 < max(during["stale_scale"]) < 100
    assert max(during["underflowed"]) > 0
    measured = measure_run(folder)
    assert 0 < measured["underflowed"] < 1
    assert 0 <= measured["saturated"] < 0.1


def test_an_audited_run_is_the_run(audited, tmp_path):
    recipe, folder, _ = audited
    plain = tmp_path / "gnmr-s0"
    train_arm(recipe, "gnmr", 0, plain, say=silent)

    one, two = (read_trace(each / "trace.parquet") for each in (folder, plain))
    np.testing.assert_array_equal(one.norm, two.norm)
    np.testing.assert_array_equal(one.active, two.active)
    assert (folder / "model" / "model.safetensors").read_bytes() == (plain / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ([3.0, 2.0, 1.0, 0.0], {"rank": 1.0, "precision": 1.0, "gain": 1.0}),
        ([0.0, 1.0, 2.0, 3.0], {"rank": -1.0, "precision": 0.0, "gain": 0.05}),
        ([1.0, 1.0, 1.0, 1.0], {"rank": 0.0, "precision": 1.0, "gain": 1.0}),
    ],
)
def test_how_a_ranking_is_scored(score, expected):
    gap = np.array([4.0, 2.0, 1.0, 0.0])
    assert rank(np.array(score), gap, k=2) == pytest.approx(expected)


def test_an_unknown_score_ranks_last():
    assert rank(np.array([np.nan, 1.0, 0.5]), np.array([9.0, 1.0, 2.0]), k=1)["gain"] == pytest.approx(1 / 81)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": [7]}, "the steps to audit must be in 1 to 6"),
        ({"at": []}, "the steps to audit must be in 1 to 6"),
        ({"at": [1], "arm": "gap"}, "the arm 'gap' reads a signal of its own"),
        ({"at": [1], "arm": "exact"}, "the arm 'exact' casts nothing"),
        ({"at": [1], "micro_batches": 0}, "micro_batches must be >= 1"),
    ],
)
def test_what_cannot_be_audited(options, message, tmp_path):
    with pytest.raises(RunError, match=message):
        audit_run(load_recipe("demo", SETTINGS), tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_the_command_prints_gaps_and_ranking(tmp_path):
    sets = [part for each in SETTINGS for part in ("--set", each)]
    done = CliRunner().invoke(app, ["audit", "demo", "--steps", "5", "--out", str(tmp_path / "a"), *sets])

    assert done.exit_code == 0, done.output
    for word in ("model.layers.0.", "self_attn.q_proj", "gap x gnmr", "persistence", "audit.json"):
        assert word in done.output
    wrong = CliRunner().invoke(app, ["audit", "demo", "--steps", "x"])
    assert wrong.exit_code == 2
    assert "--steps takes whole numbers" in wrong.output
