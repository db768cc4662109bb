"""The guard on a GPU: one wait for the device a step, and what it decides is what it decides on the CPU."""

import warnings

import pytest
import torch

import gnmr
from toys import Toy, batch

WIDTH = 64


def train(device, steps=8):
    """Train on gradients that jump now and then; returns what was on recovery at each step, and the guard's norms."""
    model = Toy(WIDTH, depth=4).to(device)
    guard = gnmr.Guard(model, gnmr.SavedActivations(), gnmr.Policy(max_active=3, alpha=1.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    active, norms = [], []
    for step in range(steps):
        scale = 1.0 if step % 3 else 4.0
        (model(batch(16, WIDTH, seed=step).to(device)).square().mean() * scale).backward()
        decision = guard.step()
        norms.append(float(guard.clip_grad_norm_(1.0)))
        active.append(guard.active)
        optimizer.step()
        optimizer.zero_grad()
        assert decision is not None
    guard.detach()
    return active, norms


def test_decisions_and_norms_are_those_of_the_cpu(device):
    here, there = train("cpu"), train(device)

    assert here[0] == there[0]
    assert there[1] == pytest.approx(here[1], rel=1e-3)


def test_a_step_waits_for_the_device_once(device):
    model = Toy(WIDTH, depth=4).to(device)
    guard = gnmr.Guard(model, gnmr.SavedActivations(), gnmr.Policy(max_active=3, alpha=1.2))
    counts = []
    for step in range(6):
        model.zero_grad()
        (model(batch(16, WIDTH).to(device)).square().mean() * 3**step).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                guard.step()
                guard.clip_grad_norm_(1.0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("called a synchronizing" in str(warning.message) for warning in caught))

    # The first clip asks for the norm of all gradients, which the first step did not read.
    assert counts[1:] == [1] * 5
    assert counts[0] <= 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_live_loss_scale_is_taken_out(device, fused):
    norms = []
    for scaled in (False, True):
        model = Toy(WIDTH).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=scaled)
        with gnmr.Guard(model, gnmr.SavedActivations(), gnmr.Policy(max_active=1)) as guard:
            with torch.autocast("cuda", torch.float16, enabled=scaled):
                loss = model(batch(16, WIDTH).to(device)).square().mean()
            scaler.scale(loss).backward()
            guard.step(scaler=scaler, optimizer=optimizer)
            norms.append(float(guard.clip_grad_norm_(1.0)))
            scaler.step(optimizer)
            scaler.update()

    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


def test_a_cuda_graph_that_replays_is_refused(device):
    model = Toy(WIDTH).to(device)
    guard = gnmr.Guard(model, gnmr.CustomPaths(low_forward=lambda op, x: op.plain(x)), gnmr.Policy(max_active=1))
    x = batch(16, WIDTH).to(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    graph.replay()
    guard.step()  # of what ran to capture it
    graph.replay()
    guard._fresh = True  # a replay runs no hooks, so that the guard hears of no backward

    with pytest.raises(gnmr.PathError, match="a CUDA graph replays it"):
        guard.step()


# Dynamo looks at .grad of the tensors that enter a layer.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_layers_that_are_compiled_follow_the_plans(device):
    model = Toy(WIDTH, depth=4).to(device)
    guard = gnmr.Guard(model, gnmr.SavedActivations(), gnmr.Policy(max_active=3, alpha=1.05, beta=None))
    for layer in model.layers:
        layer.compile()
    seen = set()
    for step in range(8):
        model.zero_grad()
        (model(batch(16, WIDTH, seed=step).to(device)).square().mean() * 2**step).backward()
        guard.step()
        seen.add(guard.active)

    assert len(seen) > 1
