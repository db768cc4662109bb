"""Models on tasks: every item once, each on the disk as soon as it is marked."""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from gnmr._io import write_json, write_text
from gnmr.errors import GnmrWarning, RunError
from gnmr.lab import runs
from gnmr.lab.environment import environment
from gnmr.lab.evaluate.compare import differences, holm, summarise
from gnmr.lab.evaluate.encoding import Encoder
from gnmr.lab.evaluate.generation import generate
from gnmr.lab.evaluate.items import Choices, Generation, Item, Question, Text, choice_metrics
from gnmr.lab.evaluate.likelihood import Sequences, can_share, loglikelihoods
from gnmr.lab.evaluate.tasks import Task
from gnmr.lab.pretrained import Pretrained, is_adapter, load_pretrained, locate

SCHEMA = 1
SETTINGS, ITEMS, EVALUATION = "settings.json", "items.jsonl", "evaluation.json"
WINDOW = 2048
"""Tokens of a window of a text, if the model takes as many and the user does not say."""

_BATCH_TOKENS = 8192
"""That the windows of a batch have at most: each token has the logits of a vocabulary."""

Progress = Callable[[int, int, str], None]
"""Hears (items done, items in all, what is running)."""


@dataclass(frozen=True)
class _Ready:
    """An item as tokens."""

    task: str
    item: Item
    sequences: Sequences
    cut_off: bool

    @property
    def length(self) -> int:
        return sum(map(len, self.sequences.tokens))

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """What the items of a batch have in common."""
        of_kind = (self.item.until, self.item.max_tokens) if isinstance(self.item, Generation) else ()
        return self.task, self.item.kind, of_kind


