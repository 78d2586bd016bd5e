"""Token healing: a prompt that ends inside a word goes on as if it had been cut elsewhere.

A tokenizer gives "http:" its own last token ":", after which a model has never seen "//": in its texts "://" was one
token. So the last token is taken back, and the first new token must be one that begins with what was taken back, itself
included. Tokens are compared as the vocabulary spells them, which is exact where a token holds half a character. Added
tokens (special ones among them) and those that stand for one byte are spelt otherwise and take no part.
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


class Healed(NamedTuple):
    """ids: the prompt without what was taken back; text: that; allowed: the ids that may come first, none for any."""

    ids: list[int]
    text: str
    allowed: list[int]


def heal(tokenizer: Tokenizer, ids: Sequence[int], follows: bool = False) -> Healed:
    """Takes the last token of a prompt back, where a longer one could stand in its place.

    follows   whether the prompt continues a row that holds tokens; then its only token may be taken back too

    >>> heal(tokenizer, tokenizer.encode("see http:"))                 # doctest: +SKIP
    Healed(ids=[2967, 4096], text=':', allowed=[42, 1232, …])
    """
    whole = list(ids)
    allowed = _vocabulary(tokenizer).longer(whole[-1]) if len(whole) > (0 if follows else 1) else []
    if len(allowed) < 2:
        return Healed(whole, "", [])
    before = tokenizer.decode(whole[:-1], skip_special=False)
    return Healed(whole[:-1], tokenizer.decode(whole, skip_special=False)[len(before) :], allowed)


def only_healing(logits: Tensor, rows: Sequence[Healed]) -> Tensor:
    """The logits of the first new tokens, without those that would not heal. [B, V]"""
    vocab = logits.shape[-1]
    allowed = torch.zeros(len(rows), vocab, dtype=torch.bool)
    for r, row in enumerate(rows):
        allowed[r, [i for i in row.allowed if i < vocab] if row.allowed else slice(None)] = True
    return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


class _Vocabulary:
    """The tokens of a tokenizer in the order of their spelling, so that all with one beginning lie together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = set(tokenizer.backend.get_added_tokens_decoder())
        tokens = sorted(
            (text, i)
            for text, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()
            if i not in added and text and not ONE_BYTE.fullmatch(text)
        )
        self.texts, self.ids = [text for text, _ in tokens], [i for _, i in tokens]
        self.text_of = {i: text for text, i in tokens}

    def longer(self, token: int) -> list[int]:
        """Ids of all tokens that begin with this one's spelling, in order; none for one that takes no part."""
        text = self.text_of.get(token)
        if text is None:
            return []
        return sorted(self.ids[bisect_left(self.texts, text) : bisect_left(self.texts, text + LAST_LETTER)])


_known: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    if tokenizer not in _known:
        _known[tokenizer] = _Vocabulary(tokenizer)
    return _known[tokenizer]
