"""The stabilisers: against their papers' formulas in NumPy, and in real runs."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch

from gnmr import RecipeError
from gnmr.lab.arms import parse_arm
from gnmr.lab.recipe import load_recipe
from gnmr.lab.sections import Optimizer
from gnmr.lab.stabilisers import OPTIMIZERS, SETTINGS, make_optimizer
from gnmr.lab.train import InterruptedRunError, train_arm
from gnmr.lab.zclip import ZClip
from gnmr.trace import read_trace

SPIKE = 17
ADAM = Optimizer(lr=0.02, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SHORT = {
    "clip": {},
    "zclip": {"warmup_steps": 4},
    "adagc": {"warmup_steps": 5},
    "spam": {"threshold": 50, "update_proj_gap": 12, "warmup_epoch": 4, "grad_accu_steps": 3},
    "stable-spam": {"update_proj_gap": 12},
}
"""Settings with which a short run comes past every warm-up and reset."""


@pytest.fixture
def short(monkeypatch):
    for name, settings in SHORT.items():
        for key, value in settings.items():
            monkeypatch.setitem(SETTINGS[name], key, value)


def gradients(steps=30):
    """A matrix and a vector a step; one of them is a thousand times too large."""
    rng = np.random.default_rng(5)
    made = [(rng.normal(size=(3, 4)), rng.normal(size=(5,))) for _ in range(steps)]
    made[SPIKE - 1] = (made[SPIKE - 1][0] * 1000, made[SPIKE - 1][1])
    return made


def zclip_reference(norms, alpha, z_threshold, warmup_steps):
    """Algorithm 1 of arXiv 2504.02507, on the norms of a run: what is let through."""
    passed = list(norms[:warmup_steps])
    mean, variance = np.mean(passed), np.var(passed)
    for norm in norms[warmup_steps:]:
        sigma = np.sqrt(variance)
        z = (norm - mean) / (sigma + 1e-6)
        passed.append(mean + z_threshold**2 / z * sigma if z > z_threshold else norm)
        mean = alpha * mean + (1 - alpha) * passed[-1]
        variance = alpha * variance + (1 - alpha) * (passed[-1] - mean) ** 2
    return np.array(passed)


def test_zclip_is_the_papers(short):
    model = torch.nn.Linear(4, 3).double()
    zclip, norms, passed = ZClip(**SETTINGS["zclip"]), [], []
    for weight, bias in gradients():
        model.weight.grad, model.bias.grad = torch.tensor(weight), torch.tensor(bias[:3])
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        zclip.on_pre_optimizer_step(None, None, None, model=model)
        passed.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))

    expected = zclip_reference(np.array(norms), **SETTINGS["zclip"])
    np.testing.assert_allclose(passed, expected, rtol=1e-5)
    assert norms[SPIKE - 1] > 1000
    assert passed[SPIKE - 1] < 10  # near the mean of the others
    assert passed[SPIKE] == pytest.approx(norms[SPIKE])  # the spike did not widen the bound


def test_zclip_leaves_what_is_not_finite_alone():
    zclip = ZClip(alpha=0.97, z_threshold=2.5, warmup_steps=2)
    calm = [zclip.bound(norm) for norm in (1.0, 1.2, math.nan, 1.1)]
    before = zclip.state_dict()

    assert calm == [None] * 4
    assert zclip.bound(math.inf) is None
    assert zclip.state_dict() == before
    assert zclip.bound(9.0) < 1.3


class Adam:
    """The reference's optimiser: how a gradient is changed is each method's own."""

    def __init__(self, shape):
        self.weight, self.m, self.v = np.ones(shape), np.zeros(shape), np.zeros(shape)

    def moments(self, gradient):
        self.m = ADAM.beta1 * self.m + (1 - ADAM.beta1) * gradient
        self.v = ADAM.beta2 * self.v + (1 - ADAM.beta2) * gradient**2

    def decay(self):
        self.weight *= 1 - ADAM.lr * ADAM.weight_decay

    def move(self, t):
        m, v = self.m / (1 - ADAM.beta1**t), self.v / (1 - ADAM.beta2**t)
        self.weight -= ADAM.lr * m / (np.sqrt(v) + ADAM.eps)


def adagc_reference(steps, lambda_abs, lambda_rel, beta, warmup_steps):
    """Algorithm 1 of arXiv 2502.11034; returns the weights after each step."""
    state, gamma = [Adam(g.shape) for g in steps[0]], [math.inf, math.inf]
    for t, pair in enumerate(steps, 1):
        everything = math.sqrt(sum((g**2).sum() for g in pair))
        for k, (adam, g) in enumerate(zip(state, pair, strict=True)):
            norm = np.linalg.norm(g)
            if t < warmup_steps:
                clipped = g * min(1, lambda_abs / everything)
                gamma[k] = min(gamma[k], np.linalg.norm(clipped))
            else:
                clipped = g * min(1, lambda_rel * gamma[k] / norm)
                gamma[k] = beta * gamma[k] + (1 - beta) * np.linalg.norm(clipped)
            adam.decay()
            adam.moments(clipped)
            adam.move(t)
        yield [adam.weight.copy() for adam in state]


def spam_reference(steps, threshold, update_proj_gap, warmup_epoch, grad_accu_steps, density):
    """Algorithm 1 of arXiv 2501.06842 with all of the momentum, as its authors' code lays out the steps."""
    assert density == 1.0
    state = [Adam(g.shape) for g in steps[0]]
    for t, pair in enumerate(steps, 1):
        since = t % update_proj_gap
        warm = 1.0
        if t >= update_proj_gap and since < warmup_epoch:
            warm = 1 - 0.99 * (1 + math.cos(math.pi * (since + 1) / (warmup_epoch + 1))) / 2
        for adam, g in zip(state, pair, strict=True):
            if since == 0:
                adam.m, adam.v = np.zeros_like(g), np.zeros_like(g)
            bounded = g
            if since >= grad_accu_steps:
                bounded = np.where(g**2 > threshold * adam.v, np.sign(g) * np.sqrt(threshold * adam.v), g)
            adam.moments(bounded)
            rate = ADAM.lr * warm * math.sqrt(1 - ADAM.beta2**t) / (1 - ADAM.beta1**t)
            adam.weight -= rate * adam.m / (np.sqrt(adam.v) + ADAM.eps)
            adam.decay()
        yield [adam.weight.copy() for adam in state]


