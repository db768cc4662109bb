"""One process, DDP and FSDP2 score and decide the same; nothing hangs where a rank has no gradient."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed package here")
WORKER = Path(__file__).with_name("worker.py")


def launch(folder, world):
    path = os.pathsep.join([str(WORKER.parents[1]), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"{world}-{rank}.json" for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(world), str(folder / "rendezvous"), str(output)],
            env=environment,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0] * world
    finally:
        for process in ranks:
            process.kill()
    return [json.loads(output.read_text()) for output in outputs]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("one"), 1)[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_norms_decisions_and_clipping_are_those_of_one_process(one, ranks, kind):
    wanted = one["one"]

    for rank in ranks:
        mine = rank[kind]
        assert mine["units"] == wanted["units"]
        np.testing.assert_allclose(mine["norms"], wanted["norms"], rtol=2e-6)
        np.testing.assert_allclose(mine["totals"], wanted["totals"], rtol=2e-6)
        assert mine["active"] == wanted["active"]
        for a, b in zip(mine["weights"], wanted["weights"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert any(wanted["active"]), "a test without a promotion says little"


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "ddp nan", "fsdp nan", "missing", "nothing", "fsdp narrow"])
def test_all_ranks_decide_from_the_same_numbers(ranks, kind):
    a, b = (rank[kind] for rank in ranks)

    np.testing.assert_array_equal(a["norms"], b["norms"])
    np.testing.assert_array_equal(a["totals"], b["totals"])
    assert a["active"] == b["active"]
    assert a["events"] == b["events"]


@pytest.mark.parametrize("kind", ["ddp nan", "fsdp nan"])
def test_a_nan_on_one_rank_recovers_the_same_unit_on_all(ranks, kind):
    for rank in ranks:
        assert rank[kind]["active"][3] == ["layers.0.down_proj"]
        assert rank[kind]["events"][0]["units"] == ["layers.0.down_proj"]


def test_uneven_and_empty_shards(one, ranks):
    for rank in ranks:
        np.testing.assert_allclose(rank["fsdp narrow"]["norms"], one["one narrow"]["norms"], rtol=2e-6)
        np.testing.assert_allclose(rank["fsdp narrow"]["totals"], one["one narrow"]["totals"], rtol=2e-6)


def test_a_gradient_that_one_rank_lacks_counts_by_its_share(ranks):
    first, both = ranks[0]["missing"]["norms"][0], ranks[0]["ddp"]["norms"][0]

    assert first[1] == pytest.approx(both[1] / 2**0.5)
    assert first[0] == pytest.approx(both[0])


def test_a_rank_without_any_backward_does_not_hang_the_others(ranks):
    for rank in ranks:
        assert rank["silent"]["gnmr"] == [1.0] * 4
        assert rank["silent"]["warned"] == 1
        assert "no unit has a gradient" in rank["silent"]["message"]


def test_micro_batches_without_sync_are_read_once_reduced(one, ranks):
    for rank in ranks:
        np.testing.assert_allclose(rank["micro"], one["one"]["norms"][0], rtol=1e-5)


def test_a_step_takes_one_collective_clipping_included(ranks):
    # The first step does not know yet that its gradients will be clipped.
    assert [rank["collectives"] for rank in ranks] == [[2, 1], [2, 1]]


def test_a_state_loads_under_another_strategy(ranks):
    assert [rank["resumed"] for rank in ranks] == [{"ddp": 0, "fsdp": 0}] * 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_stacked_experts_have_the_norms_of_one_process(one, ranks, kind):
    wanted = one["experts"]

    assert wanted["observed"] == [True, False, True]
    for rank in ranks:
        mine = rank[f"{kind} experts"]
        assert mine["units"] == wanted["units"]
        assert mine["observed"] == wanted["observed"]
        np.testing.assert_allclose(mine["norms"], wanted["norms"], rtol=1e-5)
        assert mine["total"] == pytest.approx(wanted["total"], rel=1e-5)
        assert mine["decided"]
