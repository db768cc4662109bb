"""Recipe files: the packaged ones by name, anyone's by path, and what one takes from another.

A recipe that says ``extends = "paper/a-60m"`` (or a list of files) takes every section and key from there, the later
of a list before the earlier, and its own before all. What a file of one's own extends is looked for beside it, if the
name ends in ``.toml``, and among the packaged ones otherwise. This module needs no torch.
"""

import difflib
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from gnmr.errors import RecipeError

_PARTS = "parts"
"""The folders of this name hold what recipes share, and no recipes."""


def list_recipes() -> dict[str, str]:
    """Return the packaged recipes and their one-line descriptions, those in folders last.

    Examples:
        >>> [name for name in list_recipes() if name in ("paper/a-60m", "tiny")]
        ['tiny', 'paper/a-60m']
    """
    root = _packaged()
    folders = [("", root), *((f"{folder.name}/", folder) for folder in _sorted(root) if folder.is_dir())]
    found = {}
    for prefix, folder in folders:
        for file in _sorted(folder):
            if file.name.endswith(".toml"):
                found[prefix + file.name.removesuffix(".toml")] = tomllib.loads(file.read_text())["description"]
    return found


def read_recipe(name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    """Read a recipe file, and what it extends.

    Args:
        name_or_path: a packaged recipe's name, or a file that ends in ``.toml``.

    Returns:
        What to call it in messages, and its values.

    Raises:
        gnmr.RecipeError: no such recipe, a file that is no TOML, or an ``extends`` that leads nowhere or in a circle.
    """
    return _read(name_or_path, Path(), ())


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the keys of ``over``, section by section.

    Examples:
        >>> merged({"run": {"steps": 9, "threads": 1}}, {"run": {"steps": 2}})
        {'run': {'steps': 2, 'threads': 1}}
    """
    found = dict(base)
    for key, value in over.items():
        before = found.get(key)
        found[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return found


def hint(name: object, known: Any) -> str:
    """Suggest the name that was meant, or nothing."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _read(name_or_path: str | Path, beside: Path, within: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    where, text, folder = _text(name_or_path, beside)
    if where in within:
        raise RecipeError(f"{within[0]}: extends leads in a circle: {' -> '.join((*within, where))}")
    try:
        own = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is no valid TOML: {error}") from error
    bases = own.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise RecipeError(f"{where}: extends must be a recipe's name or a list of them, got {bases!r}")
    values: dict[str, Any] = {}
    for base in bases:
        try:
            values = merged(values, _read(base, folder, (*within, where))[1])
        except RecipeError as error:
            raise error if within else RecipeError(f"{where}: extends = {base!r}: {error}") from None
    return where, merged(values, own)


def _text(name_or_path: str | Path, beside: Path) -> tuple[str, str, Path]:
    path = Path(name_or_path)
    if path.suffix == ".toml":
        path = beside / path
        try:
            return str(path), path.read_text(), path.parent
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path} cannot be read: {error}") from error
    packaged = _packaged() / f"{name_or_path}.toml"
    if ".." in path.parts or path.is_absolute() or not packaged.is_file():
        known = list_recipes()
        raise RecipeError(
            f"there is no recipe {str(name_or_path)!r}{hint(name_or_path, known)}; packaged are {', '.join(known)}, "
            "and a file's name ends in .toml"
        )
    return f"recipe {name_or_path}", packaged.read_text(), Path()


def _packaged() -> Any:
    return files("gnmr.lab") / "recipes"


def _sorted(folder: Any) -> list[Any]:
    return sorted((each for each in folder.iterdir() if each.name != _PARTS), key=lambda each: each.name)
