"""What triggers read beside the norms, against references of their own."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from gnmr import GnmrWarning, Guard, GuardError, PathError, Policy, SavedActivations, Simulated, find_units
from gnmr.pytorch.gaps import MeasuredGap, measure_gaps
from gnmr.pytorch.signals import CastError, Jacobian, MicroBatchNoise
from gnmr.triggers import AlwaysTop, Gap
from toys import Toy, ToyPaths, backward, batch

POLICY = Policy(max_active=1)


def relative(cast, value):
    return float(torch.linalg.vector_norm(cast - value) / torch.linalg.vector_norm(value))


class Spy(Simulated):
    """Keeps every cast of the low-cost path, at any size."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = {}

    def cast(self, value, at):
        out = super().cast(value, at)
        if at.path == 0:
            self.seen[at.operator, at.role] = (out.double(), value.double())
        return out


@pytest.mark.parametrize("scaling", ["token", "delayed"])
def test_the_errors_of_simulated_casts(scaling):
    model = Toy()
    paths = Spy("int4", "exact", scaling=scaling, tensors=("w", "x", "dy", "dw"))
    guard = Guard(model, paths, POLICY, trigger=Gap, signal=lambda guard: CastError(guard.paths, every=1))
    backward(model, batch(rows=16))

    found = paths.errors()

    assert set(found) == {"x", "w", "dy", "dw"}
    for unit in guard.units:
        for role, errors in found.items():
            wanted = relative(*paths.seen[unit.operators[0].fqn, role])
            assert wanted > 0.01
            assert errors[unit.index] == pytest.approx(wanted, rel=1e-4)


def test_a_unit_of_two_operators_has_the_root_mean_square_of_their_errors():
    model = Toy()
    paths = Spy("int4", "exact")
    guard = Guard(model, paths, POLICY, trigger=Gap, granularity="block")
    backward(model, batch(rows=16))

    found = paths.errors()["x"]

    for unit in guard.units:
        each = [relative(*paths.seen[operator.fqn, "x"]) for operator in unit.operators]
        assert len(each) == 2
        assert found[unit.index] == pytest.approx(np.sqrt(np.mean(np.square(each))), rel=1e-4)


def test_the_error_of_a_large_tensor_comes_from_rows_all_over_it():
    model = Toy()
    paths = Spy("int4", "exact")
    Guard(model, paths, POLICY, trigger=Gap)
    backward(model, batch(rows=5000))

    found = paths.errors()["x"][0]
    assert found == pytest.approx(relative(*paths.seen["layers.0.up_proj", "x"]), rel=0.2)


def test_weights_are_read_every_few_steps_and_kept_in_between():
    model = Toy()
    paths = Simulated("int4", "exact")
    guard = Guard(model, paths, POLICY, trigger=Gap, signal=lambda guard: CastError(guard.paths, every=2))
    found = []
    for _ in range(3):
        backward(model, batch(rows=16))
        found.append(paths.errors())
        guard.step()

    assert np.isnan(found[0]["w"]).all()
    assert (found[1]["w"] > 0.01).all()
    assert np.array_equal(found[2]["w"], found[1]["w"])
    assert not any(np.isnan(errors["x"]).any() for errors in found)


def test_a_unit_on_recovery_is_estimated_every_few_steps_and_kept_in_between():
    model = Toy()
    paths = Spy("int4", "exact")
    paths.attach(find_units(model))
    signal = CastError(paths, every=2)
    paths.switch(0, recover=True)
    read = partial(signal.read, None)

    backward(model, batch(rows=16))  # step 1
    assert np.isnan(read()[0])
    assert np.isfinite(read()[1:]).all()
    paths.end_step(1)
    backward(model, batch(rows=16))  # step 2
    wanted = paths.seen["layers.0.up_proj", "x"]
    assert paths.errors()["x"][0] == pytest.approx(relative(*wanted), rel=1e-4)
    paths.end_step(2)
    before = read()[0]
    backward(model, batch(rows=16, seed=1))  # step 3
    assert read()[0] == before > 0


