"""Layers compiled one by one follow random plans without walking into the recompile limit."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gnmr import GnmrWarning, Guard, Policy
from gnmr.triggers import Random
from toys import Quiet, Toy, backward, batch

# Dynamo looks at .grad of the tensors that enter a layer.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

STEPS, DEPTH = 40, 4


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Halved(Quiet):
    """A low path whose output tells it from the high one."""

    def low(self, operator, x):
        return operator.plain(x) * 0.5

    def high(self, operator, x):
        return operator.plain(x)


def run(paths, backend=None, steps=STEPS):
    """Train on random plans; returns what ran at each step, and the weights."""
    model = Toy(depth=DEPTH)
    draws = np.random.default_rng(0).integers(0, 2 * DEPTH + 1, steps).tolist()
    policy = Policy(max_active=2 * DEPTH)
    guard = Guard(model, paths, policy, trigger=lambda n, p, units: Random(n, p, units, counts=draws, seed=3))
    if backend is not None:
        for layer in model.layers:
            layer.compile(backend=backend, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    counts, own = [], paths.ran
    paths.ran = lambda: (counts.append(own()), counts[-1])[1]
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, batch(seed=step))
        guard.step()
        optimizer.step()
    return np.array(counts), [param.detach().clone() for param in model.parameters()]


def test_random_plans_compile_to_few_graphs_and_are_read_back():
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        counts, weights = run(Halved(), counter)
    eager_counts, eager_weights = run(Halved())

    assert counter.frame_count <= 4, "two operators a layer, two paths each: at most four graphs for all layers"
    np.testing.assert_array_equal(counts, eager_counts)
    assert counts[:, 0].sum() > 0
    assert counts[:, 1].sum() > 0
    assert (counts.sum(axis=1) == 1).all(), "one forward a unit and step"
    for mine, other in zip(weights, eager_weights, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_layer_that_was_compiled_before_the_guard_came_is_not_missed():
    model = Toy()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    backward(model, batch())
    model.zero_grad()
    paths = Halved()
    guard = Guard(model, paths, Policy(max_active=1))
    backward(model, batch())

    assert guard.step() is not None, "the read-back saw every unit on its path"


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_model_compiled_as_a_whole_is_warned_about(how):
    model = Toy()
    if how == "wrapped":
        model = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")

    with pytest.warns(GnmrWarning, match="compiled as a whole.*Compile its layers one by one"):
        guard = Guard(model, Quiet(), Policy(max_active=1))
    guard.detach()
    Guard(model, None, Policy(max_active=1), monitor_only=True)


@pytest.mark.slow
def test_inductor():
    counts, weights = run(Halved(), "inductor", steps=6)
    eager_counts, eager_weights = run(Halved(), steps=6)

    np.testing.assert_array_equal(counts, eager_counts)
    for mine, other in zip(weights, eager_weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
