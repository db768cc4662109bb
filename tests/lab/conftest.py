"""A small text, a recipe on it, and a cache of its own."""

from pathlib import Path

import pytest

import gnmr
from gnmr.lab.recipe import load_recipe


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / "gnmr-cache"
    monkeypatch.setenv("GNMR_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """About 60 kB of Python, one document."""
    path = tmp_path_factory.mktemp("text") / "source.txt"
    sources = sorted(Path(gnmr.__file__).parent.glob("*.py"))
    path.write_text("\n".join(file.read_text() for file in sources))
    return path


@pytest.fixture
def recipe(text):
    """Return a function that makes the recipe `tiny` on the small text, with overrides."""

    def make(*overrides):
        return load_recipe("tiny", [f"data.name={text}", "run.eval_every=4", "run.save_every=4", *overrides])

    return make
