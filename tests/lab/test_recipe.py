"""A recipe is checked whole before anything runs, and says what is wrong where."""

import pytest

from gnmr import RecipeError
from gnmr.lab.recipe import list_recipes, load_recipe

WRONG = [
    ("polcy.max_active=3", "unknown key 'polcy'; did you mean 'policy'?"),
    ("model.hiden_size=3", "unknown key 'model.hiden_size'; did you mean 'hidden_size'?"),
    ("data.tokeniser='bpe'", "unknown key 'data.tokeniser'; did you mean 'tokenizer'?"),
    ("optimizer.weight_deca=0.1", "unknown key 'optimizer.weight_deca'; did you mean 'weight_decay'?"),
    ("units.includ=['*']", "unknown key 'units.includ'; did you mean 'include'?"),
    ("paths.lo='e2m1'", "unknown key 'paths.lo'; did you mean 'low'?"),
    ("policy.max_actve=3", "unknown key 'policy.max_actve'; did you mean 'max_active'?"),
    ("run.step=3", "unknown key 'run.step'; did you mean 'steps'?"),
    ("stress.kindd='nan'", "unknown key 'stress.kindd'; did you mean 'kind'?"),
    ("run.steps=true", "run.steps = True: Input should be a valid integer"),
    ("run.steps='400'", "run.steps = '400': Input should be a valid integer"),
    ("run.steps=0", "run.steps = 0: Input should be greater than or equal to 1"),
    ("optimizer.lr=inf", "optimizer.lr = inf: Input should be a finite number"),
    ("optimizer.lr=-1.0", "optimizer.lr = -1.0: Input should be greater than 0"),
    ("run.seeds=[1, 1]", "seeds must be distinct"),
    ("model.num_attention_heads=5", "hidden_size 32 must be a multiple of num_attention_heads 5"),
    ("model.dtype='float16'", "model.dtype = 'float16': Input should be 'float32' or 'bfloat16'"),
    ("arms=['high', 'radnom']", "did you mean 'random'?"),
    ("arms=['high', 'random']", "the arm 'random' is matched to 'gnmr'"),
    ("arms=[]", "arms must be distinct, at least one"),
    ("policy.max_active=-1", "policy.max_active must be an int >= 0, got -1"),
    ("policy.alpha=0", "policy.alpha must be a finite number > 0"),
    ("policy.alpha=[[0.0, 1.5], [0.01, 1.1]]", "two pieces that begin at step 1 of a run of 10 steps"),
    ("paths.kind='simulate'", "paths.kind must be one of saved_activations, simulated, int8, float8, got 'simulate'"),
    ("paths.low='e2m2'", "unknown number format 'e2m2'"),
    ("paths.group_size='a'", "paths: group_size must be an int >= 1, got 'a'"),
    ("paths.scaling='delayed'", "paths: "),
    ("data.streaming=true", "streaming does not apply to the embedded text"),
    ("stress={kind='gradient_scale', first_step=50}", "stress.first_step = 50 is beyond run.steps = 10"),
    ("stress={kind='stale_scale', first_step=2}", "cannot act on SavedActivations"),
]


@pytest.mark.parametrize(("override", "message"), WRONG, ids=[override for override, _ in WRONG])
def test_what_is_wrong_is_named_with_the_rule_and_the_fix(override, message):
    with pytest.raises(RecipeError) as error:
        load_recipe("tiny", [override])

    assert str(error.value).startswith("recipe tiny:")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("paths.tensors=5", "tensors must be a list of roles"),
        ("paths.tensors=['w', 'q']", "tensors must be a list of roles"),
        ("paths.amax_history='x'", "amax_history must be an int >= 1, got 'x'"),
        ("paths.scaling='token'", "stress.kind = 'stale_scale' needs paths.scaling = 'delayed'"),
    ],
)
def test_options_of_simulated_paths_are_checked_too(override, message):
    with pytest.raises(RecipeError) as error:
        load_recipe("demo", ["stress.kind=stale_scale", override])

    assert message in str(error.value)


@pytest.mark.parametrize("name", list_recipes())
def test_a_resolved_recipe_reads_back_as_itself(name, tmp_path):
    recipe = load_recipe(name, ["policy.alpha=[[0.0, 1.5], [0.5, 1.1]]", "policy.history={ema=0.9}"])
    file = tmp_path / "resolved.toml"
    file.write_text(recipe.to_toml())

    assert load_recipe(file) == recipe


def test_every_packaged_recipe_says_what_it_is():
    assert {"demo", "persistent", "tiny"} <= set(list_recipes())
    assert all(list_recipes().values())


def test_only_paths_that_draw_noise_get_the_seed():
    paths = load_recipe("tiny", ["paths={kind='int8', outliers=6.0}"]).make_paths(seed=3)

    assert paths.describe() == {"kind": "Int8", "outliers": 6.0, "backward": "high", "frozen": "resident"}
    assert load_recipe("tiny").make_paths(seed=3).seed == 3


def test_overrides_are_toml_values_and_bare_words_are_text():
    recipe = load_recipe("tiny", ["policy.max_active=6", "data.name=allenai/c4", "policy.beta=none"])

    assert recipe.make_policy().max_active == 6
    assert recipe.make_policy().beta is None
    assert recipe.data.name == "allenai/c4"


@pytest.mark.parametrize(
    ("override", "message"),
    [("policy.max_active", "takes section.key=value"), ("name.x=1", "'name' is a value, not a section")],
)
def test_an_override_that_is_none(override, message):
    with pytest.raises(RecipeError) as error:
        load_recipe("tiny", [override])

    assert message in str(error.value)


def test_files_that_are_no_recipe(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text('name = "x"\n[policy\n')
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    empty = tmp_path / "empty.toml"
    empty.write_text("")

    for file, message in [
        (broken, "line 2"),
        (binary, "cannot be read"),
        (empty, "'name' is missing"),
        (tmp_path / "none.toml", "No such file"),
        ("dmeo", "there is no recipe 'dmeo'; did you mean 'demo'?"),
    ]:
        with pytest.raises(RecipeError) as error:
            load_recipe(file)
        assert str(file) in str(error.value)
        assert message in str(error.value)


@pytest.mark.parametrize("name", list_recipes())
def test_every_packaged_recipe_is_whole(name):
    assert load_recipe(name).name == name
