"""One recipe at three scales: as the paper prints it, and smaller.

A recipe file has a section ``[scales.tiny]`` and ``[scales.small]`` with what is other there. A scale changes sizes
and tokens and nothing else (:data:`SCALED`): the model's shape, the text and how it becomes tokens, batch, steps, and
how often and on how much is evaluated. Another shape than a pre-trained model's is that of a new one. Never the
learning rate, paths, thresholds, arms or seeds.

Two numbers follow by themselves, so that what they mean stays (here and in every variant of the policy): maxO keeps
its share of the units, as the number of layers changes, and ``warmup_steps`` its share of the steps; both rounded. One
unit stays of any, and two steps (the first GNMR is 1 by definition, so that one says nothing). Thresholds whose
schedule is in fractions of the run scale anyway.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from gnmr.errors import RecipeError
from gnmr.lab.library import merged
from gnmr.lab.sections import Model, Run

Scale = Literal["tiny", "small", "paper"]
SCALES: tuple[Scale, ...] = ("tiny", "small", "paper")

SCALED: dict[str, tuple[str, ...]] = {
    "model": (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    ),
    "data": (
        *("name", "config", "split", "validation_name", "validation_split", "text_column", "streaming"),
        *("format", "prompt_column", "response_column"),
        *("tokenizer", "vocab_size", "sequence_length", "eval_sequences"),
    ),
    "run": ("steps", "batch_size", "gradient_accumulation", "eval_every", "save_every", "log_every"),
}
"""What a scale may change, by section."""

_OF_THE_TEXT = (
    *("config", "split", "validation_name", "validation_split", "text_column", "streaming"),
    *("format", "prompt_column", "response_column"),
)
"""Keys that describe the text called ``data.name``: another text brings its own."""


def at_scale(where: str, values: Mapping[str, Any], scale: str | None) -> dict[str, Any]:
    """Return a recipe's values at a scale, without its section ``scales``, and with the scale's name in ``scale``.

    Args:
        where: what to call the recipe in messages.
        values: of the file.
        scale: ``"tiny"``, ``"small"`` or ``"paper"`` (the recipe without any override); None is what the file says
            in ``scale``, or the paper's. A recipe without scales has None.

    Raises:
        gnmr.RecipeError: no such scale, one that this recipe lacks, or one that changes what a scale may not.

    Examples:
        >>> values = {"model": {"num_hidden_layers": 24}, "policy": {"max_active": 6}, "run": {"steps": 100000}}
        >>> values["scales"] = {"tiny": {"model": {"num_hidden_layers": 8}, "run": {"steps": 100}}}
        >>> found = at_scale("recipe x", values, "tiny")
        >>> found["model"], found["policy"], found["run"], found["scale"]
        ({'num_hidden_layers': 8}, {'max_active': 2}, {'steps': 100}, 'tiny')
    """
    found = dict(values)
    scales = found.pop("scales", None)
    if scale is not None and scale not in SCALES:
        raise RecipeError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    if scales is None:
        _check_unscaled(where, found.get("scale"), scale)
        return found
    _check(where, scales)
    chosen = scale or found.get("scale") or "paper"
    found["scale"] = chosen
    if chosen == "paper":
        return found
    if chosen not in scales:
        raise RecipeError(f"{where} has no scale {chosen!r}: it has {', '.join((*scales, 'paper'))}")
    return _scaled(found, scales[chosen])


def _check_unscaled(where: str, own: object, wanted: str | None) -> None:
    """Refuse to scale what has one size only: a plain recipe, or one that a run wrote down."""
    if wanted is not None and wanted != own:
        what = "has no scales" if own is None else f"is written down at scale {own!r}"
        raise RecipeError(f"{where} {what}: leave --scale {wanted} out, or add a section [scales.{wanted}]")


def _check(where: str, scales: object) -> None:
    if not isinstance(scales, Mapping) or not all(isinstance(each, Mapping) for each in scales.values()):
        raise RecipeError(f"{where}: scales must be sections such as [scales.tiny.run], got {scales!r}")
    for name, sections in scales.items():
        if name not in SCALES[:-1]:
            raise RecipeError(f"{where}: a section of scales is called tiny or small, got {name!r}")
        for section, keys in sections.items():
            allowed = SCALED.get(section, ())
            for key in keys if isinstance(keys, Mapping) else [section]:
                if key not in allowed:
                    raise RecipeError(
                        f"{where}: scales.{name}.{section}.{key} is neither a size nor a number of tokens, and a scale "
                        f"changes nothing else; known here: {', '.join(allowed) or ', '.join(SCALED)}"
                    )


def _scaled(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    if "name" in changes.get("data", {}):
        data = {key: value for key, value in values.get("data", {}).items() if key not in _OF_THE_TEXT}
        values = values | {"data": data}
    if "hidden_size" in changes.get("model", {}):
        # A pre-trained model has the shape that it has: another shape is a new model.
        values = values | {"model": {k: v for k, v in values.get("model", {}).items() if k != "name_or_path"}}
    found = merged(values, changes)
    layers = _ratio(found, values, "model", "num_hidden_layers", Model.model_fields["num_hidden_layers"].default)
    steps = _ratio(found, values, "run", "steps", Run.model_fields["steps"].default)
    policies: list[tuple[str, ...]] = [("policy",), *(("variants", name) for name in values.get("variants", {}))]
    for path in policies:
        found = _keep_share(found, path, "max_active", layers, least=1)
        found = _keep_share(found, path, "warmup_steps", steps, least=2)
    return found


def _ratio(new: Mapping[str, Any], old: Mapping[str, Any], section: str, key: str, default: Any) -> float:
    """Return new / old of a number; 1 where one of them is none, which the check of the whole recipe will name."""
    pair = [each.get(section, {}).get(key, default) for each in (new, old)]
    usable = all(isinstance(value, int) and value > 0 for value in pair)
    return pair[0] / pair[1] if usable else 1.0


def _keep_share(values: dict[str, Any], path: tuple[str, ...], key: str, ratio: float, least: int) -> dict[str, Any]:
    inner: Any = values
    for part in path:
        inner = inner.get(part, {})
    number = inner.get(key)
    if not isinstance(number, int) or number <= 0:
        return values
    change: dict[str, Any] = {key: max(min(number, least), math.floor(number * ratio + 0.5))}
    for part in reversed(path):
        change = {part: change}
    return merged(values, change)