def stable_spam_reference(steps, gamma1, gamma2, theta, update_proj_gap):
    """Algorithm 1 of arXiv 2502.17055: AdaClip, AdaGN, and the reset of the moments."""
    state, bound = [Adam(g.shape) for g in steps[0]], [0.0, 0.0]
    first, second = [0.0, 0.0], [0.0, 0.0]
    since = 0
    for t, pair in enumerate(steps, 1):
        since = 1 if t % update_proj_gap == 0 else since + 1
        for k, (adam, g) in enumerate(zip(state, pair, strict=True)):
            if since == 1:
                adam.m, adam.v = np.zeros_like(g), np.zeros_like(g)
            largest = abs(g).max()
            bound[k] = theta * bound[k] + (1 - theta) * largest
            limit = bound[k] / (1 - theta**t)
            clipped = np.where(abs(g) > limit, g / largest * limit, g)
            norm = np.linalg.norm(clipped)
            first[k] = gamma1 * first[k] + (1 - gamma1) * norm
            second[k] = gamma2 * second[k] + (1 - gamma2) * norm**2
            usual = (first[k] / (1 - gamma1**t)) / (math.sqrt(second[k] / (1 - gamma2**t)) + ADAM.eps)
            adam.decay()
            adam.moments(clipped / norm * usual)
            adam.move(since)
        yield [adam.weight.copy() for adam in state]


REFERENCES = {"adagc": adagc_reference, "spam": spam_reference, "stable-spam": stable_spam_reference}


def optimise(kind, options, steps):
    """Yield the weights and the second moments after each step."""
    weights = [torch.nn.Parameter(torch.ones(g.shape, dtype=torch.float64)) for g in steps[0]]
    optimizer = kind(weights, **options)
    for pair in steps:
        for weight, gradient in zip(weights, pair, strict=True):
            weight.grad = torch.tensor(gradient)
        optimizer.step()
        yield [w.detach().numpy().copy() for w in weights], float(optimizer.state[weights[0]]["exp_avg_sq"].max())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimisers_are_the_papers_and_bound_a_spike(short, name):
    steps = gradients()
    found = list(optimise(*make_optimizer([name], ADAM), steps))

    for (weights, _), expected in zip(found, REFERENCES[name](steps, **SETTINGS[name]), strict=True):
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)
    adam = {"lr": ADAM.lr, "betas": (ADAM.beta1, ADAM.beta2), "eps": ADAM.eps}
    plain = list(optimise(torch.optim.AdamW, adam, steps))
    assert found[SPIKE - 1][1] < plain[SPIKE - 1][1] / 1000


