"""A copy of a guarded model is a plain model: an average of the weights, a saved model, a second run."""

import copy
import io

import pytest
import torch

from gnmr import CustomPaths, Guard, Int8, PathError, Policy, SavedActivations, Simulated
from toys import Toy, backward, batch

PATHS = {
    "saved": lambda: SavedActivations("int2", "e4m3"),
    "simulated": lambda: Simulated("int2", "exact", scaling="delayed"),
    "int8": lambda: Int8(backward="int8"),
    "custom": lambda: CustomPaths(low_forward=lambda operator, x: operator.plain(x) * 2),
}


def copied(model):
    return copy.deepcopy(model)


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # our own bytes


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("make", [copied, pickled])
def test_a_copy_runs_plainly_and_leaves_the_original_alone(kind, make):
    model, plain = Toy(), Toy()
    guard = Guard(model, PATHS[kind](), Policy(max_active=1))
    backward(model, batch())
    before = guard.paths.state_dict()
    twin = make(model)
    twin.zero_grad()

    backward(twin, 1000 * batch())
    backward(plain, 1000 * batch())

    for mine, wanted in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)
    assert guard.paths.state_dict() == before
    guard.step()
    guard.detach()
    twin(batch())


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("make", [copied, pickled])
def test_a_copy_can_be_guarded(kind, make):
    model = Toy()
    guard = Guard(model, PATHS[kind](), Policy(max_active=1))
    twin = make(model)
    second = Guard(twin, PATHS[kind](), Policy(max_active=1))
    for each, its in ((model, guard), (twin, second)):
        backward(each, batch())
        its.step()
        its.detach()

    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    assert all("forward" not in module.__dict__ for module in twin.modules())


@pytest.mark.parametrize("kind", ["saved", "simulated", "int8"])
def test_a_gradient_of_a_gradient_is_an_error(kind):
    model = Toy()
    Guard(model, PATHS[kind](), Policy(max_active=1))
    x = batch().requires_grad_()
    with pytest.raises(PathError, match="a gradient of a gradient was asked for"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_forward_takes_its_input_by_name():
    model = Toy()
    Guard(model, PATHS["custom"](), Policy(max_active=1))
    up = model.layers[0].up_proj
    x = batch()
    torch.testing.assert_close(up(input=x), up(x))
