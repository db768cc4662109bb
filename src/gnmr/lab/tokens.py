"""From text to one array of token ids, cached where it is dear."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gnmr._io import atomic_write
from gnmr.errors import RecipeError

BYTE_END = 256
"""The byte tokenizer's end-of-document id, after the 256 bytes."""


class Tokenizer(Protocol):
    """What the lab needs of a tokenizer."""

    name: str
    vocab_size: int
    end: int

    def encode(self, documents: Sequence[bytes]) -> NDArray[np.int32]:
        """Return all documents as one array of ids, ``end`` after each."""


class ByteTokenizer:
    """One token a byte: 257 ids, no training, nothing out of vocabulary."""

    name, vocab_size, end = "bytes", 257, BYTE_END

    def encode(self, documents: Sequence[bytes]) -> NDArray[np.int32]:
        """See :class:`Tokenizer`.

        Examples:
            >>> ByteTokenizer().encode([b"ab", b"c"]).tolist()
            [97, 98, 256, 99, 256]
        """
        end = np.array([self.end], dtype=np.int32)
        parts = [part for text in documents for part in (np.frombuffer(text, np.uint8), end)]
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


class FastTokenizer:
    """A tokenizer of the ``tokenizers`` library (its ``backend``): trained here, or one of a hub's."""

    def __init__(self, name: str, backend: Any, end: int) -> None:
        # A tokenizer that is edited in place is another one to the cache.
        self.name = f"{name}-{hashlib.sha256(backend.to_str().encode()).hexdigest()[:16]}"
        self.backend, self.end = backend, end
        self.vocab_size = int(backend.get_vocab_size())

    def encode(self, documents: Sequence[bytes]) -> NDArray[np.int32]:
        """See :class:`Tokenizer`."""
        encoded = self.backend.encode_batch(
            [text.decode(errors="replace") for text in documents], add_special_tokens=False
        )
        return np.array([i for each in encoded for i in (*each.ids, self.end)], dtype=np.int32)


def make_tokenizer(name: str, vocab_size: int, corpus: Sequence[bytes]) -> Tokenizer:
    """Return a tokenizer.

    Args:
        name: ``"bytes"``; ``"bpe"``, trained on ``corpus`` and cached; or a hub name or path.
        vocab_size: of the BPE.
        corpus: what a BPE is trained on.

    Raises:
        gnmr.RecipeError: the hub name or path gives no fast tokenizer with an end-of-text token.
    """
    if name == "bytes":
        return ByteTokenizer()
    return _trained(vocab_size, corpus) if name == "bpe" else _pretrained(name)


def cache_folder() -> Path:
    """Return where trained tokenizers and token arrays are kept: ``$GNMR_CACHE``, or ``~/.cache/gnmr``.

    Raises:
        ValueError: ``GNMR_CACHE`` names something that is not a folder.
    """
    given = os.environ.get("GNMR_CACHE")
    folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gnmr"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"GNMR_CACHE must name a folder, got {str(folder)!r}, which is a file")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def encoded(tokenizer: Tokenizer, documents: Sequence[bytes], key: str) -> NDArray[np.int32]:
    """Encode documents, or map the array that an earlier run left in the cache under the same key."""
    name = hashlib.sha256(f"{tokenizer.name}\0{tokenizer.vocab_size}\0{key}".encode()).hexdigest()[:32]
    path = cache_folder() / f"tokens-{name}.npy"
    if not path.exists():
        with atomic_write(path) as file:
            np.save(file, tokenizer.encode(documents), allow_pickle=False)
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise RecipeError(f"{path}: the cached tokens cannot be read ({error}): delete the file") from error


def _trained(vocab_size: int, corpus: Sequence[bytes]) -> FastTokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    digest = hashlib.sha256(b"\0".join([str(vocab_size).encode(), *corpus])).hexdigest()[:32]
    path = cache_folder() / f"bpe-{digest}.json"
    if not path.exists():
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator((text.decode(errors="replace") for text in corpus), trainer)
        with atomic_write(path) as file:
            file.write(backend.to_str().encode())
    backend = Backend.from_file(str(path))
    end = backend.token_to_id("<|end|>")
    if end is None:
        raise RecipeError(f"{path}: the cached tokenizer has no end-of-text token: delete the file")
    return FastTokenizer("bpe", backend, end)


def _pretrained(name: str) -> FastTokenizer:
    from gnmr.lab.pretrained import load_tokenizer

    try:
        loaded = load_tokenizer(name)
    except ValueError as error:
        raise RecipeError(
            f"data.tokenizer = {name!r} is neither 'bytes' nor 'bpe', nor can it be loaded (without a network, name a "
            f"folder that holds it): {error}"
        ) from error
    return FastTokenizer(name, loaded.backend_tokenizer, int(loaded.eos_token_id))
