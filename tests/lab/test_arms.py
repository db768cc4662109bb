"""The grammar of arms."""

import pytest

from gnmr import RecipeError
from gnmr.lab.arms import TRIGGERS, Arm, parse_arm
from gnmr.lab.compare import _plan
from gnmr.lab.recipe import load_recipe
from gnmr.lab.train import train_arm
from gnmr.trace import read_trace


@pytest.mark.parametrize("name", TRIGGERS)
def test_every_trigger_is_an_arm(name):
    arm = parse_arm(name)
    assert (arm.name, arm.trigger) == (name, name)
    assert arm.reference == ("gnmr" if name == "random" else None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gnmmr", "unknown arm 'gnmmr'; did you mean 'gnmr'?"),
        ("random@hihg", "unknown arm 'hihg'; did you mean 'high'?"),
        ("high@gnmr", "cannot be matched like this: random@ARM, always@ARM, norm@ARM, oracle@ARM are"),
        ("norm@random", "to an arm that is not matched"),
        ("random@", "unknown arm ''"),
        ("low:half", "is no variant: it is written TRIGGER:NAME"),
        ("gnmr:", "is no variant"),
        ("gnmr:a.b", "is no variant"),
        ("lwo+clip", "unknown arm 'lwo+clip'; did you mean 'low'?"),
        (
            "low+zlcip",
            "arm 'low+zlcip': unknown stabiliser 'zlcip'; did you mean 'zclip'? Known are clip, zclip, adagc",
        ),
        ("low+", "unknown stabiliser ''. Known are"),
        ("low+clip@gnmr", "unknown stabiliser 'clip@gnmr'; did you mean 'clip'?"),
        ("low+spam+spam", "gives the stabiliser 'spam' twice"),
        ("low+clip+zclip", "'clip' and 'zclip' both bound gradient norms: keep one of clip, zclip, adagc"),
        ("low+spam+stable-spam", "'spam' and 'stable-spam' both take the optimiser's place"),
    ],
)
def test_what_is_no_arm(name, message):
    with pytest.raises(RecipeError) as caught:
        parse_arm(name)
    assert message in str(caught.value)


def test_a_variant_may_be_matched_and_referred_to():
    assert parse_arm("gnmr:half").variant == "half"
    arm = parse_arm("norm:half@gnmr:third")
    assert (arm.trigger, arm.variant, arm.reference) == ("norm", "half", "gnmr:third")
    assert parse_arm("exact").exact
    assert not parse_arm("high").exact


@pytest.mark.parametrize(
    ("name", "trigger", "reference", "stabilisers"),
    [
        ("low+zclip", "low", None, ("zclip",)),
        ("gnmr+zclip+stable-spam", "gnmr", None, ("zclip", "stable-spam")),
        ("random@gnmr+zclip", "random", "gnmr+zclip", ("zclip",)),
        ("random+clip", "random", "gnmr+clip", ("clip",)),
        ("norm@high+spam", "norm", "high+spam", ("spam",)),
    ],
)
def test_stabilisers_are_the_references_too(name, trigger, reference, stabilisers):
    assert parse_arm(name) == Arm(name, trigger, reference, stabilisers)


def test_the_reference_of_a_stabilised_arm_must_be_among_the_arms(tmp_path):
    with pytest.raises(RecipeError, match=r"'random@gnmr\+zclip' is matched to 'gnmr\+zclip', which must be among"):
        load_recipe("demo", ["arms=['random@gnmr+zclip', 'gnmr']"])
    recipe = load_recipe("demo", ["arms=['random@gnmr+zclip', 'gnmr+zclip']", "run.seeds=[0]"])
    assert [job.arm for job in _plan(recipe, tmp_path)] == ["gnmr+zclip", "random@gnmr+zclip"]


def test_a_matched_arm_runs_after_its_reference(tmp_path):
    recipe = load_recipe("demo", ["arms=['random@norm', 'low', 'norm', 'norm@gnmr', 'gnmr']", "run.seeds=[0]"])
    plan = _plan(recipe, tmp_path)

    assert [job.arm for job in plan] == ["norm", "gnmr", "low", "random@norm", "norm@gnmr"]
    assert [job.after and job.after.arm for job in plan] == [None, None, None, "norm", "gnmr"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["triggers.gap.treshold=0.1"], "unknown key 'triggers.gap.treshold'; known here: threshold, change, every"),
        (["triggers.gnmr.alpha=0.1"], "triggers.gnmr: only gap, static, oracle have options"),
        (["triggers.gap.threshold=0.0", "arms=['gap']"], "Gap(threshold) must be > 0, got 0.0"),
        (["triggers.oracle.every=0"], "triggers.oracle.every must be a whole number of steps >= 1, got 0"),
        (["arms=['static']"], "policy.warmup_steps run, which must be >= 2, got 0"),
        (["arms=['gsnr']"], "the arm 'gsnr' compares micro-batches: run.gradient_accumulation must be >= 2"),
        (["arms=['random@2.0']"], "the rate must be in (0, 1]"),
    ],
)
def test_options_are_checked_before_anything_runs(overrides, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe("demo", overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("arm", ["gap", "oracle", "jacobian", "static", "gsnr", "random@0.2"])
def test_every_trigger_trains(arm, tmp_path):
    settings = ["run.steps=4", "run.eval_every=4", "stress.first_step=2", "data.eval_sequences=8"]
    settings += ["policy.warmup_steps=2", "run.gradient_accumulation=2", f"arms=['{arm}']", "triggers.oracle.every=2"]
    recipe = load_recipe("demo", [*settings, "triggers.gap={threshold=0.01, every=2}"])

    result = train_arm(recipe, arm, 0, tmp_path / f"{arm}-s0", say=lambda line: None)

    assert result["steps"] == 4
    trace = read_trace(tmp_path / f"{arm}-s0" / "trace.parquet")
    assert trace.header["arm"] == arm
    assert trace.active[1:].any() or arm == "random@0.2"
