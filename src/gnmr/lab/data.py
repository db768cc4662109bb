"""Training windows and the held-out sequences of a recipe."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from gnmr.errors import RecipeError
from gnmr.lab.embedded import HELD_OUT, embedded_text
from gnmr.lab.recipe import Data, Recipe
from gnmr.lab.tokens import Tokenizer, encoded, make_tokenizer

_LOADERS = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Corpus:
    """What a run reads.

    Attributes:
        train: samples of (sequence_length,) int64 ``input_ids`` and ``labels``.
        validation: the same; fixed, whatever the seed.
        vocab_size: of the tokenizer.
        facts: JSON-able: names, hash and sizes, for the run's folder.
    """

    train: Dataset[Sample]
    validation: Dataset[Sample]
    vocab_size: int
    facts: dict[str, Any]


class Windows(Dataset[Sample]):
    """Windows of a token array at seeded random places; window i depends on (seed, i) only.

    So a run that goes on at step k sees what it would have seen without the interruption.
    """

    def __init__(self, tokens: NDArray[np.int32], length: int, count: int, seed: int) -> None:
        self._tokens, self._length = tokens, length
        self._starts = np.random.default_rng([seed, 0]).integers(len(tokens) - length + 1, size=count)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Sample:
        start = int(self._starts[index])
        return _sample(self._tokens[start : start + self._length])


class Blocks(Dataset[Sample]):
    """The first ``count`` consecutive sequences of a token array."""

    def __init__(self, tokens: NDArray[np.int32], length: int, count: int) -> None:
        self._tokens, self._length = tokens, length
        self._count = min(count, len(tokens) // length)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return _sample(self._tokens[index * self._length : (index + 1) * self._length])


class Stream(IterableDataset[Sample]):
    """Documents as they come, packed into sequences without padding."""

    def __init__(self, documents: Iterable[bytes], tokenizer: Tokenizer, length: int) -> None:
        super().__init__()
        self._documents, self._tokenizer, self._length = documents, tokenizer, length

    def __iter__(self) -> Iterator[Sample]:
        rest = np.zeros(0, dtype=np.int32)
        for document in self._documents:
            rest = np.concatenate([rest, self._tokenizer.encode([document])])
            whole = len(rest) // self._length
            for row in rest[: whole * self._length].reshape(whole, self._length):
                yield _sample(row)
            rest = rest[whole * self._length :]


def load_corpus(recipe: Recipe, seed: int) -> Corpus:
    """Read what a recipe's data section names.

    Args:
        recipe: its data section and sizes.
        seed: of the order of the training windows.

    Raises:
        gnmr.RecipeError: a file that is missing, empty, unreadable or too short, or a column that is not there; with
            the path and the fix.
    """
    data = recipe.data
    if data.name == "embedded":
        text = embedded_text()
        train, held_out, digest = text.train, text.validation, text.sha256
    elif data.streaming:
        return _streamed(recipe)
    else:
        train, held_out = _split(_documents(data, data.split), data)
        digest = hashlib.sha256(b"\0".join((*train, b"held out", *held_out))).hexdigest()
    tokenizer = make_tokenizer(data.tokenizer, data.vocab_size, train)
    tokens = encoded(tokenizer, train, f"{digest}-train")
    validation = encoded(tokenizer, held_out, f"{digest}-validation")
    length = data.sequence_length
    for part, array in (("train", tokens), ("validation", validation)):
        if len(array) < length:
            raise RecipeError(
                f"data.name = {data.name!r}: its {part} part has {len(array)} tokens, fewer than one sequence of "
                f"{length}: give more text, or a smaller data.sequence_length"
            )
    run = recipe.run
    count = run.steps * run.batch_size * run.gradient_accumulation
    facts = {
        "name": data.name,
        "sha256": digest,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "train_tokens": len(tokens),
        "validation_tokens": len(validation),
    }
    return Corpus(
        Windows(tokens, length, count, seed),
        Blocks(validation, length, data.eval_sequences),
        tokenizer.vocab_size,
        facts,
    )


def _sample(tokens: NDArray[np.int32]) -> Sample:
    ids = torch.from_numpy(tokens.astype(np.int64))
    return {"input_ids": ids, "labels": ids}


def _streamed(recipe: Recipe) -> Corpus:
    """Take the first documents for validation (or the split that is named), and stream the rest."""
    data = recipe.data
    length = data.sequence_length
    if data.tokenizer == "bpe":
        raise RecipeError(
            "data.tokenizer = 'bpe' is trained on the whole text, so it cannot be streamed: use 'bytes', "
            "or a hub's tokenizer"
        )
    tokenizer = make_tokenizer(data.tokenizer, data.vocab_size, ())
    rows = _load(data, data.split, streaming=True)
    if data.validation_split:
        held_out = _load(data, data.validation_split, streaming=True)
    else:
        held_out, rows = rows.take(1000), rows.skip(1000)
    tokens = tokenizer.encode(list(itertools.islice(_texts(held_out, data), 1000)))
    if len(tokens) < length:
        raise RecipeError(f"data.name = {data.name!r}: the held-out part is shorter than one sequence of {length}")
    facts = {
        "name": data.name,
        "sha256": digest,
        "tokenizer": tokenizer.name,
        "streaming": True,
        "vocab_size": tokenizer.vocab_size,
        "validation_tokens": len(tokens),
    }
    train = Stream(_Texts(rows, data), tokenizer, length)
    return Corpus(train, Blocks(tokens, length, data.eval_sequences), tokenizer.vocab_size, facts)


class _Texts:
    """A stream that can be read again from its beginning."""

    def __init__(self, rows: Any, data: Data) -> None:
        self._rows, self._data = rows, data

    def __iter__(self) -> Iterator[bytes]:
        return _texts(self._rows, self._data)


def _documents(data: Data, split: str) -> tuple[bytes, ...]:
    documents = tuple(text for text in _texts(_load(data, split, streaming=False), data) if text.strip())
    if not documents:
        raise RecipeError(f"data.name = {data.name!r} holds no text")
    return documents


def _split(documents: Sequence[bytes], data: Data) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Hold out the split that is named, or one document of twenty, or the end of a single one."""
    if data.validation_split:
        return tuple(documents), _documents(data, data.validation_split)
    if len(documents) >= HELD_OUT:
        held_out = tuple(documents[::HELD_OUT])
        return tuple(text for i, text in enumerate(documents) if i % HELD_OUT), held_out
    whole = b"\n".join(documents)
    cut = len(whole) - len(whole) // HELD_OUT
    return (whole[:cut],), (whole[cut:],)


