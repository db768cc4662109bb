"""SavedActivations against plain autograd and against gradients in float64."""

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import gnmr
from gnmr import PathError
from gnmr.numerics.packing import packed_bytes
from gnmr.numerics.rounding import fake_quantize


class Projections(nn.Module):
    """One activation read by two operators, and one after them."""

    def __init__(self, width=16, bias=True):
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        return self.o_proj(torch.tanh(self.q_proj(x)) * self.k_proj(x))


class Model(nn.Module):
    def __init__(self, width=16, layers=1, bias=True):
        super().__init__()
        self.layers = nn.ModuleList(Projections(width, bias) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(torch.sin(x))
        return x


def attach(model, **settings):
    paths = gnmr.SavedActivations(**settings)
    paths.attach(gnmr.find_units(model))
    return paths


def gradients(model, x, forward=None):
    model.zero_grad()
    (forward or model)(x).float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def linear(bias=True, dtype=torch.float32, conv=False):
    """A model of one operator, to compare with the formula."""
    torch.manual_seed(0)
    module = Conv1D(6, 10) if conv else nn.Linear(10, 6, bias=bias)
    name = "c_fc" if conv else "q_proj"
    return nn.ModuleDict({"h": nn.ModuleList([nn.ModuleDict({name: module})])}).to(dtype), module


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(10,), (5, 10), (2, 3, 10), (0, 10), (2, 0, 10)])
@pytest.mark.parametrize("scaling", ["token", "group"])
def test_exact_forward_and_the_gradients_of_a_rounded_input(conv, dtype, shape, scaling):
    model, module = linear(dtype=dtype, conv=conv)
    plain = copy.deepcopy(module)
    attach(model, low="e2m1", scaling=scaling, group_size=4)
    x = torch.randn(shape).to(dtype).requires_grad_()
    y = module(x)
    x_plain = x.detach().clone().requires_grad_()
    y_plain = plain(x_plain)
    assert torch.equal(y, y_plain)
    grad = torch.randn_like(y)
    y.backward(grad)
    y_plain.backward(grad)
    # The float64 twin sees the rounded input where the weight gradient is made, and nowhere else.
    rounded = fake_quantize(x.detach(), "e2m1", scaling=scaling, group_size=4).double().reshape(-1, 10)
    twin = grad.double().reshape(-1, 6).t() @ rounded
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
    torch.testing.assert_close(module.weight.grad.double(), twin.t() if conv else twin, **tolerance)
    torch.testing.assert_close(x.grad, x_plain.grad)
    torch.testing.assert_close(module.bias.grad, plain.bias.grad)


def test_strided_inputs():
    model, module = linear()
    x = torch.randn(10, 4, 3).permute(1, 2, 0)
    attach(model, low="int4")
    module(x).sum().backward()
    strided = module.weight.grad.clone()
    module.weight.grad = None
    module(x.contiguous()).sum().backward()
    torch.testing.assert_close(strided, module.weight.grad)


@pytest.mark.parametrize("low", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "int2", "int4", "int8", "bf16"])
def test_every_format_and_no_bias(low):
    model, module = linear(bias=False)
    attach(model, low=low)
    x = torch.randn(7, 10)
    module(x).sum().backward()
    expected = fake_quantize(x, low).sum(0).expand(6, 10)
    torch.testing.assert_close(module.weight.grad, expected)


def test_the_recovery_path_of_bf16_is_the_plain_operator():
    model = Model().bfloat16()
    x = torch.randn(3, 5, 16).bfloat16()
    expected = gradients(model, x)
    paths = attach(model, high="bf16")
    for unit in range(3):
        paths.switch(unit, recover=True)
    torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
    assert paths.ran().tolist() == [[0, 0, 0], [1, 1, 1]]
    paths.switch(1, recover=False)
    assert not torch.equal(gradients(model, x)["layers.0.k_proj.weight"], expected["layers.0.k_proj.weight"])