def evaluate(
    models: Mapping[str, str],
    tasks: Sequence[Task],
    folder: Path,
    *,
    limit: int | None = None,
    batch_size: int = 8,
    window: int | None = None,
    stride: int | None = None,
    dtype: str = "auto",
    device: str | None = None,
    base: str | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Evaluate what is not evaluated yet, and return the evaluation, which is also written into the folder.

    Args:
        models: what :func:`gnmr.lab.pretrained.load_pretrained` takes, by the names that they are shown with. The
            first is the one that the others are compared with.
        tasks: what they are evaluated on.
        folder: of the evaluation; each model has a folder of its own in it.
        limit: items of each task at most; for a text, windows.
        batch_size: items at once. It changes results by no more than rounding.
        window: tokens of a window of a text; by default :data:`WINDOW`, or as many as the model takes.
        stride: tokens that a window is on from the one before; by default they are disjoint.
        dtype: see :func:`gnmr.lab.pretrained.load_pretrained`, as for the next two.
        device: likewise.
        base: of the adapters among the models.
        progress: hears how far it is.

    Returns:
        What stands in ``evaluation.json``: ``models``, ``tasks``, ``results`` (a line for each model and task, with
        ``n``, values and standard errors), ``differences`` (see :mod:`gnmr.lab.evaluate.compare`), ``notes``.

    Raises:
        ValueError: a name that leads to no model, a setting that does not fit, an item that does not fit the model.
        gnmr.RunError: a model's folder is in use, or holds the items of another model, or of other settings.

    Warns:
        GnmrWarning: an item is longer than the model takes, so that its beginning is cut off.
    """
    _check(models, tasks, limit, batch_size, window, stride)
    bases = {label: base if is_adapter(name) else None for label, name in models.items()}
    if base is not None and not any(bases.values()):
        raise ValueError(f"no model is a PEFT adapter, so none has the base model {base!r}: leave --base out")
    for label, name in models.items():
        locate(name, bases[label])
    results, facts, asked = [], {}, {}
    for label, name in models.items():
        progress(0, 0, f"loading {label}")
        own = folder / label
        with runs.claimed(own), runs.kept_on_failure(own):
            loaded = load_pretrained(name, dtype=dtype, device=device, base=bases[label])
            facts[label] = loaded.facts()
            encoder = Encoder(loaded.tokenizer, loaded.max_length)
            cut = window or min(WINDOW, loaded.max_length)
            ready = {task.name: _prepare(task, encoder, limit, cut, stride or cut) for task in tasks}
            settings = {task.name: _settings(task, ready[task.name], cut, stride or cut) for task in tasks}
            _check_same(own, facts[label], settings)
            rows = _evaluate(loaded, encoder, own, ready, batch_size, partial(_hear, progress, label))
            asked[label] = rows
            results += [{"model": label, "task": task, **summarise(rows[task])} for task in rows]
    pairs, notes = differences(asked)
    evaluation = {
        "schema": SCHEMA,
        "models": facts,
        "tasks": {task.name: task.facts() for task in tasks},
        "limit": limit,
        "results": results,
        "differences": holm(pairs),
        "notes": notes,
        "environment": environment(),
    }
    write_json(folder / EVALUATION, evaluation)
    return evaluation


def _hear(progress: Progress, label: str, done: int, total: int) -> None:
    progress(done, total, label)


def _check(
    models: Mapping[str, str],
    tasks: Sequence[Task],
    limit: int | None,
    batch_size: int,
    window: int | None,
    stride: int | None,
) -> None:
    """Refuse what cannot be meant, before a model is loaded."""
    if not models or not tasks:
        raise ValueError("there must be at least one model and one task")
    for label in models:
        if not re.fullmatch(r"[\w@+-][\w.@+-]*", label):
            raise ValueError(f"a model's label is the name of its folder, of letters, digits and ._@+-; got {label!r}")
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        raise ValueError(f"tasks must be distinct, got {', '.join(names)}")
    for name, value in (("limit", limit), ("batch_size", batch_size), ("window", window), ("stride", stride)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if stride is not None and stride > (window or WINDOW):
        raise ValueError(f"stride {stride} leaves out what is between windows of {window or WINDOW} tokens")


def _prepare(task: Task, encoder: Encoder, limit: int | None, window: int, stride: int) -> list[_Ready]:
    items = chain.from_iterable(_items(question, encoder, window, stride) for question in task.questions(limit))
    found = [_ready(task.name, item, encoder) for item in islice(items, limit)]
    if not found:
        raise ValueError(f"{task.name} holds no items")
    count = sum(each.cut_off for each in found)
    if count:
        warnings.warn(
            f"{count} of {len(found)} items of {task.name} are longer than the {encoder.max_length} tokens that the "
            "model takes: their beginnings are cut off",
            GnmrWarning,
            stacklevel=3,
        )
    return found


def _items(question: Question, encoder: Encoder, window: int, stride: int) -> Iterator[Item]:
    if not isinstance(question, Text):
        yield question
        return
    if window > encoder.max_length:
        raise ValueError(f"window {window} is more than the {encoder.max_length} tokens that the model takes at once")
    if stride > window:
        raise ValueError(f"stride {stride} leaves out what is between windows of {window} tokens")
    yield from encoder.windows(question, window, stride)


def _ready(task: str, item: Item, encoder: Encoder) -> _Ready:
    if isinstance(item, Choices):
        try:
            pairs = [encoder.pair(*pair) for pair in item.pairs]
        except ValueError as error:
            raise ValueError(f"item {item.key} of {task}: {error}") from error
        tokens = tuple(tuple(encoder.fits(whole)) for whole, _ in pairs)
        cut_off = any(len(kept) < len(whole) for kept, (whole, _) in zip(tokens, pairs, strict=True))
        return _Ready(task, item, Sequences(tokens, tuple(scored for _, scored in pairs)), cut_off)
    if isinstance(item, Generation):
        room = encoder.max_length - item.max_tokens
        if room < 1:
            raise ValueError(
                f"an answer of {task} has up to {item.max_tokens} tokens, which leaves no room for a question in the "
                f"{encoder.max_length} that the model takes at once"
            )
        whole = encoder.encode(item.context)
        return _Ready(task, item, Sequences((tuple(whole[-room:]),), (0,)), len(whole) > room)
    return _Ready(task, item, Sequences((item.tokens,), (item.scored,)), cut_off=False)


def _settings(task: Task, ready: Sequence[_Ready], window: int, stride: int) -> dict[str, Any]:
    cut = {"window": window, "stride": stride} if ready[0].item.kind == "window" else {}
    return {**task.facts(), **cut}


def _check_same(folder: Path, model: Mapping[str, Any], tasks: Mapping[str, Any]) -> None:
    """Refuse to add to the items of another model or of other settings; write down what these are."""
    then = "give another folder with --out, or another label with LABEL=MODEL"
    path = folder / SETTINGS
    earlier = runs.read_json(path) if path.exists() else {"model": dict(model), "tasks": {}}
    for key, value in model.items():
        if key != "name" and earlier["model"].get(key) != value:
            was = earlier["model"].get(key)
            raise RunError(f"{folder} holds another model's items: {key} was {was!r}, and is {value!r}: {then}")
    for name, settings in tasks.items():
        before = earlier["tasks"].get(name, settings)
        for key in sorted(before.keys() | settings.keys()):
            if before.get(key) != settings.get(key):
                raise RunError(
                    f"{folder} holds items of {name} with {key} = {before.get(key)!r}, and now it is "
                    f"{settings.get(key)!r}: {then}"
                )
    write_json(path, {"schema": SCHEMA, "model": dict(model), "tasks": {**earlier["tasks"], **tasks}})


def _evaluate(
    loaded: Pretrained,
    encoder: Encoder,
    folder: Path,
    ready: Mapping[str, Sequence[_Ready]],
    batch_size: int,
    progress: Callable[[int, int], None],
) -> dict[str, list[dict[str, Any]]]:
    """Mark what is not marked yet, and return the rows of each task in the order of its items."""
    done = _earlier(folder, ready)
    pending = [each for items in ready.values() for each in items if (each.task, each.item.key) not in done]
    total, count = len(done) + len(pending), len(done)
    sharing = can_share(loaded.model)
    with (folder / ITEMS).open("a") as file:
        for batch in _batches(pending, batch_size):
            progress(count, total)
            for each, row in zip(batch, _rows(loaded.model, encoder, batch, sharing), strict=True):
                found = {"task": each.task, "item": each.item.key, "digest": each.item.digest, **row}
                done[each.task, each.item.key] = found
                file.write(json.dumps(found, allow_nan=False) + "\n")
            file.flush()
            count += len(batch)
    progress(count, total)
    return {task: [done[task, each.item.key] for each in items] for task, items in ready.items()}


def _earlier(folder: Path, ready: Mapping[str, Sequence[_Ready]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows that are there already, and leave the file such that whole lines can be added to it."""
    path = folder / ITEMS
    rows = runs.read_metrics(path) if path.exists() else []
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))  # a kill cut the last line short
    wanted = {(each.task, each.item.key): each.item.digest for items in ready.values() for each in items}
    found = {(row["task"], row["item"]): row for row in rows if (row["task"], row["item"]) in wanted}
    for (task, key), row in found.items():
        if row["digest"] != wanted[task, key]:
            raise RunError(f"{path}: item {key} of {task} asks something else than it did: give another --out")
    return found


