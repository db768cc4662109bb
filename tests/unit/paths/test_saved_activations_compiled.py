"""SavedActivations under torch.compile: few graphs, right gradients, packed tensors held."""

import copy
import random

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import gnmr

# What the compiler itself does: it asks any tensor for its .grad, makes an instance of an autograd function, and
# imports torch.jit. It hides these where warnings are not errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


class Layer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.o_proj(torch.tanh(self.q_proj(h)) * self.k_proj(h))


class Model(nn.Module):
    def __init__(self, layers=2, width=32):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attached(model, **settings):
    paths = gnmr.SavedActivations(**settings)
    paths.attach(gnmr.find_units(model))
    return paths


def gradients(model, x):
    model.zero_grad()
    model(x).float().square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def saved_bytes(forward, *, dtypes=None):
    seen = {}

    def note(tensor):
        if dtypes is None or tensor.dtype in dtypes:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(seen.values())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_measure_the_errors_of_eager_ones(backend):
    torch.manual_seed(0)
    model = Model(layers=3)
    twin = copy.deepcopy(model)
    paths, eager = attached(model), attached(twin)
    for each in (paths, eager):
        each.watch_errors(2)
        each.switch(0, True)
    counter = CompileCounterWithBackend(backend)
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for step in range(3):
        x = torch.randn(2, 8, 32, requires_grad=True)
        gradients(model, x), gradients(twin, x)

        found, expected = paths.errors()["x"], eager.errors()["x"]

        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.0)
        assert (found > 0.01).all()
        paths.end_step(step + 1)
        eager.end_step(step + 1)
    assert counter.frame_count == 1  # the layers share it


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_random_plans_over_forty_steps_make_one_graph_and_the_eager_gradients(rounding):
    torch.manual_seed(0)
    model = Model(layers=12)
    twin = copy.deepcopy(model)
    settings = {"low": "e2m1", "high": "e5m2", "rounding": rounding}
    paths, eager = attached(model, **settings), attached(twin, **settings)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    draw = random.Random(1)
    plan = [False] * len(paths.units)
    x = torch.randn(2, 8, 32, requires_grad=True)
    for step in range(40):
        found, expected = gradients(model, x), gradients(twin, x)
        ran = paths.ran()
        assert ran.tolist() == [[int(not p) for p in plan], [int(p) for p in plan]]
        if step % 8 == 0:
            torch.testing.assert_close(found, expected)
        for unit in range(len(plan)):
            if (new := draw.random() < 0.4) != plan[unit]:
                plan[unit] = new
                paths.switch(unit, new)
                eager.switch(unit, new)
        paths.end_step(step + 1)
        eager.end_step(step + 1)
        if step == 0:
            assert counter.frame_count == 1  # the layers share it
            torch.compiler.set_stance("fail_on_recompile")
    torch.compiler.set_stance("default")
    assert counter.frame_count == 1
    assert (paths.held_bytes() == eager.held_bytes()).all()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_holds_the_packed_input_and_not_the_input(backend):
    torch.manual_seed(0)
    model = Model(layers=1, width=64).bfloat16()
    x = torch.randn(4, 16, 64).bfloat16()
    plain = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)
    plain_bytes = saved_bytes(lambda: plain(x))
    paths = attached(model, low="e2m1", high="e4m3")
    expected = gradients(model, x)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    packed = saved_bytes(lambda: compiled(x), dtypes={torch.uint8})
    assert packed == 2 * 4 * 16 * 32  # q and k together, and o
    assert saved_bytes(lambda: compiled(x)) < plain_bytes
    found = gradients(compiled._orig_mod, x)
    compiled_gradients = gradients(compiled, x)
    for name, grad in expected.items():
        torch.testing.assert_close(compiled_gradients[f"_orig_mod.{name}"], grad, rtol=3e-2, atol=1e-3)
        torch.testing.assert_close(found[name], grad)
    paths.switch(2, recover=True)
    assert saved_bytes(lambda: compiled(x), dtypes={torch.uint8}) == 4 * 16 * 32 + 4 * 16 * 64


