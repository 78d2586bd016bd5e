"""Token healing: removes the last token of a prompt, and restricts the first new token to those that begin with it.

A tokenizer ends "http:" with the token ":", after which the model has never seen "//": in its training texts "://" was
one token. So the last token is removed, and the first new token must begin with its text; the token itself is allowed
too. Tokens are compared by their spelling in the vocabulary, which is exact even for a token that holds part of a
character. Added tokens (special ones among them) and single-byte tokens are spelt differently and are not healed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lamina.checkpoint.tokenizer import Tokenizer

ONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
LAST_LETTER = chr(0x10FFFF)


class HealedPrompt(NamedTuple):
    """ids: the prompt without the removed token; text: of that token; allowed: ids that the first new token may be,
    empty for all."""

    ids: list[int]
    text: str
    allowed: list[int]


def heal(tokenizer: Tokenizer, ids: Sequence[int], follows: bool = False) -> HealedPrompt:
    """Removes the last token of a prompt, if a longer token begins with it.

    follows   whether the prompt follows tokens of a cache row; only then may its only token be removed

    >>> heal(tokenizer, tokenizer.encode("see http:"))                 # doctest: +SKIP
    HealedPrompt(ids=[2967, 4096], text=':', allowed=[42, 1232, …])
    """
    whole = list(ids)
    allowed = _vocabulary(tokenizer).extensions(whole[-1]) if len(whole) > (0 if follows else 1) else []
    if len(allowed) < 2:
        return HealedPrompt(whole, "", [])
    before = tokenizer.decode(whole[:-1], skip_special=False)
    return HealedPrompt(whole[:-1], tokenizer.decode(whole, skip_special=False)[len(before) :], allowed)


def mask_to_healing(logits: Tensor, rows: Sequence[HealedPrompt]) -> Tensor:
    """Logits [B, V] of the first new tokens, -inf for ids that a row's healing does not allow."""
    vocab = logits.shape[-1]
    allowed = torch.zeros(len(rows), vocab, dtype=torch.bool)
    for r, row in enumerate(rows):
        allowed[r, [i for i in row.allowed if i < vocab] if row.allowed else slice(None)] = True
    return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


class _Vocabulary:
    """The tokens of a tokenizer sorted by spelling, so that all tokens with a common prefix are adjacent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = set(tokenizer.backend.get_added_tokens_decoder())
        tokens = sorted(
            (text, i)
            for text, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()
            if i not in added and text and not ONE_BYTE.fullmatch(text)
        )
        self.texts, self.ids = [text for text, _ in tokens], [i for _, i in tokens]
        self.text_of = {i: text for text, i in tokens}

    def extensions(self, token: int) -> list[int]:
        """Sorted ids of all tokens that begin with this one's spelling, itself included; empty if it is not healed."""
        text = self.text_of.get(token)
        if text is None:
            return []
        return sorted(self.ids[bisect_left(self.texts, text) : bisect_left(self.texts, text + LAST_LETTER)])


_known: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    if tokenizer not in _known:
        _known[tokenizer] = _Vocabulary(tokenizer)
    return _known[tokenizer]
