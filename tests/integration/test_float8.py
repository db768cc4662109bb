"""Float8 paths on the real torchao, emulated on a CPU."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gnmr import Float8, Guard, PathError, Policy, UnitError, find_units
from gnmr.lab.recipe import load_recipe
from gnmr.pytorch.measure import held_for_backward
from gnmr.triggers import Fixed, Random
from toys import Toy, backward, batch, spike

# torchao changes what transformers and peft do when they are imported, so that it is in no environment by default:
# pip install 'gnmr[float8]' runs this file.
torchao_float8 = pytest.importorskip("torchao.float8")
theirs = pytest.importorskip("torchao.float8.float8_linear")
Float8LinearConfig = torchao_float8.Float8LinearConfig
convert_to_float8_training = torchao_float8.convert_to_float8_training

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
GEMMS = ("fprop", "dgrad", "wgrad")
WIDTH = 32


def config(recipe="tensorwise", **changes):
    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **changes)


def is_projection(module, fqn):
    return fqn.endswith("_proj")


def toy(**options):
    return Toy(width=WIDTH, **options)


def run(model, x, scale=1.0):
    """Return the output and the gradients of one forward and backward."""
    model.zero_grad()
    y = model(x)
    (y.square().mean() * scale).backward()
    return [y.detach(), *(param.grad.clone() for param in model.parameters())]


def assert_same(mine, wanted):
    assert len(mine) == len(wanted)
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_differ(mine, wanted):
    assert not any(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))


def attached(model, *args, **options):
    paths = Float8(*args, **options)
    paths.attach(find_units(model))
    return paths


def recover(paths, on=True):
    for unit in paths.units:
        paths.switch(unit.index, on)


# What the paths compute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_low_is_torchaos_converted_model_and_recovery_is_the_plain_one(recipe, dtype):
    model, x = toy().to(dtype), batch(width=WIDTH).to(dtype)
    exact = run(model, x)
    converted = convert_to_float8_training(copy.deepcopy(model), config=config(recipe), module_filter_fn=is_projection)
    paths = attached(model, recipe)

    low = run(model, x)
    recover(paths)

    assert_same(low, run(converted, x))
    assert_differ(low, exact)
    assert_same(run(model, x), exact)
    assert paths.ran().tolist() == [[1] * 4, [1] * 4]


def products(linear, x, dy):
    x = x.clone().requires_grad_()
    linear.weight.grad = None
    y = linear(x)
    y.backward(dy)
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": linear.weight.grad}


@pytest.mark.parametrize("gemms", [("fprop",), ("dgrad",), ("wgrad",), ("dgrad", "wgrad"), GEMMS])
def test_a_rung_recovers_the_products_that_it_names_and_no_other(gemms):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(32, 16, bias=False)})])})
    q_proj, x, dy = model["layers"][0]["q_proj"], torch.randn(8, 32), torch.randn(8, 16)
    exact = products(q_proj, x, dy)
    paths = attached(model, "rowwise", gemms)
    low = products(q_proj, x, dy)
    recover(paths)

    mine = products(q_proj, x, dy)

    for gemm in GEMMS:
        torch.testing.assert_close(mine[gemm], (exact if gemm in gemms else low)[gemm], rtol=1e-6, atol=1e-6)
        assert not torch.equal(low[gemm], exact[gemm])


def test_what_torchao_converted_keeps_its_own_config_and_stays_converted():
    own = config("rowwise")
    model, x = toy(), batch(width=WIDTH)
    exact = run(model, x)
    convert_to_float8_training(model, config=own, module_filter_fn=is_projection)
    wanted = run(model, x)
    paths = attached(model)

    assert_same(run(model, x), wanted)
    recover(paths)
    assert_same(run(model, x), exact)
    model.eval()
    torch.testing.assert_close(model(x), wanted[0], rtol=0, atol=0)
    paths.detach()
    assert all(module.config is own for module in model.modules() if isinstance(module, theirs.Float8Linear))
    assert_same(run(model.train(), x), wanted)


@pytest.mark.parametrize("options", [{"low": "tensorwise"}, {"emulate": False}])
def test_what_torchao_converted_otherwise_is_refused(options):
    model = convert_to_float8_training(toy(), config=config("rowwise"), module_filter_fn=is_projection)

    with pytest.raises(UnitError, match="was converted by torchao with another config than Float8\\(low=.*leave both"):
        attached(model, **options)
    attached(model, "rowwise", emulate=True)


# What the model keeps


def test_the_model_keeps_its_modules_parameters_hooks_and_keys():
    model, x = toy(), batch(width=WIDTH)
    seen, up_proj = [], model.layers[0].up_proj
    up_proj.register_forward_hook(lambda *_: seen.append(1))
    modules, params, keys = list(model.modules()), list(model.parameters()), list(model.state_dict())
    exact, random = run(model, x), torch.get_rng_state()
    paths = attached(model)

    assert torch.equal(torch.get_rng_state(), random)
    assert list(model.modules()) == modules
    assert [id(param) for param in model.parameters()] == [id(param) for param in params]
    assert list(model.state_dict()) == keys
    assert_differ(run(model, x), exact)
    copied = copy.deepcopy(model)
    assert_same(run(copied, x), exact)
    model.eval()
    torch.testing.assert_close(model(x), exact[0], rtol=0, atol=0)
    paths.detach()
    assert_same(run(model.train(), x), exact)
    assert len(seen) == 5
    assert vars(up_proj).keys() == vars(nn.Linear(2, 2)).keys()


def test_a_parameter_that_is_replaced_is_followed():
    """As FSDP2 does in every forward."""
    model, x = toy(), batch(width=WIDTH)
    attached(model)
    before = model(x)
    model.layers[0].up_proj._parameters["weight"] = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))

    assert not torch.equal(model(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_bytes_are_what_autograd_holds(dtype):
    model, x = toy(depth=1).to(dtype), batch(width=WIDTH).to(dtype)
    paths = attached(model, "rowwise")
    for path in (0, 1):
        recover(paths, bool(path))
        with held_for_backward(model) as held:
            model(x)
        assert paths.held_bytes()[path].sum() == held.projections > 0
    assert paths.extra_bytes(np.array([True, False])).tolist() == [0, 0]


def test_held_bytes_under_autocast_and_of_a_frozen_weight():
    model, x = toy(depth=1), batch(width=WIDTH)
    units = find_units(model)
    paths = Float8()
    paths.attach(units)
    model.layers[0].up_proj.weight.requires_grad_(False)
    for path in (0, 1):
        recover(paths, bool(path))
        with held_for_backward(model, units) as held, torch.autocast("cpu", torch.bfloat16):
            model(x)
        assert paths.held_bytes()[path].sum() == held.projections


# The proof


def test_a_config_that_quantises_nothing_is_an_error():
    from torchao.float8 import CastConfig, ScalingType

    off = CastConfig(scaling_type=ScalingType.DISABLED)
    nothing = Float8LinearConfig(cast_config_input=off, cast_config_weight=off, cast_config_grad_output=off)

    with pytest.raises(PathError, match="low would quantise nothing of 'layers.0.up_proj'"):
        attached(toy(), nothing)


def test_a_torchao_that_quantises_nothing_is_an_error_when_attached(monkeypatch):
    monkeypatch.setattr(theirs.Float8Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias))
    model = toy()

    with pytest.raises(PathError, match="low-cost path of 'layers.0.up_proj' runs nothing in float8, where its config"):
        attached(model)
    assert "forward" not in vars(model.layers[0].up_proj)


@pytest.mark.parametrize(("path", "what"), [(0, "multiply in float8"), (1, "multiply in high precision")])
def test_a_path_that_runs_as_the_other_is_an_error_at_its_first_forward(path, what):
    model, x = toy(), batch(width=WIDTH)
    paths = attached(model, recover=("fprop",))
    recover(paths, bool(path))
    rungs = paths._rungs[paths.operators[1]]
    rungs.linears[path].config = rungs.configs[1 - path]

    with pytest.raises(PathError, match=f"path of 'layers.0.down_proj' should {what}"):
        model(x)


def test_exact_values_zeros_and_large_biases_are_no_error():
    model = toy(depth=1)
    with torch.no_grad():
        model.layers[0].up_proj.bias.fill_(1e6)  # hides what float8 does
        model.layers[0].down_proj.weight.zero_()  # as LoRA's B at the start
    paths = attached(model)
    x = batch(width=WIDTH)
    model(x)
    up, down = (paths._rungs[operator] for operator in paths.operators)
    assert up.proven[0]
    assert not down.proven[0], "zeros prove nothing: it is looked at again"
    with torch.no_grad():
        model.layers[0].down_proj.weight.normal_()
    model(x * torch.nan)
    assert not down.proven[0]
    model(x)
    assert down.proven[0]


# Switching


def test_a_switch_between_steps_under_accumulation_and_checkpointing():
    (model, plain), xs = (toy(), toy()), [batch(width=WIDTH, seed=seed) for seed in range(2)]

    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.layers, self.embed, self.head = model.layers, model.embed, model.head

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    recomputed = Checkpointed(model)
    paths, reference = attached(recomputed, "rowwise"), attached(plain, "rowwise")
    for step in range(3):
        for each in (paths, reference):
            each.switch(1, step == 1)
        for accumulated in (recomputed, plain):
            accumulated.zero_grad()
            for x in xs:
                backward(accumulated, x)
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=0, atol=0)
        assert paths.ran().tolist() == (2 * reference.ran()).tolist()


def train(guard, model, steps, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    active = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, batch(width=WIDTH))
        if step == 3:
            spike(model, "layers.1.up_proj", 10.0)
        guard.step()
        optimizer.step()
        active.append(guard.active)
    return active


def test_a_guard_recovers_a_unit_and_a_resumed_one_goes_on_bit_for_bit():
    policy = Policy(max_active=1, lock_steps=1)
    whole, broken = toy(), toy()
    with Guard(whole, Float8("rowwise"), policy) as guard:
        active = train(guard, whole, 7)
    first = Guard(broken, Float8("rowwise"), policy)
    begun = train(first, broken, 4)
    state, weights = first.state_dict(), copy.deepcopy(broken.state_dict())
    resumed = toy(seed=1)
    resumed.load_state_dict(weights)
    second = Guard(resumed, Float8("rowwise"), policy)
    second.load_state_dict(state)

    assert begun + train(second, resumed, 3, first=4) == active
    assert active[3] == active[4] == ("layers.1.up_proj",)
    assert_same(list(resumed.parameters()), list(whole.parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("granularity", ["block", "operator"])
def test_compiled_layers_follow_random_plans_without_the_recompile_limit(granularity):
    depth, steps = 4, 12
    counts, weights, counter = [], [], CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for backend in (None, counter):
        model = toy(depth=depth)
        n = depth if granularity == "block" else 2 * depth
        draws = np.random.default_rng(0).integers(0, n + 1, steps).tolist()
        trigger = lambda n, p, units: Random(n, p, units, counts=draws, seed=3)  # noqa: B023, E731
        paths = Float8("tensorwise")
        guard = Guard(model, paths, Policy(max_active=n), trigger=trigger, granularity=granularity)
        if backend is not None:
            for layer in model.layers:
                layer.compile(backend=backend, dynamic=False)
        optimizer, own, seen = torch.optim.SGD(model.parameters(), lr=1e-2), paths.ran, []
        paths.ran = lambda own=own, seen=seen: (seen.append(own()), seen[-1])[1]
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for step in range(steps):
                optimizer.zero_grad()
                backward(model, batch(width=WIDTH, seed=step))
                guard.step()
                optimizer.step()
        counts.append(np.array(seen))
        weights.append([param.detach().clone() for param in model.parameters()])

    assert counter.frame_count <= (2 if granularity == "block" else 3), "not one for each plan"
    np.testing.assert_array_equal(*counts)
    assert counts[0].sum(axis=(0, 2)).min() > 0, "both paths ran"
    for mine, wanted in zip(*weights, strict=True):
        torch.testing.assert_close(mine, wanted)
    torch._dynamo.reset()


def test_lora_adapters_beside_a_frozen_base_are_units():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(toy(), peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    x = batch(width=WIDTH)
    plain = model(x)
    of_layer = lambda fqn: fqn.partition(".lora_")[0]  # noqa: E731
    guard = Guard(
        model,
        Float8("rowwise"),
        Policy(max_active=1),
        include=["*.up_proj", "*.lora_[AB].*"],
        granularity=of_layer,
        trigger=lambda n, p, units: Fixed(n, p, units, recover=[units[1]]),
    )
    assert [len(unit.operators) for unit in guard.units] == [3, 3]
    backward(model, x)
    guard.step()
    assert not torch.equal(model(x), plain)
    assert guard.paths.ran().tolist() == [[3, 0], [0, 3]]
    guard.detach()
    torch.testing.assert_close(model(x), plain, rtol=0, atol=0)


@pytest.fixture
def mesh():
    """One rank is enough: FSDP2 puts whole parameters in for a forward, and shards afterwards, all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fsdp2_trains_as_one_process(mesh):
    (model, plain), x = (toy(), toy()), batch(width=WIDTH)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    paths, reference = attached(model, "rowwise"), attached(plain, "rowwise")
    for recovers in (False, True):
        recover(paths, recovers)
        recover(reference, recovers)
        mine, *grads = run(model, x)
        assert_same([mine, *(grad.full_tensor() for grad in grads)], run(plain, x))
    assert all(rungs.proven == [True, True] for rungs in paths._rungs.values())


