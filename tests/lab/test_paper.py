"""The paper's recipes run, and the paper's tables stand beside what they left."""

import json

import pytest
from typer.testing import CliRunner

from gnmr import RecipeError, RunError
from gnmr.cli.main import app
from gnmr.lab import runs
from gnmr.lab.arms import parse_arm
from gnmr.lab.compare import summarise
from gnmr.lab.metrics import measure_run
from gnmr.lab.paper import entries, finished, lines, table
from gnmr.lab.recipe import list_recipes, load_recipe
from gnmr.lab.tables import write_tables
from gnmr.lab.train import check_same, train_arm
from gnmr.trace import read_trace

SHORT = ["run.steps=10", "policy.alpha=1.05", "run.eval_every=5"]
FEW = ("run.eval_every=20", "run.batch_size=2", "data.sequence_length=16", "data.eval_sequences=4")


def gnmr(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def compared(tmp_path_factory, text):
    """Runs of five recipes at scale tiny, cut short, and the comparison of each, as `gnmr compare` leaves them."""
    root = tmp_path_factory.mktemp("runs")
    recipes = {}
    for name, arms, own in (
        ("paper/a-60m", ["low", "exact", "gnmr:alpha2"], ["run.steps=8"]),
        # The first fortieth of a two-stage threshold needs forty steps.
        ("paper/b-8-16-130m", ["gnmr"], ["run.steps=40", "model.num_hidden_layers=2"]),
        ("paper/ablation-max-active", ["gnmr:sixth", "gnmr:half", "random@gnmr:sixth"], SHORT),
        ("paper/ablation-thresholds", ["gnmr:high-throughout"], SHORT),
        ("paper/moe", ["gnmr"], ["run.steps=20", "run.eval_every=4"]),
    ):
        given = [*FEW, *own, f"data.name={text}", "run.seeds=[0]", f"arms={arms}"]
        recipe = recipes[name] = load_recipe(name, given, "tiny")
        folder = root / recipe.folder
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GNMR_CACHE", str(tmp_path_factory.getbasetemp() / "gnmr-cache"))
            for arm in arms:
                train_arm(recipe, arm, 0, folder / runs.run_name(arm, 0), say=lambda line: None)
        write_tables(summarise(recipe, folder), folder)
    return root, recipes


def test_a_run_says_its_scale_and_measures_what_the_papers_tables_have(compared):
    root, _ = compared
    folder = root / "paper/a-60m/tiny/gnmr.alpha2-s0"
    measured = measure_run(folder, 257)

    assert load_recipe(folder / runs.RECIPE).scale == "tiny"
    for key in ("exceeds_gnmr", "exceeds_delta", "promotion_ratio", "hit_max"):
        assert 0 <= measured[key] <= 1
    assert measured["step_seconds"] > 0
    assert measured["peak_memory"] > 0
    assert read_trace(folder / "trace.parquet").policy.alpha == 2.0


def test_exact_is_the_model_without_casts(compared):
    root, _ = compared
    exact, low = (measure_run(root / f"paper/a-60m/tiny/{arm}-s0") for arm in ("exact", "low"))

    assert exact["held_bytes_units"] > 2 * low["held_bytes_units"]  # BF16 against 4 bits and a scale a token
    assert exact["eval_loss"] != low["eval_loss"]
    assert load_recipe("demo").make_paths(exact=True).formats == (None, None)


def test_variants_run_their_own_policies(compared):
    root, recipes = compared
    folder = root / "paper/ablation-max-active/tiny"
    sixth, half, random = (
        read_trace(folder / f"{arm}-s0" / "trace.parquet") for arm in ("gnmr.sixth", "gnmr.half", "random@gnmr.sixth")
    )

    assert len(sixth.units) == 6  # blocks
    assert (sixth.policy.max_active, half.policy.max_active) == (1, 3)
    assert 0 < sixth.active.sum(axis=1).max() <= 1 < half.active.sum(axis=1).max() <= 3
    assert random.active.sum(axis=1).tolist() == sixth.active.sum(axis=1).tolist()
    # Another variant is no business of a run; its own is.
    recipe = recipes["paper/ablation-max-active"]
    for name, same in (("sixth", False), ("half", True)):
        other = recipe.model_copy(update={"variants": {**recipe.variants, name: {"max_active": 2}}})
        if same:
            check_same(other, "gnmr:sixth", 0, folder / "gnmr.sixth-s0")
        else:
            with pytest.raises(RunError, match=r"begun with variant.max_active = 1, and the recipe says 2"):
                check_same(other, "gnmr:sixth", 0, folder / "gnmr.sixth-s0")


def test_two_stages_and_a_single_one(compared):
    root, _ = compared
    two = read_trace(root / "paper/b-8-16-130m/tiny/gnmr-s0/trace.parquet")
    one = read_trace(root / "paper/ablation-thresholds/tiny/gnmr.high-throughout-s0/trace.parquet")

    assert two.policy.alpha == ((1, 1.5), (2, 1.1))
    assert two.policy.beta is None
    assert two.units == ["model.layers.0", "model.layers.1"]
    assert one.policy.alpha == 1.5


def test_the_mixture_has_an_expert_for_a_unit_and_begins_on_recovery(compared):
    root, _ = compared
    trace = read_trace(root / "paper/moe/tiny/gnmr-s0/trace.parquet")
    head, body = lines(table("12"), finished(root))
    ours = {(line[0], line[1]): line[head.index("ours, TINY scale")] for line in body}

    assert trace.units[:2] == ["model.layers.0.mlp.experts.0", "model.layers.0.mlp.experts.1"]
    assert len(trace.units) == 2 * 8
    assert trace.policy.warmup_steps == 4  # a twentieth of the 80 steps at this scale
    assert trace.active[:3].all()
    assert trace.active[-1].sum() == trace.policy.max_active == 4, "a quarter, at a threshold below 1"
    assert float(ours["8/16, α 0.9", "29K steps"]) > 1
    assert ours["8-bit", "29K steps"] == "-"


def test_a_variant_that_the_recipe_lacks_is_named(tmp_path):
    with pytest.raises(RecipeError, match="arm 'gnmr:haf': there is no variant 'haf'; did you mean 'half'?"):
        train_arm(load_recipe("paper/ablation-max-active", scale="tiny"), "gnmr:haf", 0, tmp_path / "x")


# From the paper's facts, by hand: number, row, column, value.
SPOT = [
    ("1", "4-bit", "130M", "169.21"),
    ("1", "4-bit", "1.3B", "x"),
    ("1", "4/8, α 3.0, β 2.0", "350M", "18.77"),
    ("1", "16-bit", "1.3B", "15.56"),
    ("2", "6/8", "1.3B tokens", "28.52"),
    ("2", "8/16", "6.6B", "17.04"),
    ("2", "16-bit", "13.1B", "15.06"),
    ("3", "350M, α 2.0, β 1.5", "GNMR > α", "0.141 %"),
    ("4", "8/16", "throughput", "103696 tok/s"),
    ("5", "1.5/1.1", "2.1B", "23.92"),
    ("6", "maxO 8 of 12", "2.6B", "23.63"),
    ("9", "6/8", "3B", "13.93"),
    ("10", "static profile", "130M", "215.10"),
    ("11", "GNMR", "hit maxO", "0.0043"),
    ("11", "Jacobian proxy, always the top 4", "peak memory", "3682 MB"),
    ("13", "8-bit", "4K steps", "0.312"),
    ("15", "4-bit with GNMR", "loss", "3.076"),
]


@pytest.mark.parametrize(("number", "row", "column", "value"), SPOT)
def test_the_papers_numbers(number, row, column, value):
    _, body = lines(table(number), {})

    assert [line[2] for line in body if line[:2] == [row, column]] == [value]


def test_every_cell_points_at_an_arm_and_a_metric_that_there_are(compared):
    root, _ = compared
    columns = {column["key"] for column in json.loads(next(root.rglob("comparison.json")).read_text())["columns"]}
    for entry in entries():
        assert set(entry.recipes) <= set(list_recipes())
        for cell in entry.cells:
            if "recipe" in cell:
                assert parse_arm(cell["arm"]).name in load_recipe(cell["recipe"]).arms
                assert cell["metric"] in columns


def test_ours_stand_beside_the_papers_and_the_scale_is_loud(compared):
    root, _ = compared
    done = gnmr("tables", 1, "--runs", root)

    assert done.exit_code == 0, done.output
    assert "ours, TINY scale" in done.output
    assert "never with the paper's column" in done.output
    assert "NOT as packaged: " in done.output
    assert "run.steps" in done.output
    comparison = json.loads((root / "paper/a-60m/tiny/comparison.json").read_text())
    ours = {row["arm"]: float(row["metrics"]["perplexity"]["mean"]) for row in comparison["rows"]}
    head, body = lines(table("1"), finished(root))
    found = {(line[0], line[1]): line[head.index("ours, TINY scale")] for line in body}
    assert found["4/8, α 2.0, β 1.5", "60M"] == f"{ours['gnmr:alpha2']:.2f}"
    assert found["16-bit", "60M"] == f"{ours['exact']:.2f}"
    assert found["8-bit", "60M"] == "-"  # that arm was not run
    assert found["16-bit", "130M"] == "-"


def test_a_share_of_the_run_is_the_evaluation_there(compared):
    root, _ = compared
    head, body = lines(table("6"), finished(root))
    rows = runs.read_metrics(root / "paper/ablation-max-active/tiny/gnmr.half-s0/metrics.jsonl")
    middle = next(row["eval_perplexity"] for row in rows if row["step"] == 5 and "eval_loss" in row)
    found = {line[1]: line[head.index("ours, TINY scale")] for line in body if line[0] == "maxO 6 of 12"}

    assert found["1.3B tokens"] == f"{middle:.2f}"
    assert found["2.1B"] == "-"  # nothing was evaluated at 80 %
    assert found["2.6B"] != "-"


def test_without_runs_the_paper_stands_alone(tmp_path):
    done = gnmr("tables", 14, "--runs", tmp_path)

    assert done.exit_code == 0
    assert "2.913" in done.output
    assert "No finished comparison under" in done.output


def test_the_list_names_what_makes_each_table():
    done = gnmr("tables")

    assert "Tables 14-15" in done.output
    assert "paper/moe" in done.output
    assert "paper/pangu-4bit" in done.output
    assert "Figures 2-3" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tables", "99"], "there is no table '99' here"),
        (["tables", "1", "--runs", "nowhere"], "nowhere is no folder"),
        (["train", "demo", "--scale", "tiny"], "recipe demo has no scales"),
        (["compare", "paper/a-60m", "--scale", "hge"], "scale must be one of tiny, small, paper, got 'hge'"),
        (["recipes", "--scale", "tiny"], "needs the name of a recipe"),
    ],
)
def test_what_cannot_be_shown_is_one_line(arguments, message):
    done = gnmr(*arguments)

    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_recipe_is_printed_as_it_will_run(tmp_path):
    done = gnmr("recipes", "paper/b-6-8-3b", "--scale", "small")
    file = tmp_path / "printed.toml"
    file.write_text(done.output)

    assert load_recipe(file) == load_recipe("paper/b-6-8-3b", scale="small")


def test_without_a_network_the_tokenizer_is_named(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(RecipeError) as error:
        train_arm(load_recipe("paper/a-60m"), "gnmr", 0, tmp_path / "gnmr-s0", say=lambda line: None)

    assert "data.tokenizer = 'hf-internal-testing/llama-tokenizer'" in str(error.value)
    assert "without a network, name a folder that holds it" in str(error.value)
    assert "\n" not in str(error.value)
