"""The grammar of arms."""

import pytest

from gnmr import RecipeError
from gnmr.lab.arms import TRIGGERS, Arm, parse_arm
from gnmr.lab.compare import _plan
from gnmr.lab.recipe import load_recipe


@pytest.mark.parametrize("name", TRIGGERS)
def test_every_trigger_is_an_arm(name):
    arm = parse_arm(name)
    assert (arm.name, arm.trigger) == (name, name)
    assert arm.reference == ("gnmr" if name == "random" else None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gmnr", "unknown arm 'gmnr'; did you mean 'gnmr'?"),
        ("random@hihg", "unknown arm 'hihg'; did you mean 'high'?"),
        ("high@gnmr", "cannot be matched like this: random@ARM, norm@ARM are"),
        ("norm@random", "to an arm that is not matched"),
        ("random@", "unknown arm ''"),
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
