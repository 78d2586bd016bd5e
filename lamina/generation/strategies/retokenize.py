"""Ids of one tokenizer into ids of another, by way of text, while the row grows.

Two tokenizers split the same text at different places, and text that goes on may be split differently than before:

    the model's tokens      |The| un|believ|          text so far  "The unbeliev"
    the assistant's         |The| unb|elie|v|
    the model goes on       |The| un|believ|able|     text now     "The unbelievable"
    the assistant's         |The| unb|eliev|able|     two tokens are replaced by two others

So the last few tokens are tokenized again, without the new text and with it, and what both results begin with stays
(`retokenize`). A character that several tokens make up counts once its last token is there (`Spelling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from lamina.checkpoint.tokenizer import UNFINISHED, TextStream, Tokenizer

Encode = Callable[[str], list[int]]
WINDOW = 64  # the last tokens of a prompt, which are decoded one by one; those before, all at once
NEUTRAL = "\n.0\N{REPLACEMENT CHARACTER}"  # characters that few tokens begin with and go on from
LONGEST = 8  # tokens that the last character before a stream may take


class Spelling:
    """The text of a growing row, token by token. Special tokens are spelt out, except the first `skipped` ones.

    pieces   what each token adds, in whole characters: empty for a token that ends inside a character

    >>> spelling = Spelling(tokenizer)                                 # doctest: +SKIP
    >>> spelling.read(tokenizer.encode("naïve")); spelling.pieces      # doctest: +SKIP
    ['na', '', 'ï', 've']
    """

    def __init__(self, tokenizer: Tokenizer, skipped: int = 0) -> None:
        self.tokenizer, self.skipped = tokenizer, skipped
        self.stream = tokenizer.stream(skip_special=False)
        self.pieces: list[str] = []

    def read(self, ids: Sequence[int]) -> None:
        """Reads the tokens that are new. ids: the whole row, from its first token on."""
        if len(self.pieces) < self.skipped:
            self.pieces = [""] * min(self.skipped, len(ids))
        if len(ids) - len(self.pieces) > 2 * WINDOW:
            self._read_at_once(ids[len(self.pieces) : -WINDOW])
        self.pieces += [self.stream.put(id) for id in ids[len(self.pieces) :]]

    def since(self, token: int) -> str:
        """The text from this token on."""
        return "".join(self.pieces[token:])

    @property
    def unfinished(self) -> int:
        """How many of the last tokens are part of a character that is not whole yet."""
        return sum(1 for _ in takewhile(lambda piece: not piece, reversed(self.pieces))) if self.stream.held else 0

    def _read_at_once(self, ids: Sequence[int]) -> None:
        text = self.tokenizer.decode(ids, skip_special=False)
        while text.endswith(UNFINISHED):
            ids = ids[:-1]
            text = self.tokenizer.decode(ids, skip_special=False)
        if ids:
            self.pieces += [text, *[""] * (len(ids) - 1)]
            self.stream = stream_after(self.tokenizer, ids)


def stream_after(tokenizer: Tokenizer, ids: Sequence[int]) -> TextStream:
    """A decoder of what follows these ids, which end with a whole character. It is shown the last ones, from the start
    of a character on: a decoder may write a token differently at the beginning, such as without its space."""
    stream = tokenizer.stream(skip_special=False)
    for count in range(1, min(LONGEST, len(ids)) + 1):
        if UNFINISHED not in tokenizer.decode(ids[-count:], skip_special=False):
            for id in ids[-count:]:
                stream.put(id)
            break
    return stream


def retokenize(encode: Encode, ids: Sequence[int], old: str, new: str) -> tuple[int, list[int]]:
    """How the ids of a text change when it goes on: how many of the last ones are replaced, and by which.

    The text ended with `old`, and its ids are `ids`. Now it ends with `new` instead, which begins with `old`. Where the
    ids do not end as `old` is tokenized by itself, they all stay, and those of the new text are added. An empty `old`
    does not mean that there was no text before.

    >>> bpe = {"a": [1], "abb": [2, 3]}
    >>> retokenize(bpe.__getitem__, [7, 1], "a", "abb")
    (1, [2, 3])
    """
    before, after = encode(old), encode(new)
    same = common(before, after)
    back = len(before) - same
    if old and list(ids[max(len(ids) - back, 0) :]) == before[same:]:
        return back, after[same:]
    return 0, ids_after(encode, old, new[len(old) :])


def ids_after(encode: Encode, before: str, text: str) -> list[int]:
    """The ids of a text behind another one whose own ids are fixed.

    A token across the border is not possible. Where the tokenizer wants one, the text is tokenized behind a neutral
    character: by itself some tokenizers would put a space in front of it.
    """
    for context in (before or NEUTRAL[0], *NEUTRAL):
        fixed, whole = encode(context), encode(context + text)
        if whole[: len(fixed)] == fixed:
            return whole[len(fixed) :]
    return encode(text)


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The ids that a tokenizer puts in front of a text.

    >>> from tokenizers import Tokenizer as Backend, models
    >>> beginning(Tokenizer(Backend(models.BPE({"a": 0, "<s>": 1}, [])), bos_id=1, add_bos=True))
    [1]
    """
    text, whole = tokenizer.encode("a", special=False), tokenizer.encode("a")
    return whole[: whole.index(text[0])] if text and text[0] in whole else []


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with in common.

    >>> common([5, 6, 7], [5, 6, 8])
    2
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
