"""The reference traces: an independent implementation's answers, step by step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gnmr import Controller, Policy

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.json"))


def _number(value):
    return np.nan if value is None else float(value)


def _policy(fields):
    schedules = {key: tuple(map(tuple, value)) for key, value in fields.items() if isinstance(value, list)}
    return Policy(**fields | schedules)


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_golden_trace(file, library):
    trace = json.loads(file.read_text())
    controller = Controller(trace["n_units"], _policy(trace["policy"]), xp=library)

    for step, (row, expect) in enumerate(zip(trace["norms"], trace["expect"], strict=True), 1):
        norms = library.asarray([_number(value) for value in row], dtype=library.float64)
        observed = library.asarray([value is not None for value in row])
        decision = controller.update(norms, observed)

        assert int(decision.step) == step
        for name in ("gnmr", "delta_gnmr", "risk"):
            wanted = [float(value) for value in expect[name]]
            np.testing.assert_allclose(np.asarray(getattr(decision, name)), wanted, rtol=1e-9)
        for name in ("active", "nonfinite"):
            assert np.flatnonzero(np.asarray(getattr(decision, name))).tolist() == expect[name]
        assert decision.lock.tolist() == expect["lock"]
        assert bool(decision.global_fault) == expect["global_fault"]


def test_there_are_golden_traces():
    assert len(FILES) == 10
