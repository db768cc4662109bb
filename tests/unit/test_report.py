"""The report: self-contained, true to its numbers, safe with any name, and drawn by a real browser."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from gnmr import Controller, Policy, RunError, TraceError
from gnmr.lab.metrics import COLUMNS, aggregate
from gnmr.lab.paired import paired_differences
from gnmr.report import figures, write_report
from gnmr.report.data import read_comparison
from gnmr.report.plots import palette
from gnmr.trace import TraceWriter
from gnmr.triggers import Fixed

UNITS = ["<script>alert(1)</script>", 'layers.0."q"&k', "层.1.<b>v_proj</b>"]
POLICY = Policy(max_active=1, alpha=1.2, window=2, warmup_steps=3)


def write_run(folder, arm, seed, *, traced=True):
    folder.mkdir()
    draw = np.random.default_rng(seed)
    rows = [
        {"step": t, "loss": 3 - t / 50 + 0.1 * draw.random(), "tokens": 64 * t, "seconds": 0.1} for t in range(1, 41)
    ]
    rows[20]["loss"] = "nan"
    rows += [{"step": t, "eval_loss": 3 - t / 50} for t in (20, 40)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "faults.json").write_text(json.dumps([{"first": 10, "last": 15, "unit": 1}]))
    controller = Fixed(3, POLICY, UNITS, recover=True) if arm == "high" else Controller(3, POLICY, UNITS)
    if not traced:
        return
    header = {"policy": POLICY.to_dict(), "units": UNITS, "trigger": "fixed" if arm == "high" else "gnmr"}
    with TraceWriter(folder / "trace.arrow", header) as writer:
        for t, norms in enumerate(draw.lognormal(size=(40, 3))):
            row = np.where([t == 25, False, False], np.nan, norms)
            writer.write(row, np.ones(3, dtype=bool), controller.update(row))


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "comparison")


def make_folder(folder):
    folder.mkdir()
    draw = np.random.default_rng(0)
    rows = []
    for arm in ("high", "gnmr", "random"):
        for seed in (0, 1):
            write_run(folder / f"{arm}-s{seed}", arm, seed, traced=arm != "random")
        metrics = {column.key: aggregate(list(2 + draw.random(2))) for column in COLUMNS}
        metrics["hit_max"] = aggregate([None, None])
        rows.append({"arm": arm, "runs": [f"{arm}-s0", f"{arm}-s1"], "metrics": metrics})
    comparison = {
        "schema": 1,
        "recipe": {
            "name": "a <i>name</i>",
            "description": "a 'description' & more",
            **{name: {"key": "<u>value</u>"} for name in ("paths", "model", "data", "optimizer", "units")},
            "policy": POLICY.to_dict(),
            "run": {"steps": 40},
            "stress": None,
        },
        "environment": {
            "machine": {"cpu": "A CPU", "cores": 2, "gpu": None},
            "versions": {"python": "3"},
            "revision": None,
            "data": {"sha256": "0"},
        },
        "arms": ["high", "gnmr", "random"],
        "seeds": [0, 1],
        "columns": [vars(column) for column in COLUMNS],
        "rows": rows,
        "differences": paired_differences(rows),
        "notes": ["what a <b>spike</b> is"],
    }
    (folder / "comparison.json").write_text(json.dumps(comparison))
    return folder


def test_names_are_escaped_everywhere(folder):
    html = write_report(folder).read_text()
    mine = html[html.index("<body>") :]

    for name in UNITS:
        assert name not in mine
    assert "<i>name</i>" not in mine
    assert "<u>value</u>" not in mine
    assert "a &lt;i&gt;name&lt;/i&gt;" in mine
    assert "what a &lt;b&gt;spike&lt;/b&gt; is" in mine
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in mine


def test_nothing_is_fetched(folder):
    html = write_report(folder).read_text()

    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=[\"']?(?!data:)", html[html.index("<style>") :])


def test_the_page_says_what_the_numbers_say(folder):
    html = write_report(folder).read_text()
    comparison = json.loads((folder / "comparison.json").read_text())
    loss = {row["arm"]: row["metrics"]["eval_loss"] for row in comparison["rows"]}
    best = min(loss, key=lambda arm: loss[arm]["mean"])

    assert f"Lowest mean validation loss: <b>{best}</b>, {loss[best]['mean']:.4f}" in html
    pair = next(pair for pair in comparison["differences"] if pair["second"] == "random")
    assert f"gnmr minus random: <b>{pair['mean']:+.4f} ± {pair['se']:.4f}</b>" in html
    assert "No trace was recorded for random." in html
    assert "false alarms" in html
    assert "its matched control random." in html


def test_the_papers_figures_are_drawn_from_traces_and_tokens(folder):
    _, runs = read_comparison(folder)
    runs = [run for run in runs if run.seed == 0]
    gnmr = figures.gnmr_over_steps([run for run in runs if run.trace is not None])
    losses = figures.loss_over_tokens(runs)

    assert [line.name for line in gnmr.data] == ["high, mean", "high, largest", "gnmr, mean", "gnmr, largest"]
    trace = next(run for run in runs if run.arm == "gnmr").trace
    mean, largest = gnmr.data[2], gnmr.data[3]
    assert mean.y[0] == pytest.approx(trace.gnmr[0].mean())
    assert mean.y[25] == pytest.approx(trace.gnmr[25, 1:].mean())  # the first unit's norm was NaN there
    assert largest.y[9] == trace.gnmr[9].max()
    assert [line.name for line in losses.data] == ["high", "gnmr", "random"]
    assert len({line.line.color for line in losses.data}) == 3
    assert losses.data[0].x[:2] == (64, 128)
    assert losses.data[0].y[20] is None  # a NaN is a gap


def test_arms_without_a_colour_of_their_own_get_different_ones():
    arms = ["gnmr", "gnmr:half", "gnmr:third", "exact"]

    assert len(set(palette(arms).values())) == len(arms)


def test_the_scale_is_named(folder):
    path = folder / "comparison.json"
    comparison = json.loads(path.read_text())
    comparison["recipe"]["scale"] = "tiny"
    path.write_text(json.dumps(comparison))

    html = write_report(folder).read_text()

    assert "</i> at scale tiny</h1>" in html.replace("&lt;", "<").replace("&gt;", ">")
    assert "compare the arms here only" in html


def test_a_file_of_its_own(folder, tmp_path):
    out = tmp_path / "elsewhere" / "page.html"

    assert write_report(folder, out) == out
    assert out.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("comparison.json", None, "cannot be read"),
        ("comparison.json", "{", "is damaged"),
        ("comparison.json", '{"schema": 7}', "is no comparison of schema 1"),
        ("comparison.json", '{"schema": 1}', "is damaged: KeyError('rows')"),
        ("gnmr-s0/metrics.jsonl", None, "cannot be read"),
        ("gnmr-s0/metrics.jsonl", '{"step', "is damaged"),
        ("gnmr-s0/faults.json", '[{"first": 1}]', "is damaged"),
        ("gnmr-s0/trace.parquet", "no trace", "damaged or no trace"),
    ],
)
def test_a_damaged_file_is_named(folder, name, content, message):
    path = folder / name
    path.unlink()
    if content is not None:
        path.write_text(content)

    with pytest.raises((RunError, TraceError)) as error:
        write_report(folder)
    assert str(path) in str(error.value)
    assert message in str(error.value)


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (
            "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
            "disable-background-networking", "disable-component-update", "window-size=1366,768",
            f"user-data-dir={profile}",
        ):  # fmt: skip
            options.add_argument(f"--{flag}")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        yield driver
        driver.quit()


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Chromium: apt-get install chromium chromium-driver")
def test_chromium_draws_it_without_a_complaint(browser, tmp_path):
    from selenium.webdriver.support.ui import WebDriverWait

    path = write_report(make_folder(tmp_path / "comparison"))
    browser.get(path.as_uri())
    plots = browser.execute_script("return document.querySelectorAll('.js-plotly-plot').length")
    drawn = browser.execute_script("return document.querySelectorAll('.js-plotly-plot .main-svg').length")

    assert plots == 2 + 3 + 2 + 1 + 1  # losses, maps of gnmr twice and high, the paper's, budget, most promoted
    assert drawn >= plots
    complaints = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert complaints == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert {url.split(":")[0] for url in asked} <= {"file", "data", "blob", "chrome"}  # chrome: the empty tab before
    # Another run is chosen: its map is shown, at the full width.
    browser.execute_script("which.value = '1'; which.dispatchEvent(new Event('change'))")
    shown = browser.execute_script("return maps.map(map => !map.hidden)")
    assert shown == [False, True, False]
    WebDriverWait(browser, 10).until(
        lambda page: page.execute_script("return maps[1].querySelector('.main-svg').clientWidth") > 900
    )
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    # On paper every fold is open.
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return [...document.querySelectorAll('details')].every(each => each.open)")


def test_a_long_run_is_thinned(tmp_path):
    folder = make_folder(tmp_path / "comparison")
    shutil.rmtree(folder / "gnmr-s0")
    short = write_report(folder_with_long_run(folder, 100)).stat().st_size
    long = write_report(folder_with_long_run(folder, 4000)).stat().st_size

    assert "at most 600" in Path(folder / "report.html").read_text()
    assert long - short < 1_000_000


def folder_with_long_run(folder, steps):
    run = folder / "gnmr-s0"
    shutil.rmtree(run, ignore_errors=True)
    write_run(run, "gnmr", 0, traced=False)
    rows = [{"step": t, "loss": 3.0} for t in range(1, steps + 1)] + [{"step": steps, "eval_loss": 2.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    controller = Controller(3, POLICY, UNITS)
    draw = np.random.default_rng(0)
    with TraceWriter(run / "trace.arrow", {"policy": POLICY.to_dict(), "units": UNITS}) as writer:
        for norms in draw.lognormal(size=(steps, 3)):
            writer.write(norms, np.ones(3, dtype=bool), controller.update(norms))
    return folder