def test_a_cast_that_makes_nan_has_an_infinite_error():
    class Broken(Simulated):
        def cast(self, value, at):
            out = super().cast(value, at)
            return out * torch.nan if (at.unit, at.role) == (1, "dy") else out

    model = Toy()
    guard = Guard(model, Broken("int8", "exact"), POLICY, trigger=Gap)
    backward(model, batch())
    assert guard.paths.errors()["dy"][1] == np.inf


@pytest.mark.parametrize("fmt", ["e2m1", "int2"])
def test_the_errors_of_saved_activations(fmt):
    model = Toy()
    paths = SavedActivations(fmt, "e4m3")
    guard = Guard(model, paths, POLICY, trigger=Gap)
    inputs = {}
    for unit in guard.units:
        unit.operators[0].module.register_forward_pre_hook(
            lambda module, args, name=unit.name: inputs.update({name: args[0].detach()})
        )
    backward(model, batch(rows=16))

    from gnmr.numerics.rounding import fake_quantize

    found = paths.errors()["x"]
    for unit in guard.units:
        x = inputs[unit.name]
        assert found[unit.index] == pytest.approx(relative(fake_quantize(x, fmt), x), rel=1e-3)


class Told(ToyPaths):
    """Says that it measures, and tells what a test gives it."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def watch_errors(self, every):
        pass

    def errors(self):
        return {role: np.full(len(self.units), value) for role, value in self.found.items()}


def test_a_trigger_that_hears_of_no_error_says_so():
    model = Toy()
    guard = Guard(model, Told({"x": np.nan}), POLICY, trigger=Gap, signal=lambda guard: CastError(guard.paths, every=1))
    backward(model, batch())
    guard.step()
    backward(model, batch())
    with pytest.warns(GnmrWarning, match="no error of any cast has been measured in the last steps.*Told"):
        guard.step()
    backward(model, batch())
    guard.step()  # once is enough

    with pytest.raises(PathError, match="needs the errors of the casts of x, dy, dw, and Told measures w"):
        CastError(Told({"w": 0.1})).read(None)


def test_paths_that_measure_nothing_are_refused():
    with pytest.raises(PathError, match="ToyPaths does not measure the errors of its casts, which this trigger needs"):
        Guard(Toy(), ToyPaths(), POLICY, trigger=Gap)


def test_the_noise_of_micro_batches():
    model = Toy()
    units = find_units(model)
    signal = MicroBatchNoise(units)
    shares = []
    for seed in range(3):
        before = [unit.params[0].grad.clone() if seed else 0.0 for unit in units]
        backward(model, batch(seed=seed), scale=1 / 3)
        shares.append([(unit.params[0].grad - old).double() for unit, old in zip(units, before, strict=True)])

    guard_norms = np.array([float(sum(p.grad.double().square().sum() for p in unit.params)) ** 0.5 for unit in units])
    found = signal.read(type("Reading", (), {"norms": guard_norms}))

    for unit in units:
        if len(unit.params) > 1:
            continue  # the bias is in the norm too; the weights alone are compared
        mine = torch.stack([share[unit.index].flatten() for share in shares]) * 3  # gradients of the micro-batches
        mean = mine.mean(dim=0)
        noise = float((mine - mean).square().sum() / 3 / mean.square().sum())
        assert found[unit.index] == pytest.approx(noise, rel=1e-4)
    signal.close()
    backward(model, batch())
    assert np.isnan(signal.read(type("Reading", (), {"norms": guard_norms}))).all()


def test_noise_needs_two_micro_batches():
    model = Toy()
    guard = Guard(model, ToyPaths(), POLICY, trigger=partial(AlwaysTop, by="gsnr"))
    backward(model, batch())
    with pytest.raises(GuardError, match="this step had one: accumulate over at least two"):
        guard.step()


def test_the_jacobian_is_the_spectral_norm():
    units = find_units(Toy())
    found = Jacobian(units, iterations=200).read(None)
    for unit in units:
        wanted = torch.linalg.matrix_norm(unit.operators[0].weight.detach(), ord=2)
        assert found[unit.index] == pytest.approx(float(wanted), rel=1e-3)


# The measured gap


def params_of(model):
    return list(model.parameters())


def test_the_gap_is_the_difference_of_two_gradients():
    model, x = Toy(), batch(rows=16)
    paths = Simulated("int4", "exact", tensors=("x", "dy"))
    units = find_units(model)
    paths.attach(units)
    closures = [lambda: model(x).square().mean(), lambda: model(2 * x).square().mean()]

    found = measure_gaps(units, params_of(model), paths, np.zeros(4, dtype=bool), closures, lr=0.1)

    for b in range(4):
        rhos = []
        for closure in closures:
            grads = []
            for low in (False, True):
                for unit in range(4):
                    paths.switch(unit, not (low and unit == b))
                grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(closure(), params_of(model))]))
            rhos.append((grads[1] - grads[0]).double())
        sizes = [float(rho.norm()) for rho in rhos]
        assert found.absolute[b] == pytest.approx(np.sqrt(np.mean(np.square(sizes))), rel=1e-4)
        assert found.bias[b] == pytest.approx(float((rhos[0] + rhos[1]).norm() / 2), rel=1e-4)
        assert found.own[b] <= found.absolute[b] * (1 + 1e-6)
    assert (found.absolute > 0).all()
    assert np.isfinite(found.loss).all()
    assert (found.loss != 0).any()


@pytest.mark.parametrize("paths", [lambda: Simulated("int4", "exact", scaling="delayed"), SavedActivations])
def test_measuring_leaves_a_run_as_it_was(paths):
    def run(measured):
        model = Toy()

        def signal(guard):
            closure = lambda: model(batch(rows=16)).square().mean()  # noqa: E731
            return MeasuredGap(guard.units, params_of(model), guard.paths, lambda: guard.plan, closure)

        trigger = partial(AlwaysTop, by="oracle" if measured else "norm")
        guard = Guard(model, paths(), Policy(max_active=0), trigger=trigger, signal=signal if measured else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, batch(rows=16, seed=step))
            guard.step()
            optimizer.step()
        return guard, torch.rand(1), [param.detach() for param in model.parameters()]

    (measured, noise, weights), (_, same_noise, same_weights) = run(True), run(False)
    assert noise == same_noise
    assert all(torch.equal(a, b) for a, b in zip(weights, same_weights, strict=True))
    state, other = measured.paths.state_dict(), run(False)[0].paths.state_dict()
    assert state == other
    assert (measured._signal._last > 0).all()


def test_the_oracle_takes_the_unit_whose_low_path_harms_most():
    model, x = Toy(), batch(rows=16)

    class OneBad(Simulated):
        def cast(self, value, at):
            out = super().cast(value, at)
            return out * 5 if (at.unit, at.path) == (2, 0) else out

    def signal(guard):
        return MeasuredGap(
            guard.units, params_of(model), guard.paths, lambda: guard.plan, lambda: model(x).square().mean()
        )

    guard = Guard(model, OneBad("int8", "exact"), POLICY, trigger=partial(AlwaysTop, by="oracle"), signal=signal)
    backward(model, x)
    guard.step()
    assert guard.active == ("layers.1.up_proj",)


def test_a_signal_that_cannot_be_made_and_one_that_nobody_reads():
    with pytest.raises(ValueError, match="'measured' must be given, as Guard"):
        Guard(Toy(), ToyPaths(), POLICY, trigger=partial(AlwaysTop, by="oracle"))
    with pytest.raises(ValueError, match="signal was given, and Controller reads none"):
        Guard(Toy(), ToyPaths(), POLICY, signal=lambda guard: Jacobian(guard.units))


@pytest.mark.parametrize("paths", [lambda: Simulated("int4", "exact", scaling="delayed"), SavedActivations])
def test_a_resumed_guard_goes_on_as_an_uninterrupted_one(paths):
    def make():
        model = Toy()
        return model, Guard(model, paths(), Policy(max_active=2, lock_steps=3), trigger=partial(Gap, threshold=1e-4))

    def run(model, guard, steps):
        risks = []
        for step in steps:
            model.zero_grad()
            backward(model, batch(rows=16, seed=step))
            risks.append(guard.step().risk)
        return risks

    whole = run(*make(), range(8))
    model, guard = make()
    first = run(model, guard, range(3))
    state = json.loads(json.dumps(guard.state_dict(), allow_nan=False))
    guard.detach()
    model, guard = make()
    guard.load_state_dict(state)

    np.testing.assert_array_equal(np.array(whole), np.array(first + run(model, guard, range(3, 8))))
    assert (np.array(whole) > 1).any()
