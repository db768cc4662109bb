"""The guard's place in a training loop: what it reads, switches, refuses and leaves behind."""

import copy
import json
import logging
import math
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from gnmr import GnmrWarning, Guard, GuardError, PathError, Policy, SavedActivations, StateError, TraceError
from gnmr.triggers import Fixed
from toys import Toy, ToyPaths, backward, batch, spike

POLICY = Policy(max_active=1)
NAMES = ["layers.0.up_proj", "layers.0.down_proj", "layers.1.up_proj", "layers.1.down_proj"]


def train(guard, model, steps, spikes=None, first=0, vary=False):
    """Run steps; ``spikes`` maps a step, from 0 on, to the unit whose gradient grows tenfold."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    active = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, batch(seed=step if vary else 0))
        if step in (spikes or {}):
            spike(model, spikes[step], 10.0)
        guard.step()
        guard.clip_grad_norm_(1.0)
        optimizer.step()
        active.append(guard.active)
    return active


# The call's place


def test_a_second_step_without_a_backward_does_nothing_and_warns():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    backward(model, batch())
    decision = guard.step()

    with pytest.warns(UserWarning, match="called again without a new backward: nothing was done"):
        again = guard.step()

    assert again is decision
    assert guard.controller.step == 1


@pytest.mark.parametrize("when", ["before any backward", "after zero_grad"])
def test_a_step_without_a_gradient_says_where_to_call_it(when):
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    if when == "after zero_grad":
        backward(model, batch())
        model.zero_grad()

    with pytest.raises(GuardError, match="between backward\\(\\) and optimizer.step\\(\\), before zero_grad"):
        guard.step()


def test_a_backward_that_reaches_any_parameter_of_a_unit_counts():
    model = Toy()
    guard = Guard(model, None, POLICY, granularity="block", monitor_only=True)
    model.layers[0].down_proj(torch.ones(1, 16)).sum().backward()

    assert guard.step() is not None


def test_no_paths_without_monitor_only_is_refused():
    with pytest.raises(ValueError, match="paths=None can switch nothing.*monitor_only=True"):
        Guard(Toy(), None, POLICY)


def test_fractions_need_the_length_of_the_run():
    policy = Policy(max_active=1, alpha=((0.0, 1.5), (0.5, 1.1)))

    with pytest.raises(ValueError, match="fractions of a run"):
        Guard(Toy(), ToyPaths(), policy)
    assert Guard(Toy(), ToyPaths(), policy, total_steps=10).policy.alpha == ((1, 1.5), (6, 1.1))


# What is switched


def test_a_spike_is_recovered_at_the_next_step_and_let_go_after_the_lock():
    model, paths = Toy(), ToyPaths()
    guard = Guard(model, paths, Policy(max_active=1, lock_steps=1))

    active = train(guard, model, 6, {3: NAMES[2]})

    assert active == [(), (), (), (NAMES[2],), (NAMES[2],), ()]
    ran_high = {fqn for fqn, path in paths.log if path == "high"}
    assert ran_high == {NAMES[2]}


def test_what_runs_is_what_was_planned_one_step_before():
    model, paths = Toy(), ToyPaths()
    guard = Guard(model, paths, POLICY)
    planned = ()
    for step in range(6):
        paths.log.clear()
        model.zero_grad()
        backward(model, batch(seed=step))
        if step == 3:
            spike(model, NAMES[0], 10.0)
        assert {fqn for fqn, path in paths.log if path == "high"} == set(planned)
        guard.step()
        planned = guard.active


def test_monitor_only_decides_the_same_and_switches_nothing():
    (model, paths), (watched, still) = (Toy(), ToyPaths()), (Toy(), ToyPaths())
    spikes = {3: NAMES[2], 5: NAMES[0]}

    active = train(Guard(model, paths, POLICY), model, 8, spikes)
    guard = Guard(watched, still, POLICY, monitor_only=True)
    seen = train(guard, watched, 8, spikes)

    assert active == seen
    assert any(seen)
    assert {path for _, path in still.log} == {"low"}
    assert "monitor_only" in repr(guard)


def test_monitor_only_without_paths():
    model = Toy()
    guard = Guard(model, None, POLICY, monitor_only=True)

    assert train(guard, model, 5, {3: NAMES[2]})[3] == (NAMES[2],)


def test_warm_up_runs_everything_on_the_recovery_path_and_is_no_promotion():
    model, paths = Toy(), ToyPaths()
    guard = Guard(model, paths, Policy(max_active=1, warmup_steps=3))
    highs = []
    for step in range(5):
        paths.log.clear()
        train(guard, model, 1, first=step)
        highs.append(sum(path == "high" for _, path in paths.log))

    assert highs == [4, 4, 4, 0, 0]
    assert guard.ledger.promotions.sum() == 0


def test_block_units_share_a_decision():
    model, paths = Toy(), ToyPaths()
    guard = Guard(model, paths, POLICY, granularity="block")
    train(guard, model, 4, {3: NAMES[2]})
    assert guard.active == ("layers.1",)

    paths.log.clear()
    backward(model, batch())

    assert {fqn for fqn, path in paths.log if path == "high"} == {NAMES[2], NAMES[3]}


def test_the_plan_is_the_same_for_all_micro_batches_and_accumulation_equals_one_batch():
    decided = []
    for parts in (1, 4):
        model, paths = Toy(), ToyPaths()
        guard = Guard(model, paths, POLICY)
        decisions = []
        for step in range(6):
            paths.log.clear()
            model.zero_grad()
            for part in batch(8, seed=step).split(8 // parts):
                backward(model, part, scale=1 / parts)
            if step == 3:
                spike(model, NAMES[1], 10.0)
            assert len(set(paths.log)) == 4, "one path a unit"
            decisions.append(guard.step())
        decided.append(decisions)

    for one, four in zip(*decided, strict=True):
        np.testing.assert_allclose(one.gnmr, four.gnmr, rtol=1e-5)
        assert one.active.tolist() == four.active.tolist()


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_recompute_of_checkpointing_runs_on_the_forwards_paths(reentrant):
    class Checkpointed(Toy):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(x)

    (plain, _), (model, paths) = (Toy(), None), (Checkpointed(), ToyPaths({NAMES[2]: lambda y: y * 1.01}))
    reference = ToyPaths({NAMES[2]: lambda y: y * 1.01})
    guards = [Guard(plain, reference, POLICY), Guard(model, paths, POLICY)]
    for step in range(6):
        for each, guard in zip((plain, model), guards, strict=True):
            each.zero_grad()
            backward(each, batch(seed=step))
            if step == 3:
                spike(each, NAMES[2], 10.0)
            guard.step()
        once, twice = (dict.fromkeys(p.log) for p in (reference, paths))
        assert once == twice
        assert len(paths.log) == 2 * len(reference.log), "forward and recompute"
        paths.log.clear(), reference.log.clear()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert guards[1].ledger.promotions.tolist() == [0, 0, 1, 0]


# Read-back


def test_a_switch_that_does_nothing_is_an_error():
    class Stuck(ToyPaths):
        def switch(self, unit, recover):
            pass

    model = Toy()
    guard = Guard(model, Stuck(), POLICY)

    with pytest.raises(PathError, match=f"'{NAMES[2]}' was planned on its recovery path and ran on its low-cost"):
        train(guard, model, 6, {3: NAMES[2]})


@pytest.mark.parametrize("how", ["replaced", "eval", "functional"])
def test_a_forward_that_bypasses_its_path_is_an_error(how):
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    projection = model.layers[0].down_proj
    if how == "replaced":
        projection.forward = lambda x: nn.functional.linear(x, projection.weight)
    elif how == "eval":
        projection.eval()
    else:
        block = model.layers[0]
        block.forward = lambda x: x + nn.functional.linear(block.up_proj(x), projection.weight)
    backward(model, batch())

    with pytest.raises(PathError, match=rf"'{NAMES[1]}' got a gradient, and its path did not run \(1 of 4"):
        guard.step()


def test_evaluation_runs_as_without_gnmr_and_leaves_no_trace():
    model, twin = Toy(), Toy()
    guard = Guard(model, ToyPaths({NAMES[0]: lambda y: y * 2}), POLICY)
    backward(model, batch())

    model.eval()
    with torch.no_grad():
        assert torch.equal(model(batch()), twin(batch()))
    model.train()

    assert guard.step() is not None


# Faults


def test_a_nan_of_one_low_path_is_recovered_the_others_are_not_and_it_is_tried_again(caplog):
    model = Toy()

    class Nan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, weight):
            return y.view_as(y)

        @staticmethod
        def backward(ctx, dy):
            return dy, torch.full((8, 16), math.nan)

    weight = model.layers[1].down_proj.weight
    paths = ToyPaths({NAMES[3]: lambda y: Nan.apply(y, weight)})
    guard = Guard(model, paths, Policy(max_active=2, lock_steps=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    active = []
    with caplog.at_level(logging.WARNING, "gnmr"):
        for _ in range(6):
            optimizer.zero_grad()
            backward(model, batch(seed=0))
            guard.step()
            active.append(guard.active)

    # Recovered after the fault and, under the lock, for one update more; then tried again, and it fails again.
    assert active == [(NAMES[3],), (NAMES[3],), ()] * 2
    assert np.isfinite(guard.controller.state.mean).all()
    assert {event["kind"] for event in guard.events} == {"nonfinite"}
    assert all(event["units"] == [NAMES[3]] for event in guard.events)
    assert guard.events[0] == {"step": 1, "kind": "nonfinite", "units": [NAMES[3]], "on_recovery": []}
    assert f"step 1: nonfinite gradient in 1 units: {NAMES[3]}" in caplog.text


def test_nan_everywhere_is_a_global_fault_that_spends_nothing():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    train(guard, model, 4, {3: NAMES[2]})
    before = guard.active
    state = guard.controller.state
    model.zero_grad()
    backward(model, batch() * math.nan)

    decision = guard.step()

    assert decision.global_fault
    assert guard.active == before == (NAMES[2],)
    assert guard.controller.state.mean.tolist() == state.mean.tolist()
    assert guard.events[-1] == {"step": 5, "kind": "global_fault", "units": NAMES, "on_recovery": [NAMES[2]]}


def test_a_unit_without_a_gradient_is_not_observed():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    train(guard, model, 3)
    model.zero_grad()
    backward(model, batch())
    model.layers[0].down_proj.weight.grad = None

    decision = guard.step()

    assert decision.gnmr[1] == 1.0
    assert guard.controller.state.count.tolist() == [4, 3, 4, 4]


# The model as it was


def fingerprint(model):
    return {
        "keys": list(model.state_dict()),
        "params": [(name, id(param)) for name, param in model.named_parameters()],
        "dicts": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "forwards": {name: module.__dict__.get("forward") for name, module in model.named_modules()},
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._state_dict_hooks))
            for m in model.modules()
        ],
        "param hooks": [bool(param._post_accumulate_grad_hooks) for param in model.parameters()],
    }


def test_attaching_keeps_names_and_parameters_and_detaching_leaves_no_trace():
    model = Toy()
    own = model.layers[0].up_proj.forward
    model.layers[0].up_proj.forward = partial(own)
    before = fingerprint(model)

    guard = Guard(model, ToyPaths(), POLICY)
    attached = fingerprint(model)
    train(guard, model, 4, {3: NAMES[2]})
    guard.detach()

    assert attached["keys"] == before["keys"]
    assert attached["params"] == before["params"]
    assert fingerprint(model) == before


def test_a_replaced_forward_from_before_is_still_called():
    model = Toy()
    calls = []
    own = model.layers[0].up_proj.forward
    model.layers[0].up_proj.forward = lambda x: (calls.append(1), own(x))[1]
    Guard(model, ToyPaths(), POLICY)

    model(batch())

    assert calls == [1]


def test_a_failed_attach_leaves_no_hook():
    class Refuses(ToyPaths):
        def attach(self, units):
            raise PathError("no")

    model = Toy()
    before = fingerprint(model)

    with pytest.raises(PathError, match="no"):
        Guard(model, Refuses(), POLICY)

    assert fingerprint(model) == before


def test_a_context_detaches():
    model = Toy()
    before = fingerprint(model)

    with Guard(model, ToyPaths(), POLICY) as guard:
        train(guard, model, 2)

    assert fingerprint(model) == before


def test_weights_of_an_attached_model_load_without_gnmr(tmp_path):
    model = Toy(seed=1)
    guard = Guard(model, ToyPaths(), POLICY)
    train(guard, model, 3)

    torch.save(model.state_dict(), tmp_path / "m.pt")
    save_file(model.state_dict(), tmp_path / "m.safetensors")

    for weights in (torch.load(tmp_path / "m.pt", weights_only=True), load_file(tmp_path / "m.safetensors")):
        other = Toy()
        other.load_state_dict(weights)
        assert torch.equal(other(batch()), model(batch()))


def test_a_deepcopy_of_an_attached_model_is_independent():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    train(guard, model, 2)

    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    backward(twin, batch())

    assert model(batch()).abs().sum() > 0
    assert twin(batch()).abs().sum() == 0
    train(guard, model, 2, first=2)
    assert guard.controller.step == 4


def test_one_backend_serves_one_guard_and_one_model_has_one():
    model, paths = Toy(), ToyPaths()
    guard = Guard(model, paths, POLICY)

    with pytest.raises(PathError, match="this ToyPaths is attached already: detach its guard first"):
        Guard(Toy(), paths, POLICY)
    with pytest.raises(PathError, match=rf"'{NAMES[0]}' is on the paths of another guard.*one guard at a time"):
        Guard(model, ToyPaths(), POLICY)

    guard.detach()
    Guard(model, paths, POLICY)


# The ledger


def test_the_ledger_says_what_when_how_long_and_at_what_cost():
    model = Toy()
    guard = Guard(model, ToyPaths(), Policy(max_active=1, lock_steps=0))
    train(guard, model, 8, {3: NAMES[2], 6: NAMES[0]})

    spans = guard.ledger.spans

    assert [(span.unit, span.first, span.extra_bytes) for span in spans] == [(NAMES[2], 5, 2), (NAMES[0], 8, 2)]
    assert spans[0].last == 5
    assert guard.ledger.promotion_ratio == pytest.approx(2 / 32)
    assert guard.ledger.steps == 8


# State


def test_resume_goes_on_bit_for_bit_through_json_and_torch_load(tmp_path):
    spikes = {3: NAMES[2], 6: NAMES[0], 9: NAMES[1]}
    policy = Policy(max_active=1, lock_steps=2, window=3)
    model = Toy()
    whole = Guard(model, ToyPaths(), policy)
    expected = train(whole, model, 12, spikes, vary=True)

    for form in ("json", "torch"):
        model = Toy()
        guard = Guard(model, ToyPaths(), policy)
        head = train(guard, model, 7, spikes, vary=True)
        state, weights = guard.state_dict(), copy.deepcopy(model.state_dict())
        if form == "json":
            state = json.loads(json.dumps(state, allow_nan=False))
        else:
            torch.save(state, tmp_path / "g.pt")
            state = torch.load(tmp_path / "g.pt", weights_only=True)
        other, paths = Toy(seed=5), ToyPaths()
        other.load_state_dict(weights)
        resumed = Guard(other, paths, policy)
        resumed.load_state_dict(state)
        tail = train(resumed, other, 5, spikes, first=7, vary=True)

        assert head + tail == expected
        assert resumed.state_dict() == whole.state_dict()
        assert ({fqn for fqn, path in paths.log[:4] if path == "high"}) == set(head[-1])


def test_the_state_is_a_snapshot():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    state = guard.state_dict()
    model.layers[0].up_proj.weight.register_hook(lambda grad: grad * math.nan)
    train(guard, model, 2)

    assert state["events"] == []
    assert len(guard.events) == 2


def test_forwards_before_a_load_belong_to_no_step():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    train(guard, model, 4, {3: NAMES[2]})
    state = guard.state_dict()
    guard.detach()

    resumed = Guard(model, ToyPaths(), POLICY)
    model(batch())
    resumed.load_state_dict(state)

    train(resumed, model, 1)


def test_renamed_units_are_named_and_start_fresh():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    train(guard, model, 4)
    state = json.loads(json.dumps(guard.state_dict()).replace("layers.1.", "blocks.1."))
    other = Toy()
    resumed = Guard(other, ToyPaths(), POLICY)

    with pytest.warns(GnmrWarning) as caught:
        resumed.load_state_dict(state)

    texts = " ".join(str(warning.message) for warning in caught)
    assert "no saved history for 'layers.1.up_proj', 'layers.1.down_proj'" in texts
    assert "'blocks.1.up_proj', 'blocks.1.down_proj' fits no unit" in texts
    assert resumed.controller.state.count.tolist() == [4, 4, 0, 0]
    assert all(not names for names in train(resumed, other, 2, first=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"kind": "other"}, "no guard state of schema 1: kind 'other'"),
        (lambda s: s | {"schema": 9}, "schema 9"),
        (lambda s: {}, "kind None"),
        (lambda s: {k: v for k, v in s.items() if k != "ledger"}, "damaged: it has no 'ledger'"),
        (
            lambda s: s | {"controller": {k: v for k, v in s["controller"].items() if k != "mean"}},
            "no controller state: it has no 'mean'",
        ),
    ],
)
def test_a_damaged_state_is_named(change, message):
    guard = Guard(Toy(), ToyPaths(), POLICY)

    with pytest.raises(StateError, match=message):
        guard.load_state_dict(change(guard.state_dict()))


def test_another_policy_is_an_error_that_names_the_field():
    state = Guard(Toy(), ToyPaths(), POLICY).state_dict()
    other = Guard(Toy(), ToyPaths(), Policy(max_active=1, alpha=1.7))

    with pytest.raises(StateError, match="policy.alpha = 1.5, and now it is 1.7"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow_policy_change=True)


def test_a_state_of_another_backend_keeps_what_matches_by_name():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY, trigger=lambda n, p, u: Fixed(n, p, u, recover=True))

    assert guard.active == tuple(NAMES)
    train(guard, model, 2)


# The trace


def test_record_writes_a_trace_that_replays(tmp_path):
    trace = pytest.importorskip("gnmr.trace")
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY, record=tmp_path / "run.arrow", header={"seed": 7})
    train(guard, model, 6, {3: NAMES[2]})
    guard.close()
    guard.detach()

    read = trace.read_trace(tmp_path / "run.parquet")

    assert read.header["units"] == NAMES
    assert read.header["seed"] == 7
    assert read.header["policy"] == POLICY.to_dict()
    assert np.argwhere(read.active)[0].tolist() == [3, 2]


def test_a_resumed_trace_drops_what_was_written_after_the_checkpoint(tmp_path):
    trace = pytest.importorskip("gnmr.trace")
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY, record=tmp_path / "run.arrow")
    train(guard, model, 4)
    state, weights = guard.state_dict(), copy.deepcopy(model.state_dict())
    train(guard, model, 2, first=4)
    guard.detach()

    other = Toy()
    other.load_state_dict(weights)
    resumed = Guard(other, ToyPaths(), POLICY, record=tmp_path / "run.arrow", resume_record=True)
    resumed.load_state_dict(state)
    train(resumed, other, 4, first=4)
    with pytest.raises(GuardError, match="load the state before the first step"):
        resumed.load_state_dict(state)
    resumed.detach()

    assert trace.read_trace(tmp_path / "run.parquet").steps.tolist() == list(range(1, 9))


# What changes behind the guard's back


def test_a_detached_guard_says_so():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    guard.detach()
    backward(model, batch())
    with pytest.raises(GuardError, match="the guard is detached"):
        guard.step()


def test_a_parameter_that_was_replaced_is_an_error():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    backward(model, batch())
    guard.step()
    layer = model.layers[0].up_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    backward(model, batch())
    with pytest.raises(GuardError, match="the parameter 'weight' of a unit was replaced"):
        guard.step()


def test_a_unit_that_a_step_did_not_use_is_not_observed_whatever_zero_grad_leaves():
    class Sometimes(Toy):
        short = False

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers[: 1 if self.short else 2]:
                x = layer(x)
            return self.head(x)

    model = Sometimes()
    guard = Guard(model, ToyPaths(), POLICY)
    backward(model, batch())
    guard.step()
    for param in model.parameters():
        param.grad.zero_()
    model.short = True
    backward(model, batch())
    before = guard.controller.state.count.copy()
    guard.step()

    np.testing.assert_array_equal(guard.controller.state.count - before, [1, 1, 0, 0])


def test_gradients_of_zeros_are_warned_about():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY)
    backward(model, batch())
    for param in model.parameters():
        param.grad.zero_()
    with pytest.warns(GnmrWarning, match="all gradients of the units are zero"):
        guard.step()


def test_a_state_is_loaded_into_the_same_backend_only():
    class OtherPaths(ToyPaths):
        pass

    state = Guard(Toy(), ToyPaths(), POLICY).state_dict()
    with pytest.raises(StateError, match="of a guard on ToyPaths paths, and this one is on OtherPaths"):
        Guard(Toy(), OtherPaths(), POLICY).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"record": "run.parquet"}, ValueError, r"record must be a file named \*.arrow"),
        ({"record": "run.arrow"}, TraceError, "is there already: another run writes it, or was not finished"),
        ({"header": {"policy": 1}}, ValueError, "header must not hold 'policy'"),
    ],
)
def test_a_record_that_cannot_be_is_refused_at_once(tmp_path, monkeypatch, options, kind, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.arrow").write_bytes(b"")
    with pytest.raises(kind, match=message):
        Guard(Toy(), ToyPaths(), POLICY, **options)


def test_a_resumed_record_needs_the_state(tmp_path):
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY, record=tmp_path / "run.arrow")
    train(guard, model, 3)
    guard._writer.flush()
    guard._writer.abandon()
    before = (tmp_path / "run.arrow").read_bytes()
    again = Toy()
    guard = Guard(again, ToyPaths(), POLICY, record=tmp_path / "run.arrow", resume_record=True)
    backward(again, batch())

    with pytest.raises(GuardError, match="no state was loaded: every row"):
        guard.step()
    assert (tmp_path / "run.arrow").read_bytes() == before


def test_the_history_of_a_guard_that_only_watched_is_taken_over():
    model = Toy()
    watching = Guard(model, None, POLICY, monitor_only=True)
    train(watching, model, 3)
    watching.detach()
    guard = Guard(model, SavedActivations(), POLICY)
    guard.load_state_dict(watching.state_dict())

    assert guard.controller.step == 3
    train(guard, model, 1)
    assert guard.controller.step == 4
