"""Recipes: what a run is, as a TOML file that is checked before anything is computed."""

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gnmr import Paths, Policy, SavedActivations, Simulated
from gnmr.errors import RecipeError

Arm = Literal["high", "low", "gnmr", "random", "always", "norm"]
Positive = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Model(_Section):
    """A LLaMA of these shapes, or any causal LM by hub name or path."""

    name_or_path: str | None = None
    hidden_size: Positive = 64
    intermediate_size: Positive = 172
    num_hidden_layers: Positive = 4
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads {self.num_attention_heads}"
            )
        return self


class Data(_Section):
    """Text, how it becomes tokens, and what is held out."""

    name: str = "embedded"
    config: str | None = None
    split: str = "train"
    validation_split: str | None = None
    text_column: str = "text"
    streaming: bool = False
    tokenizer: str = "bytes"
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    sequence_length: Annotated[int, Field(ge=2)] = 64
    eval_sequences: Positive = 512


class Optimizer(_Section):
    """Adam(W) with linear warm-up and a cosine to a share of the peak."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.0


class Units(_Section):
    """Which parts of the model are units: see :func:`gnmr.find_units`."""

    granularity: Literal["operator", "block"] = "operator"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()


class Stress(_Section):
    """Seeded faults in the low-cost path of one unit at a time: see :mod:`gnmr.lab.stress`."""

    kind: Literal["gradient_scale", "stale_scale", "saturation", "nan"]
    first_step: Positive = 50
    every: Positive = 25
    duration: Positive = 12
    factor: Annotated[float, Field(gt=0)] = 16.0


class Run(_Section):
    """How long, how large, how often, on how many threads."""

    steps: Positive = 400
    batch_size: Positive = 8
    gradient_accumulation: Positive = 1
    eval_every: Positive = 100
    save_every: Positive = 200
    log_every: Positive = 10
    seeds: tuple[int, ...] = (0, 1, 2)
    threads: Positive = 1
    bf16_autocast: bool = False

    @model_validator(mode="after")
    def _seeds_differ(self) -> Self:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be distinct and >= 0, at least one, got {list(self.seeds)}")
        return self


_PATHS: dict[str, type[Paths]] = {"saved_activations": SavedActivations, "simulated": Simulated}


class Recipe(_Section):
    """Everything that decides a run.

    Attributes:
        name: of the comparison's folder.
        description: one line.
        paths: ``kind`` and the keyword arguments of that path class.
        policy: fields of :class:`gnmr.Policy`.
        arms: which arms a comparison runs.
    """

    name: str
    description: str = ""
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    units: Units = Units()
    paths: dict[str, Any]
    policy: dict[str, Any]
    run: Run = Run()
    stress: Stress | None = None
    arms: tuple[Arm, ...] = get_args(Arm)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.make_paths()
        self.make_policy().resolve(self.run.steps)
        if not self.arms or len(set(self.arms)) != len(self.arms):
            raise ValueError(f"arms must be distinct, at least one, got {list(self.arms)}")
        if "random" in self.arms and "gnmr" not in self.arms:
            raise ValueError("the arm 'random' is matched to 'gnmr', which must be among the arms")
        return self

    def make_policy(self) -> Policy:
        """Return the policy."""
        return Policy.from_dict(self.policy)

    def make_paths(self, seed: int = 0, wrap: Callable[[type[Paths]], type[Any]] = lambda kind: kind) -> Any:
        """Return fresh paths.

        Args:
            seed: of stochastic rounding, where the recipe names none.
            wrap: makes the class to use from the path class.
        """
        options = dict(self.paths)
        kind = options.pop("kind", None)
        if kind not in _PATHS:
            raise ValueError(f"paths.kind must be one of {', '.join(_PATHS)}, got {kind!r}{_hint(str(kind), _PATHS)}")
        if "tensors" in options:
            options["tensors"] = tuple(options["tensors"])
        known = _parameters(_PATHS[kind])
        for name in options:
            if name not in known:
                raise ValueError(
                    f"paths.{name} is no option of {kind!r}{_hint(name, known)}; it has {', '.join(known)}"
                )
        if "seed" in known:
            options.setdefault("seed", seed)
        return wrap(_PATHS[kind])(**options)

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
        >>> load_recipe("demo", ["policy.max_actve=6"])
        Traceback (most recent call last):
        ...
        gnmr.errors.RecipeError: recipe demo: Policy has no field 'max_actve'; did you mean 'max_active'? ...
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
        raise RecipeError(f"{where}: " + "; ".join(_say(each) for each in error.errors())) from None


def _say(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        *sections, name = error["loc"]
        known = _keys_of(sections)
        return f"unknown key {key!r}{_hint(str(name), known)}; known here: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{key!r} is missing"
    message = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    if not key:
        return message
    return f"{key} = {error['input']!r}: {message}" if error["type"] != "value_error" else f"{key}: {message}"


def _keys_of(sections: Sequence[Any]) -> list[str]:
    model: Any = Recipe
    for section in sections:
        annotation = model.model_fields[str(section)].annotation
        model = next(c for c in (annotation, *get_args(annotation)) if hasattr(c, "model_fields"))
    return list(model.model_fields)


def _parameters(kind: type[Paths]) -> list[str]:
    import inspect

    return list(inspect.signature(kind).parameters)


def _hint(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value
