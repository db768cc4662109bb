"""From texts to token ids, cut where ``lm-eval`` cuts them."""

from collections.abc import Iterator
from typing import Any

from gnmr.lab.evaluate.items import Text, Window


class Encoder:
    """A tokenizer, with the rules for what comes before a text and between a context and its continuation.

    Args:
        tokenizer: a fast one of ``transformers``.
        max_length: tokens that the model takes at once.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        begin = tokenizer.bos_token_id
        self.prefix = int(tokenizer.eos_token_id if begin is None else begin)
        """What a text begins after: the token for the beginning of a text, or for its end."""
        self._prefix_text = tokenizer.decode([self.prefix])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens are the tokenizer's own, but never two beginnings."""
        special = {"add_special_tokens": False} if text.startswith(self._prefix_text) else {}
        return list(self.tokenizer.encode(text, verbose=False, **special))

    def pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Return the ids of a continuation after its context, and how many of them are the continuation's.

        Spaces at the end of the context belong to the continuation, and the two are encoded together, so that the cut
        is where the context alone would end.

        Raises:
            ValueError: the continuation has no token of its own, or more than the model takes at once.
        """
        if context == "":
            ids = list(self.tokenizer.encode(continuation, add_special_tokens=False))
            whole = ids if ids and ids[0] == self.prefix else [self.prefix, *ids]
            scored = len(whole) - 1
        else:
            kept = context.rstrip()
            whole = self.encode(context + continuation)
            scored = len(whole) - len(self.encode(kept))
        if not 0 < scored <= self.max_length:
            raise ValueError(
                f"the continuation {continuation[:80]!r} has {scored} tokens of its own, and must have between 1 and "
                f"the {self.max_length} that the model takes at once"
            )
        return whole, scored

    def fits(self, tokens: list[int]) -> list[int]:
        """Return the end of a sequence that the model takes at once; its last token is only predicted."""
        return tokens[-(self.max_length + 1) :]

    def windows(self, text: Text, length: int, stride: int) -> Iterator[Window]:
        """Cut a text into windows that predict each of its tokens once.

        Args:
            text: what is predicted, after :attr:`prefix`.
            length: tokens that a window's model call takes, the first of which is only context.
            stride: tokens that each window but the first predicts: ``length`` is disjoint, as in ``lm-eval``; fewer
                give each prediction at least ``length - stride + 1`` tokens of context.
        """
        special = {"add_special_tokens": False} if text.text.startswith(self._prefix_text) else {}
        encoded = self.tokenizer(text.text, return_offsets_mapping=True, verbose=False, **special)
        tokens = [self.prefix, *encoded["input_ids"]]
        total, end, before = max(1, len(text.text.encode())), 0, 0
        while end < len(tokens) - 1:
            scored = min(stride if end else length, len(tokens) - 1 - end)
            end += scored
            begin = max(0, end - length)  # the last window, which predicts what is left, has all the context that fits
            upto = len(text.text[: encoded["offset_mapping"][end - 1][1]].encode()) if end < len(tokens) - 1 else total
            share = (upto - before) / total
            before = upto
            key = f"{text.key}/{end - scored}"
            yield Window(key, tuple(tokens[begin : end + 1]), scored, share * text.n_bytes, share * text.n_words)
