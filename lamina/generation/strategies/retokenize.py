"""Converts the ids of a growing row from one tokenizer to another, through text.

Two tokenizers split the same text at different places, and text that is continued may be split differently than before:

    the model's tokens      |The| un|believ|          text so far  "The unbeliev"
    the assistant's         |The| unb|elie|v|
    the model goes on       |The| un|believ|able|     text now     "The unbelievable"
    the assistant's         |The| unb|eliev|able|     two tokens are replaced by two others

So the last few tokens are tokenized twice, without the new text and with it, and the common prefix of both stays
(`retokenize`). A character that takes several tokens counts once its last token is there (`Spelling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from lamina.checkpoint.tokenizer import UNFINISHED, TextStream, Tokenizer
from lamina.generation.reuse import common

Encode = Callable[[str], list[int]]
WINDOW = 64  # tokens at the end of a prompt that are decoded one by one; those before are decoded at once
NEUTRAL = "\n.0\N{REPLACEMENT CHARACTER}"  # characters that rarely merge with a following one into a token
LONGEST = 8  # tokens that one character may take


class Spelling:
    """The text of a growing row, token by token. Special tokens are spelt out; the first `skipped` tokens have no text.

    pieces   the whole characters that each token completes: empty for a token that ends inside a character

    >>> spelling = Spelling(tokenizer)                                 # doctest: +SKIP
    >>> spelling.read(tokenizer.encode("naïve")); spelling.pieces      # doctest: +SKIP
    ['na', '', 'ï', 've']
    """

    def __init__(self, tokenizer: Tokenizer, skipped: int = 0) -> None:
        self.tokenizer, self.skipped = tokenizer, skipped
        self.stream = tokenizer.stream(skip_special=False)
        self.pieces: list[str] = []

    def read(self, ids: Sequence[int]) -> None:
        """Decodes the tokens that are new. ids: the whole row"""
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
        """Tokens at the end of the row that belong to an incomplete character."""
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
    """A text stream for the tokens after these ids, which end with a whole character. It has read the ids of the last
    character already: a decoder may treat its first token differently, for example drop its space."""
    stream = tokenizer.stream(skip_special=False)
    for count in range(1, min(LONGEST, len(ids)) + 1):
        if UNFINISHED not in tokenizer.decode(ids[-count:], skip_special=False):
            for id in ids[-count:]:
                stream.put(id)
            break
    return stream


def retokenize(encode: Encode, ids: Sequence[int], old: str, new: str) -> tuple[int, list[int]]:
    """How the ids of a text change when the text is continued. -> the number of last ids to replace, and the new ids

    ids   of the text so far, which ends with `old`
    new   replaces `old` at the end of the text, and begins with it

    If the last ids differ from the tokens of `old` by itself, all ids stay and those of the new text are appended. An
    empty `old` does not mean that the text so far is empty.

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
    """The ids of `text` after the text `before`, whose ids are fixed.

    No token may span the border. If the tokenizer would make one, `text` is tokenized after a neutral character
    instead, because some tokenizers put a space in front of a text by itself.
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
