"""TransformerEngine's paths, decided against a recording double of its documented interface."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gnmr
from gnmr.paths.base import HIGH, LOW

DOUBLES = Path(__file__).parents[2] / "doubles"
NAMES = ("transformer_engine", "nvdlfw_inspect")


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
        del sys.modules[name]


@pytest.fixture
def te(monkeypatch):
    forget()
    monkeypatch.syspath_prepend(DOUBLES)
    torch.manual_seed(0)
    yield import_module("transformer_engine.pytorch")
    forget()


@pytest.fixture
def log(te):
    return import_module("transformer_engine").log


class Layer(nn.Module):
    def __init__(self, te):
        super().__init__()
        self.layernorm_qkv = te.LayerNormLinear(16, 16)
        self.proj = te.Linear(16, 16, bias=False)
        self.layernorm_mlp = te.LayerNormMLP(16, 32)

    def forward(self, x):
        x = x + self.proj(self.layernorm_qkv(x, is_first_microbatch=None))
        return x + self.layernorm_mlp(x)


class Model(nn.Module):
    def __init__(self, te):
        super().__init__()
        self.layers = nn.ModuleList([Layer(te), Layer(te)])
        self.head = nn.Linear(16, 1)
        self.run = lambda layer, x: layer(x)

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def batch():
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def switched(model, paths, *recovered):
    units = gnmr.find_units(model)
    paths.attach(units)
    for unit in units:
        paths.switch(unit.index, recover=unit.name in recovered)
    return units


def forwards(log):
    """Which modules ran, and whether quantised."""
    return [(entry["what"], entry["fp8"]) for entry in log if entry["what"] != "reduce"]


def test_its_modules_are_units_by_default_and_their_norms_are_not(te):
    units = gnmr.find_units(Model(te))

    assert [unit.name.split(".")[-1] for unit in units[:3]] == ["layernorm_qkv", "proj", "layernorm_mlp"]
    assert [len(unit.params) for unit in units[:3]] == [2, 1, 2]
    assert units[1].operators[0].weight.shape == (16, 16)
    assert not units[1].operators[0].transposed


def test_subclasses_and_hugging_face_names_are_units_too(te):
    class Wrapped(te.Linear):
        """As Megatron-Core's."""

    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.ModuleDict({"q_proj": te.Linear(4, 4), "linear_fc1": Wrapped(4, 4)})])}
    )

    assert [unit.name for unit in gnmr.find_units(model)] == ["layers.0.q_proj", "layers.0.linear_fc1"]


def test_only_the_recovered_unit_leaves_the_region(te, log):
    model, paths = Model(te), gnmr.TransformerEngine("current")
    switched(model, paths, "layers.0.proj")
    log.clear()
    with paths.autocast():
        model(batch())

    assert forwards(log) == [
        *(("LayerNormLinear", True), ("Linear", False), ("LayerNormMLP", True)),
        *(("LayerNormLinear", True), ("Linear", True), ("LayerNormMLP", True)),
    ]
    assert paths.ran().tolist() == [[1, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0]]


def test_recovery_is_exact_and_leaves_nothing_behind(te):
    model, paths, x = Model(te), gnmr.TransformerEngine("current"), batch()
    exact = model(x)
    units = switched(model, paths, *(unit.name for unit in gnmr.find_units(model)))
    with paths.autocast():
        recovered = model(x)
        for unit in units:
            paths.switch(unit.index, recover=False)
        low = model(x)
    paths.detach()

    assert torch.equal(recovered, exact)
    assert not torch.equal(low, exact)
    assert torch.equal(model(x), exact)


def test_the_region_is_reduced_once_a_forward_and_no_unit_has_one_of_its_own(te, log):
    group = object()
    model, paths = Model(te), gnmr.TransformerEngine("delayed", amax_reduction_group=group)
    switched(model, paths, "layers.0.proj", "layers.1.layernorm_mlp")
    log.clear()
    with paths.autocast():
        model(batch())

    assert [entry for entry in log if entry["what"] == "reduce"] == [{"what": "reduce", "group": group}]
    assert log[-1]["what"] == "reduce"


