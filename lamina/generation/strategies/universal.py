"""`UniversalAssistant`: guesses of a model that has another tokenizer, by way of text.

    the model's row      |The| un|believ|       -> text -> the assistant's row      |The| unb|elie|v|
    guessed by it                |able| story|  -> text -> the model's ids of that  |able| stor|y|

The assistant's cache holds the row's text in the assistant's own ids. Text that the model adds is tokenized together
with the last few tokens, and where that changes ids the cache is rewound to them (`retokenize.py`). Guesses are the
best tokens by the assistant's scores: processors know the model's ids, so they have no part in guesses. No guess was
drawn, so the model's tokens are those of the same run without an assistant, sampled ones too (`speculation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.cache.layers.cross import Source
from lamina.generation.feed import Reader
from lamina.generation.prompt import from_rows
from lamina.generation.run import Run
from lamina.generation.strategies.drafts import Guess, refuse_embeddings, source_ids
from lamina.generation.strategies.retokenize import Spelling, beginning, common, ids_after, retokenize, stream_after

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer
    from lamina.model import Model


@dataclass
class _Row:
    """A row's text in the assistant's ids, and what the assistant's cache holds: ids[:held] and then `more`, which are
    guesses, or ids that were replaced since.

    spelt   how many tokens of the model's row `ids` stand for
    """

    spelling: Spelling
    ids: list[int] = field(default_factory=list)
    spelt: int = 0
    held: int = 0
    more: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return self.held + len(self.more)

    def replace(self, back: int, new: Sequence[int]) -> None:
        """Other ids in place of the last ones."""
        kept = len(self.ids) - back
        if kept < self.held:
            self.more, self.held = self.ids[kept : self.held] + self.more, kept
        self.ids[kept:] = new

    @property
    def shared(self) -> int:
        """How many first ids the cache need not read. The last one it must, for the logits after it."""
        return min(self.held + common(self.more, self.ids[self.held :]), len(self.ids) - 1)


class UniversalAssistant:
    """A draft by a model whose ids are not the run's.

    most        how many of its tokens a guess has, at most
    threshold   a guess ends with the first token that has a probability below it

    Where states or windows limit how far the assistant's cache can be rewound, `assistant_lookbehind` says how many of
    its tokens can be replaced beside its guesses. It counts twice in the slack, since a ring that was rewound can go
    back that much less the next time.
    """

    def __init__(self, run: Run, model: Model, most: int, threshold: float | None = None) -> None:
        assert run.model.tokenizer is not None and model.tokenizer is not None
        refuse_embeddings(run)
        self.run, self.model, self.threshold = run, model, threshold or 0.0
        self.ours, self.theirs = run.model.tokenizer, model.tokenizer
        slack = most + 2 * run.settings.assistant_lookbehind
        self.cache = model.new_cache(run.cache.rows, slack=slack, source=_source(run, model, self.ours, self.theirs))
        self.reader = Reader(model, self.cache)
        self.ends = frozenset((*model.eos_ids, *self.theirs.eos_ids))
        self.begin = list(model.start_ids) or beginning(self.theirs)
        self.rows = [_Row(Spelling(self.ours, self._skipped(text))) for text in run.cache.tokens]

    @torch.no_grad()
    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Guess:
        possible, limit = self.cache.rewindable.tolist(), self.cache.limit
        going: dict[int, int] = {}  # row -> how many tokens it guesses, at most
        for row, text, n in zip(rows, texts, most, strict=True):
            self._follow(self.rows[row], text, possible[row])
            longest = n if limit is None else min(n, limit - len(self.rows[row].ids) + 1)
            if longest > 0 and self.rows[row].ids:
                going[row] = longest
        if not going:
            return Guess([[] for _ in rows])
        guessed = self._guess(going, self._read(list(going), possible))
        return Guess(
            [
                self._in_our_ids(self.rows[row], text, guessed[row])[:n] if row in going else []
                for row, text, n in zip(rows, texts, most, strict=True)
            ]
        )

    # -- the model's row in the assistant's ids ------------------------------------------------------------------------

    def _skipped(self, text: Sequence[int]) -> int:
        """Tokens at the beginning of the model's row that stand for no text: the assistant has its own."""
        if self.run.model.start_ids:
            return len(self.run.model.start_ids)
        return int(self.ours.bos_id is not None and list(text[:1]) == [self.ours.bos_id])

    def _follow(self, row: _Row, text: Sequence[int], possible: int) -> None:
        """Brings a row's ids up to the model's text. possible: how far the cache's row can be rewound"""
        start = max(row.spelt - self.run.settings.target_lookbehind, 0)
        old = row.spelling.since(start)
        row.spelling.read(text)
        new = row.spelling.since(start)
        if len(row.ids) <= len(self.begin):  # no text before
            row.ids = self.begin + self._encoded(row.spelling.since(0))
        elif new != old:
            back, ids = retokenize(self._encoded, row.ids, old, new)
            if row.cached - (len(row.ids) - back) > possible:
                back, ids = 0, ids_after(self._encoded, old, new[len(old) :])
            row.replace(back, ids)
        row.spelt = len(text)

    def _encoded(self, text: str) -> list[int]:
        """Without ids past the end of the assistant's table."""
        return [id for id in self.theirs.encode(text, special=False) if id < self.model.vocab]

    def _read(self, rows: Sequence[int], possible: Sequence[int]) -> Tensor:
        """Makes the assistant's cache hold these rows' ids. -> logits after the last [R, V]"""
        back, anew, unread = [0] * self.cache.rows, [], []
        for number in rows:
            row = self.rows[number]
            kept = row.shared
            if row.cached - kept > possible[number]:  # states or windows cannot go back that far
                anew.append(number)
                kept = 0
            else:
                back[number] = row.cached - kept
            unread.append(row.ids[kept:])
            row.held, row.more = len(row.ids), []
        if anew:
            self.cache.reset(anew)
        if any(back):
            self.cache.rewind(back)
        return self.reader.read_rows(unread, rows, self.run.settings.prefill_chunk)

    # -- guesses -------------------------------------------------------------------------------------------------------

    def _guess(self, most: Mapping[int, int], logits: Tensor) -> dict[int, list[int]]:
        """The tokens that follow in these rows, by the assistant. logits [R, V] after what they hold."""
        guessed: dict[int, list[int]] = {row: [] for row in most}
        going = list(most)
        while True:
            chosen = logits.argmax(dim=-1)
            sure = [True] * len(going)
            if self.threshold:
                sure = (logits.float().softmax(dim=-1).gather(1, chosen[:, None])[:, 0] >= self.threshold).tolist()
            left = []
            for n, (row, token) in enumerate(zip(going, chosen.tolist(), strict=True)):
                guessed[row].append(token)
                if sure[n] and len(guessed[row]) < most[row] and token not in self.ends:
                    self.rows[row].more.append(token)
                    left.append(n)
            if not left:
                return guessed
            going, index = [going[n] for n in left], on_device(left, chosen.device)
            logits = self.reader.read_all(chosen[index, None], going)

    def _in_our_ids(self, row: _Row, text: Sequence[int], guessed: Sequence[int]) -> list[int]:
        """The guess in the model's ids, tokenized behind the row's last tokens, without a last character that is not
        whole."""
        stream, ended = stream_after(self.theirs, row.ids), guessed[-1] in self.ends
        said = "".join([stream.put(id) for id in (guessed[:-1] if ended else guessed)])
        start = max(len(text) - self.run.settings.target_lookbehind, 0)
        ids = ids_after(lambda one: self.ours.encode(one, special=False), row.spelling.since(start), said)
        if ended and not stream.held:
            ids += self._end(guessed[-1])
        if unfinished := row.spelling.unfinished:  # the guess must begin with the character that the row ends in
            ids = ids[unfinished:] if ids[:unfinished] == list(text[-unfinished:]) else []
        unknown = next((n for n, id in enumerate(ids) if id >= self.run.model.vocab), len(ids))
        return ids[:unknown]

    def _end(self, id: int) -> list[int]:
        """The model's id for one with which the assistant ends: the same token, or the one that ends its texts."""
        token = self.theirs.backend.id_to_token(id)
        same = None if token is None else self.ours.backend.token_to_id(token)
        return [same] if same in self.run.model.eos_ids else list(self.run.model.eos_ids[:1])


def _source(run: Run, model: Model, ours: Tokenizer, theirs: Tokenizer) -> Source | None:
    """What an assistant that reads a source makes of the text of the run's."""
    if not model.start_ids:
        return None
    texts = [ours.decode([id for id in row if id >= 0]) for row in source_ids(run, model).tolist()]
    source = from_rows([theirs.encode(text) for text in texts])
    return model.encode(source.ids, source.counts)
