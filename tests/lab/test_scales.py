"""A scale changes sizes and tokens, and nothing else; a recipe takes from others what it extends."""

import pytest

from gnmr import RecipeError
from gnmr.lab.library import list_recipes
from gnmr.lab.recipe import load_recipe
from gnmr.lab.scales import SCALES

PAPER = [name for name in list_recipes() if name.startswith("paper/")]

# Written out here once more: what the code allows is not what the test asks it for.
SIZES = {
    *(f"model.{key}" for key in ("hidden_size", "intermediate_size", "num_hidden_layers")),
    *(f"model.{key}" for key in ("num_attention_heads", "num_key_value_heads")),
    "model.name_or_path",  # of which another shape is a new model
    *(f"data.{key}" for key in ("name", "config", "validation_split", "streaming", "tokenizer", "vocab_size")),
    *(f"data.{key}" for key in ("sequence_length", "eval_sequences", "format")),
    *(f"run.{key}" for key in ("steps", "batch_size", "gradient_accumulation", "eval_every", "save_every")),
}


def flat(values, prefix=""):
    found = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("scale", SCALES[:-1])
def test_a_scale_changes_sizes_and_tokens_only(name, scale):
    as_printed, scaled = (load_recipe(name, scale=each) for each in ("paper", scale))
    before, after = (flat(each.model_dump(mode="json")) for each in (as_printed, scaled))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    shares = {key for key in changed if key.endswith((".max_active", ".warmup_steps"))}

    assert changed - shares - SIZES == {"scale"}
    assert {"run.steps", "data.name", "model.hidden_size"} <= changed
    layers = scaled.model.num_hidden_layers / as_printed.model.num_hidden_layers
    for key in before:
        if key.endswith(".max_active"):
            assert after[key] >= 1
            assert abs(after[key] - before[key] * layers) <= 0.5 or after[key] == 1
        if key.endswith(".warmup_steps"):
            assert abs(after[key] - before[key] * scaled.run.steps / as_printed.run.steps) <= 0.5 or after[key] == 2


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_is_the_default_and_every_recipe_bears_its_name(name):
    recipe = load_recipe(name)

    assert recipe == load_recipe(name, scale="paper")
    assert recipe.scale == "paper"
    assert recipe.name == name
    assert {"high", "low", "random"} <= set(recipe.arms)
    tokens = recipe.run.batch_size * recipe.run.gradient_accumulation * recipe.data.sequence_length
    assert tokens == {"paper/pangu-4bit": 1_048_576, "paper/c-13b": 32_768}.get(name, 131_072)
    assert recipe.run.steps % recipe.run.eval_every == 0


# tokens in 10^9, learning rate, hidden, intermediate, heads, layers
SHAPES = {
    "a-60m": (1.3, 2.5e-3, 512, 1376, 8, 8),
    "a-130m": (2.6, 2.5e-3, 768, 2048, 12, 12),
    "a-350m": (7.8, 1e-3, 1024, 2736, 16, 24),
    "a-1.3b": (13.1, 6e-4, 2048, 5461, 32, 24),
    "b-6-8-130m": (2.6, 1e-3, 768, 2048, 12, 12),
    "b-6-8-350m": (7.8, 5e-4, 1024, 2736, 16, 24),
    "b-6-8-1.3b": (13.1, 5e-4, 2048, 5472, 32, 24),
    "b-6-8-3b": (28.8, 3e-4, 2560, 6848, 32, 32),
    "pangu-4bit": (4.0, 2e-3, 1536, 6144, 12, 26),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_rates_and_tokens_are_the_papers(name):
    recipe = load_recipe(f"paper/{name}")
    model, run = recipe.model, recipe.run
    tokens = run.steps * run.batch_size * run.gradient_accumulation * recipe.data.sequence_length

    assert (recipe.optimizer.lr, model.hidden_size, model.intermediate_size) == SHAPES[name][1:4]
    assert (model.num_attention_heads, model.num_hidden_layers) == SHAPES[name][4:]
    assert tokens / 1e9 == pytest.approx(SHAPES[name][0], rel=0.01)


def test_shares_of_variants_and_warm_up_are_kept():
    paper, tiny = (load_recipe("paper/ablation-max-active", scale=scale) for scale in ("paper", "tiny"))
    assert [paper.make_policy(name).max_active for name in ("sixth", None, "half", "two-thirds")] == [2, 4, 6, 8]
    assert [tiny.make_policy(name).max_active for name in ("sixth", None, "half", "two-thirds")] == [1, 2, 3, 4]

    assert load_recipe("paper/static-130m").policy["warmup_steps"] == 500
    static = load_recipe("paper/static-130m", scale="small")
    assert static.policy["warmup_steps"] == 10  # 2.5 % of 400
    assert load_recipe("paper/static-130m", ["policy.max_active=3"], "small").policy["max_active"] == 3


def test_a_resolved_recipe_remembers_its_scale(tmp_path):
    recipe = load_recipe("paper/a-60m", scale="tiny")
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())

    assert load_recipe(file) == load_recipe(file, scale="tiny") == recipe
    assert recipe.folder.as_posix() == "paper/a-60m/tiny"
    assert load_recipe("demo").folder.as_posix() == "demo"
    with pytest.raises(RecipeError, match="is written down at scale 'tiny': leave --scale small out"):
        load_recipe(file, scale="small")


