"""The norms are those of the true gradient: accumulated, in every dtype, from the optimiser's buffer."""

import math

import numpy as np
import pytest
import torch

from gnmr import find_units
from gnmr.pytorch.monitor import Monitor
from toys import Toy, backward, batch


def reference(units):
    squares = [sum(p.grad.double().square().sum().item() for p in unit.params) for unit in units]
    return np.sqrt(squares)


@pytest.mark.parametrize("granularity", ["operator", "block"])
def test_norms_are_those_of_float64(granularity):
    model = Toy()
    units = find_units(model, granularity=granularity)
    backward(model, batch())

    reading = Monitor(model, units).read(total=True)

    np.testing.assert_allclose(reading.norms, reference(units), rtol=1e-6)
    total = sum(p.grad.double().square().sum().item() for p in model.parameters())
    assert reading.total == pytest.approx(total**0.5, rel=1e-6)
    assert reading.observed.all()


def test_the_total_is_read_only_where_asked():
    model = Toy()
    monitor = Monitor(model, find_units(model))
    backward(model, batch())

    assert monitor.read().total is None
    assert monitor.read().norms.tolist() == monitor.read(total=True).norms.tolist()


def test_accumulation_of_four_equals_one_big_batch():
    big, small, x = Toy(), Toy(), batch(8)
    backward(big, x)
    for part in x.split(2):
        backward(small, part, scale=1 / 4)

    norms = [Monitor(model, find_units(model)).read().norms for model in (big, small)]

    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_no_gradient_is_not_observed_and_a_zero_gradient_is():
    model = Toy()
    units = find_units(model)
    backward(model, batch())
    model.layers[0].up_proj.weight.grad = model.layers[0].up_proj.bias.grad = None
    model.layers[0].down_proj.weight.grad.zero_()

    reading = Monitor(model, units).read()

    assert reading.observed.tolist() == [False, True, True, True]
    assert math.isnan(reading.norms[0])
    assert reading.norms[1] == 0.0


def test_one_parameter_with_a_gradient_makes_a_unit_observed():
    model = Toy()
    model.layers[0].up_proj.bias.grad = torch.full((16,), 0.5)

    reading = Monitor(model, find_units(model)).read()

    assert reading.observed.tolist() == [True, False, False, False]
    assert reading.norms[0] == 2.0


def test_mixed_dtypes():
    model = Toy()
    model.layers[0].up_proj.to(torch.bfloat16)
    model.layers[1].up_proj.to(torch.float64)
    units = find_units(model)
    for unit in units:
        for param in unit.params:
            param.grad = torch.randn(param.shape).to(param.dtype)

    np.testing.assert_allclose(Monitor(model, units).read().norms, reference(units), rtol=1e-6)


def test_a_bfloat16_norm_is_not_rounded_to_bfloat16():
    model = Toy().to(torch.bfloat16)
    weight = model.layers[0].down_proj.weight
    weight.grad = torch.ones_like(weight)
    weight.grad[0, 0] = 0.0

    assert Monitor(model, find_units(model)).read().norms[1] == pytest.approx(math.sqrt(127), rel=1e-6)


def test_main_grad_is_read_before_grad():
    model = Toy()
    weight = model.layers[0].down_proj.weight
    weight.grad = torch.zeros_like(weight)
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)

    monitor = Monitor(model, find_units(model))

    assert monitor.read().norms[1] == pytest.approx(math.sqrt(128))
    assert monitor.gradients()[0] is weight.main_grad


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_nonfinite_gradient_shows_in_its_own_unit_only(bad):
    model = Toy()
    backward(model, batch())
    model.layers[1].up_proj.weight.grad[3, 2] = bad

    reading = Monitor(model, find_units(model)).read()

    assert np.isfinite(reading.norms).tolist() == [True, True, False, True]
    assert math.isnan(reading.norms[2]) == math.isnan(bad)


@pytest.mark.parametrize("scale", [2.0, 65536.0])
def test_a_loss_scale_is_divided_out_exactly(scale):
    plain, scaled = Toy(), Toy()
    backward(plain, batch())
    backward(scaled, batch(), scale)

    readings = [Monitor(m, find_units(m)).read(s, total=True) for m, s in ((plain, 1.0), (scaled, scale))]

    assert readings[0].norms.tolist() == readings[1].norms.tolist()
    assert readings[0].total == readings[1].total


def test_an_empty_gradient_has_norm_zero():
    model = Toy()
    weight = model.layers[0].down_proj.weight
    model.layers[0].down_proj.weight = torch.nn.Parameter(weight[:0])
    model.layers[0].down_proj.weight.grad = torch.zeros(0, 16)

    reading = Monitor(model, find_units(model)).read()

    assert reading.norms[1] == 0.0
    assert reading.observed[1]