def _texts(rows: Any, data: Data) -> Iterator[bytes]:
    for row in rows:
        if data.text_column not in row:
            raise RecipeError(
                f"data.name = {data.name!r} has no column {data.text_column!r}; its columns are "
                f"{', '.join(row)}: set data.text_column"
            )
        yield str(row[data.text_column]).encode()


def _load(data: Data, split: str, *, streaming: bool) -> Any:
    import datasets

    datasets.disable_progress_bars()
    files = _local_files(data.name)
    try:
        if files is None:
            return datasets.load_dataset(data.name, data.config, split=split, streaming=streaming)
        kind = _LOADERS[files[0].suffix]
        options = {"sample_by": "document"} if kind == "text" else {}
        return datasets.load_dataset(
            kind, data_files=[str(file) for file in files], split="train", streaming=streaming, **options
        )
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError, UnicodeDecodeError) as error:
        cause = error.__cause__ or error
        raise RecipeError(f"data.name = {data.name!r} cannot be read: {cause}") from error


def _local_files(name: str) -> list[Path] | None:
    """Return the files of a path, or None for a hub name."""
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _LOADERS)
    elif path.suffix in _LOADERS:
        files = [path]
    else:
        return None
    if not files or not all(file.is_file() for file in files):
        raise RecipeError(f"data.name = {name!r}: there is no such file, or no {', '.join(_LOADERS)} in the folder")
    if len({_LOADERS[file.suffix] for file in files}) > 1:
        raise RecipeError(f"data.name = {name!r} mixes kinds of files: name one file, or a folder of one kind")
    if all(file.stat().st_size == 0 for file in files):
        raise RecipeError(f"data.name = {name!r} is empty: there is no text to learn from")
    return files
