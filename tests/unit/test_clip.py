"""guard.clip_grad_norm_ is torch.nn.utils.clip_grad_norm_, with the norms reused."""

import copy
import math

import pytest
import torch

from gnmr import Guard, GuardError, Policy
from toys import Toy, ToyPaths, backward, batch


def pair(dtype=torch.float32):
    """Two equal models with equal gradients, the first one guarded."""
    model = Toy().to(dtype)
    twin = copy.deepcopy(model)
    guard = Guard(model, ToyPaths(), Policy(max_active=1))
    for each in (model, twin):
        backward(each, batch().to(dtype))
    return guard, model, twin


def assert_same(model, twin):
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        if other.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("max_norm", [1e-3, 0.1, 1.0, 1e6, math.inf])
@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e4])
def test_it_clips_as_torch_does(max_norm, factor):
    guard, model, twin = pair()
    for each in (model, twin):
        for param in each.parameters():
            param.grad.mul_(factor)

    guard.step()
    total = guard.clip_grad_norm_(max_norm)
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)

    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0)
    assert_same(model, twin)


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["layers.0.up_proj", "embed"])
def test_a_nonfinite_total_leaves_what_torch_leaves(max_norm, bad, where):
    guard, model, twin = pair()
    for each in (model, twin):
        each.get_submodule(where).weight.grad[0, 0] = bad

    guard.step()
    total = guard.clip_grad_norm_(max_norm)
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)

    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert_same(model, twin)


def test_error_if_nonfinite_touches_nothing():
    guard, model, _ = pair()
    model.embed.weight.grad[0, 0] = math.nan
    before = model.head.weight.grad.clone()

    guard.step()
    with pytest.raises(RuntimeError, match="total norm of the gradients is nan"):
        guard.clip_grad_norm_(1e-3, error_if_nonfinite=True)

    assert torch.equal(model.head.weight.grad, before)


def test_missing_gradients_and_several_dtypes():
    guard, model, twin = pair(torch.bfloat16)
    for each in (model, twin):
        each.head.float()
        each.head.weight.grad = torch.ones(1, 8)
        each.embed.weight.grad = None
        each.layers[0].down_proj.weight.grad = None

    guard.step()
    total = guard.clip_grad_norm_(0.5)
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)

    # In bfloat16 torch rounds each parameter's norm to three digits on its way; gnmr does not.
    torch.testing.assert_close(total, wanted.float(), rtol=1e-2, atol=0)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=2e-2, atol=0)


def test_from_the_second_step_on_one_pass_reads_everything(monkeypatch):
    guard, model, twin = pair()
    guard.step()
    guard.clip_grad_norm_(0.1)
    for each in (model, twin):
        each.zero_grad()
        backward(each, batch(seed=1))

    guard.step()
    monkeypatch.setattr(guard._monitor, "read", lambda: pytest.fail("a second pass"))
    total = guard.clip_grad_norm_(0.1)
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)

    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0)
    assert_same(model, twin)


def test_clipping_before_the_step_is_refused():
    guard, model, _ = pair()
    before = [param.grad.clone() for param in model.parameters()]

    with pytest.raises(GuardError, match=r"clip_grad_norm_ needs guard.step\(\) before it in this step"):
        guard.clip_grad_norm_(0.1)
    guard.step()
    backward(model, batch(seed=1))
    with pytest.raises(GuardError, match=r"clip_grad_norm_ needs guard.step\(\) before it in this step"):
        guard.clip_grad_norm_(0.1)

    model.zero_grad()
    backward(model, batch())
    for param, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_a_parameter_that_is_unfrozen_later_is_clipped_too():
    model, twin = Toy(), Toy()
    model.head.requires_grad_(False)
    guard = Guard(model, None, Policy(max_active=1), monitor_only=True)
    model.head.requires_grad_(True)
    for each in (model, twin):
        backward(each, batch())
    guard.step()

    total = guard.clip_grad_norm_(0.1)
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)

    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0)
    assert_same(model, twin)


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan])
def test_a_senseless_max_norm_is_refused(max_norm):
    guard, *_ = pair()

    with pytest.raises(ValueError, match=r"max_norm must be > 0, got"):
        guard.clip_grad_norm_(max_norm)


def test_clipping_twice_in_a_step_is_an_error():
    guard, *_ = pair()
    guard.step()
    guard.clip_grad_norm_(0.1)

    with pytest.raises(GuardError, match=r"needs guard\.step\(\) before it"):
        guard.clip_grad_norm_(0.1)