@pytest.mark.parametrize(("recipe", "calibrating"), [("delayed", True), ("current", False)])
def test_recovery_goes_on_to_feed_the_histories_of_delayed_scaling(te, log, recipe, calibrating):
    group = object()
    model, paths = Model(te), gnmr.TransformerEngine(recipe, amax_reduction_group=group)
    switched(model, paths, "layers.0.proj")
    log.clear()
    with paths.autocast():
        model(batch())
    proj = log[1]

    assert (proj["fp8"], proj["calibrating"]) == (False, calibrating)
    assert proj["recipe"] is paths.recipe, "another recipe would rebuild the quantizers"
    assert proj["group"] is group


def test_a_host_region_of_the_deprecated_name_is_one_too(te, log):
    from transformer_engine.common.recipe import Float8CurrentScaling

    model, paths = Model(te), gnmr.TransformerEngine()
    switched(model, paths, "layers.1.proj")
    with pytest.warns(DeprecationWarning, match="fp8_autocast"):
        region = te.fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling())  # accelerate's
    log.clear()
    with region:
        model(batch())

    assert [fp8 for _, fp8 in forwards(log)] == [True] * 4 + [False, True]
    with pytest.raises(ValueError, match=r"autocast\(\) needs a recipe"), paths.autocast():
        pass


def test_without_a_region_the_low_path_would_be_high_precision(te):
    model, paths = Model(te), gnmr.TransformerEngine("current")
    switched(model, paths)

    with pytest.raises(gnmr.PathError, match=r"'layers.0.layernorm_qkv' is on its low-cost path, and no te.autocast"):
        model(batch())


def test_a_recovered_unit_needs_no_region(te, log):
    model, paths = Model(te), gnmr.TransformerEngine()
    switched(model, paths, *(unit.name for unit in gnmr.find_units(model)))
    log.clear()
    model(batch())

    assert not any(fp8 for _, fp8 in forwards(log))
    assert paths.ran().tolist() == [[0] * 6, [1] * 6]


def test_evaluation_is_the_host_s_own(te, log):
    model, paths = Model(te).eval(), gnmr.TransformerEngine("current")
    switched(model, paths, "layers.0.proj")
    log.clear()
    model(batch())
    with paths.autocast():
        model(batch())

    assert [fp8 for _, fp8 in forwards(log)] == [False] * 6 + [True] * 6
    assert paths.ran().sum() == 0


def test_te_checkpoint_recomputes_on_the_planned_paths(te, log):
    model, paths = Model(te), gnmr.TransformerEngine("current")
    switched(model, paths, "layers.0.proj")
    model.run = te.checkpoint
    log.clear()
    with paths.autocast():
        loss = model(batch()).sum()
    once = forwards(log)
    loss.backward()

    assert forwards(log)[6:] == once[3:] + once[:3], "backward recomputes the last layer first"
    assert paths.ran().tolist() == [[2, 0, 2, 2, 2, 2], [0, 2, 0, 0, 0, 0]]


def test_torch_checkpoint_recomputes_outside_the_region(te):
    model, paths = Model(te), gnmr.TransformerEngine("current")
    switched(model, paths)
    model.run = lambda layer, x: checkpoint(layer, x, use_reentrant=False)
    with paths.autocast():
        loss = model(batch()).sum()

    with pytest.raises(gnmr.PathError, match="use te.checkpoint, since torch's recomputes outside it"):
        loss.backward()


def test_a_changed_recipe_is_an_error_since_nothing_would_change(te):
    model, paths = Model(te), gnmr.TransformerEngine("delayed")
    switched(model, paths)
    with paths.autocast():
        model(batch())
    paths.recipe.amax_history_len = 16

    with paths.autocast(), pytest.raises(gnmr.PathError, match="amax_history_len=16.*was to be.*amax_history_len=1024"):
        model(batch())


def test_another_recipe_than_the_one_asked_for_is_an_error(te):
    from transformer_engine.common.recipe import Float8BlockScaling

    model, paths = Model(te), gnmr.TransformerEngine("current")
    switched(model, paths)

    with (
        te.autocast(recipe=Float8BlockScaling()),
        pytest.raises(gnmr.PathError, match="was to be Float8CurrentScaling"),
    ):
        model(batch())


def test_an_operator_runs_once_in_a_region_of_delayed_scaling(te):
    model, paths, x = Model(te), gnmr.TransformerEngine("delayed"), batch()
    switched(model, paths)
    for _ in range(2):  # micro-batches, each in its own
        with paths.autocast():
            model(x)

    with paths.autocast(), pytest.raises(gnmr.PathError, match="'layers.0.layernorm_qkv' ran twice in one region"):
        model(model(x) * x)