@pytest.mark.parametrize("scaling", ["token", "group"])
@pytest.mark.parametrize("high", ["bf16", "e2m3"])
def test_operators_compiled_one_by_one(scaling, high):
    torch.manual_seed(0)
    model = Model(layers=1)
    x = torch.randn(3, 32)
    paths = attached(model, high=high, scaling=scaling, group_size=8)
    paths.switch(1, recover=True)
    expected = gradients(model, x)
    for unit in paths.units:
        unit.operators[0].module.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, x), expected)


@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 3, 32)])
def test_shapes_frozen_weights_eval_and_autocast(shape):
    torch.manual_seed(0)
    model = Model(layers=1)
    attached(model, low="e3m2")
    model.layers[0].k_proj.weight.requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(shape, requires_grad=True)

    def step(module, autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(x)
        wanted = [p for p in model.parameters() if p.requires_grad]
        return y, torch.autograd.grad(y.float().square().sum(), [x, *wanted])

    for autocast in (False, True):
        torch.testing.assert_close(step(compiled, autocast), step(model, autocast), rtol=1e-4, atol=1e-5)
    model.eval()
    torch.testing.assert_close(step(compiled, False), step(model, False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_compiled_layers(reentrant):
    torch.manual_seed(0)
    model = Model(layers=2)
    paths = attached(model, rounding="stochastic")
    paths.switch(0, recover=True)
    x = torch.randn(3, 32, requires_grad=True)
    expected = gradients(model, x)
    for layer in model.layers:
        layer.compile(backend="aot_eager")

    class Checkpointed(nn.Module):
        def forward(self, x):
            for layer in model.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    outer = Checkpointed()
    model.zero_grad()
    outer(x).square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected)


def test_llama_decoder_layers_compiled():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    )
    model = LlamaForCausalLM(config)
    paths = attached(model)
    tokens = torch.randint(0, 40, (2, 8))

    def step():
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = step()
    held = paths.held_bytes()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter)
    torch.testing.assert_close(step(), expected, rtol=1e-4, atol=1e-6)
    graphs = counter.frame_count
    for unit in (0, 3, 6, 9):
        paths.switch(unit, recover=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        step()
    assert counter.frame_count == graphs
    assert (paths.held_bytes() == held).all()


def test_all_operators_of_a_llama_compiled_one_by_one_stay_within_the_limit():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=40, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    paths = attached(model)
    counter = CompileCounterWithBackend("aot_eager")
    for unit in paths.units:
        # fullgraph raises where the limit is hit; without it, the rest would silently run in eager mode.
        unit.operators[0].module.compile(backend=counter, fullgraph=True)
    tokens = torch.randint(0, 40, (2, 8))
    for step in range(3):
        model(tokens, labels=tokens).loss.backward()
        assert paths.ran().sum() == len(paths.units)
        paths.switch(step, recover=True)
    assert counter.frame_count <= 4


@pytest.mark.parametrize("high", ["e4m3", "bf16"])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_custom_operators_are_what_the_compiler_takes_them_for(high, seed):
    x = torch.randn(6, 10)
    wanted, flag, scalar = torch.tensor([True, True]), torch.tensor(1), torch.tensor(5)
    gnmr.SavedActivations()  # registers them
    how = ("e2m1", high, "token", 128)
    checks = ("test_schema", "test_faketensor")
    arguments = (x, wanted, scalar, scalar, *how, seed)
    torch.library.opcheck(torch.ops.gnmr.pack_input.default, arguments, test_utils=checks)
    held = torch.ops.gnmr.pack_input(*arguments)
    arguments = (torch.randn(6, 4), flag, *held, 10, *how, False)
    torch.library.opcheck(torch.ops.gnmr.weight_gradient.default, arguments, test_utils=checks)
    counts = torch.zeros(6, dtype=torch.int64)
    torch.library.opcheck(torch.ops.gnmr.saw.default, (counts, flag, 6, 10, 4), test_utils=checks)
