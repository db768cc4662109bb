"""Log-likelihoods of many continuations, in batches, with what they share computed once."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

WORTH_SHARING = 16
"""A prefix of so many tokens or more is computed once for all continuations of an item."""


@dataclass(frozen=True)
class Sequences:
    """The continuations of one item.

    Attributes:
        tokens: of each, with its context.
        scored: of each, how many at the end are the continuation.
    """

    tokens: tuple[tuple[int, ...], ...]
    scored: tuple[int, ...]

    def shared(self) -> int:
        """Return how many tokens at the beginning are context of them all, less one that each begins with itself."""
        first, *others = self.tokens
        limit = min(len(tokens) - scored for tokens, scored in zip(self.tokens, self.scored, strict=True))
        same = next((i for i in range(limit) if any(other[i] != first[i] for other in others)), limit)
        return max(0, same - 1)


def can_share(model: Any) -> bool:
    """Return whether a cache of the model's keys may have gaps: attention sees every position, and no state runs on."""
    try:
        cache = DynamicCache(config=model.config)
    except (KeyError, AttributeError, TypeError):
        return False  # a layer that no cache is known for
    return _takes(model, "position_ids") and all(type(layer) is DynamicLayer for layer in cache.layers)


@torch.inference_mode()
def loglikelihoods(model: Any, items: Sequence[Sequences], *, sharing: bool) -> list[list[float]]:
    """Return the log-likelihood of each continuation of each item, in nats.

    Args:
        model: a causal language model.
        items: all of them are one batch.
        sharing: compute a long prefix that an item's continuations share once; see :func:`can_share`.

    Returns:
        For each item the sum of its continuations' log-probabilities, in float32 a token; NaN where the logits are.
    """
    prefixes = [item.shared() if sharing and len(item.tokens) > 1 else 0 for item in items]
    apart = [place for place, prefix in enumerate(prefixes) if prefix < WORTH_SHARING]
    together = [place for place, prefix in enumerate(prefixes) if prefix >= WORTH_SHARING]
    found: dict[int, list[float]] = {}
    for places, cut in ((apart, [0] * len(apart)), (together, [prefixes[place] for place in together])):
        if places:
            found.update(zip(places, _batch(model, [items[place] for place in places], cut), strict=True))
    return [found[place] for place in range(len(items))]


def _batch(model: Any, items: Sequence[Sequences], cut: Sequence[int]) -> Iterator[list[float]]:
    """Score items whose first ``cut`` tokens are computed once each; either all cuts are 0, or none is."""
    rests = [tokens[n:] for item, n in zip(items, cut, strict=True) for tokens in item.tokens]
    scored = [n for item in items for n in item.scored]
    inputs, mask = padded([rest[:-1] for rest in rests], model.device)
    options = _after(model, items, cut, mask) if cut[0] else {"attention_mask": mask, "use_cache": False}
    # The logits from the first that some row needs on: a vocabulary for each token is what fills a memory.
    first = min(len(rest) - 1 - n for rest, n in zip(rests, scored, strict=True))
    logits = model(input_ids=inputs, **options, **_last(model, inputs.shape[1] - first)).logits
    first = inputs.shape[1] - logits.shape[1]
    sums = (_sum(row, rest, n, first) for row, rest, n in zip(logits, rests, scored, strict=True))
    return ([float(next(sums)) for _ in item.tokens] for item in items)


def _after(model: Any, items: Sequence[Sequences], cut: Sequence[int], mask: Tensor) -> dict[str, Any]:
    """Compute keys and values of the prefixes, repeat them for each continuation, and say where these go on."""
    prefixes, seen = padded([item.tokens[0][:n] for item, n in zip(items, cut, strict=True)], model.device)
    cache = DynamicCache(config=model.config)
    given = {"cache" if _takes(model, "cache") else "past_key_values": cache, "use_cache": True}
    model(input_ids=prefixes, attention_mask=seen, **given, **_last(model, 1))
    repeats = torch.tensor([len(item.tokens) for item in items], device=model.device)
    rows = torch.arange(len(items), device=model.device).repeat_interleave(repeats)
    cache.batch_select_indices(rows)
    # A prefix is padded behind, and what follows the padding has the positions that follow the prefix.
    begins = torch.tensor(cut, device=model.device)[rows]
    return {
        "attention_mask": torch.cat([seen[rows], mask], dim=1),
        "position_ids": begins[:, None] + torch.arange(mask.shape[1], device=model.device),
        **given,
    }


def _last(model: Any, count: int) -> dict[str, int]:
    """Ask for the last logits only, where the model can be asked."""
    return {"logits_to_keep": count} if _takes(model, "logits_to_keep") else {}


def _takes(model: Any, name: str) -> bool:
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(bare.forward).parameters


def _sum(logits: Tensor, tokens: Sequence[int], scored: int, first: int) -> Tensor:
    """Sum the log-probabilities of the last ``scored`` tokens; the logits begin at the place ``first``."""
    rows = logits[len(tokens) - 1 - scored - first : len(tokens) - 1 - first].float()
    targets = torch.tensor(tokens[-scored:], device=logits.device)
    return (rows.gather(1, targets[:, None])[:, 0] - rows.logsumexp(dim=1)).double().sum()


def padded(rows: Sequence[Sequence[int]], device: Any, side: str = "right") -> tuple[Tensor, Tensor]:
    """Return ids (rows, longest) and a mask of what is no padding.

    Examples:
        >>> [part.tolist() for part in padded([[5, 6], [7]], "cpu")]
        [[[5, 6], [7, 0]], [[1, 1], [1, 0]]]
    """
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(ids.shape[1] - len(row), None)
        ids[place, where], mask[place, where] = torch.tensor(row), 1
    return ids.to(device), mask.to(device)