@pytest.mark.parametrize("reduce_amax", [True, False])
def test_where_nothing_is_reduced_an_operator_may_run_twice(te, reduce_amax):
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    recipe = Float8CurrentScaling() if reduce_amax else DelayedScaling(reduce_amax=False)
    model, paths, x = Model(te), gnmr.TransformerEngine(recipe), batch()
    switched(model, paths)
    with paths.autocast():
        model(model(x) * x)

    assert paths.ran()[LOW].tolist() == [2] * 6


def test_grouped_linears_get_all_their_arguments(te, log):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"linear_fc1": te.GroupedLinear(2, 16, 8)})])})
    paths, x = gnmr.TransformerEngine("current"), batch()
    units = switched(model, paths)
    log.clear()
    with paths.autocast():
        model["layers"][0]["linear_fc1"](x, [1, 3], is_first_microbatch=True)
        model["layers"][0]["linear_fc1"](inp=x, m_splits=[4, 0])

    assert [entry["arguments"] for entry in log if entry["what"] == "GroupedLinear"] == [
        {"m_splits": [1, 3], "is_first_microbatch": True},
        {"m_splits": [4, 0], "is_first_microbatch": None},
    ]
    assert len(units[0].params) == 2


@pytest.mark.parametrize(
    ("recipe", "low"), [("delayed", 1.0), ("current", 1.0), ("block", 1 + 4 / 128), ("mxfp8", 1 + 1 / 32)]
)
def test_bytes_held_are_those_of_the_inputs_of_the_products(te, recipe, low):
    import_module("transformer_engine").chip["mxfp8"] = (True, "")
    model, paths = Model(te), gnmr.TransformerEngine(recipe)
    switched(model, paths)
    assert paths.held_bytes().sum() == 0
    with paths.autocast():
        model(batch())
    elements = [64, 64, 4 * (16 + 32)]

    held = paths.held_bytes()
    assert held[LOW, :3].tolist() == [round(n * low) for n in elements]
    assert held[HIGH, :3].tolist() == [4 * n for n in elements]


def test_weights_that_are_kept_in_fp8_are_warned_of(te):
    with te.quantized_model_init():
        model = Model(te)

    with pytest.warns(gnmr.GnmrWarning, match="weights of 6 operators are kept in FP8.*not exact"):
        gnmr.TransformerEngine("current").attach(gnmr.find_units(model))


def test_what_te_does_not_quantise_is_no_unit_of_it(te):
    plain = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4)})])})
    fused = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": te.ops.Linear(4, 4)})])})

    with pytest.raises(gnmr.UnitError, match="'layers.0.q_proj' is Linear, which te.autocast does not change"):
        gnmr.TransformerEngine("current").attach(gnmr.find_units(plain))
    with pytest.raises(gnmr.UnitError, match=r"is transformer_engine.pytorch.ops.Linear, which says nothing"):
        gnmr.TransformerEngine("current").attach(gnmr.find_units(fused))


@pytest.mark.parametrize(
    "paths", [gnmr.SavedActivations, gnmr.Simulated, lambda: gnmr.CustomPaths(low_context=torch.no_grad)]
)
def test_other_backends_do_not_take_its_modules(te, paths):
    with pytest.raises(gnmr.UnitError, match="module of TransformerEngine, which .* does not know .6 such operators"):
        paths().attach(gnmr.find_units(Model(te)))


def test_what_the_chip_lacks_is_said_with_its_reason(te):
    with pytest.raises(gnmr.PathError, match="recipe='mxfp8' cannot run here: MXFP8 needs compute capability 10.0"):
        gnmr.TransformerEngine("mxfp8")
    with pytest.raises(ValueError, match="recipe must be one of delayed, current, block, mxfp8, or an object of"):
        gnmr.TransformerEngine("hybrid")


def test_an_old_te_is_refused(te, monkeypatch):
    monkeypatch.delattr(te, "autocast")
    with pytest.raises(gnmr.PathError, match=r"no te.autocast: gnmr.TransformerEngine needs 2.9 or newer"):
        gnmr.TransformerEngine()


def test_without_te_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ImportError, match=r"needs NVIDIA TransformerEngine .*pip install"):
        gnmr.TransformerEngine("current")


