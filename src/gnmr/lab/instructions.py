"""Prompts with responses, as rows of tokens of which only the responses are learnt.

A row of the data has ``data.prompt_column`` and ``data.response_column``, or the column ``messages``: a list of
``{"role": ..., "content": ...}`` that ends with the assistant's turn, the one that is learnt. Where the tokenizer has a
chat template, that is how a row is written; otherwise as prompt, line break, response, end of text.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from gnmr.errors import GnmrWarning, RecipeError
from gnmr.lab.sections import Data

IGNORED = -100
"""The label of a token that is not learnt, as ``torch.nn.functional.cross_entropy`` has it."""

Encoded = tuple[list[int], int]
"""The tokens of a row, and how many of them are the prompt's."""
Sample = dict[str, torch.Tensor]


class Instructions(Dataset[Sample]):
    """Rows in a seeded order, epoch after epoch; sample i depends on (seed, i) only.

    Args:
        rows: encoded.
        length: of every sample; what is longer is cut at its end, what is shorter is padded.
        count: samples; None takes each row once, in its own order.
        seed: of the order.
        pad: id that fills up; it is masked, so that any will do.
    """

    def __init__(self, rows: Sequence[Encoded], length: int, count: int | None, seed: int, pad: int) -> None:
        self._rows, self._length, self._pad = rows, length, pad
        self._order = np.arange(len(rows))
        if count is not None:
            epochs = -(-count // len(rows))
            orders = [np.random.default_rng([seed, 0, epoch]).permutation(len(rows)) for epoch in range(epochs)]
            self._order = np.concatenate(orders)[:count]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids, prompt = self._rows[int(self._order[index])]
        ids = ids[: self._length]
        fill = self._length - len(ids)
        return {
            "input_ids": torch.tensor([*ids, *[self._pad] * fill]),
            "labels": torch.tensor([*[IGNORED] * prompt, *ids[prompt:], *[IGNORED] * fill]),
            "attention_mask": torch.tensor([*[1] * len(ids), *[0] * fill]),
        }


def encode_rows(rows: Iterable[Mapping[str, Any]], data: Data, name: str, tokenizer: Any) -> list[Encoded]:
    """Encode the rows of a data set.

    Args:
        rows: of the data set.
        data: the recipe's section.
        name: of the data set, for messages.
        tokenizer: of ``transformers``.

    Raises:
        gnmr.RecipeError: a row that lacks what is learnt, or no row of which anything could be.

    Warns:
        gnmr.GnmrWarning: prompts that fill a sequence on their own, so that nothing of their rows could be learnt:
            they are left out.
    """
    found, long = [], 0
    for place, row in enumerate(rows):
        messages = _messages(row, data, name, place)
        ids, prompt = _templated(tokenizer, messages) if tokenizer.chat_template else _plain(tokenizer, messages)
        if prompt >= data.sequence_length:
            long += 1
        else:
            found.append((ids, prompt))
    if long:
        warnings.warn(
            f"{long} of {long + len(found)} rows of {name!r} are left out: their prompt alone has "
            f"data.sequence_length = {data.sequence_length} tokens or more",
            GnmrWarning,
            stacklevel=2,
        )
    if not found:
        raise RecipeError(f"{name!r} holds no row that fits into data.sequence_length = {data.sequence_length} tokens")
    return found


def _messages(row: Mapping[str, Any], data: Data, name: str, place: int) -> list[dict[str, str]]:
    from gnmr.lab.texts import cell

    if data.prompt_column in row or "messages" not in row:
        prompt = cell(row, data.prompt_column, name, "prompt_column")
        response = cell(row, data.response_column, name, "response_column")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    else:
        messages = list(row["messages"] or [])
    texts = [each.get("content") if isinstance(each, Mapping) else None for each in messages]
    spoken = all(isinstance(text, str) and text.strip() for text in texts)
    if len(messages) < 2 or not spoken or messages[-1].get("role") != "assistant":
        raise RecipeError(f"{name!r}, row {place}: it must have a prompt, and end with a response that is not empty")
    return messages


def _templated(tokenizer: Any, messages: list[dict[str, str]]) -> Encoded:
    write = tokenizer.apply_chat_template
    prompt = write(messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False)
    whole = write(messages, tokenize=True, return_dict=False)
    if whole[: len(prompt)] != prompt:
        raise RecipeError(
            "the tokenizer's chat template writes a prompt otherwise where a response follows, so that the response "
            "cannot be told from it: give rows with a prompt and a response, and a tokenizer without a template"
        )
    return list(whole), len(prompt)


def _plain(tokenizer: Any, messages: list[dict[str, str]]) -> Encoded:
    *before, last = [each["content"] for each in messages]
    prompt = tokenizer.encode("\n".join([*before, ""]), add_special_tokens=False)
    response = tokenizer.encode(last, add_special_tokens=False)
    return [*prompt, *response, tokenizer.eos_token_id], len(prompt)
