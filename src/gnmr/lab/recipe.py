"""Recipes: what a run is, as a TOML file that is checked before anything is computed."""

import difflib
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Self, get_args

import tomli_w
from pydantic import Field, ValidationError, model_validator

from gnmr import Paths, Policy, SavedActivations, Simulated
from gnmr.errors import RecipeError
from gnmr.lab.arms import DEFAULT, check_options, parse_arm
from gnmr.lab.sections import ArmName, Data, Model, Optimizer, Run, Section, Stress, Units
from gnmr.lab.stabilisers import check_fits
from gnmr.lab.stress import stressed

_PATHS: dict[str, type[Paths]] = {"saved_activations": SavedActivations, "simulated": Simulated}


class Recipe(Section):
    """Everything that decides a run.

    Attributes:
        name: of the comparison's folder.
        description: one line.
        paths: ``kind`` and the keyword arguments of that path class.
        policy: fields of :class:`gnmr.Policy`.
        triggers: options of triggers, such as ``[triggers.gap] threshold = 0.02``; see :mod:`gnmr.lab.arms`.
        arms: which arms a comparison runs; see :mod:`gnmr.lab.arms`.
    """

    name: str
    description: str = ""
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    units: Units = Units()
    paths: dict[str, Any]
    policy: dict[str, Any]
    triggers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    run: Run = Run()
    stress: Stress | None = None
    arms: tuple[ArmName, ...] = DEFAULT

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.make_paths()
        policy = self.make_policy().resolve(self.run.steps)
        if not self.arms or len(set(self.arms)) != len(self.arms):
            raise ValueError(f"arms must be distinct, at least one, got {list(self.arms)}")
        arms = [parse_arm(name) for name in self.arms]
        check_options(arms, self.triggers, policy)
        if any(arm.trigger == "gsnr" for arm in arms) and self.run.gradient_accumulation < 2:
            raise ValueError("the arm 'gsnr' compares micro-batches: run.gradient_accumulation must be >= 2")
        for arm in arms:
            check_fits(arm.name, arm.stabilisers, self.optimizer)
            if arm.reference is not None and arm.reference not in self.arms:
                raise ValueError(f"the arm {arm.name!r} is matched to {arm.reference!r}, which must be among the arms")
        if self.stress is not None and self.stress.first_step > self.run.steps:
            raise ValueError(
                f"stress.first_step = {self.stress.first_step} is beyond run.steps = {self.run.steps}: no fault would "
                "ever act"
            )
        return self

    def make_policy(self) -> Policy:
        """Return the policy; ``beta = "none"`` is how TOML says None."""
        _check_keys("policy", self.policy, [field.name for field in fields(Policy)])
        values = dict(self.policy)
        if values.get("beta") == "none":
            values["beta"] = None
        try:
            return Policy.from_dict(values)
        except ValueError as error:
            raise ValueError(str(error).replace("Policy.", "policy.")) from None

    def make_paths(self, seed: int = 0) -> Any:
        """Return fresh paths, with the recipe's faults if it has a stress section.

        Args:
            seed: of stochastic rounding, where the recipe names none.
        """
        options = dict(self.paths)
        kind = options.pop("kind", None)
        if kind not in _PATHS:
            raise ValueError(f"paths.kind must be one of {', '.join(_PATHS)}, got {kind!r}{_hint(kind, _PATHS)}")
        known = list(inspect.signature(_PATHS[kind]).parameters)
        _check_keys("paths", options, known)
        options.setdefault("seed", seed)
        wrap: Callable[[type[Paths]], type[Any]] = lambda kind: kind  # noqa: E731
        if self.stress is not None:
            wrap = partial(stressed, fault=self.stress.kind, factor=self.stress.factor)
        try:
            return wrap(_PATHS[kind])(**options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"paths: {error}") from None

    def to_toml(self) -> str:
        """Return the resolved recipe, every default written out."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a packaged recipe by name, or a TOML file.

    Args:
        name_or_path: such as ``demo`` or ``./mine.toml``.
        overrides: ``section.key=value`` with the value as TOML; a bare word is a string.

    Raises:
        gnmr.RecipeError: no such recipe; a file that is no TOML; an unknown key or a wrong value. The message names
            the file, the key and, for a misspelt one, the right one.

    Examples:
        >>> load_recipe("demo", ["policy.max_active=6"]).policy["max_active"]
        6
        >>> load_recipe("demo", ["policy.max_actve=6"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        gnmr.errors.RecipeError: recipe demo: unknown key 'policy.max_actve'; did you mean 'max_active'?...
    """
    where, text = _read(name_or_path)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is no valid TOML: {error}") from error
    for override in overrides:
        _apply(values, override)
    return _validated(where, values)


def list_recipes() -> dict[str, str]:
    """Return the packaged recipes and their one-line descriptions."""
    found = {}
    for file in sorted(_packaged().iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            found[file.name.removesuffix(".toml")] = tomllib.loads(file.read_text())["description"]
    return found


def _packaged() -> Any:
    return files("gnmr.lab") / "recipes"


def _read(name_or_path: str | Path) -> tuple[str, str]:
    path = Path(name_or_path)
    if path.suffix != ".toml":
        packaged = _packaged() / f"{name_or_path}.toml"
        if not packaged.is_file():
            known = list_recipes()
            raise RecipeError(
                f"there is no recipe {str(name_or_path)!r}{_hint(str(name_or_path), known)}; packaged are "
                f"{', '.join(known)}, and a file's name ends in .toml"
            )
        return f"recipe {name_or_path}", packaged.read_text()
    try:
        return str(path), path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set takes section.key=value, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *sections, last = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise RecipeError(f"--set {override!r}: {section!r} is a value, not a section")
    values[last] = value


def _validated(where: str, values: Mapping[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        said = [_say(each) for each in error.errors()]
        raise RecipeError(f"{where}: " + said[0] if len(said) == 1 else "\n  ".join([f"{where}:", *said])) from None


_MISSING = {
    "paths": f": a section with kind = {' or '.join(map(repr, _PATHS))}, and its settings",
    "policy": ": a section with max_active, alpha, beta and the other fields of gnmr.Policy",
}


def _say(error: Any) -> str:
    *sections, name = error["loc"] or [""]
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _keys_of(sections)
        return f"unknown key {key!r}{_hint(name, known)}; known here: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{key!r} is missing{_MISSING.get(key, '')}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    hint = (
        _hint(error["input"], error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "))
        if (error["type"] == "literal_error")
        else ""
    )
    return f"{key} = {error['input']!r}: {error['msg']}{hint}"


def _check_keys(section: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in values:
        if name not in known:
            raise ValueError(f"unknown key '{section}.{name}'{_hint(name, known)}; known here: {', '.join(known)}")


def _keys_of(sections: Sequence[Any]) -> list[str]:
    model: Any = Recipe
    for section in sections:
        annotation = model.model_fields[str(section)].annotation
        model = next(c for c in (annotation, *get_args(annotation)) if hasattr(c, "model_fields"))
    return list(model.model_fields)


def _hint(name: object, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value