def test_the_recipe_decides_what_a_stabiliser_does_not():
    kind, options = make_optimizer(["spam"], ADAM)

    assert kind.__name__ == "SPAM"
    assert options == {
        "lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1,
        "threshold": 5000, "update_proj_gap": 500, "warmup_epoch": 150, "grad_accu_steps": 20, "density": 1.0,
    }  # fmt: skip
    assert make_optimizer(["zclip"], ADAM) is None


RUN = (
    "optimizer.max_grad_norm=0",
    "run.steps=16",
    "run.eval_every=16",
    "run.save_every=16",
    "stress={kind='gradient_scale', first_step=3, every=4, duration=1, factor=200.0}",
)


@pytest.fixture
def trained(recipe, tmp_path, short):
    """Return a function that trains an arm on the tiny recipe."""

    def train(arm, folder=None, **options):
        folder = folder or tmp_path / f"{arm}-s0"
        train_arm(recipe(*RUN), arm, 0, folder, say=lambda line: None, **options)
        return folder

    return train


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_stabiliser_changes_the_run_and_not_what_the_guard_sees_first(trained):
    low = trained("low")
    first = read_trace(low / "trace.parquet").norm[0]
    for name in SETTINGS:
        folder = trained(f"low+{name}")
        np.testing.assert_array_equal(read_trace(folder / "trace.parquet").norm[0], first)
        assert weights(folder) != weights(low), name
        assert json.loads((folder / "environment.json").read_text())["stabilisers"] == {name: SETTINGS[name]}


def test_clip_is_the_recipes_own_clipping(recipe, trained, tmp_path):
    clipping = recipe(*RUN, "optimizer.max_grad_norm=1.0")
    train_arm(clipping, "low", 0, tmp_path / "clipping", say=lambda line: None)

    assert weights(trained("low+clip")) == weights(tmp_path / "clipping")


@pytest.mark.parametrize("arm", ["low+zclip", "low+adagc", "low+spam", "gnmr+stable-spam", "low+zclip+spam"])
@pytest.mark.parametrize("step", [2, 13])
def test_a_stabilised_run_goes_on_bit_for_bit(trained, tmp_path, arm, step):
    def interrupt(done, total):
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    folder = tmp_path / "stopped"
    with pytest.raises(InterruptedRunError):
        trained(arm, folder, progress=interrupt)
    trained(arm, folder, resume=True)

    whole = trained(arm)
    assert weights(folder) == weights(whole)
    np.testing.assert_array_equal(*(read_trace(each / "trace.parquet").norm for each in (folder, whole)))


def test_edges_recovers_the_first_and_the_last_layer_throughout(recipe, tmp_path):
    folder = tmp_path / "edges-s0"
    train_arm(recipe("model.num_hidden_layers=3", "run.steps=3"), "edges", 0, folder, say=lambda line: None)
    trace = read_trace(folder / "trace.parquet")

    expected = [".layers.1." not in name for name in trace.units]
    assert 0 < sum(expected) < len(expected)
    np.testing.assert_array_equal(trace.planned, np.tile(expected, (3, 1)))


def test_a_recipe_that_clips_is_not_clipped_twice(recipe, tmp_path):
    message = r"arm 'low\+zclip': the recipe clips already \(optimizer.max_grad_norm = 1.0\).*set optimizer.max_grad"
    with pytest.raises(RecipeError, match=message):
        train_arm(recipe(), "low+zclip", 0, tmp_path / "low+zclip-s0")
    assert not list(tmp_path.iterdir())
    with pytest.raises(RecipeError, match=r"arm 'low\+clip': the recipe clips already"):
        recipe("arms=['low+clip']")
    assert recipe("arms=['low+spam']").arms == ("low+spam",)


def test_a_missing_package_is_named_before_anything_runs(recipe, monkeypatch):
    monkeypatch.setattr("gnmr.lab.stabilisers.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"arm 'low\+adagc': 'adagc' needs pytorch-optimizer: pip install 'gnmr\[lab"):
        recipe("arms=['low+adagc']", "optimizer.max_grad_norm=0")


def test_the_packaged_recipe_has_every_stabiliser():
    arms = [parse_arm(name) for name in load_recipe("stabilisers").arms]

    assert {name for arm in arms for name in arm.stabilisers} == set(SETTINGS)
    assert {arm.name for arm in arms} >= {"low", "high", "gnmr", "random", "edges"}
