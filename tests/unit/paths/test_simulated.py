"""Simulated paths against a float64 twin with a quantiser of its own (ml_dtypes, numpy)."""

import gc
import json
import random
import warnings
import weakref
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import gnmr
from gnmr.numerics import FORMATS, fake_quantize
from gnmr.paths.base import HIGH, LOW
from gnmr.paths.product import ROLES

DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
}
PAIRS = {"hybrid-fp8": ("e4m3", "e5m2")}


class Layer(nn.Module):
    """Two operators and what is between them."""

    def __init__(self, d=16, hidden=12):
        super().__init__()
        self.fc1 = nn.Linear(d, hidden)
        self.fc2 = nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Model(nn.Module):
    def __init__(self, n=2, d=16):
        super().__init__()
        self.layers = nn.ModuleList(Layer(d) for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Conv1D(nn.Module):
    """GPT-2's operator: the weight is stored as (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


def reference_cast(x, name, scaling):
    """float64 in and out; the scale in float32, as specified."""
    x32 = x.detach().numpy().astype(np.float32)
    if name == "bf16":
        return torch.from_numpy(x32.astype(ml_dtypes.bfloat16).astype(np.float64))
    largest = np.float32(FORMATS[name].max)
    axis = None if scaling in {"tensor", "delayed"} else -1
    amax = np.abs(x32).max(axis=axis, keepdims=True)
    scale = np.where(amax > 0, amax / largest, np.float32(1))
    scaled = np.clip(x32 / scale, -largest, largest)
    rounded = np.rint(scaled) if name.startswith("int") else scaled.astype(DTYPES[name])
    return torch.from_numpy(rounded.astype(np.float32) * scale).double()


class Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, name, scaling, tensors):
        ctx.names = forward, _ = PAIRS.get(name, (name, name))
        ctx.scaling, ctx.tensors = scaling, tensors
        xq = reference_cast(x, forward, scaling) if "x" in tensors else x
        wq = reference_cast(w, forward, scaling) if "w" in tensors else w
        ctx.save_for_backward(xq, wq)
        y = xq @ wq.T + (0 if b is None else b)
        return reference_cast(y, forward, scaling) if "y" in tensors else y

    @staticmethod
    def backward(ctx, dy):
        (xq, wq), name = ctx.saved_tensors, ctx.names[1]

        def cast(role, value):
            return reference_cast(value, name, ctx.scaling) if role in ctx.tensors else value

        g = cast("dy", dy)
        dw = cast("dw", g.flatten(0, -2).T @ xq.flatten(0, -2))
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return cast("dx", g @ wq), dw, db, None, None, None


def one(paths, module, name="fc1"):
    """Put one operator under the paths."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({name: module})])})
    paths.attach(gnmr.find_units(model))
    return model


def grads(paths, module, x, dy):
    """y, dL/dx, dL/dw, dL/db of one operator."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    bias = None if module.bias is None else module.bias.grad
    return y.detach(), x.grad, module.weight.grad, bias


def on_grid(shape, name, generator):
    """Values of a format with a scale of 1: products of them are exact in float32."""
    fmt = FORMATS[name]
    top = fmt.max if name.startswith("int") else 8 * 2.0**fmt.emin
    steps = torch.randint(-4, 5, shape, generator=generator).float()
    values = steps * (1 if name.startswith("int") else 2.0**fmt.emin)
    values = values.clamp(-top, top)
    values[..., 0] = fmt.max
    return values


@pytest.mark.parametrize("scaling", ["token", "group", "tensor", "delayed"])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "int4", "int6", "hybrid-fp8"])
def test_all_six_casts_are_the_twins_bit_for_bit(name, scaling):
    generator = torch.Generator().manual_seed(0)
    forward, backward = PAIRS.get(name, (name, name))
    module = nn.Linear(6, 5, bias=False)
    with torch.no_grad():
        module.weight.copy_(on_grid((5, 6), forward, generator))
    x, dy = on_grid((2, 3, 6), forward, generator), on_grid((2, 3, 5), backward, generator)
    paths = gnmr.Simulated(low=name, high="exact", scaling=scaling)
    one(paths, module)
    y, dx, dw, _ = grads(paths, module, x, dy)
    x64, w64 = x.double().requires_grad_(), module.weight.detach().double().requires_grad_()
    twin = Reference.apply(x64, w64, None, name, scaling, ROLES)
    twin.backward(dy.double())

    assert torch.equal(y, twin.detach().float())
    assert torch.equal(dx, x64.grad.float())
    assert torch.equal(dw, w64.grad.float())


@pytest.mark.parametrize("scaling", ["token", "group", "tensor", "delayed"])
@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e4m3", "e5m2", "int2", "int8", "bf16", "hybrid-fp8"])
@pytest.mark.parametrize("path", [LOW, HIGH])
def test_gradients_match_the_twin(name, scaling, path):
    torch.manual_seed(1)
    tensors = ("w", "x", "dy")
    module = nn.Linear(32, 24)
    x, dy = torch.randn(2, 5, 32), torch.randn(2, 5, 24)
    low, high = (name, "exact") if path == LOW else ("e2m1", name)
    paths = gnmr.Simulated(low, high, scaling=scaling, tensors=tensors)
    one(paths, module)
    paths.switch(0, recover=path == HIGH)
    results = grads(paths, module, x, dy)
    x64, w64, b64 = (t.detach().double().requires_grad_() for t in (x, module.weight, module.bias))
    twin = Reference.apply(x64, w64, b64, name, scaling, tensors)
    twin.backward(dy.double())

    for result, expected in zip(results, (twin.detach(), x64.grad, w64.grad, b64.grad), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling", ["token", "delayed"])
@pytest.mark.parametrize("exact", ["exact", None])
def test_exact_is_the_plain_operator(scaling, exact):
    module = nn.Linear(8, 4)
    x, dy = torch.randn(3, 8), torch.randn(3, 4)
    plain = grads(None, module, x, dy)
    paths = gnmr.Simulated("e2m1", exact, scaling=scaling)
    one(paths, module)
    paths.switch(0, recover=True)

    for result, expected in zip(grads(paths, module, x, dy), plain, strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8), (2, 0, 8)])
@pytest.mark.parametrize("scaling", ["token", "group", "tensor", "delayed"])
def test_shapes(shape, scaling):
    module = nn.Linear(8, 4)
    paths = gnmr.Simulated("e3m2", "exact", scaling=scaling)
    one(paths, module)
    x = torch.randn(shape)
    y, dx, dw, db = grads(paths, module, x, torch.ones(*shape[:-1], 4))

    assert (y.shape, dx.shape, dw.shape, db.shape) == ((*shape[:-1], 4), x.shape, (4, 8), (4,))
    assert all(t.isfinite().all() for t in (y, dx, dw, db))


def test_non_contiguous_input_and_gradient():
    module = nn.Linear(8, 4)
    # No cast of a product: its last bit depends on the strides, and could fall on either side of a rounding.
    paths = gnmr.Simulated("e3m2", tensors=("w", "x", "dy"))
    one(paths, module)
    x, dy = torch.randn(8, 3, 2).permute(2, 1, 0), torch.randn(4, 3, 2).permute(2, 1, 0)
    strided = grads(paths, module, x, dy)
    packed = grads(paths, module, x.contiguous(), dy.contiguous())

    for a, b in zip(strided, packed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scaling", ["token", "delayed"])
def test_conv1d_is_a_linear_with_its_weight_transposed(scaling):
    conv, linear = Conv1D(6, 8), nn.Linear(8, 6)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    x, dy = torch.randn(2, 3, 8), torch.randn(2, 3, 6)
    results = []
    for module in (conv, linear):
        # Without the casts of products: a transposed product sums in another order.
        paths = gnmr.Simulated("e3m2", scaling=scaling, tensors=("w", "x", "dy"))
        one(paths, module, "c_fc")
        results.append(grads(paths, module, x, dy))
    (y1, dx1, dw1, db1), (y2, dx2, dw2, db2) = results

    for conv_result, linear_result in ((y1, y2), (dx1, dx2), (dw1.t(), dw2), (db1, db2)):
        torch.testing.assert_close(conv_result, linear_result)


@pytest.mark.parametrize("low", ["e4m3", "exact"])
@pytest.mark.parametrize("scaling", ["tensor", "delayed"])
def test_autocast_casts_as_for_a_plain_linear(low, scaling):
    module = nn.Linear(8, 4)
    paths = gnmr.Simulated(low, "e3m2", scaling=scaling)
    one(paths, module)
    seen = {}
    original = paths.cast
    paths.cast = lambda value, at: seen.setdefault(at.role, value.dtype) and original(value, at)
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.float().sum().backward()

    assert y.dtype == torch.bfloat16
    assert (x.grad.dtype, module.weight.grad.dtype) == (torch.float32, torch.float32)
    assert set(seen.values()) <= {torch.bfloat16}
    if low == "exact":
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(nn.functional.linear(x, module.weight, module.bias), y)


@pytest.mark.parametrize("scaling", ["token", "delayed"])
def test_frozen_weight_and_input_without_gradient(scaling):
    module = nn.Linear(8, 4)
    paths = gnmr.Simulated("e3m2", "exact", scaling=scaling)
    one(paths, module)
    x, dy = torch.randn(3, 8), torch.randn(3, 4)
    _, dx, dw, db = grads(paths, module, x, dy)
    module.zero_grad()
    module(x).backward(dy)

    assert torch.equal(module.weight.grad, dw)
    assert paths.held_bytes()[LOW, 0] == x.nbytes
    module.weight.requires_grad_(False)
    module.zero_grad()
    x.requires_grad_()
    module(x).backward(dy)

    assert torch.equal(x.grad, dx)
    assert torch.equal(module.bias.grad, db)
    assert module.weight.grad is None
    assert paths.held_bytes()[LOW, 0] == module.weight.nbytes


def test_held_bytes_are_what_autograd_really_saved():
    module = nn.Linear(8, 4, bias=False)
    paths = gnmr.Simulated("e3m2", "exact", scaling="token")
    one(paths, module)
    x = torch.randn(3, 8, requires_grad=True)
    for path in (LOW, HIGH):
        paths.switch(0, recover=path == HIGH)
        saved = saved_by(lambda: module(x))
        own = [t for t in saved if t.ndim == 2 and t.data_ptr() != module.weight.data_ptr()]

        assert paths.held_bytes()[path, 0] == sum(t.nbytes for t in own)


def saved_by(call):
    """Tensors that autograd keeps, each storage once."""
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return saved.values()


def test_eval_mode_and_detach_are_the_plain_operator():
    model = Model()
    x = torch.randn(2, 16)
    keys, before = list(model.state_dict()), model(x)
    paths = gnmr.Simulated("e2m1")
    paths.attach(gnmr.find_units(model))

    assert not torch.equal(model(x), before)
    assert torch.equal(model.eval()(x), before)
    assert list(model.state_dict()) == keys
    paths.detach()
    assert torch.equal(model.train()(x), before)
    assert all(set(m.__dict__) == set(nn.Linear(1, 1).__dict__) for m in model.modules() if type(m) is nn.Linear)


def test_backward_after_detach_is_an_error():
    module = nn.Linear(8, 4)
    paths = gnmr.Simulated("e2m1")
    one(paths, module)
    y = module(torch.randn(2, 8))
    paths.detach()

    with pytest.raises(gnmr.PathError, match="run backward before detach"):
        y.sum().backward()


def test_a_dropped_model_is_freed_without_detach():
    module = nn.Linear(8, 4)
    paths = gnmr.Simulated("e2m1")
    model = one(paths, module)
    module(torch.randn(2, 8)).sum().backward()
    gone = weakref.ref(module)
    del paths, model, module
    gc.collect()

    assert gone() is None


def train(model, paths, *, reentrant=None, steps=3, micro_batches=2):
    """A few steps; gradients of all of them, and what the paths wrote down."""
    generator = torch.Generator().manual_seed(5)
    history = []
    for step in range(1, steps + 1):
        model.zero_grad()
        for _ in range(micro_batches):
            x = torch.randn(4, 16, generator=generator).requires_grad_()
            for layer in model.layers:
                x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            x.square().sum().backward()
        history.append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.01)
        paths.end_step(step)
        paths.switch(step % 4, recover=True)
    return history


def pair(**settings):
    torch.manual_seed(0)
    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    paths = [gnmr.Simulated(**settings), gnmr.Simulated(**settings)]
    for path, model in zip(paths, models, strict=True):
        path.attach(gnmr.find_units(model))
    return models, paths


def same(first, second):
    return all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("scaling", ["token", "delayed"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("high", ["hybrid-fp8", "exact"])
def test_checkpointing_recomputes_what_the_forward_did(reentrant, scaling, rounding, high):
    models, paths = pair(low="int4", high=high, scaling=scaling, rounding=rounding)
    plain = train(models[0], paths[0])
    recomputed = train(models[1], paths[1], reentrant=reentrant)

    assert same(plain, recomputed)
    assert paths[0].state_dict() == paths[1].state_dict()
    assert (paths[0].counters() == paths[1].counters()).all()


class TestDelayed:
    """Delayed scaling: one scale for a tensor, from the largest of its last amaxes."""

    def paths(self, module, high="exact", **settings):
        settings = {"scaling": "delayed", "tensors": ("w", "x", "dy"), "amax_history": 3} | settings
        paths = gnmr.Simulated("int4", high, **settings)
        one(paths, module)
        return paths

    def step(self, paths, module, scale, number, micro_batches=1):
        for _ in range(micro_batches):
            y = module(torch.full((2, 4), float(scale)))
            y.backward(torch.full_like(y, float(scale) / 10))
        paths.end_step(number)
        return y.detach()

    def entries(self, paths, role="x"):
        return paths.state_dict()["operators"]["layers.0.fc1"]["amax"][role]

    def test_history_rolls_at_the_end_of_a_step_only_and_forgets(self):
        module = nn.Linear(4, 2)
        paths = self.paths(module)
        module(torch.full((2, 4), 9.0)).sum().backward()
        assert self.entries(paths) == [0, 0, 0]
        for number, scale in enumerate([1, 5, 2, 3], 1):
            if number == 1:
                self.step(paths, module, 9, 0)
            self.step(paths, module, scale, number, micro_batches=2)

        assert self.entries(paths) == [5, 2, 3]
        assert self.entries(paths, "dy") == pytest.approx([0.5, 0.2, 0.3])

    def test_the_scale_is_that_of_the_history_and_overflow_saturates(self):
        module = nn.Linear(4, 2, bias=False)
        nn.init.constant_(module.weight, 1.0)
        paths = self.paths(module)
        assert self.step(paths, module, 7, 1)[0, 0] == 28
        assert self.step(paths, module, 70, 2)[0, 0] == 28  # still the scale of 7
        assert paths.counters()[:, 0].tolist() == [8 + 4, 0, 2 * (8 + 8 + 4)]
        assert self.step(paths, module, 70, 3)[0, 0] == 280

    def test_micro_batches_of_a_step_count_together(self):
        module = nn.Linear(4, 2)
        paths = self.paths(module)
        for scale in (3, 8, 5):
            module(torch.full((2, 4), float(scale))).sum().backward()
        paths.end_step(1)

        assert self.entries(paths) == [0, 0, 8]

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_nonfinite_never_enters(self, bad):
        module = nn.Linear(4, 2)
        paths = self.paths(module)
        self.step(paths, module, 2, 1)
        y = module(torch.full((2, 4), bad))
        y.sum().backward()
        paths.end_step(2)

        assert y.isnan().all()
        assert self.entries(paths) == [0, 0, 2]
        assert json.loads(json.dumps(paths.state_dict(), allow_nan=False)) == paths.state_dict()

    @pytest.mark.parametrize("high", ["exact", "hybrid-fp8"])
    def test_the_recovery_path_keeps_the_histories_fresh(self, high):
        module = nn.Linear(4, 2)
        paths = self.paths(module, high)
        self.step(paths, module, 1, 1)
        paths.switch(0, recover=True)
        for number in (2, 3, 4):
            self.step(paths, module, 50, number)

        assert self.entries(paths) == [50, 50, 50]
        assert self.entries(paths, "dy") == [5, 5, 5]
        assert paths.counters()[2, 0] == 8 + 8 + 4  # one step on the low-cost path

    def test_a_step_that_did_not_see_the_unit_keeps_its_history(self):
        module = nn.Linear(4, 2)
        paths = self.paths(module)
        self.step(paths, module, 2, 1)
        with torch.no_grad():
            module(torch.full((2, 4), 100.0))
        paths.end_step(2)

        assert self.entries(paths) == [0, 0, 2]

    def test_a_history_of_zeros_is_none(self):
        module = nn.Linear(4, 2, bias=False)
        nn.init.constant_(module.weight, 1.0)
        paths = self.paths(module)
        self.step(paths, module, 0, 1)

        assert self.step(paths, module, 1e-3, 2)[0, 0].item() == pytest.approx(4e-3)

    def test_a_resumed_run_goes_on_bit_for_bit(self):
        settings = {"low": "int6", "high": "exact", "scaling": "delayed", "rounding": "stochastic"}
        models, paths = pair(**settings)
        train(models[0], paths[0])
        models[1].load_state_dict(models[0].state_dict())
        state = json.loads(json.dumps(paths[0].state_dict()))
        paths[1].load_state_dict(state)
        for unit in (1, 2, 3):
            paths[1].switch(unit, recover=True)

        assert paths[1].state_dict() == paths[0].state_dict()
        assert same(train(models[0], paths[0]), train(models[1], paths[1]))
        assert (paths[0].counters() == paths[1].counters()).all()

    def test_operators_that_do_not_fit_are_named(self):
        models, paths = pair(low="int6", high="exact", scaling="delayed")
        train(models[0], paths[0])
        state = paths[0].state_dict()
        state["operators"]["layers.7.fc1"] = state["operators"].pop("layers.1.fc1")
        with pytest.warns(gnmr.GnmrWarning) as caught:
            paths[1].load_state_dict(state)
        messages = [str(w.message) for w in caught]

        assert "no amax history was saved for layers.1.fc1: theirs starts empty" in messages[0]
        assert "operators that the model does not: layers.7.fc1" in messages[1]
        assert all(g.isfinite().all() for step in train(models[1], paths[1]) for g in step)


def test_stochastic_rounding_moves_with_step_operator_and_seed():
    module = nn.Linear(64, 64, bias=False)
    x = torch.randn(4, 64)
    outputs = {}
    for seed in (0, 1):
        paths = gnmr.Simulated("int4", rounding="stochastic", seed=seed)
        model = one(paths, module)
        outputs[seed, 1] = module(x)
        assert torch.equal(module(x), outputs[seed, 1])
        paths.end_step(1)
        outputs[seed, 2] = module(x)
        paths.detach()
        del model
    paths = gnmr.Simulated("int4", rounding="stochastic")
    one(paths, module, "fc2")
    outputs["fc2"] = module(x)
    results = [y.detach() for y in outputs.values()]

    assert not any(torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


def test_counters_are_of_the_low_path_and_of_each_cast_once():
    module = nn.Linear(4, 2)
    paths = gnmr.Simulated("e2m1", "exact")
    one(paths, module)
    x = torch.tensor([[6.0, 0.1, 0.2, 0.0]], requires_grad=True)
    with torch.no_grad():
        module(x)
    assert paths.counters().sum() == 0
    module(x).sum().backward()
    total = 8 + 4 + 2 + 2 + 8 + 4
    saturated, underflowed, all_ = paths.counters()[:, 0]

    assert (saturated, all_) == (0, total)
    assert underflowed >= 2  # 0.1 and 0.2 lie below half of 0.5
    paths.switch(0, recover=True)
    module(x).sum().backward()
    assert paths.counters()[2, 0] == total


@pytest.mark.parametrize("recover", [False, True])
def test_how_stale_the_scales_are(recover):
    module = nn.Linear(4, 2, bias=False)
    paths = gnmr.Simulated("int8", "exact", scaling="delayed", tensors=("x", "dy"))
    one(paths, module)
    paths.switch(0, recover)
    module(torch.ones(3, 4)).sum().backward()
    assert np.isnan(paths.stale_scales()).all()  # no history yet
    paths.end_step(1)
    assert np.isnan(paths.stale_scales()).all()  # nothing was cast yet

    module(4 * torch.ones(3, 4)).sum().backward()
    assert paths.stale_scales().tolist() == [4.0]
    paths.end_step(2)
    module(torch.ones(3, 4)).sum().backward()

    assert paths.stale_scales().tolist() == [1.0]  # of dL/dy; x is at a quarter of its scale


def test_a_subclass_injects_faults_through_cast():
    class Faulty(gnmr.Simulated):
        def cast(self, value, at):
            if at.path == HIGH:
                return super().cast(value, at)
            if at.role == "dy":
                return super().cast(value, at) * 16
            if at.role == "x" and at.scale is not None:
                at = replace(at, scale=at.scale / 4)
            return super().cast(value, at)

    module = nn.Linear(8, 4, bias=False)
    settings = {"low": "e4m3", "high": "e4m3", "scaling": "delayed", "tensors": ("w", "x", "dy")}
    paths = Faulty(**settings)
    one(paths, module)
    x, dy = torch.ones(2, 8), torch.ones(2, 4)
    y, dx, dw, _ = grads(paths, module, x, dy)
    paths.switch(0, recover=True)
    y_fine, dx_fine, dw_fine, _ = grads(paths, module, x, dy)

    torch.testing.assert_close(y, y_fine / 4)
    torch.testing.assert_close(dx, dx_fine * 16)
    torch.testing.assert_close(dw, dw_fine * 4)
    assert paths.counters()[0, 0] == 16  # x saturated


def test_zero_rows_and_a_zero_gradient_stay_zero():
    module = nn.Linear(4, 2, bias=False)
    paths = gnmr.Simulated("e2m1")
    one(paths, module)
    y, dx, dw, _ = grads(paths, module, torch.zeros(3, 4), torch.zeros(3, 2))

    assert not any(t.any() for t in (y, dx, dw))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("scaling", "high"), [("token", "exact"), ("delayed", "exact"), ("token", "bf16")])
def test_compiled_units_give_the_eager_gradients(backend, scaling, high):
    torch.compiler.reset()
    models, paths = pair(low="e3m2", high=high, scaling=scaling, tensors=("w", "x", "dy"))
    for layer in models[1].layers:
        layer.compile(backend=backend)

    for eager, compiled in zip(train(models[0], paths[0]), train(models[1], paths[1]), strict=True):
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(a, b)
    assert (paths[0].ran() == paths[1].ran()).all()
    assert (paths[0].counters()[2] == paths[1].counters()[2]).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_one_graph_serves_all_layers_and_all_plans():
    torch.compiler.reset()
    model = Model(n=10)
    paths = gnmr.Simulated("e3m2", "exact", scaling="delayed")
    paths.attach(gnmr.find_units(model))
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.layers:
        layer.compile(backend=counter)
    draw = random.Random(0)
    for step in range(1, 41):
        plan = [draw.random() < 0.3 for _ in paths.units]
        for unit, recover in enumerate(plan):
            paths.switch(unit, recover)
        model(torch.randn(2, 16)).sum().backward()

        assert paths.ran().tolist() == [[int(not p) for p in plan], [int(p) for p in plan]]
        paths.end_step(step)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("scaling", "group_size", "of_weights", "of_others"),
    [
        ("block", 4, {"scaling": "tile", "group_size": 4}, {"scaling": "group", "group_size": 4}),
        ("mx", None, {"scaling": "mx", "group_size": 32}, {"scaling": "mx", "group_size": 32}),
    ],
)
def test_blocks_of_weights_and_of_everything_else(scaling, group_size, of_weights, of_others):
    module = nn.Linear(64, 48, bias=False)
    paths = gnmr.Simulated("e4m3", "exact", scaling=scaling, group_size=group_size, tensors=("w", "x", "dy"))
    one(paths, module)
    x, dy = torch.randn(6, 64) * torch.exp(torch.randn(64)), torch.randn(6, 48)
    y, dx, dw, _ = grads(paths, module, x, dy)

    w_cast = fake_quantize(module.weight.detach(), "e4m3", **of_weights)
    x_cast, dy_cast = fake_quantize(x, "e4m3", **of_others), fake_quantize(dy, "e4m3", **of_others)
    torch.testing.assert_close(y, x_cast @ w_cast.t())
    torch.testing.assert_close(dx, dy_cast @ w_cast)
    torch.testing.assert_close(dw, dy_cast.t() @ x_cast)
    assert paths.describe()["group_size"] == of_weights["group_size"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"low": "e4m4"},
            "unknown number format 'e4m4'; did you mean 'e4m3'.*bf16, hybrid-fp8, exact",
        ),
        ({"high": "fp8"}, "unknown number format 'fp8'"),
        ({"scaling": "row"}, "scaling must be one of token, group, block, mx, tensor, delayed, got 'row'"),
        ({"scaling": "mx", "group_size": 64}, "group_size must be 32 under scaling='mx', got 64: leave it out"),
        ({"group_size": 0}, "group_size must be an int >= 1, got 0"),
        ({"amax_history": 0}, "amax_history must be an int >= 1, got 0"),
        ({"tensors": ("w", "g")}, r"roles among w, x, y, dy, dw, dx, got \('w', 'g'\)"),
        ({"tensors": "wx"}, "roles among w, x, y, dy, dw, dx, got 'wx'"),
        ({"tensors": ()}, "tensors is empty"),
        ({"rounding": "up"}, "rounding must be 'nearest' or 'stochastic', got 'up'"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        gnmr.Simulated(**arguments)


def test_describe_holds_every_setting_and_makes_the_same_paths():
    paths = gnmr.Simulated(None, "bf16", scaling="delayed", tensors=("x", "w"), seed=3)
    settings = json.loads(json.dumps(paths.describe()))

    assert settings.pop("kind") == "Simulated"
    assert gnmr.Simulated(**settings).describe() == paths.describe()


def test_loading_where_nothing_is_delayed_needs_no_history():
    _, paths = pair(low="e3m2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths[1].load_state_dict(json.loads(json.dumps(paths[0].state_dict())))
