"""The packaged backends on a GPU: as on the CPU, and with the memory that they promise."""

import pytest
import torch
from torch import nn

import gnmr
from gnmr import doctor
from gnmr.numerics.packing import pack, unpack
from toys import Toy, batch

WIDTH = 64


def hidden(rows, width, device):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.filterwarnings("default")  # those of other libraries are their own
@pytest.mark.parametrize("name", sorted(doctor.TRIALS))
def test_both_paths_of_a_backend_run(name):
    found = next(each for each in doctor.paths() if each.name == name)
    if found.status == "missing":
        pytest.skip(found.detail)

    assert found.status == "ok", found.detail
    assert "on cuda" in found.detail


@pytest.mark.parametrize("scaling", ["token", "group"])
@pytest.mark.parametrize("fmt", ["e2m1", "int4", "e3m2", "int6", "e4m3", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_is_the_same_bit_for_bit_as_on_the_cpu(device, fmt, scaling, dtype):
    x = hidden(128, 256, "cpu").to(dtype)
    here, there = pack(x, fmt, scaling, 64), pack(x.to(device), fmt, scaling, 64)

    assert torch.equal(here.data, there.data.cpu())
    assert torch.equal(unpack(here), unpack(there).cpu())


@pytest.mark.parametrize("paths", [gnmr.SavedActivations, gnmr.Simulated])
def test_gradients_are_those_of_the_cpu(device, paths):
    found = []
    for place in ("cpu", device):
        model = Toy(WIDTH).to(place)
        backend = paths()
        backend.attach(gnmr.find_units(model))
        backend.switch(1, recover=True)
        model(batch(32, WIDTH).to(place)).square().mean().backward()
        found.append([param.grad.cpu() for param in model.parameters()])

    for cpu, gpu in zip(*found, strict=True):
        # Sums in another order may cross a rounding boundary of a format: few elements, by one step of it.
        assert (gpu - cpu).norm() <= 2e-2 * cpu.norm()


def test_packed_activations_free_the_memory_that_they_promise(device):
    rows, width = 4096, 1024
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"fc1": nn.Linear(width, 8)})])}).to(device)
    fc1 = model["layers"][0]["fc1"]

    def held():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = fc1(torch.randn(rows, width, device=device, requires_grad=True).sin())
        grown = torch.cuda.memory_allocated() - before
        del y
        return grown

    held()  # the libraries' own workspaces
    plain = held()
    paths = gnmr.SavedActivations(low="e2m1", high="e4m3")
    paths.attach(gnmr.find_units(model))
    held()
    freed = plain - held()
    promised = 4 * rows * width - int(paths.held_bytes()[0, 0])

    assert freed == pytest.approx(promised, rel=0.02)


@pytest.mark.skipif(not hasattr(gnmr, "Float8"), reason="this gnmr has no Float8")
@pytest.mark.parametrize("low", ["rowwise", "tensorwise"])
def test_float8_trains_under_the_guard(device, low):
    torch.manual_seed(0)
    model = Toy(WIDTH).to(device, torch.bfloat16)
    policy = gnmr.Policy(max_active=2, alpha=1.01, beta=None)
    with gnmr.Guard(model, gnmr.Float8(low=low), policy) as guard:
        for step in range(6):
            model.zero_grad()
            (model(batch(32, WIDTH).to(device, torch.bfloat16)).square().mean() * 2**step).backward()
            guard.step()  # raises where what ran is not what was planned
        assert len(guard.active) == 2
