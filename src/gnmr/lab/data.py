"""Training windows and the held-out sequences of a recipe."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from gnmr.errors import RecipeError
from gnmr.lab.embedded import HELD_OUT, embedded_text
from gnmr.lab.recipe import Recipe
from gnmr.lab.sections import Data
from gnmr.lab.tokens import Tokenizer, encoded, make_tokenizer

STREAMED_HELD_OUT = 1000
"""Documents that are held out from the beginning of a stream."""

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
    data, run = recipe.text, recipe.run
    count = run.steps * run.batch_size * run.gradient_accumulation
    if data.format == "instruction":
        return _instructions(data, count, seed)
    if data.streaming:
        return _streamed(data, seed)
    facts: dict[str, Any] = {"name": data.name}
    if data.name == "embedded":
        text = embedded_text()
        train, held_out, digest = text.train, text.validation, text.sha256
        facts["skipped_files"] = text.skipped
    else:
        train, held_out = _split(data)
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
    facts |= {
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


def training_tokenizer(data: Data) -> Tokenizer:
    """Return the tokenizer that a run on this data is trained with; see :func:`load_corpus` for what may be raised."""
    train = embedded_text().train if data.name == "embedded" else _split(data)[0]
    return make_tokenizer(data.tokenizer, data.vocab_size, train)


def _sample(tokens: NDArray[np.int32]) -> Sample:
    ids = torch.from_numpy(tokens.astype(np.int64))
    return {"input_ids": ids, "labels": ids}


def _split(data: Data) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Hold out what is named, or one document of twenty, or the end of a single one."""
    from gnmr.lab.texts import texts_of  # and `datasets`, which the embedded text does without

    documents = tuple(texts_of(data, data.name, data.split))
    if not documents:
        raise RecipeError(f"data.name = {data.name!r} holds no text")
    if data.validation_name or data.validation_split:
        name = data.validation_name or data.name
        held_out = tuple(texts_of(data, name, data.validation_split or data.split))
        if not held_out:
            raise RecipeError(f"the held-out text {name!r} holds no text")
        return documents, held_out
    if len(documents) >= HELD_OUT:
        return tuple(text for i, text in enumerate(documents) if i % HELD_OUT), documents[::HELD_OUT]
    whole = b"\n".join(documents)
    cut = len(whole) - len(whole) // HELD_OUT
    return (whole[:cut],), (whole[cut:],)


def _instructions(data: Data, count: int, seed: int) -> Corpus:
    """Hold out what is named, or one row of twenty; the loss is on the responses."""
    from gnmr.lab.instructions import Encoded, Instructions, encode_rows
    from gnmr.lab.pretrained import load_tokenizer
    from gnmr.lab.texts import load_rows, rows_of

    tokenizer = load_tokenizer(data.tokenizer)

    def read(name: str, split: str) -> list[Encoded]:
        return encode_rows(rows_of(load_rows(data, name, split), name), data, name, tokenizer)

    train = read(data.name, data.split)
    if data.validation_name or data.validation_split:
        held_out = read(data.validation_name or data.name, data.validation_split or data.split)
    else:
        held_out = train[::HELD_OUT]
        train = [row for i, row in enumerate(train) if i % HELD_OUT]
    if not train:
        raise RecipeError(f"data.name = {data.name!r} has one row, which is held out: give more, or a validation_name")
    digest = hashlib.sha256(repr((train, held_out)).encode()).hexdigest()
    facts = {
        "name": data.name,
        "format": data.format,
        "sha256": digest,
        "tokenizer": data.tokenizer,
        "chat_template": bool(tokenizer.chat_template),
        "vocab_size": len(tokenizer),
        "train_rows": len(train),
        "validation_rows": min(len(held_out), data.eval_sequences),
        "cut_rows": sum(len(ids) > data.sequence_length for ids, _ in train),
    }
    pad = tokenizer.eos_token_id
    return Corpus(
        Instructions(train, data.sequence_length, count, seed, pad),
        Instructions(held_out[: data.eval_sequences], data.sequence_length, None, seed, pad),
        len(tokenizer),
        facts,
    )


def _streamed(data: Data, seed: int) -> Corpus:
    """Hold out what is named, or the first documents; stream the rest, shuffled in a buffer."""
    from gnmr.lab.texts import texts_of

    length = data.sequence_length
    if data.tokenizer == "bpe":
        raise RecipeError(
            "data.tokenizer = 'bpe' is trained on the whole text, so it cannot be streamed: use 'bytes', or a hub's"
        )
    tokenizer = make_tokenizer(data.tokenizer, data.vocab_size, ())
    rows = texts_of(data, data.name, data.split)
    if data.validation_name or data.validation_split:
        held_out = texts_of(data, data.validation_name or data.name, data.validation_split or data.split)
    else:
        held_out, rows = rows.take(STREAMED_HELD_OUT), rows.skip(STREAMED_HELD_OUT)
        if next(iter(rows), None) is None:
            raise RecipeError(
                f"data.name = {data.name!r} streams no more than the {STREAMED_HELD_OUT} documents that are held out: "
                "set data.validation_name or data.validation_split, or streaming = false"
            )
    tokens = tokenizer.encode(list(held_out.take(STREAMED_HELD_OUT)))
    if len(tokens) < length:
        raise RecipeError(f"data.name = {data.name!r}: the held-out part is shorter than one sequence of {length}")
    facts = {
        "name": data.name,
        "streaming": True,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "validation_tokens": len(tokens),
    }
    train = Stream(rows.shuffle(seed), tokenizer, length)
    return Corpus(train, Blocks(tokens, length, data.eval_sequences), tokenizer.vocab_size, facts)