def _batches(pending: Sequence[_Ready], batch_size: int) -> Iterator[tuple[_Ready, ...]]:
    """Put items of like length together, the longest first: what does not fit in memory fails at once."""
    ordered = sorted(pending, key=lambda each: (str(each.batch_key), -each.length))
    for _, group in groupby(ordered, key=lambda each: each.batch_key):
        items = list(group)
        windows = items[0].item.kind == "window"
        size = max(1, min(batch_size, _BATCH_TOKENS // items[0].length)) if windows else batch_size
        yield from (tuple(items[i : i + size]) for i in range(0, len(items), size))


def _rows(model: Any, encoder: Encoder, batch: Sequence[_Ready], sharing: bool) -> list[dict[str, Any]]:
    first = batch[0].item
    if isinstance(first, Generation):
        contexts = [each.sequences.tokens[0] for each in batch]
        answers = generate(model, encoder, contexts, first.until, first.max_tokens)
        return [_written(each, *answer) for each, answer in zip(batch, answers, strict=True)]
    found = loglikelihoods(model, [each.sequences for each in batch], sharing=sharing)
    return [_scored(each, values) for each, values in zip(batch, found, strict=True)]


def _written(each: _Ready, answer: str, finite: bool) -> dict[str, Any]:
    assert isinstance(each.item, Generation)  # noqa: S101 (it was written on)
    row: dict[str, Any] = {"kind": "generation", "finite": finite, "cut_off": each.cut_off, "answer": answer}
    return {**row, "metrics": each.item.mark(answer) if finite else {}}


def _scored(each: _Ready, values: Sequence[float]) -> dict[str, Any]:
    item, finite = each.item, all(map(math.isfinite, values))
    row: dict[str, Any] = {"kind": item.kind, "finite": finite, "cut_off": each.cut_off}
    row["loglikelihoods"] = [runs.number(value) for value in values]
    if isinstance(item, Choices):
        return {**row, "gold": item.gold, "metrics": choice_metrics(item, values) if finite else {}}
    assert not isinstance(item, Generation)  # noqa: S101 (those are written on)
    return {**row, "tokens": item.scored, "bytes": item.n_bytes, "words": item.n_words}
