"""`PartedTokenizer`: the base of tokenizers that cut text in Python, as transformers' classes for them do.

Text is cut at added tokens first, and what is between them by `part_ids`. The `backend` has the ids of the model, and
decodes.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.chat.messages import check_text, short
from lamina.checkpoint.tokenizer import Tokenizer
from lamina.errors import InputError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend


class PartedTokenizer(Tokenizer):
    """kept    ids of the texts that text is cut at; those of the backend's added tokens if None
    first   ids that come before each text
    last    ids that come after it
    """

    def __init__(
        self,
        backend: Backend,
        *,
        kept: Mapping[str, int] | None = None,
        first: Sequence[int] = (),
        last: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self._first, self._last = list(first), list(last)
        super().__init__(backend, **options)
        self._added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        own = {text: int(backend.token_to_id(text) or 0) for text in self._added}
        self._kept = dict(own if kept is None else kept)

    @abstractmethod
    def part_ids(self, text: str) -> list[int]:
        """The ids of a text without added tokens."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise InputError(f"only text can be encoded, not {short(text)}")
        check_text(text, "the text")
        ids: list[int] = []
        for part in split_parts(text, list(self._kept), self._added):
            ids += [self._kept[part]] if part in self._kept else self.part_ids(part)
        return [*self._first, *ids, *self._last] if special else ids

    def _surround(self, before: Sequence[int], after: Sequence[int]) -> None:
        self._first, self._last = list(before), list(after)


def split_parts(text: str, kept: Sequence[str], flags: Mapping[str, AddedToken]) -> list[str]:
    """A text cut at some texts, the longest one at each place; without empty parts.

    flags  says which of them take the spaces before or after, or stand between spaces only

    >>> split_parts("a<s> b", ["<s>"], {})
    ['a', '<s>', ' b']
    """
    if not kept:
        return [text] if text else []
    found = re.split(f"({'|'.join(map(re.escape, sorted(kept, key=len, reverse=True)))})", text)
    parts = [part for part in found if part]
    for i, part in enumerate(parts):
        if (token := flags.get(part)) is None:
            continue
        left, right = (parts[i - 1] if i else ""), (parts[i + 1] if i + 1 < len(parts) else "")
        if token.rstrip and right:
            parts[i + 1] = right.lstrip()
        if token.lstrip and left:
            parts[i - 1] = left.rstrip()
        if token.single_word and left and left[-1] != " ":
            parts[i - 1 : i + 1] = [parts[i - 1] + part, ""]
        elif token.single_word and right and right[0] != " ":
            parts[i : i + 2] = ["", part + parts[i + 1]]
    return [part for part in parts if part]


def word_merges(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], unknown: str) -> tuple[Backend, list[int]]:
    """BPE of words whose last piece ends in </w>, and a table from its ids to those of the vocabulary. Pieces that
    only lead to others are unknown on their own."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    every, table = dict(vocab), {index: index for index in vocab.values()}
    for left, right in merges:
        for text in (left, right, left + right):
            if text not in every:
                every[text] = index = max(table, default=-1) + 1
                table[index] = vocab[unknown]
    model: Any = models.BPE(every, list(merges), unk_token=unknown, end_of_word_suffix="</w>", fuse_unk=False)
    return Backend(model), [table.get(index, vocab[unknown]) for index in range(max(table) + 1)]