@pytest.mark.parametrize(
    ("text", "scale", "message"),
    [
        ("", "huge", "scale must be one of tiny, small, paper, got 'huge'"),
        ("scales.tiny.run.steps = 50", "small", "has no scale 'small': it has tiny, paper"),
        ("scales.tiny.optimizer.lr = 1.0", None, "scales.tiny.optimizer.lr is neither a size nor a number of tokens"),
        ("scales.tiny.run.threads = 2", None, "known here: steps, batch_size"),
        ("scales.tiny.policy.alpha = 2.0", "tiny", "scales.tiny.policy.alpha is neither"),
        ("scales.tiny.arms = ['low']", None, "scales.tiny.arms.arms is neither"),
        ("scales.huge.run.steps = 50", None, "a section of scales is called tiny or small, got 'huge'"),
        ("scales = 3", None, "scales must be sections"),
    ],
)
def test_a_wrong_scale_is_named(tmp_path, text, scale, message):
    file = tmp_path / "mine.toml"
    if text.startswith("scales"):
        text += "\n"
    file.write_text(text + 'extends = "tiny"\n')

    with pytest.raises(RecipeError) as error:
        load_recipe(file, scale=scale)
    assert message in str(error.value)


def test_a_recipe_without_scales_is_not_scaled():
    with pytest.raises(RecipeError, match="recipe demo has no scales: leave --scale tiny out"):
        load_recipe("demo", scale="tiny")


def test_a_file_takes_what_it_extends(tmp_path):
    (tmp_path / "base.toml").write_text('extends = "paper/a-60m"\nname = "base"\n[policy]\nalpha = 1.7\n')
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = ["base.toml"]\nname = "mine"\nscale = "tiny"\n[optimizer]\nlr = 1e-4\n')
    recipe, packaged = load_recipe(mine), load_recipe("paper/a-60m", scale="tiny")

    assert (recipe.name, recipe.scale, recipe.optimizer.lr) == ("mine", "tiny", 1e-4)
    assert recipe.policy == packaged.policy | {"alpha": 1.7}
    assert recipe.model == packaged.model
    assert recipe.arms == packaged.arms


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ('"papr/a-60m"', "extends = 'papr/a-60m': there is no recipe 'papr/a-60m'; did you mean 'paper/a-60m'?"),
        ('"none.toml"', "none.toml cannot be read"),
        ('"mine.toml"', "extends leads in a circle"),
        ('"../recipe"', "there is no recipe '../recipe'"),
        ("3", "extends must be a recipe's name or a list of them, got 3"),
        ("[1]", "extends must be a recipe's name or a list of them, got [1]"),
    ],
)
def test_extends_that_leads_nowhere(tmp_path, extends, message):
    file = tmp_path / "mine.toml"
    file.write_text(f"extends = {extends}\n")

    with pytest.raises(RecipeError) as error:
        load_recipe(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "arms=['gnmr:haf']",
            "there is no variant 'haf'; did you mean 'half'?; the recipe has sixth, half, two-thirds",
        ),
        ("variants.half.max_actve=1", "unknown key 'variants.half.max_actve'; did you mean 'max_active'?"),
        ("variants.half.max_active=-1", "variants.half.max_active must be an int >= 0, got -1"),
        ("variants={'a b'={}}", "'a b'"),
    ],
)
def test_a_wrong_variant_is_named(override, message):
    with pytest.raises(RecipeError) as error:
        load_recipe("paper/ablation-max-active", [override])
    assert message in str(error.value)
