"""The boundaries between the layers, and what a user sees of the package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gnmr

SOURCE = Path(gnmr.__file__).parent
EDGES = {"gnmr.integrations", "gnmr.lab", "gnmr.report", "gnmr.cli"}
TORCH = {"torch", "gnmr.pytorch", "gnmr.paths", "gnmr.numerics", "gnmr.integrations", "gnmr.lab"}
FORBIDDEN = {
    **dict.fromkeys(
        ["_io", "_machine", "controller", "errors", "memory", "policy", "replay", "trace", "triggers"], TORCH | EDGES
    ),
    "paths": EDGES,
    "numerics": EDGES | {"gnmr.pytorch", "gnmr.paths"},
    "pytorch": EDGES,
    "integrations": {"gnmr.lab", "gnmr.report", "gnmr.cli"},
    "lab": {"gnmr.cli"},
    "doctor": EDGES,
}
# What a user is told to import, beside the names at the top: the protocol of a backend and its units, measuring.
PUBLIC_TO_LAB = {
    *(
        "gnmr.trace",
        "gnmr.replay",
        "gnmr.triggers",
        "gnmr.theory",
        "gnmr.memory",
        "gnmr.errors",
        "gnmr.policy",
        "gnmr.integrations",
    ),
    *("gnmr.paths.base", "gnmr.pytorch.units", "gnmr.pytorch.measure", "gnmr.pytorch.gaps", "gnmr.pytorch.signals"),
    *("gnmr.lab", "gnmr.report", "gnmr._io", "gnmr._machine"),
}
NAMES = {
    *("Controller", "Decision", "Ema", "Policy", "State", "Window", "controller"),
    *("CustomPaths", "Float8", "Guard", "Int8", "Paths", "SavedActivations", "Simulated", "TransformerEngine"),
    "find_units",
    *("GnmrError", "GuardError", "PathError", "RecipeError", "RunError", "StateError", "TraceError", "UnitError"),
    "GnmrWarning",
}


def modules(part):
    folder = SOURCE / part
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    return [file for file in files if file.exists()]


def imports(file):
    """Names that a file imports, wherever in it, but for type checking only."""
    tree = ast.parse(file.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield node.module
            if node.module == "gnmr":
                yield from (f"gnmr.{alias.name}" for alias in node.names)


def within(name, parts):
    return any(name == part or name.startswith(f"{part}.") for part in parts)


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_layer_imports_nothing_from_above(part):
    found = [
        f"{file.relative_to(SOURCE)} imports {name}"
        for file in modules(part)
        for name in imports(file)
        if within(name, FORBIDDEN[part])
    ]

    assert found == []


def test_the_lab_uses_the_public_surface_only():
    lazy = {f"gnmr.{name}" for name in NAMES}
    found = [
        f"{file.relative_to(SOURCE)} imports {name}"
        for file in modules("lab")
        for name in imports(file)
        if name.startswith("gnmr.") and not within(name, PUBLIC_TO_LAB) and name not in lazy
    ]

    assert found == []


def test_importing_gnmr_imports_no_heavy_library():
    heavy = ("torch", "pyarrow", "transformers", "jax", "rich")
    code = f"import sys, gnmr; print([name for name in {heavy} if name in sys.modules])"

    out = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"


def test_what_needs_torch_says_so_without_it():
    code = """
import sys
sys.modules["torch"] = None
import gnmr
gnmr.Controller(1, gnmr.Policy(max_active=1)).update([1.0])
try:
    gnmr.Guard
except ImportError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "gnmr.Guard needs PyTorch: pip install 'gnmr[torch]'" in out.stdout


def test_the_public_names_are_these():
    submodules = {file.stem for file in SOURCE.iterdir()} | {"annotations"}
    helpers = {"import_module", "version", "Any", "TYPE_CHECKING"}
    names = {name for name in dir(gnmr) if not name.startswith("_")} - helpers

    assert sorted(names - (submodules - {"controller"})) == sorted(NAMES)
    assert set(gnmr._LAZY) <= set(NAMES)
    with pytest.raises(AttributeError, match="module 'gnmr' has no attribute 'Gaurd'"):
        gnmr.Gaurd  # noqa: B018


@pytest.mark.parametrize("name", sorted(name for name in NAMES if name.endswith("Error")))
def test_every_error_is_a_builtin_that_a_caller_would_catch(name):
    kind = getattr(gnmr, name)

    assert issubclass(kind, gnmr.GnmrError)
    assert name == "GnmrError" or issubclass(kind, ValueError | RuntimeError)
    assert kind.__doc__