# What is refused


def test_float8_all_gather_is_refused():
    gathered = config(enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(toy(), config=gathered, module_filter_fn=is_projection)

    with pytest.raises(ValueError, match="enable_fsdp_float8_all_gather=True: .* no high precision to recover to"):
        Float8(gathered)
    with pytest.raises(UnitError, match="'layers.0.up_proj' was converted with .* no high precision to recover to"):
        attached(model)


def test_float8_all_gather_is_refused_of_sharded_weights(mesh):
    gathered = config(enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(toy(), config=gathered, module_filter_fn=is_projection)
    fully_shard(model, mesh=mesh)

    with pytest.raises(UnitError, match="'layers.0.up_proj' was converted with .* no high precision to recover to"):
        attached(model)


def test_a_linear_with_a_forward_of_its_own_is_refused():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, patched = toy(), toy()
    model.layers[1].up_proj = Doubled(WIDTH, 2 * WIDTH)
    patched.layers[1].up_proj.forward = lambda x: x

    with pytest.raises(UnitError, match="'layers.1.up_proj' is a Doubled, and torchao converts a plain nn.Linear"):
        attached(model)
    with pytest.raises(UnitError, match="'layers.1.up_proj' has a forward of its own"):
        attached(patched)
    assert "forward" not in vars(model.layers[0].up_proj)


def test_a_second_guard_is_refused_and_the_first_goes_on():
    model, x = toy(), batch(width=WIDTH)
    paths = attached(model)
    low = run(model, x)

    with pytest.raises(PathError, match="on the paths of another guard"):
        attached(model)
    with pytest.raises(PathError, match="attached already"):
        paths.attach(find_units(toy()))
    assert_same(run(model, x), low)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": "fp8"}, "low must be one of tensorwise, rowwise, rowwise_with_gw_hp, or a Float8LinearConfig"),
        ({"recover": ()}, "recover must be a list of products among fprop, dgrad, wgrad"),
        ({"recover": "fprop"}, "recover must be a list"),
        ({"recover": ["bprop"]}, "recover must be a list"),
        ({"low": "rowwise_with_gw_hp", "recover": ["wgrad"]}, "would change nothing: low runs only fprop, dgrad"),
        ({"emulate": "yes"}, "emulate must be True, False or None"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        Float8(**options)


def test_sizes_that_a_gpu_cannot_multiply_are_named():
    paths = attached(toy(), "rowwise")
    rungs = paths._rungs[paths.operators[0]]
    rungs.native = True

    with pytest.raises(PathError, match="'layers.0.up_proj' got 4 tokens.*a multiple of 16"):
        rungs.run_and_look(0, batch(width=WIDTH))
    assert rungs.run_and_look(0, batch(rows=16, width=WIDTH)).shape == (16, 2 * WIDTH)


@pytest.mark.parametrize(("found", "message"), [(None, "needs torchao"), ("0.16.0", "installed is 0.16.0")])
def test_a_missing_or_untested_torchao_is_an_import_error(monkeypatch, found, message):
    from importlib.metadata import PackageNotFoundError

    from gnmr.paths import _torchao

    def version(name):
        if found is None:
            raise PackageNotFoundError
        return found

    monkeypatch.setattr(_torchao, "version", version)
    with pytest.raises(ImportError, match=f"{message}.*pip install 'gnmr\\[float8\\]'"):
        _torchao._check_version()


def test_settings_are_described_and_a_recipe_makes_them():
    recipe = load_recipe("demo", ['paths={kind="float8", low="rowwise", recover=["wgrad"]}', "stress.at=output"])

    assert recipe.make_paths(seed=3).describe() | {"torchao": ""} == {
        "kind": "StressedFloat8",
        "low": "rowwise",
        "recover": ["wgrad"],
        "emulate": None,
        "torchao": "",
    }
