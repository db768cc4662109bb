"""A live loss scale changes no score, and a step that the scaler skips is an event and nothing else."""

import math

import pytest
import torch

from gnmr import Guard, GuardError, Policy
from toys import Toy, ToyPaths, backward, batch, spike

POLICY = Policy(max_active=1)
UNIT = "layers.1.up_proj"


def make(scale=1024.0, enabled=True):
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    return model, guard, scaler, torch.optim.SGD(model.parameters(), lr=1e-3)


def step(model, guard, scaler, optimizer, seed=0, fault=None, unscale="guard"):
    optimizer.zero_grad()
    scaler.scale(model(batch(seed=seed)).square().mean()).backward()
    if fault is not None:
        spike(model, UNIT, fault)
    if unscale == "user":
        scaler.unscale_(optimizer)
    decision = guard.step(scaler=scaler, optimizer=None if unscale == "nobody" else optimizer)
    scaler.step(optimizer)
    scaler.update()
    return decision


@pytest.mark.parametrize("unscale", ["guard", "user", "nobody"])
def test_the_scores_are_those_of_a_run_without_a_scaler(unscale):
    scaled = make()
    plain = make(enabled=False)
    for seed in range(6):
        fault = 10.0 if seed == 3 else None
        mine = step(*scaled, seed, fault, unscale)
        wanted = step(*plain, seed, fault)

        assert mine.gnmr.tolist() == wanted.gnmr.tolist()
        assert mine.active.tolist() == wanted.active.tolist()


@pytest.mark.parametrize("unscale", ["guard", "nobody"])
def test_doubling_the_scale_changes_no_score(unscale):
    model, guard, scaler, optimizer = make()
    for seed in range(4):
        scaler._scale.fill_(1024.0 * 2**seed) if seed else None
        with torch.no_grad():  # the same gradient at every step
            model.load_state_dict(Toy().state_dict())

        decision = step(model, guard, scaler, optimizer, unscale=unscale)

        torch.testing.assert_close(decision.gnmr.tolist(), [1.0] * 4, rtol=1e-11, atol=0)


def test_the_guard_unscales_in_place_once():
    model, guard, scaler, optimizer = make()
    twin = Toy()
    backward(twin, batch())
    scaler.scale(model(batch()).square().mean()).backward()

    guard.step(scaler=scaler, optimizer=optimizer)
    guard.clip_grad_norm_(math.inf)

    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, wanted.grad)


def test_only_the_optimizer_asked_for_is_taken_as_unscaled():
    model, guard, scaler, optimizer = make()
    other = torch.nn.Linear(2, 2)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    loss = model(batch()).square().mean() + other(torch.ones(1, 2)).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(second)

    guard.step(scaler=scaler, optimizer=optimizer)

    twin = Toy()
    backward(twin, batch())
    assert torch.equal(model.head.weight.grad, twin.head.weight.grad)


def test_scaled_gradients_are_not_clipped():
    model, guard, scaler, _ = make()
    scaler.scale(model(batch()).square().mean()).backward()
    guard.step(scaler=scaler)

    with pytest.raises(GuardError, match=r"guard\.step\(scaler=scaler, optimizer=optimizer\) unscales them"):
        guard.clip_grad_norm_(1.0)


@pytest.mark.parametrize("where", ["a unit", "outside the units"])
@pytest.mark.parametrize("unscale", ["guard", "nobody"])
def test_a_skipped_step_changes_neither_history_nor_lock_and_is_an_event(unscale, where):
    parts = model, guard, *_ = make()
    for seed in range(3):
        step(*parts, seed, unscale=unscale)
    step(*parts, 3, 10.0, unscale)
    before, weights = guard.state_dict(), model.head.weight.clone()
    assert guard.active == (UNIT,)

    if where == "a unit":
        decision = step(*parts, 4, math.inf, unscale)
    else:
        hook = model.head.weight.register_hook(lambda grad: grad * math.inf)
        decision = step(*parts, 4, unscale=unscale)
        hook.remove()

    after = guard.state_dict()
    assert decision is None
    assert torch.equal(model.head.weight, weights), "the scaler skipped"
    assert after["controller"] == before["controller"]
    assert after["ledger"] == before["ledger"]
    units = [UNIT] if where == "a unit" else []
    assert after["events"][-1] == {"step": 5, "kind": "skipped", "units": units, "on_recovery": units}
    assert step(*parts, 5, unscale=unscale) is not None


def test_a_fault_that_comes_again_is_no_matter_of_the_scale():
    parts = _, guard, _, _ = make()
    step(*parts)

    assert step(*parts, fault=math.nan) is None
    decision = step(*parts, fault=math.nan)

    assert decision.nonfinite.tolist() == [False, False, True, False]
    assert guard.active == (UNIT,)
    assert [event["kind"] for event in guard.events] == ["skipped", "nonfinite"]


def test_a_disabled_scaler_is_none():
    model, guard, scaler, optimizer = make(enabled=False)

    assert step(model, guard, scaler, optimizer, fault=math.nan) is not None
