"""Paths made by a user: from functions, from contexts, and from paths/base.py alone."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gnmr
from gnmr.paths.base import HIGH, LOW, OperatorPaths


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


def model_and_units():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.layers = nn.ModuleList([Block(), Block()])
    return model, gnmr.find_units(model)


def run(model, x):
    for layer in model.layers:
        x = layer(x)
    return x


def test_functions_run_on_their_path_and_the_other_is_plain():
    model, units = model_and_units()
    x = torch.randn(3, 8)
    plain = run(model, x)
    paths = gnmr.CustomPaths(low_forward=lambda operator, x: operator.plain(x) * 2)
    paths.attach(units)
    doubled = run(model, x)
    for unit in range(4):
        paths.switch(unit, recover=True)

    assert not torch.allclose(doubled, plain)
    assert torch.equal(run(model, x), plain)
    assert paths.ran().tolist() == [[1] * 4, [1] * 4]
    paths.detach()
    assert torch.equal(run(model, x), plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_contexts_stand_around_forward_and_recompute(reentrant):
    model, units = model_and_units()
    log = []

    def logged(name):
        @contextmanager
        def context():
            log.append(f"+{name}")
            try:
                yield
            finally:  # checkpointing leaves the last recompute by an exception, as soon as it has enough
                log.append(f"-{name}")

        return context

    paths = gnmr.CustomPaths(low_context=logged("low"), high_context=logged("high"))
    paths.attach(units)
    paths.switch(1, recover=True)
    x = torch.randn(3, 8, requires_grad=True)
    checkpoint(model.layers[0], x, use_reentrant=reentrant).sum().backward()
    once = ["+low", "-low", "+high", "-high"]

    assert log == once * 2
    assert model.layers[0].fc2.weight.grad is not None


def test_held_bytes_follow_the_bits_of_each_path():
    model, units = model_and_units()
    paths = gnmr.CustomPaths(low_forward=lambda operator, x: operator.plain(x), low_bits=4)
    assert paths.held_bytes().shape == (2, 0)
    paths.attach(units)
    assert paths.held_bytes().sum() == 0
    run(model, torch.randn(3, 8))

    assert paths.held_bytes()[LOW].tolist() == [12, 24, 12, 24]
    assert paths.held_bytes()[HIGH].tolist() == [96, 192, 96, 192]


def test_describe_names_the_pieces():
    def coarse(operator, x):
        return operator.plain(x)

    described = gnmr.CustomPaths(low_forward=coarse, high_context=torch.no_grad).describe()
    assert described["low"].endswith("coarse")
    assert described["high"] == "no_grad"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, ValueError, "nothing to switch: give a function .*low_forward=.* or a context"),
        (
            {"low_forward": lambda o, x: x, "low_context": torch.no_grad},
            ValueError,
            "give low_forward or low_context, not both",
        ),
        ({"high_forward": 3}, TypeError, r"high_forward must be a function \(operator, x\) -> y, got 3"),
        (
            {"low_context": torch.autocast("cpu")},
            TypeError,
            r"low_context is a context manager: pass what makes one, low_context=lambda: autocast",
        ),
        ({"low_context": "bf16"}, TypeError, "low_context must be a function that makes"),
        ({"low_context": torch.no_grad, "low_bits": -1}, ValueError, "low_bits must be >= 0, got -1"),
    ],
)
def test_bad_settings(arguments, kind, message):
    with pytest.raises(kind, match=message):
        gnmr.CustomPaths(**arguments)


class HalfPrecisionInput(OperatorPaths):
    """A backend written from the documentation of paths/base.py: BF16 input on the low-cost path."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def low(self, operator, x):
        self.seen[operator.fqn] = x.numel()
        return operator.linear(x.bfloat16().to(x.dtype))

    def high(self, operator, x):
        self.seen[operator.fqn] = x.numel()
        return operator.plain(x)

    def held_bytes(self):
        held = np.zeros((2, len(self.units)), dtype=np.int64)
        for unit in self.units:
            elements = sum(self.seen.get(operator.fqn, 0) for operator in unit.operators)
            held[:, unit.index] = 2 * elements, 4 * elements
        return held

    def describe(self):
        return {**super().describe(), "low": "bf16 input"}


def test_a_backend_of_thirty_lines_works_under_the_guard():
    model, _ = model_and_units()
    policy = gnmr.Policy(max_active=1, alpha=1.5)
    guard = gnmr.Guard(model, HalfPrecisionInput(), policy, granularity="block")
    x = torch.randn(3, 8)
    for scale in (1, 1, 1, 50):
        model.zero_grad()
        (run(model, x).sum() * scale).backward()
        guard.step()
        assert len(guard.active) == (scale == 50)
    assert guard.paths.held_bytes().tolist() == [[144, 144], [288, 288]]
    guard.detach()
