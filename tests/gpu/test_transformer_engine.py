"""TransformerEngine itself, where it is installed: what the double says of it, and its kernels."""

import warnings

import pytest
import torch
from torch import nn

import gnmr
from gnmr.paths.base import HIGH, LOW

with warnings.catch_warnings():
    warnings.simplefilter("default")  # its warnings are its own
    te = pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")

pytestmark = pytest.mark.filterwarnings("default")

WIDTH, ROWS = 128, 64
RECIPES = ("delayed", "current", "block", "mxfp8")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layernorm_qkv = te.LayerNormLinear(WIDTH, WIDTH, params_dtype=torch.bfloat16)
        self.proj = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16)
        self.layernorm_mlp = te.LayerNormMLP(WIDTH, 2 * WIDTH, params_dtype=torch.bfloat16)

    def forward(self, x):
        x = x + self.proj(self.layernorm_qkv(x))
        return x + self.layernorm_mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.run = lambda layer, x: layer(x)

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return x


def tokens():
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return x.to("cuda", torch.bfloat16)


def attached(recipe="current", *recovered, **options):
    try:
        paths = gnmr.TransformerEngine(recipe, **options)
    except gnmr.PathError as error:
        pytest.skip(str(error))
    model = Model()
    units = gnmr.find_units(model)
    paths.attach(units)
    for unit in units:
        paths.switch(unit.index, unit.name in recovered)
    return model, paths, units


def gradients(model, paths):
    model.zero_grad()
    with paths.autocast():
        y = model(tokens())
    y.float().square().mean().backward()
    return y.detach(), [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_recovered_unit_leaves_fp8(recipe):
    model, paths, units = attached(recipe, "layers.0.proj")
    gradients(model, paths)

    assert [unit.operators[0].module.fp8 for unit in units] == [True, False, True, True, True, True]
    assert paths.ran().tolist() == [[1, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recovery_of_all_is_bf16_bit_for_bit(recipe):
    plain, x = Model(), tokens()
    wanted = plain(x)
    model, paths, units = attached(recipe)
    low, _ = gradients(model, paths)
    for unit in units:
        paths.switch(unit.index, recover=True)
    high, _ = gradients(model, paths)

    assert not torch.equal(low, wanted)
    assert torch.equal(high, wanted)


def test_amax_histories_go_on_while_a_unit_is_on_recovery():
    model, paths, _ = attached("delayed")
    for recover in (False, False, True, True, False):
        paths.switch(1, recover)
        gradients(model, paths)
    histories = [layer.proj.fp8_meta["scaling_fwd"].amax_history[:, 0] for layer in model.layers]

    # Without calibration, two zeros would have been rolled into the first.
    assert [int((history > 0).sum()) for history in histories] == [5, 5]


def test_te_checkpoint_recomputes_on_the_planned_paths():
    model, paths, _ = attached("current", "layers.0.proj")
    _, wanted = gradients(model, paths)
    paths.ran()
    model.run = te.checkpoint
    _, found = gradients(model, paths)

    assert paths.ran()[[LOW, HIGH], [0, 1]].tolist() == [2, 2]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


def test_torch_checkpoint_is_refused():
    model, paths, _ = attached("current")
    model.run = lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    with paths.autocast():
        y = model(tokens().requires_grad_())

    with pytest.raises(gnmr.PathError, match="use te.checkpoint"):
        y.float().sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_under_the_guard(recipe):
    try:
        paths = gnmr.TransformerEngine(recipe)
    except gnmr.PathError as error:
        pytest.skip(str(error))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with gnmr.Guard(model, paths, gnmr.Policy(max_active=2, alpha=1.01, beta=None)) as guard:
        for step in range(8):
            with paths.autocast():
                loss = model(tokens()).float().square().mean() * 2**step
            loss.backward()
            guard.step()
            guard.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert len(guard.active) == 2
        assert all(torch.isfinite(param).all() for param in model.parameters())