def test_the_guard_reads_back_what_the_modules_did(te):
    model, paths = Model(te), gnmr.TransformerEngine("current")
    with gnmr.Guard(model, paths, gnmr.Policy(max_active=2, alpha=1.01, beta=None)) as guard:
        promoted = []
        for step in range(4):
            model.zero_grad()
            with paths.autocast():
                loss = model(batch()).sum() * 3**step
            loss.backward()
            guard.step()
            promoted.append(len(guard.active))
    assert promoted[-1] == 2
    assert guard.ledger.promotions.sum() >= 2


def test_a_module_that_runs_in_fp8_on_recovery_is_an_error(te):
    model, paths = Model(te), gnmr.TransformerEngine("current")
    guard = gnmr.Guard(model, paths, gnmr.Policy(max_active=2, warmup_steps=1))
    model.layers[0].proj.prepare_forward = lambda **_: setattr(model.layers[0].proj, "fp8", True)
    with paths.autocast():
        loss = model(batch()).sum()
    loss.backward()

    with pytest.raises(
        gnmr.PathError, match="'layers.0.proj' was planned on its recovery path and ran on its low-cost"
    ):
        guard.step()


@pytest.fixture
def debug(te):
    from gnmr.paths.transformer_engine import FEATURE, register_feature

    api = import_module("nvdlfw_inspect.api")
    register_feature()

    def start(feature=FEATURE):
        api.initialize(feature)

    return SimpleNamespace(start=start, api=api)


def gradients(model, paths, x):
    model.zero_grad()
    with paths.autocast():
        y = model(x)
    y.sum().backward()
    return y.detach(), model.layers[1].layernorm_mlp.fc2_weight.grad.clone()


def test_single_products_recover_by_the_debug_feature(te, debug):
    debug.start()
    model, x = Model(te), batch()
    paths = gnmr.TransformerEngine("current", gemms=["wgrad"])
    units = switched(model, paths)
    y, low = gradients(model, paths, x)
    ran_low = paths.ran()
    paths.switch(5, recover=True)
    same, recovered = gradients(model, paths, x)
    ran_high = paths.ran()
    paths.switch(5, recover=False)
    _, back = gradients(model, paths, x)

    assert torch.equal(same, y), "its forward stays in FP8"
    assert not torch.equal(recovered, low)
    assert torch.equal(back, low)
    assert ran_low.tolist() == [[1] * 6, [0] * 6]
    assert ran_high[:, 5].tolist() == [0, 1]
    assert paths.held_bytes()[:, 5].tolist() == [4 * 48, 4 * 48 * 4]
    assert paths.describe() == {
        "kind": "TransformerEngine",
        "recipe": "Float8CurrentScaling: Float8CurrentScaling(use_power_2_scales=False)",
        "gemms": ["wgrad"],
    }
    assert units[5].name == "layers.1.layernorm_mlp"
    paths.switch(5, recover=True)
    paths.detach()
    from gnmr.paths.transformer_engine import SWITCHBOARD

    assert SWITCHBOARD.quantized("layers.1.layernorm_mlp.fc2", "wgrad")


def test_a_feature_that_is_not_asked_is_found_by_the_read_back(te, debug):
    debug.start(None)
    import_module("nvdlfw_inspect.registry")
    model, paths = Model(te), gnmr.TransformerEngine("current", gemms=("dgrad", "wgrad"))
    switched(model, paths, "layers.0.proj")
    gradients(model, paths, batch())

    assert paths.ran()[:, 1].tolist() == [1, 0]


def test_single_products_need_the_debug_tool_and_names(te, debug):
    model = Model(te)
    with pytest.raises(gnmr.PathError, match=r"register_feature\(\) and debug_api.initialize\(...\) before the model"):
        gnmr.TransformerEngine("current", gemms=("wgrad",)).attach(gnmr.find_units(model))
    debug.start()
    model.layers[0].proj.name = model.layers[1].proj.name = "proj"
    with pytest.raises(gnmr.PathError, match="'proj' is the name of several layers"):
        gnmr.TransformerEngine("current", gemms=("wgrad",)).attach(gnmr.find_units(model))


@pytest.mark.parametrize("gemms", [(), ("forward",), "wgrad"])
def test_products_go_by_their_names(te, gemms):
    with pytest.raises(ValueError, match="gemms must name some of fprop, dgrad, wgrad"):
        gnmr.TransformerEngine("current", gemms=gemms)
