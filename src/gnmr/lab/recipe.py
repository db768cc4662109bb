"""Recipes: what a run is, as a TOML file that is checked before anything is computed."""

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Self, get_args

import tomli_w
from pydantic import Field, ValidationError, model_validator

from gnmr import Float8, Int8, Paths, Policy, SavedActivations, Simulated
from gnmr.errors import RecipeError
from gnmr.lab.arms import DEFAULT, check_options, parse_arm
from gnmr.lab.library import hint as _hint
from gnmr.lab.library import list_recipes, read_recipe
from gnmr.lab.scales import Scale, at_scale
from gnmr.lab.sections import Adapter, ArmName, Data, Model, Optimizer, Run, Section, Stress, Units, VariantName
from gnmr.lab.stabilisers import check_fits
from gnmr.lab.stress import stressed

__all__ = ["Recipe", "list_recipes", "load_recipe"]

_PATHS: dict[str, type[Paths]] = {
    "saved_activations": SavedActivations,
    "simulated": Simulated,
    "int8": Int8,
    "float8": Float8,
}


class Recipe(Section):
    """Everything that decides a run.

    Attributes:
        name: of the comparison's folder.
        description: one line.
        scale: at which it was read, or None for a recipe without scales; see :mod:`gnmr.lab.scales`.
        adapter: LoRA adapters, for a fine-tuning run; None trains all parameters.
        paths: ``kind`` and the keyword arguments of that path class.
        policy: fields of :class:`gnmr.Policy`.
        variants: by name, fields that are other than in ``policy``, for the arms ``TRIGGER:NAME``.
        triggers: options of triggers, such as ``[triggers.gap] threshold = 0.02``; see :mod:`gnmr.lab.arms`.
        arms: which arms a comparison runs; see :mod:`gnmr.lab.arms`.
    """

    name: str
    description: str = ""
    scale: Scale | None = None
    model: Model = Model()
    adapter: Adapter | None = None
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    units: Units = Units()
    paths: dict[str, Any]
    policy: dict[str, Any]
    variants: dict[VariantName, dict[str, Any]] = Field(default_factory=dict)
    triggers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    run: Run = Run()
    stress: Stress | None = None
    arms: tuple[ArmName, ...] = DEFAULT

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.make_paths()
        for variant in (None, *self.variants):
            self.make_policy(variant).resolve(self.run.steps)
        if not self.arms or len(set(self.arms)) != len(self.arms):
            raise ValueError(f"arms must be distinct, at least one, got {list(self.arms)}")
        arms = [parse_arm(name) for name in self.arms]
        if any(arm.trigger == "gsnr" for arm in arms) and self.run.gradient_accumulation < 2:
            raise ValueError("the arm 'gsnr' compares micro-batches: run.gradient_accumulation must be >= 2")
        for arm in arms:
            check_fits(arm.name, arm.stabilisers, self.optimizer)
            if arm.reference is not None and arm.reference not in self.arms:
                raise ValueError(f"the arm {arm.name!r} is matched to {arm.reference!r}, which must be among the arms")
            check_options([arm], self.triggers, self.make_policy(arm.variant).resolve(self.run.steps))
        if self.adapter is not None and self.units.watch == "weight":
            raise ValueError(
                "units.watch = 'weight', and the weights under adapters are frozen: set units.watch to 'adapter' or "
                "'output_grad'"
            )
        if self.data.tokenizer == "model" and self.model.name_or_path is None:
            raise ValueError("data.tokenizer = 'model', and model.name_or_path names no pre-trained model")
        if self.stress is not None and self.stress.first_step > self.run.steps:
            raise ValueError(
                f"stress.first_step = {self.stress.first_step} is beyond run.steps = {self.run.steps}: no fault would "
                "ever act"
            )
        return self

    @property
    def text(self) -> Data:
        """The section ``data``, with the tokenizer ``model`` by its own name."""
        if self.data.tokenizer != "model":
            return self.data
        return self.data.model_copy(update={"tokenizer": self.model.name_or_path})

    @property
    def folder(self) -> Path:
        """Where its runs lie under ``runs/``: each scale has a folder of its own."""
        return Path(self.name) / (self.scale or "")

    def check_variant(self, variant: str | None) -> None:
        """Raise ``ValueError`` unless the recipe has this variant; None is the policy itself."""
        if variant is not None and variant not in self.variants:
            known = ", ".join(self.variants) or "none"
            raise ValueError(f"there is no variant {variant!r}{_hint(variant, self.variants)}; the recipe has {known}")

    def make_policy(self, variant: str | None = None) -> Policy:
        """Return the policy, or a variant of it; ``beta = "none"`` is how TOML says None."""
        self.check_variant(variant)
        section, own = ("policy", self.policy) if variant is None else (f"variants.{variant}", self.variants[variant])
        _check_keys(section, own, [field.name for field in fields(Policy)])
        values = {**self.policy, **own}
        if values.get("beta") == "none":
            values["beta"] = None
        try:
            return Policy.from_dict(values)
        except ValueError as error:
            raise ValueError(str(error).replace("Policy.", f"{section}.")) from None

    def make_paths(self, seed: int = 0, *, exact: bool = False) -> Any:
        """Return fresh paths, with the recipe's faults if it has a stress section.

        Args:
            seed: of stochastic rounding, where the paths have it and the recipe names none.
            exact: paths that cast nothing, in the recipe's place, and without its faults.
        """
        if exact:
            return Simulated(low="exact", high="exact")
        options = dict(self.paths)
        kind = options.pop("kind", None)
        if kind not in _PATHS:
            raise ValueError(f"paths.kind must be one of {', '.join(_PATHS)}, got {kind!r}{_hint(kind, _PATHS)}")
        known = list(inspect.signature(_PATHS[kind]).parameters)
        _check_keys("paths", options, known)
        if "seed" in known:
            options.setdefault("seed", seed)
        wrap: Callable[[type[Paths]], type[Any]] = lambda kind: kind  # noqa: E731
        if self.stress is not None:
            wrap = partial(stressed, fault=self.stress.kind, factor=self.stress.factor, at=self.stress.at)
        try:
            return wrap(_PATHS[kind])(**options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"paths: {error}") from None

    def to_toml(self) -> str:
        """Return the resolved recipe, every default written out."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = (), scale: str | None = None) -> Recipe:
    """Read a packaged recipe by name, or a TOML file.

    Args:
        name_or_path: such as ``demo``, ``paper/a-60m`` or ``./mine.toml``.
        overrides: ``section.key=value`` with the value as TOML; a bare word is a string. They come after the scale.
        scale: see :mod:`gnmr.lab.scales`.

    Raises:
        gnmr.RecipeError: no such recipe or scale; a file that is no TOML; an unknown key or a wrong value. The message
            names the file, the key and, for a misspelt one, the right one.

    Examples:
        >>> load_recipe("demo", ["policy.max_active=6"]).policy["max_active"]
        6
        >>> load_recipe("paper/a-60m", scale="tiny").model.num_hidden_layers
        4
        >>> load_recipe("demo", ["policy.max_actve=6"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        gnmr.errors.RecipeError: recipe demo: unknown key 'policy.max_actve'; did you mean 'max_active'?...
    """
    where, values = read_recipe(name_or_path)
    values = at_scale(where, values, scale)
    for override in overrides:
        _apply(values, override)
    return _validated(where, values)


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


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value
