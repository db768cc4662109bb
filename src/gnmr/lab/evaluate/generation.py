"""Greedy continuations of many contexts, in batches, each up to the first of its stop texts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from gnmr.lab.evaluate.encoding import Encoder
from gnmr.lab.evaluate.likelihood import padded


class _Finite(LogitsProcessor):
    """Remembers in which rows every logit was a number: a greedy choice among NaN is none."""

    rows: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        finite = ~scores.isnan().any(dim=1)
        self.rows = finite if self.rows is None else self.rows & finite
        return scores


class _Stops(StoppingCriteria):
    """A row is done once one of the texts is in what it wrote."""

    def __init__(self, tokenizer: Any, until: Sequence[str], start: int, rows: int) -> None:
        self._tokenizer, self._until, self._start, self._done = tokenizer, until, start, [False] * rows
        # A token is a byte or more; some more are read in case the text begins within one.
        self._back = max(len(text.encode()) for text in until) + 8

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        ends = self._tokenizer.batch_decode(input_ids[:, max(self._start, input_ids.shape[1] - self._back) :])
        self._done = [
            done or any(text in end for text in self._until) for done, end in zip(self._done, ends, strict=True)
        ]
        return torch.tensor(self._done, device=input_ids.device)


@torch.inference_mode()
def generate(
    model: Any, encoder: Encoder, contexts: Sequence[Sequence[int]], until: Sequence[str], new: int
) -> list[tuple[str, bool]]:
    """Write on each context.

    Args:
        model: a causal language model.
        encoder: of its tokenizer.
        contexts: their tokens, one batch.
        until: texts that end an answer, beside the end of the text.
        new: tokens that are written at most.

    Returns:
        The answer of each, without what ended it, and whether all of its logits were numbers.
    """
    ids, mask = padded(contexts, model.device, side="left")
    end = int(encoder.tokenizer.eos_token_id)
    stops = [text for text in (*until, encoder.tokenizer.decode([end])) if text]
    finite = _Finite()
    written = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=end,
        use_cache=True,
        logits_processor=LogitsProcessorList([finite]),
        stopping_criteria=StoppingCriteriaList([_Stops(encoder.tokenizer, stops, ids.shape[1], len(contexts))]),
    )[:, ids.shape[1] :]
    answers = encoder.tokenizer.batch_decode(written, skip_special_tokens=True)
    assert finite.rows is not None  # noqa: S101 (one token at least was written)
    return [(_cut(answer, stops), ok) for answer, ok in zip(answers, finite.rows.tolist(), strict=True)]


def _cut(answer: str, stops: Sequence[str]) -> str:
    for stop in stops:
        answer = answer.split(stop, maxsplit=1)[0]
    return answer
