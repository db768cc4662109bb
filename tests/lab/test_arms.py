"""The grammar of arms."""

import pytest

from gnmr import RecipeError
from gnmr.lab.arms import TRIGGERS, parse_arm
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
        ("low:half", "is no variant: it is written TRIGGER:NAME"),
        ("gnmr:", "is no variant"),
        ("gnmr:a.b", "is no variant"),
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


def test_a_matched_arm_runs_after_its_reference(tmp_path):
    recipe = load_recipe("demo", ["arms=['random@norm', 'low', 'norm', 'norm@gnmr', 'gnmr']", "run.seeds=[0]"])
    plan = _plan(recipe, tmp_path)

    assert [job.arm for job in plan] == ["norm", "gnmr", "low", "random@norm", "norm@gnmr"]
    assert [job.after and job.after.arm for job in plan] == [None, None, None, "norm", "gnmr"]