@pytest.mark.parametrize("conv", [False, True])
def test_autocast_is_what_the_plain_operator_does_under_it(conv):
    model, module = linear(conv=conv)
    x = torch.randn(4, 5, 10, requires_grad=True)
    results = []
    for installed in (False, True):
        paths = attach(model, low="bf16") if installed else None
        model.zero_grad()
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, module.weight.grad, module.bias.grad])
    assert results[1][0].dtype == torch.bfloat16
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert paths.held_bytes()[0, 0] == 20 * 10 * 2
    # The cast of a weight that was made here carries no gradient, and may not be met by others.
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
        assert F.linear(x, module.weight.t() if conv else module.weight).requires_grad


def test_held_bytes_count_a_shared_input_once():
    model = Model()
    paths = attach(model, low="e2m1", high="e4m3")
    assert not paths.held_bytes().any()
    model(torch.randn(4, 16))
    low, high = (packed_bytes((4, 16), 4, fmt) for fmt in ("e2m1", "e4m3"))
    assert paths.held_bytes().tolist() == [[low, 0, low], [high, 0, high]]


def saved(forward):
    """Bytes of unique storages that autograd saves, by dtype."""
    seen = {}

    def note(tensor):
        seen[tensor.untyped_storage().data_ptr()] = (tensor.dtype, tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    sizes = {}
    for dtype, size, _ in seen.values():
        sizes[dtype] = sizes.get(dtype, 0) + size
    return sizes, result


def test_an_input_is_packed_once_for_each_format():
    model = Model()
    paths = attach(model, low="e2m1", high="e4m3")
    x = torch.randn(4, 16)
    assert saved(lambda: model(x))[0][torch.uint8] == 2 * 32  # q and k together, and o
    paths.switch(1, recover=True)
    assert saved(lambda: model(x))[0][torch.uint8] == 32 + 64 + 32


def test_nothing_is_stored_for_a_frozen_weight_or_without_grad():
    model, module = linear()
    attach(model)
    x = torch.randn(3, 10, requires_grad=True)
    module.weight.requires_grad_(False)
    assert torch.uint8 not in saved(lambda: module(x))[0]
    module.weight.requires_grad_(True)
    with torch.no_grad():
        assert torch.uint8 not in saved(lambda: module(x))[0]
    model.eval()
    assert torch.uint8 not in saved(lambda: module(x))[0]


def test_an_input_changed_in_place_is_packed_again():
    model = Model()
    attach(model)
    layer = model.layers[0]
    x = torch.randn(4, 16)
    a = layer.q_proj(x)
    expected = fake_quantize(x, "e2m1").sum(0)
    x.mul_(-2).add_(1)
    b = layer.k_proj(x)
    (a.sum() + b.sum()).backward()
    torch.testing.assert_close(layer.q_proj.weight.grad[0], expected)
    torch.testing.assert_close(layer.k_proj.weight.grad[0], fake_quantize(x, "e2m1").sum(0))


def test_memory_that_is_used_again_is_another_input():
    model = Model()
    attach(model)
    for fill in range(20):  # the allocator gives the same block again
        x = torch.full((4, 16), float(fill))
        model.zero_grad()
        model.layers[0].q_proj(x).sum().backward()
        assert (model.layers[0].q_proj.weight.grad == 4 * fill).all()
        del x


def test_codes_die_with_the_input_and_the_graph():
    model, module = linear()
    attach(model)
    x = torch.randn(3, 10)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = module(x)
    codes = next(weakref.ref(t.untyped_storage()) for t in kept if t.dtype == torch.uint8)
    kept.clear()
    del x
    gc.collect()
    assert codes() is not None or y.grad_fn is not None  # the graph holds them
    y.sum().backward()
    del y
    gc.collect()
    assert codes() is None


def test_an_inference_tensor_is_packed_and_not_remembered():
    model, module = linear()
    attach(model)
    with torch.inference_mode():
        x = torch.ones(2, 10)
    module(x).sum().backward()
    with torch.inference_mode():
        x.mul_(3)
    module(x).sum().backward()
    assert (module.weight.grad == 8).all()


def test_threads_do_not_share_the_last_input():
    model = Model()
    attach(model)
    layer, errors = model.layers[0], []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(4, 16, generator=generator)
            for operator in (layer.q_proj, layer.k_proj):
                found = torch.autograd.grad(operator(x).sum(), operator.weight)[0][0]
                if not torch.allclose(found, fake_quantize(x, "e2m1").sum(0), atol=1e-5):
                    errors.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_checkpointing_recomputes_the_forward(reentrant, rounding):
    model = Model(layers=2)
    paths = attach(model, rounding=rounding)
    paths.end_step(7)
    paths.switch(1, recover=True)
    x = torch.randn(3, 16, requires_grad=True)
    expected = gradients(model, x)

    def forward(x):
        for layer in model.layers:
            x = x + checkpoint(lambda h, layer=layer: layer(torch.sin(h)), x, use_reentrant=reentrant)
        return x

    torch.testing.assert_close(gradients(model, x, forward), expected, rtol=0, atol=0)


def test_stochastic_noise_follows_seed_and_step():
    model, module = linear()
    paths = attach(model, rounding="stochastic", seed=3)
    x = torch.randn(64, 10)

    def weight_gradient():
        return torch.autograd.grad(module(x).sum(), module.weight)[0]

    first = weight_gradient()
    assert torch.equal(weight_gradient(), first)
    paths.end_step(1)
    second = weight_gradient()
    assert not torch.equal(second, first)
    state = paths.state_dict()
    paths.end_step(2)
    paths.load_state_dict(state)
    assert torch.equal(weight_gradient(), second)
    # Unbiased: the mean over steps is the exact gradient, to nearest it is not.
    mean = sum(paths.end_step(t) or weight_gradient() for t in range(300)) / 300
    torch.testing.assert_close(mean[0], x.sum(0), rtol=0, atol=0.6)


def test_double_backward_is_an_error():
    model, module = linear()
    attach(model)
    x = torch.randn(3, 10, requires_grad=True)
    # A sum: dy needs no gradient, so that torch alone would drop the part through W without a word.
    for loss in (module(x).sum(), module(x).square().sum()):
        with pytest.raises(PathError, match="a gradient of a gradient was asked for"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_what_it_cannot_see_through_is_refused():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model, _ = linear()
    model["h"][0]["q_proj"] = Own(10, 6)
    with pytest.raises(gnmr.UnitError, match="forward of its own"):
        attach(model)
    with pytest.raises(ValueError, match="rounding must be"):
        gnmr.SavedActivations(rounding="up")
    with pytest.raises(ValueError, match="unknown number format"):
        gnmr.SavedActivations(low="fp4")
    with pytest.raises(ValueError, match="cannot be packed"):
        gnmr.SavedActivations(scaling="tensor")


def llama(layers=2, **settings):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, vocab_size=50,
        **settings,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_real_models_only_their_weight_gradients_change(kind):
    if kind == "llama":
        model = llama()
    else:
        config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=32)
        model = GPT2LMHeadModel(config).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    tokens = torch.randint(0, 50, (2, 16))

    def step():
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    loss, exact = step()
    paths = attach(model, low="e2m1", high="int8")
    low_loss, low = step()
    assert torch.equal(low_loss, loss)
    units = {f"{unit.name}.weight": unit.index for unit in paths.units}
    for name, grad in exact.items():
        error = (low[name] - grad).norm() / grad.norm()
        assert (0.001 < error < 0.6) if name in units else error < 1e-5, (name, error)
    for unit in range(len(units)):
        paths.switch(unit, recover=True)
    high = step()[1]
    assert all((high[n] - exact[n]).norm() < 0.3 * (low[n] - exact[n]).norm() for n in units)
    paths.detach()
    assert torch.equal(step()[1][next(iter(units))], exact[next(iter(units))])


def test_an_input_that_numpy_fills_anew_is_packed_anew():
    model, module = linear()
    attach(model)
    buffer = np.ones((3, 10), dtype=np.float32)
    x = torch.from_numpy(buffer)
    module(x).sum().backward()
    buffer[:] = 4.0
    module(x).sum().backward()

    torch.testing.assert_close(module.weight.grad[0], torch.full((10,), 3 * (1.0 + 4.0)))
