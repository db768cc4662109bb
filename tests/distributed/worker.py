"""One rank of the distributed tests: runs every scenario and writes what it saw as JSON.

Usage: worker.py RANK WORLD RENDEZVOUS_FILE OUTPUT_FILE
"""

import json
import math
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

from gnmr import Guard, GuardError, Policy
from toys import Toy, ToyPaths, batch

rank, world = map(int, sys.argv[1:3]) if __name__ == "__main__" else (0, 1)
POLICY = Policy(max_active=1, alpha=1.2)
STEPS, SPIKE = 6, 3


def share(x):
    """This rank's rows of a batch; the whole of it for one process."""
    return x.chunk(world)[rank]


def wrap(kind, model):
    if kind == "one":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = dist.init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(kind, *, width=8, nan_on=None, max_norm=0.5, steps=STEPS, touch=None):
    """Train; step SPIKE sees a batch that is ten times as large (or a NaN on one rank)."""
    model = Toy(width)
    wrapped = wrap(kind, model)
    guard = Guard(wrapped, ToyPaths(), POLICY)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-2)
    seen = {
        "norms": [],
        "active": [],
        "events": guard.events,
        "units": [unit.name for unit in guard.units],
        "totals": [],
    }
    update = guard.controller.update
    guard.controller.update = lambda norms, observed: (
        seen["norms"].append(norms.tolist()),
        update(norms, observed),
    )[1]
    for step in range(steps):
        optimizer.zero_grad()
        x = share(batch(8, width, seed=step))
        if step == SPIKE:
            x = x * 10
        loss = wrapped(x).square().mean()
        loss.backward()
        if nan_on == rank and step == SPIKE:
            grad = model.layers[0].down_proj.weight.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[0, 0] = math.nan
        if touch is not None:
            touch(model, step)
        guard.step()
        seen["totals"].append(guard.clip_grad_norm_(max_norm).item())
        seen["active"].append(guard.active)
        if nan_on is None:
            optimizer.step()
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    seen["weights"] = [p.detach().flatten().tolist() for p in full]
    return seen


def drop_on_last_rank(model, step):
    if rank == world - 1:
        model.layers[0].down_proj.weight.grad = None


def nothing_on_last_rank(model, step):
    if rank == world - 1:
        for param in model.parameters():
            param.grad = None


def silent_rank():
    """The last rank has no backward at all, as one that ran out of data."""
    model = Toy()
    guard = Guard(model, None, POLICY, monitor_only=True)
    if rank < world - 1:
        model(batch()).square().mean().backward()
    decision = guard.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guard.step()
    model.zero_grad()
    try:
        guard.step()
    except GuardError as error:
        message = str(error)
    return {"gnmr": decision.gnmr.tolist(), "warned": len(caught), "message": message}


def micro_batches():
    """FSDP2 without gradient sync until the last micro-batch."""
    model = Toy()
    wrapped = wrap("fsdp", model)
    guard = Guard(wrapped, ToyPaths(), POLICY)
    parts = share(batch(8)).chunk(2)
    for index, part in enumerate(parts):
        wrapped.set_requires_gradient_sync(index == len(parts) - 1)
        (wrapped(part).square().mean() / len(parts)).backward()
    reading = []
    update = guard.controller.update
    guard.controller.update = lambda norms, observed: (reading.extend(norms.tolist()), update(norms, observed))[1]
    guard.step()
    return reading


def collectives():
    """How many collectives a step with clipping takes, once the first is over."""
    model = Toy()
    guard = Guard(DistributedDataParallel(model), ToyPaths(), POLICY)
    count, own = [], dist.all_reduce
    for step in range(2):
        model.zero_grad()
        model(batch(seed=step)).square().mean().backward()
        count.append(0)

        def counted(*args, **kwargs):
            count[-1] += 1
            return own(*args, **kwargs)

        dist.all_reduce = counted
        guard.step()
        guard.clip_grad_norm_(1.0)
        dist.all_reduce = own
    return count


def resumed_elsewhere():
    """A state of the one-process run, loaded under DDP and FSDP2."""
    out = {}
    for kind in ("ddp", "fsdp"):
        wrapped = wrap(kind, Toy())
        guard = Guard(wrapped, ToyPaths(), POLICY)
        other = Guard(Toy(), None, POLICY, monitor_only=True)
        guard.load_state_dict(json.loads(json.dumps(other.state_dict() | {"paths": {}})))
        out[kind] = guard.controller.step
    return out


def experts(kind):
    """A mixture of three stacked experts, an uneven number of rows for two ranks; one expert gets no token."""
    torch.manual_seed(0)
    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
    model = MixtralForCausalLM(MixtralConfig(**shape, **heads, num_local_experts=3, num_experts_per_tok=1))
    router, route = model.model.layers[0].mlp.gate, model.model.layers[0].mlp.gate.forward

    def never_the_second(hidden):
        logits, _, _ = route(hidden)
        odd = torch.arange(len(logits)) % 2
        return logits, torch.softmax(logits, dim=-1).gather(1, 2 * odd[:, None]), 2 * odd[:, None]

    router.forward = never_the_second
    wrapped = model
    if kind == "fsdp":
        mesh = dist.init_device_mesh("cpu", (world,))
        fully_shard(model.model.layers[0], mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        wrapped = DistributedDataParallel(model)
    guard = Guard(wrapped, ToyPaths(), POLICY, granularity="expert", include="*.experts.*")
    ids = share(torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(0)))
    wrapped(input_ids=ids, labels=ids).loss.backward()
    reading = guard._monitor.read(total=True)
    return {
        "units": [unit.name for unit in guard.units],
        "norms": reading.norms[reading.observed].tolist(),
        "observed": reading.observed.tolist(),
        "total": reading.total,
        "decided": guard.step() is not None,
    }


def main():
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*find_unused_parameters=True.*")
    torch.set_num_threads(1)
    found = {}
    if world == 1:
        found["one"] = run("one")
        found["one narrow"] = run("one", width=3)
        found["experts"] = experts("one")
    else:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)
        for kind in ("ddp", "fsdp"):
            found[kind] = run(kind)
            found[f"{kind} nan"] = run(kind, nan_on=0)
        found["fsdp narrow"] = run("fsdp", width=3)
        found["missing"] = run("ddp", touch=drop_on_last_rank, steps=2)
        found["nothing"] = run("ddp", touch=nothing_on_last_rank, steps=2)
        found["silent"] = silent_rank()
        found["micro"] = micro_batches()
        found["collectives"] = collectives()
        found["resumed"] = resumed_elsewhere()
        found["ddp experts"] = experts("ddp")
        found["fsdp experts"] = experts("fsdp")
        dist.destroy_process_group()
    Path(sys.argv[4]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
