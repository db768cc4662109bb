"""INT8 execution against integer and float64 references, and where frozen weights are meanwhile."""

import copy
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gnmr
from gnmr.numerics import int8
from gnmr.paths import int8_slot
from gnmr.paths.base import HIGH, LOW
from gnmr.paths.frozen import DequantizedWeight
from gnmr.pytorch.measure import held_for_backward
from gnmr.triggers import Gap
from toys import Toy, backward, batch


class Conv1D(nn.Module):
    """GPT-2's operator: the weight is stored as (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


def one(paths, module, name="fc1"):
    """Put one operator under the paths; a frozen one is in a unit with one that trains."""
    layer = nn.ModuleDict({name: module, "fc2": nn.Linear(2, 2)})
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    paths.attach(gnmr.find_units(model, granularity="block"))
    return model


def linear(dtype=torch.float32, *, frozen=False, bias=True, size=(17, 11)):
    torch.manual_seed(0)
    module = nn.Linear(*size, bias=bias, dtype=dtype)
    if frozen:
        module.requires_grad_(False)
    return module


def codes(x):
    """The codes and scales of rows, by NumPy in float32."""
    x = x.detach().float().numpy()
    amax = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.where(amax > 0, amax / np.float32(127), np.float32(1)).astype(np.float32)
    return torch.from_numpy(np.rint(x / scale)).double(), torch.from_numpy(scale).double()


def grads(module, x, dy):
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    found = [x.grad, module.weight.grad, None if module.bias is None else module.bias.grad]
    return [y.detach(), *(None if each is None else each.clone() for each in found)]


def lora_model(rank=2):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=50, use_cache=False
    )
    base = transformers.LlamaForCausalLM(config).bfloat16()
    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(base, config)


def base_units(model):
    """Blocks with the frozen base; the adapters stay as they are, and are watched."""
    units = gnmr.find_units(model, granularity="block", filter_fn=lambda module, fqn: "layers" in fqn)
    keep = lambda op: ".lora_" not in op.fqn  # noqa: E731
    return [type(unit)(unit.name, unit.index, tuple(filter(keep, unit.operators)), unit.pieces) for unit in units]


# The product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [linear, lambda: linear(bias=False), lambda: Conv1D(11, 17)])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 1), (2, 1, 4)])
def test_forward_and_backward_are_those_of_the_codes(dtype, make, shape):
    module = make().to(dtype)
    weight = module.weight.detach().t() if isinstance(module, Conv1D) else module.weight.detach()
    (cx, sx), (cw, sw) = codes(x := torch.randn(*shape, 17, dtype=dtype)), codes(weight)
    dy = torch.randn(*shape, 11, dtype=dtype)
    one(gnmr.Int8(), module)

    y, dx, dw, db = grads(module, x, dy)

    flat, bias = dy.double().reshape(-1, 11), 0 if module.bias is None else module.bias.detach().double()
    cx, sx = cx.reshape(-1, 17), sx.reshape(-1, 1)
    expected_y = (cx.long() @ cw.long().t()).double() * sx * sw.t() + bias
    expected_dw = flat.t() @ (cx * sx)
    tight = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
    loose = {"rtol": 1e-6, "atol": 1e-6}  # dequantised operands are float32
    torch.testing.assert_close(y.double(), expected_y.view(*shape, 11), **(tight or loose))
    torch.testing.assert_close(dx.double(), (flat @ (cw * sw)).view(*shape, 17), **loose)
    dw = dw.t() if isinstance(module, Conv1D) else dw
    torch.testing.assert_close(dw.double(), expected_dw, **loose)
    if db is not None:
        torch.testing.assert_close(db.double(), flat.sum(0), **loose)


@pytest.mark.parametrize("module", [linear(), linear(torch.bfloat16), Conv1D(11, 17)])
def test_an_int8_backward_casts_the_gradient_with_the_scales_in_it(module):
    module = copy.deepcopy(module)
    dtype = module.weight.dtype
    weight = module.weight.detach().t() if isinstance(module, Conv1D) else module.weight.detach()
    x, dy = torch.randn(6, 17, dtype=dtype), torch.randn(6, 11, dtype=dtype)
    (cx, sx), (cw, sw) = codes(x), codes(weight)
    one(gnmr.Int8(backward="int8"), module)

    _, dx, dw, db = grads(module, x, dy)

    cg, sg = codes(dy.float() * sw.t().float())
    expected_dx = (cg.long() @ cw.long()).double() * sg
    ct, st = codes((dy.float() * sx.float()).t())
    expected_dw = (ct.long() @ cx.long()).double() * st
    close = {"rtol": 8e-3, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(dx.double(), expected_dx, **close)
    torch.testing.assert_close((dw.t() if isinstance(module, Conv1D) else dw).double(), expected_dw, **close)
    torch.testing.assert_close(db, dy.sum(0))


def test_it_is_what_simulated_int8_simulates():
    simulated, real = linear(), linear()
    one(gnmr.Simulated("int8", "exact", tensors=("x", "w")), simulated)
    one(gnmr.Int8(), real)
    x, dy = torch.randn(9, 17), torch.randn(9, 11)

    for mine, theirs in zip(grads(real, x, dy), grads(simulated, x, dy), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_it_really_multiplies_int8(monkeypatch):
    products = []
    product = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: products.append((a.dtype, b.dtype)) or product(a, b))
    for how, count in (("high", 1), ("int8", 3)):
        module = linear(torch.bfloat16)
        one(gnmr.Int8(backward=how), module)
        products.clear()
        y, *_ = grads(module, torch.randn(9, 17).bfloat16(), torch.randn(9, 11).bfloat16())

        assert products == [(torch.int8, torch.int8)] * count
        assert y.dtype == torch.bfloat16
    exact = nn.functional.linear(*(each.float() for each in (torch.ones(1, 17), module.weight)))
    low = module(torch.ones(1, 17).bfloat16()) - module.bias
    assert 0 < (low.float() - exact).norm() / exact.norm() < 0.1, "coarse, and no no-op"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recovery_and_eval_are_the_model_bit_for_bit(dtype):
    module, plain = linear(dtype), linear(dtype)
    paths = gnmr.Int8()
    one(paths, module)
    x, dy = torch.randn(4, 17).to(dtype), torch.randn(4, 11).to(dtype)
    low = grads(module, x, dy)
    paths.switch(0, recover=True)

    for mine, wanted, coarse in zip(grads(module, x, dy), expected := grads(plain, x, dy), low, strict=True):
        assert torch.equal(mine, wanted)
        assert coarse is low[-1] or not torch.equal(coarse, wanted)
    paths.switch(0, recover=False)
    assert torch.equal(module.eval()(x), expected[0])
    assert paths.ran().tolist() == [[1], [1]]


def test_autocast_runs_in_its_dtype():
    module, plain = linear(), linear()
    paths = gnmr.Int8()
    one(paths, module)
    x, dy = torch.randn(4, 17), torch.randn(4, 11).bfloat16()

    with torch.autocast("cpu", torch.bfloat16):
        low = module(x)
        paths.switch(0, recover=True)
        high, wanted = module(x), plain(x)

    assert low.dtype == torch.bfloat16
    assert torch.equal(high, wanted)
    low.backward(dy)
    assert module.weight.grad.dtype == torch.float32
    torch.testing.assert_close(module.weight.grad, dy.float().t() @ x, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("how", ["high", "int8"])
def test_rows_of_zeros_and_rows_that_are_not_numbers(how):
    module = linear(bias=False)
    one(gnmr.Int8(backward=how), module)
    x = torch.randn(4, 17)
    x[0], x[1, 3], x[2, 5] = 0, torch.inf, torch.nan

    y, dx, dw, _ = grads(module, x, torch.ones(4, 11))

    assert y.isfinite().all(1).tolist() == [True, False, False, True]
    assert not y[0].any()
    assert not y[1:3].isfinite().any()
    assert dx.isfinite().all()
    assert not dw.isfinite().any()


def test_a_gradient_that_is_not_a_number_is_not_hidden():
    module = linear()
    one(gnmr.Int8(backward="int8"), module)
    dy = torch.ones(4, 11)
    dy[1, 2] = torch.inf

    _, dx, dw, db = grads(module, torch.randn(4, 17), dy)

    assert dx.isfinite().all(1).tolist() == [True, False, True, True]
    assert dw.isfinite().all(1).tolist() == [i != 2 for i in range(11)]
    assert db.isfinite().tolist() == [i != 2 for i in range(11)]


def test_no_tokens():
    module = linear()
    one(gnmr.Int8(backward="int8", outliers=6.0), module)

    y, dx, dw, db = grads(module, torch.zeros(0, 17), torch.zeros(0, 11))

    assert (y.shape, dx.shape) == ((0, 11), (0, 17))
    assert not dw.any()
    assert not db.any()


# Outliers


@pytest.mark.parametrize("frozen", ["trainable", "resident", "offload", "dequantize"])
@pytest.mark.filterwarnings("ignore:.*full precision of frozen weights is gone")
def test_outlier_columns_are_multiplied_in_high_precision(frozen):
    module = linear(frozen=frozen != "trainable")
    weight = module.weight.detach().clone()
    x = torch.randn(9, 17)
    x[2, 4], x[:, 11] = 40.0, -60.0
    inside = x.clone()
    inside[:, [4, 11]] = 0
    (cx, sx), (cw, sw) = codes(inside), codes(weight)
    at_home = frozen in ("trainable", "resident")
    columns = (weight.double() if at_home else (cw * sw))[:, [4, 11]]
    kept = x[:, [4, 11]].double()
    paths = gnmr.Int8(outliers=6.0, frozen="resident" if frozen == "trainable" else frozen)
    one(paths, module)
    dy = torch.randn(9, 11)

    y, dx, dw, _ = grads(module, x, dy)

    expected = (cx @ cw.t()) * sx * sw.t() + kept @ columns.t() + module.bias.detach().double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    exact = nn.functional.linear(x, weight, module.bias.detach())
    other = linear()
    one(gnmr.Int8(), other)
    assert (y - exact).norm() < 0.5 * (other(x) - exact).norm(), "the outliers no longer spoil the other columns"
    through = cw * sw
    through[:, [4, 11]] = columns
    torch.testing.assert_close(dx.double(), dy.double() @ through, rtol=1e-5, atol=1e-5)
    if frozen == "trainable":
        become = cx * sx
        become[:, [4, 11]] = kept
        torch.testing.assert_close(dw.double(), dy.double().t() @ become, rtol=1e-5, atol=1e-5)
    paths.detach()


def test_an_infinite_outlier_spoils_what_it_spoils_in_the_model():
    module = linear()
    one(gnmr.Int8(outliers=6.0), module)
    x = torch.ones(2, 17)
    x[0, 3] = torch.inf

    y = module(x)

    assert y.isinf().all(1).tolist() == [True, False]
    assert torch.equal(y[0].sign(), module.weight[:, 3].sign())


# Weights that train


def test_a_weight_is_quantised_once_a_step(monkeypatch):
    counted = []
    monkeypatch.setattr(int8_slot, "quantize_rows", lambda w: counted.append(w.shape) or int8.quantize_rows(w))
    model = Toy()
    guard = gnmr.Guard(model, gnmr.Int8(), gnmr.Policy(max_active=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, 4):
        for micro in range(3):
            backward(model, batch(seed=micro))
        guard.step()
        assert len(counted) == 4 * step
        assert guard.paths.weight_bytes()["int8"] == 0, "no codes of weights that are about to change"
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("behind", [False, True])
def test_the_codes_follow_the_weight(behind):
    module = linear(bias=False)
    paths = gnmr.Int8()
    one(paths, module)
    x = torch.randn(3, 17)
    before = module(x)

    if behind:  # the optimiser of a wrapper that writes past the version counter
        module.weight.data.mul_(-3)
        paths.end_step(1)
    else:
        with torch.no_grad():
            module.weight.mul_(-3)

    torch.testing.assert_close(module(x), -3 * before)


def test_a_backward_uses_the_codes_of_its_forward():
    module = linear(bias=False)
    one(gnmr.Int8(), module)
    x = torch.randn(3, 17).requires_grad_()
    y = module(x)
    rows = int8.quantize_rows(module.weight.detach()).dequantize(torch.float32)
    with torch.no_grad():
        module.weight.zero_()
    y.backward(dy := torch.randn(3, 11))

    torch.testing.assert_close(x.grad, dy @ rows)


# What is kept


class Attention(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32, dtype=dtype) for _ in range(3))

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outliers", [None, 2.5])
def test_held_bytes_are_those_that_autograd_holds(dtype, outliers):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([Attention(dtype)])})
    paths = gnmr.Int8(outliers=outliers)
    paths.attach(units := gnmr.find_units(model))
    x = torch.randn(2, 20, 32).to(dtype)  # not a square: what looks like a weight is not counted

    def held(plan):
        for unit, recover in enumerate(plan):
            paths.switch(unit, recover=recover)
        with held_for_backward(model, units) as found:
            y = model["layers"][0](x)
        sum(each.sum() for each in y).backward()
        return found.projections

    low, mixed, high = held([0, 0, 0]), held([0, 1, 0]), held([1, 1, 1])
    assert low == paths.held_bytes()[LOW].sum()
    assert high == paths.held_bytes()[HIGH].sum() == 40 * 32 * dtype.itemsize
    assert outliers or low == 40 * (32 + 4)
    assert paths.held_bytes()[:, 1:].sum() == 0, "the first reader is charged"
    for plan, found in (([0, 1, 0], mixed), ([1, 1, 1], high), ([0, 0, 0], low)):
        assert low + paths.extra_bytes(np.array(plan, dtype=bool)).sum() == found


def test_nothing_is_kept_for_a_frozen_weight():
    module = linear(frozen=True)
    paths = gnmr.Int8()
    model = one(paths, module)
    with held_for_backward(model, paths.units) as held:
        y = module(torch.randn(5, 17, requires_grad=True))
    assert held.projections == 0
    assert paths.held_bytes().sum() == 0
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_the_forward(reentrant):
    plain, model = Toy(), Toy()
    for each in (plain, model):
        gnmr.Int8(backward="int8").attach(gnmr.find_units(each))
    x = batch().requires_grad_()
    plain.layers[1](plain.layers[0](x)).sum().backward()
    y = x.detach().requires_grad_()
    for layer in model.layers:
        y = checkpoint(layer, y, use_reentrant=reentrant)
    y.sum().backward()

    for mine, wanted in zip(model.layers.parameters(), plain.layers.parameters(), strict=True):
        assert torch.equal(mine.grad, wanted.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it where it is no error
def test_layers_may_be_compiled_and_break_at_the_operators():
    torch._dynamo.reset()
    plain, model = Toy(), Toy()
    guards = [gnmr.Guard(each, gnmr.Int8(), gnmr.Policy(max_active=1)) for each in (plain, model)]
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    for recover in (False, True):
        for each, guard in zip((plain, model), guards, strict=True):
            guard.paths.switch(0, recover)
            each.zero_grad()
            backward(each, batch())
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad)
        assert guards[1].paths.ran().tolist() == guards[0].paths.ran().tolist()


# Frozen weights


STORES = ["resident", "offload", "dequantize"]


@pytest.mark.parametrize("frozen", STORES)
@pytest.mark.parametrize("make", [lambda: linear(torch.bfloat16), lambda: Conv1D(11, 17).bfloat16()])
@pytest.mark.filterwarnings("ignore:.*full precision of frozen weights is gone")
def test_a_frozen_operator_on_both_paths_in_eval_mode_and_after(frozen, make):
    module = make().requires_grad_(False)
    param, weight, plain = module.weight, module.weight.detach().clone(), copy.deepcopy(module)
    paths = gnmr.Int8(frozen=frozen)
    model = one(paths, module)
    x, dy = torch.randn(4, 17).bfloat16(), torch.randn(4, 11).bfloat16()
    by_rows = weight.t() if isinstance(module, Conv1D) else weight
    coarse = int8.quantize_rows(by_rows).dequantize(torch.bfloat16)
    coarse = coarse.t() if isinstance(module, Conv1D) else coarse
    in_memory, kept = (coarse if frozen == "dequantize" else weight), copy.deepcopy(plain)
    with torch.no_grad():
        kept.weight.copy_(in_memory)

    low = grads(module, x, dy)
    paths.switch(0, recover=True)
    paths.end_step(1)
    high = grads(module, x, dy)
    state = model.state_dict()
    paths.switch(0, recover=False)

    assert module.weight is param
    assert paths.ran()[:, 0].tolist() == [1, 1]
    for mine, wanted in zip(high[:2], grads(kept, x, dy)[:2], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)
    assert not torch.equal(low[0], high[0])
    assert torch.equal(module.eval()(x), kept(x))
    assert type(state["layers.0.fc1.weight"]) is torch.Tensor
    assert torch.equal(state["layers.0.fc1.weight"], in_memory)
    assert torch.equal(model.state_dict()["layers.0.fc1.weight"], in_memory)
    paths.detach()
    assert module.weight is param
    assert type(param) is nn.Parameter
    assert torch.equal(param, in_memory)
    assert torch.equal(module.train()(x), kept(x))
    assert not module._state_dict_hooks


def test_the_int8_path_is_the_same_whatever_the_store():
    found = []
    for frozen in STORES:
        module = linear(torch.bfloat16, frozen=True)
        one(gnmr.Int8(frozen=frozen, backward="int8"), module)
        torch.manual_seed(1)
        found.append(grads(module, torch.randn(4, 17).bfloat16(), torch.randn(4, 11).bfloat16())[:2])
    for each in found[1:]:
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(each, found[0], strict=True))


def test_each_store_has_the_bytes_that_it_says():
    n, k = 11, 17
    full, codes_and_scales = 2 * n * k, n * k + 4 * n
    for frozen, expected in {
        "resident": [(full, 0), (full, 0)],
        "offload": [(0, full), (full, full)],
        "dequantize": [(0, 0), (0, 0)],
    }.items():
        paths = gnmr.Int8(frozen=frozen)
        module = linear(torch.bfloat16, frozen=True, bias=False)
        one(paths, module)
        rest = 2 * 2 * 4  # fc2 trains
        for recover, (on_device, in_host) in zip((False, True), expected, strict=True):
            paths.switch(0, recover)
            paths.end_step(1)
            assert paths.weight_bytes() == {"int8": codes_and_scales, "full": on_device + rest, "host": in_host}
        extra = paths.extra_bytes(np.array([True]))
        assert extra.tolist() == [full if frozen == "offload" else 0]


def test_offloaded_weights_are_mapped_files_without_a_name(tmp_path):
    module = linear(torch.bfloat16, frozen=True, size=(64, 64))
    weight = module.weight.detach().clone()
    maps = Path("/proc/self/maps")
    paths = gnmr.Int8(frozen="offload", offload_dir=tmp_path)
    model = one(paths, module)

    assert list(tmp_path.iterdir()) == [], "nothing is left behind, whatever happens to the process"
    mapped = [line for line in maps.read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == 1
    assert torch.equal(module.weight, weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    paths.detach()
    assert str(tmp_path) not in maps.read_text()
    assert torch.equal(module.weight, weight)


def test_the_pool_holds_what_the_next_step_recovers_and_is_filled_before_it():
    model = lora_model()
    units = base_units(model)
    paths = gnmr.Int8(frozen="offload")
    paths.attach(units)
    assert paths.ready() == ()
    paths.switch(1, recover=True)
    paths.end_step(1)
    ready = paths.ready()
    assert len(ready) == 7
    assert all(".layers.1." in name for name in ready)
    copies = [op.module.weight.data_ptr() for op in units[1].operators]
    model(torch.zeros(1, 4, dtype=torch.long))
    assert paths.ready() == ready, "the forward brings nothing more"
    assert copies != [op.module.weight.data_ptr() for op in units[1].operators], "and runs on what was brought"
    paths.switch(0, recover=True)
    paths.switch(1, recover=False)
    assert paths.ready() == (), "never more than the plan, in whatever order it changes"
    paths.end_step(2)
    assert {name.split(".layers.")[1][0] for name in paths.ready()} == {"0"}


@pytest.mark.parametrize("frozen", STORES)
@pytest.mark.filterwarnings("ignore:.*full precision of frozen weights is gone")
def test_lora_trains_under_a_guard_within_the_budget(frozen, monkeypatch):
    model = lora_model()
    before = {name: param.detach().clone() for name, param in model.named_parameters() if not param.requires_grad}
    paths = gnmr.Int8(frozen=frozen)
    monkeypatch.setattr("gnmr.pytorch.guard.find_units", lambda model, **_: tuple(base_units(model)))
    guard = gnmr.Guard(model, paths, gnmr.Policy(max_active=1, alpha=1.0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    losses, recovered = [], 0
    for step in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss * (1 + 4 * (step % 3 == 2))).backward()
        guard.step()
        assert len(paths.ready()) <= 7
        recovered += len(guard.active)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert recovered > 0
    guard.detach()
    after = dict(model.named_parameters())
    assert all(type(after[name]) is nn.Parameter for name in before)
    assert all(torch.equal(after[name], before[name]) for name in before) == (frozen != "dequantize")


@pytest.mark.filterwarnings("ignore:.*full precision of frozen weights is gone")
@pytest.mark.parametrize("frozen", STORES)
@pytest.mark.parametrize("recover", [False, True])
def test_other_weights_may_be_loaded_meanwhile(frozen, recover):
    module, other = linear(torch.bfloat16, frozen=True), linear(torch.bfloat16, frozen=True)
    with torch.no_grad():
        other.weight.mul_(-2)
    paths = gnmr.Int8(frozen=frozen)
    one(paths, module)
    paths.switch(0, recover)
    paths.end_step(1)
    x = torch.randn(4, 17).bfloat16()
    module(x)
    module.load_state_dict(other.state_dict())
    paths.switch(0, recover=False)
    reference = linear(torch.bfloat16, frozen=True)
    reference.load_state_dict(other.state_dict())
    one(gnmr.Int8(), reference)

    assert torch.equal(module(x), reference(x))
    paths.detach()
    torch.testing.assert_close(module.weight, other.weight, rtol=0.02, atol=0.02)
    assert frozen == "dequantize" or torch.equal(module.weight, other.weight)


@pytest.mark.parametrize("frozen", STORES)
@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.filterwarnings("ignore:.*full precision of frozen weights is gone")
def test_a_copy_is_a_model_of_its_own(frozen, pickled):
    module = linear(torch.bfloat16, frozen=True)
    paths = gnmr.Int8(frozen=frozen)
    model = one(paths, module)
    if pickled:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)  # our own bytes
    else:
        twin = copy.deepcopy(model)
    x = torch.randn(4, 17).bfloat16()
    wanted = module.eval()(x)
    paths.detach()

    assert torch.equal(twin["layers"][0]["fc1"](x), wanted)
    assert torch.equal(twin.state_dict()["layers.0.fc1.weight"], module.weight)
    for store in STORES:
        again = gnmr.Int8(frozen=store)
        third = copy.deepcopy(twin)
        again.attach(gnmr.find_units(third, granularity="block"))
        third["layers"][0]["fc1"](x)
        again.detach()
        assert store == "dequantize" or torch.equal(third["layers"][0]["fc1"].weight, module.weight)


def test_dequantised_weights_say_so_once():
    paths = gnmr.Int8(frozen="dequantize")
    model = one(paths, linear(frozen=True))
    with pytest.warns(gnmr.GnmrWarning, match="full precision of frozen weights is gone: this state_dict holds"):
        model.state_dict()
    model.state_dict()
    with pytest.warns(gnmr.GnmrWarning, match="is gone: the model now has their dequantised values"):
        paths.detach()


def test_a_weight_of_codes_is_not_changed_in_place_and_moves_with_its_model():
    module = linear(torch.bfloat16, frozen=True)
    one(gnmr.Int8(frozen="dequantize"), module)
    with pytest.raises(gnmr.PathError, match="would change a frozen weight of which only INT8 codes are there"):
        module.weight.data.add_(1)
    plain = module.weight.plain()
    module.float()
    assert isinstance(module.weight, DequantizedWeight)
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight.bfloat16().plain(), plain)
    assert "DequantizedWeight" in repr(module.weight)


def test_frozen_weights_that_cannot_leave():
    module = linear(frozen=True)
    paths = gnmr.Int8(frozen="offload")
    one(paths, module)
    module.weight.requires_grad_(True)
    with pytest.raises(gnmr.PathError, match=r"'layers.0.fc1' was unfrozen while its full precision is in host memory"):
        module(torch.randn(2, 17))


def test_a_full_disk_leaves_the_model_as_it_was(monkeypatch, tmp_path):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    module = linear(frozen=True)
    weight = module.weight.detach().clone()
    with pytest.raises(gnmr.PathError, match=r"cannot be put into .*No space left.*offload_dir"):
        one(gnmr.Int8(frozen="offload", offload_dir=tmp_path), module)
    assert torch.equal(module.weight, weight)
    assert "forward" not in module.__dict__


# The trigger, the state, the settings


@pytest.mark.parametrize("how", ["high", "int8"])
@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_errors_are_those_of_the_casts_on_either_path(how, recover, frozen):
    module = linear(frozen=frozen)
    x, dy = torch.randn(9, 17), torch.randn(9, 11)
    (cx, sx), (_, sw) = codes(x), codes(module.weight)
    paths = gnmr.Int8(backward=how)
    one(paths, module)
    paths.watch_errors(1)
    paths.switch(0, recover)
    with paths.apart():
        grads(module, 100 * x, dy)
    grads(module, x, dy)

    errors = paths.errors()

    assert errors["x"][0] == pytest.approx(float((cx * sx - x).norm() / x.norm()), rel=1e-4)
    assert set(errors) == ({"x", "dy"} if how == "int8" else {"x"})
    if how == "int8":
        cast = (dy * sw.t().float()) if frozen else (dy * sx.float()).t()
        cg, sg = codes(cast)
        assert errors["dy"][0] == pytest.approx(float((cg * sg - cast).norm() / cast.norm()), rel=1e-4)


def test_gap_reads_the_errors():
    model = Toy()
    guard = gnmr.Guard(model, gnmr.Int8(backward="int8"), gnmr.Policy(max_active=1), trigger=Gap)
    for seed in range(3):
        model.zero_grad()
        backward(model, batch(seed=seed))
        guard.step()
    assert np.isfinite(guard._signal.last["x"]).all()
    state = json.loads(json.dumps(guard.state_dict()))
    again = gnmr.Guard(Toy(), gnmr.Int8(backward="int8"), gnmr.Policy(max_active=1), trigger=Gap)
    again.load_state_dict(state)
    assert again.state_dict() == guard.state_dict()


def test_a_state_of_something_else_is_refused():
    with pytest.raises(gnmr.StateError, match="no state of Int8"):
        gnmr.Int8().load_state_dict({})


def test_a_gradient_of_a_gradient_is_an_error():
    module = linear()
    one(gnmr.Int8(), module)
    x = torch.randn(2, 17, requires_grad=True)
    with pytest.raises(gnmr.PathError, match="a gradient of a gradient was asked for"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outliers": 0}, "outliers must be > 0"),
        ({"outliers": float("nan")}, "outliers must be > 0"),
        ({"backward": "fp8"}, "backward must be 'high' or 'int8', got 'fp8'"),
        ({"frozen": "disk"}, "frozen must be 'resident', 'offload' or 'dequantize', got 'disk'"),
        ({"offload_dir": "."}, "belongs to frozen='offload'"),
        ({"frozen": "offload", "offload_dir": "/nowhere/at/all"}, "offload_dir must be a folder"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        gnmr.Int8(**settings)


def test_a_device_without_the_product_is_refused(monkeypatch):
    def missing(a, b):
        raise NotImplementedError("aten::_int_mm is not implemented")

    monkeypatch.setattr(torch, "_int_mm", missing)
    with pytest.raises(gnmr.PathError, match=r"does not run on cpu .*use gnmr.Simulated\(low='int8'\)"):
        one(gnmr.Int8(), linear())


def test_settings_are_described():
    paths = gnmr.Int8(outliers=6.0, frozen="dequantize")
    assert paths.describe() == {"kind": "Int8", "outliers": 6.0, "backward": "high", "frozen": "dequantize"}
    assert repr(paths) == "Int8(outliers=6.0, backward='high', frozen='dequantize')"


class Shifted(nn.Module):
    """A parametrization: the weight that the model runs on is made at each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, weight):
        return weight + self.shift


def test_a_weight_that_is_computed_at_each_forward_is_quantised_at_each():
    module = linear(frozen=True)
    nn.utils.parametrize.register_parametrization(module, "weight", Shifted())
    module.requires_grad_(False)
    paths = gnmr.Int8()
    one(paths, module)
    x = batch(width=17)
    before = module(x)
    module.parametrizations.weight[0].shift.fill_(1.0)
    after = module(x)

    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before + x.sum(dim=-1, keepdim=True), atol=0.2, rtol=0.05)
