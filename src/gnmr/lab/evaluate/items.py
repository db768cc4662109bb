"""What a task asks, in three kinds: choose a continuation, write an answer, predict a text."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class Choices:
    """Score each continuation after its context.

    Attributes:
        key: the item's name in its task.
        pairs: a context and a continuation for each choice.
        answers: the choices' own texts, whose lengths the normalised accuracies divide by.
        gold: the place of the right one.
    """

    kind: ClassVar[str] = "choices"
    key: str
    pairs: tuple[tuple[str, str], ...]
    answers: tuple[str, ...]
    gold: int

    @property
    def digest(self) -> str:
        """A hash of all that the item asks; two models have met the same item if it is the same."""
        return _hash(self.pairs, self.answers, self.gold)


@dataclass(frozen=True)
class Generation:
    """Write on, greedily, and have it marked.

    Attributes:
        key: the item's name in its task.
        context: what is written on.
        until: texts that end the answer, which has none of them.
        max_tokens: that are written at most.
        mark: from the answer to its metrics.
        target: what is right, in words.
    """

    kind: ClassVar[str] = "generation"
    key: str
    context: str
    until: tuple[str, ...]
    max_tokens: int
    mark: Callable[[str], dict[str, float]]
    target: str

    @property
    def digest(self) -> str:
        """As of :class:`Choices`."""
        return _hash(self.context, self.until, self.max_tokens, self.target)


@dataclass(frozen=True)
class Text:
    """Predict a text, which is cut into windows once there is a tokenizer.

    Attributes:
        key: the text's name in its task.
        text: what is predicted.
        n_bytes: that the log-likelihood is divided by: of the text before it was cleaned, if it was.
        n_words: likewise.
    """

    kind: ClassVar[str] = "text"
    key: str
    text: str
    n_bytes: float
    n_words: float


@dataclass(frozen=True)
class Window:
    """Predict the last tokens of a sequence.

    Attributes:
        key: the text's name, and the window's place in it.
        tokens: the whole sequence.
        scored: how many of them, at the end, are predicted.
        n_bytes: the window's share of the text's.
        n_words: likewise.
    """

    kind: ClassVar[str] = "window"
    key: str
    tokens: tuple[int, ...]
    scored: int
    n_bytes: float
    n_words: float

    @property
    def digest(self) -> str:
        """As of :class:`Choices`; other tokenizers make other windows."""
        return _hash(self.tokens, self.scored)


Question = Choices | Generation | Text
Item = Choices | Generation | Window


def choice_metrics(item: Choices, loglikelihoods: Sequence[float]) -> dict[str, float]:
    """Mark a choice as ``lm-eval`` does, and say how likely the right one was.

    Args:
        item: with the right one.
        loglikelihoods: of its continuations, in nats.

    Returns:
        ``acc``: the likeliest is right; ``acc_norm`` and ``acc_bytes``: the likeliest per character and per byte is;
        ``gold_loglikelihood``, and the same per byte.

    Examples:
        >>> item = Choices("0", (("2+2=", " four"), ("2+2=", " 5")), ("four", "5"), gold=0)
        >>> choice_metrics(item, [-4.0, -3.0])
        {'acc': 0.0, 'acc_norm': 1.0, 'acc_bytes': 1.0, 'gold_loglikelihood': -4.0, 'gold_per_byte': -1.0}
    """
    found = np.array(loglikelihoods, dtype=np.float64)
    characters = np.array([len(answer) for answer in item.answers], dtype=np.float64)
    n_bytes = np.array([len(answer.encode()) for answer in item.answers], dtype=np.float64)
    return {
        "acc": float(found.argmax() == item.gold),
        "acc_norm": float((found / characters).argmax() == item.gold),
        "acc_bytes": float((found / n_bytes).argmax() == item.gold),
        "gold_loglikelihood": float(found[item.gold]),
        "gold_per_byte": float(found[item.gold] / n_bytes[item.gold]),
    }


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


Row = Mapping[str, Any]
"""One line of a data set."""
