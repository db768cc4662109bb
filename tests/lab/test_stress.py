"""Faults: where and when the schedule says, on the low-cost path only."""

import numpy as np
import pytest
import torch
from torch import nn

from gnmr import CustomPaths, RecipeError, SavedActivations, Simulated, find_units
from gnmr.lab.stress import Fault, faulty, schedule, stressed

DELAYED = {"low": "hybrid-fp8", "high": "exact", "scaling": "delayed", "tensors": ("w", "x", "dy")}


def model():
    torch.manual_seed(0)
    layer = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False), "k_proj": nn.Linear(8, 8, bias=False)})
    return nn.ModuleDict({"layers": nn.ModuleList([layer])})


def gradients(paths, *, recover=False, steps=1):
    """Return dL/dw and dL/dx of both units after a step with the first unit faulty."""
    net = model()
    paths.attach(find_units(net))
    paths.switch(0, recover)
    for step in range(1, steps + 1):
        net.zero_grad()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        layer = net["layers"][0]
        layer["k_proj"](torch.tanh(layer["q_proj"](x))).square().sum().backward()
        paths.end_step(step)
    return layer["q_proj"].weight.grad, layer["k_proj"].weight.grad, x.grad


@pytest.mark.parametrize(("kind", "options"), [(Simulated, DELAYED), (SavedActivations, {})])
@pytest.mark.parametrize("fault", ["gradient_scale", "saturation", "nan"])
def test_a_fault_harms_its_unit_and_what_it_passes_on(kind, options, fault):
    sound = gradients(kind(**options))
    paths = stressed(kind, fault, 4.0)(**options)
    paths.faults = [Fault(1, 1, 0)]
    harmed = gradients(paths)

    torch.testing.assert_close(harmed[1], sound[1])
    if fault == "gradient_scale":
        torch.testing.assert_close(harmed[0], 4 * sound[0])
        torch.testing.assert_close(harmed[2], 4 * sound[2])
    elif fault == "saturation":
        assert 0 < harmed[0].norm() < sound[0].norm()
    else:
        assert harmed[0].isnan().any()


@pytest.mark.parametrize(("kind", "options"), [(Simulated, DELAYED), (SavedActivations, {})])
@pytest.mark.parametrize("fault", ["gradient_scale", "nan"])
def test_the_recovery_path_has_no_fault(kind, options, fault):
    sound = gradients(kind(**options), recover=True)
    paths = stressed(kind, fault, 4.0)(**options)
    paths.faults = [Fault(1, 1, 0)]

    for mine, theirs in zip(gradients(paths, recover=True), sound, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_stale_scale_saturates():
    paths = stressed(Simulated, "stale_scale", 16.0)(**DELAYED)
    paths.faults = [Fault(2, 2, 0)]
    gradients(paths, steps=2)

    saturated, _, total = paths.counters()
    assert saturated[0] > 0.1 * total[0]
    assert saturated[1] == 0


def test_a_fault_ends_with_its_stretch():
    paths = stressed(SavedActivations, "gradient_scale", 16.0)()
    paths.faults = [Fault(1, 2, 0)]

    for mine, theirs in zip(gradients(paths, steps=3), gradients(SavedActivations(), steps=3), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_resumed_run_is_at_the_same_step():
    paths = stressed(SavedActivations, "nan", 16.0)()
    paths.faults = [Fault(3, 3, 0)]
    other = stressed(SavedActivations, "nan", 16.0)()
    other.faults = paths.faults
    paths.attach(find_units(model()))
    other.attach(find_units(model()))
    paths.end_step(2)
    other.load_state_dict(paths.state_dict())

    assert paths.is_faulty(0)
    assert other.is_faulty(0)
    assert not other.is_faulty(1)


def test_the_schedule_is_seeded_and_covers_what_it_says():
    options = {"n_units": 5, "steps": 60, "first_step": 10, "every": 20, "duration": 15}
    faults = schedule(**options, seed=1)

    assert [(each.first, each.last) for each in faults] == [(10, 24), (30, 44), (50, 60)]
    assert faults == schedule(**options, seed=1)
    assert any(faults != schedule(**options, seed=seed) for seed in range(2, 6))
    where = faulty(faults, 60, 5)
    assert where.sum() == 15 + 15 + 11
    np.testing.assert_array_equal(
        np.flatnonzero(where.any(axis=1)) + 1, [*range(10, 25), *range(30, 45), *range(50, 61)]
    )


@pytest.mark.parametrize(("kind", "fault"), [(SavedActivations, "stale_scale"), (CustomPaths, "stale_scale")])
def test_a_fault_that_a_path_cannot_have_is_refused(kind, fault):
    with pytest.raises(RecipeError, match=f"cannot act on {kind.__name__}"):
        stressed(kind, fault, 2.0)


def test_a_fault_of_a_cast_that_is_not_made_is_refused():
    with pytest.raises(RecipeError, match="acts on the cast of 'dy'"):
        stressed(Simulated, "nan", 2.0)(tensors=("w", "x"))


def test_a_fault_before_the_casts_is_not_in_their_errors():
    grads, errors = [], []
    for at in (None, "output"):
        net = model()
        paths = stressed(Simulated, "gradient_scale", 16.0, at)("int4", "exact", scaling="tensor", tensors=("x", "dy"))
        paths.faults = [Fault(1, 1, 0)]
        paths.attach(find_units(net))
        paths.watch_errors(1)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        net["layers"][0]["q_proj"](x).square().sum().backward()
        grads.append(next(net.parameters()).grad)
        errors.append(paths.errors()["dy"][0])

    assert torch.allclose(grads[0], grads[1])
    assert errors[0] > 10
    assert errors[1] < 0.2


def test_a_stale_scale_is_no_fault_of_the_output():
    with pytest.raises(RecipeError, match=r"stress\.at = 'output' leaves alone"):
        stressed(Simulated, "stale_scale", 2.0, "output")
    with pytest.raises(RecipeError, match="cannot act on SavedActivations"):
        stressed(SavedActivations, "nan", 2.0, "cast")
