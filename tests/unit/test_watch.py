"""Units with frozen operators are watched by their adapters, or by the gradient at their output."""

import copy

import numpy as np
import pytest
import torch
import transformers

import gnmr
from gnmr import UnitError, find_units

peft = pytest.importorskip("peft")
TARGETS = ("q_proj", "down_proj")


def lora(targets=TARGETS):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    settings = peft.LoraConfig(r=2, target_modules=list(targets), task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def tokens(rows=4):
    return torch.randint(32, (rows, 8), generator=torch.Generator().manual_seed(1))


def loss_of(model, ids, scale=1.0):
    return model(input_ids=ids, labels=ids).loss * scale


def guard_of(model, watch, **options):
    options = {"granularity": "block", **options}
    return gnmr.Guard(model, gnmr.Simulated(low="int8"), gnmr.Policy(max_active=1), watch=watch, **options)


def layers(model):
    return model.base_model.model.model.layers


def at_outputs(model, ids):
    """The norms of dL/dh behind each layer, by autograd itself."""
    kept = []
    hooks = [layer.register_forward_hook(lambda module, args, out: kept.append(out)) for layer in layers(model)]
    loss = loss_of(model, ids)
    for hook in hooks:
        hook.remove()
    return [grad.double().norm().item() for grad in torch.autograd.grad(loss, kept)]


def test_adapters_are_the_units_gradient_and_the_frozen_base_its_operators():
    model = lora()
    guard = guard_of(model, "adapter")
    loss_of(model, tokens()).backward()
    guard.step()

    assert [unit.name for unit in guard.units] == [f"base_model.model.model.layers.{i}" for i in range(3)]
    assert all(len(unit.operators) == 7 for unit in guard.units)
    for unit, layer in zip(guard.units, layers(model), strict=True):
        grads = [param.grad for name, param in layer.named_parameters() if "lora_" in name]
        assert len(grads) == 4
        expected = torch.linalg.vector_norm(torch.stack([grad.double().norm() for grad in grads]))
        assert guard._last[0].norms[unit.index] == pytest.approx(expected.item(), rel=1e-6)


def test_single_operators_are_watched_by_their_own_adapters():
    units = find_units(lora(), include=["*q_proj", "*down_proj"], watch="adapter")

    assert len(units) == 6
    assert [tuple(piece.param.shape) for piece in units[0].pieces] == [(2, 16), (16, 2)]


# transformers is about to rename its checkpointing.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_the_gradient_at_a_layers_output_is_that_of_autograd(checkpointing):
    model = lora()
    expected = at_outputs_on_low(model)
    guard = guard_of(model, "output_grad")
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    loss_of(model, tokens()).backward()
    guard.step()

    np.testing.assert_allclose(guard._last[0].norms, expected, rtol=1e-5)


def test_micro_batches_add_up_to_the_large_batch():
    model = lora()
    guard = guard_of(model, "output_grad")
    for part in tokens().split(2):
        loss_of(model, part, 1 / 2).backward()
    guard.step()
    small = guard._last[0].norms
    guard.detach()

    np.testing.assert_allclose(small, at_outputs_on_low(model), rtol=1e-5)


def at_outputs_on_low(model):
    paths = gnmr.Simulated(low="int8")
    paths.attach(find_units(model, granularity="block", watch="output_grad"))
    found = at_outputs(model, tokens())
    paths.detach()
    return found


def test_a_loss_scale_is_taken_out_of_the_outputs():
    plain, scaled = lora(), lora()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    norms = []
    for model, live in ((plain, None), (scaled, scaler)):
        guard = guard_of(model, "output_grad")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        loss = loss_of(model, tokens())
        (loss if live is None else live.scale(loss)).backward()
        guard.step(**({} if live is None else {"scaler": live, "optimizer": optimizer}))
        norms.append(guard._last[0].norms)

    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_operators_without_adapters_are_watched_at_their_outputs():
    model = lora()
    guard = guard_of(model, "output_grad", granularity="operator", include=["*k_proj", "*q_proj"])
    loss_of(model, tokens()).backward()
    guard.step()

    reading = guard._last[0]
    # Nothing before the first layer is trained, so that no gradient comes to its frozen k_proj.
    assert reading.observed.tolist() == [True, False, True, True, True, True]
    assert (reading.norms[reading.observed] > 0).all()


# dynamo reads the .grad of what goes from one graph into the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_are_watched_at_their_outputs():
    model = lora()
    expected = at_outputs_on_low(model)
    guard = guard_of(model, "output_grad")
    for layer in layers(model):
        layer.compile(backend="aot_eager")
    loss_of(model, tokens()).backward()
    guard.step()

    np.testing.assert_allclose(guard._last[0].norms, expected, rtol=1e-4)


def test_clipping_at_outputs_is_torchs():
    model, twin = lora(), lora()
    guard = guard_of(model, "output_grad")
    other = guard_of(twin, "adapter")
    for each in (model, twin):
        loss_of(each, tokens()).backward()
    guard.step()
    other.step()
    total = guard.clip_grad_norm_(0.01)

    assert total == torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


def test_a_step_without_a_backward_is_refused_at_outputs_too():
    guard = guard_of(lora(), "output_grad")

    with pytest.raises(gnmr.GuardError, match="no unit has a gradient"):
        guard.step()


def test_detaching_takes_the_hooks_away():
    model = lora()
    guard_of(model, "output_grad").detach()

    assert not any(module._forward_hooks for module in model.modules())


def test_a_copy_of_a_watched_model_is_heard_by_nobody():
    model = lora()
    guard = guard_of(model, "output_grad")
    twin = copy.deepcopy(model)
    loss_of(twin, tokens()).backward()

    assert not guard._outputs.heard
    with pytest.raises(gnmr.GuardError, match="no unit has a gradient"):
        guard.step()


def test_what_cannot_be_watched_is_an_error():
    model = lora(["q_proj"])

    with pytest.raises(UnitError, match=r"down_proj' has no trainable adapter.*target_modules"):
        find_units(model, include="*down_proj", watch="adapter")
    with pytest.raises(ValueError, match="watch must be 'weight', 'adapter' or 'output_grad', got 'grad'"):
        find_units(model, watch="grad")
    with pytest.raises(ValueError, match="watch='output_grad' has none"):
        guard_of(model, "output_grad", trigger=_gsnr)


def _gsnr(n_units, policy, units):
    from gnmr.triggers import AlwaysTop

    return AlwaysTop(n_units, policy, units, by="gsnr")
