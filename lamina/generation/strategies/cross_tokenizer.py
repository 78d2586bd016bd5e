"""`CrossTokenizerAssistant`: drafts by an assistant with another tokenizer, converted through text ("universal assisted
decoding").

    the model's row      |The| un|believ|       -> text -> the assistant's row      |The| unb|elie|v|
    its draft                    |able| story|  -> text -> the draft in model ids   |able| stor|y|

The assistant's cache holds the row's text in the assistant's own ids. Text that the model adds is tokenized together
with the last few tokens; if that changes ids, the cache is rewound to the first change (`retokenize.py`). Draft tokens
are the argmax of the assistant's logits: processors know the model's ids and cannot run on them. They are not drawn, so
the model's tokens, sampled or not, are those of the same run without an assistant (`speculation.py`).
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
from lamina.generation.reuse import common
from lamina.generation.run import Run
from lamina.generation.strategies.drafts import Draft, refuse_embeddings, source_ids
from lamina.generation.strategies.retokenize import Spelling, beginning, ids_after, retokenize, stream_after

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer
    from lamina.model import Model


@dataclass
class _Row:
    """A row's text in the assistant's ids.

    spelling     the row's text, by the model's tokens
    ids          the text in the assistant's ids
    spelt        tokens of the model's row that `ids` stand for
    held, more   the cache holds ids[:held] and then `more`: draft tokens, or ids that were replaced since
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
        """Replaces the last `back` ids by `new`."""
        kept = len(self.ids) - back
        if kept < self.held:
            self.more, self.held = self.ids[kept : self.held] + self.more, kept
        self.ids[kept:] = new

    @property
    def shared(self) -> int:
        """Length of the prefix of `ids` that the cache holds and need not be fed. The last id is always fed, for the
        logits after it."""
        return min(self.held + common(self.more, self.ids[self.held :]), len(self.ids) - 1)


class CrossTokenizerAssistant:
    """Drafts by a model whose ids differ from the run's.

    most        maximum length of a draft, in the assistant's tokens
    threshold   a draft ends with the first token whose probability is below it

    If recurrent states or windows limit rewinding of the assistant's cache, `assistant_lookbehind` is the number of its
    tokens that can be replaced besides its draft. It counts twice in the slack: a ring that was rewound by n tokens can
    be rewound by n fewer the next time.
    """

    def __init__(self, run: Run, model: Model, most: int, threshold: float | None = None) -> None:
        assert run.model.tokenizer is not None and model.tokenizer is not None
        refuse_embeddings(run.cache.tokens)
        self.run, self.model, self.threshold = run, model, threshold or 0.0
        self.ours, self.theirs = run.model.tokenizer, model.tokenizer
        slack = most + 2 * run.settings.assistant_lookbehind
        self.cache = model.new_cache(run.cache.rows, slack=slack, source=_source(run, model, self.ours, self.theirs))
        self.reader = Reader(model, self.cache)
        self.ends = frozenset((*model.eos_ids, *self.theirs.eos_ids))
        self.begin = list(model.start_ids) or beginning(self.theirs)
        self.rows = [_Row(Spelling(self.ours, self._skipped(text))) for text in run.cache.tokens]

    @torch.no_grad()
    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Draft:
        possible, limit = self.cache.rewindable.tolist(), self.cache.limit
        going: dict[int, int] = {}  # row -> the maximum length of its draft
        for row, text, n in zip(rows, texts, most, strict=True):
            self._follow(self.rows[row], text, possible[row])
            longest = n if limit is None else min(n, limit - len(self.rows[row].ids) + 1)
            if longest > 0 and self.rows[row].ids:
                going[row] = longest
        if not going:
            return Draft([[] for _ in rows])
        drafted = self._draft(going, self._read(list(going), possible))
        return Draft(
            [
                self._in_our_ids(self.rows[row], text, drafted[row])[:n] if row in going else []
                for row, text, n in zip(rows, texts, most, strict=True)
            ]
        )

    # -- the model's row in the assistant's ids ------------------------------------------------------------------------

    def _skipped(self, text: Sequence[int]) -> int:
        """Tokens at the beginning of the model's row (BOS, decoder start) that stand for no text; the assistant's row
        begins with its own."""
        if self.run.model.start_ids:
            return len(self.run.model.start_ids)
        return int(self.ours.bos_id is not None and list(text[:1]) == [self.ours.bos_id])

    def _follow(self, row: _Row, text: Sequence[int], possible: int) -> None:
        """Updates a row's ids to the model's row `text`. possible: tokens that the row of the cache can be rewound"""
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
        """The text in the assistant's ids, without ids that its vocabulary does not have."""
        return [id for id in self.theirs.encode(text, special=False) if id < self.model.vocab]

    def _read(self, rows: Sequence[int], possible: Sequence[int]) -> Tensor:
        """Rewinds and feeds the assistant's cache until it holds these rows' ids. -> logits after the last [R, V]"""
        back, restart, unread = [0] * self.cache.rows, [], []
        for index in rows:
            row = self.rows[index]
            kept = row.shared
            if row.cached - kept > possible[index]:  # states or windows cannot be rewound that far
                restart.append(index)
                kept = 0
            else:
                back[index] = row.cached - kept
            unread.append(row.ids[kept:])
            row.held, row.more = len(row.ids), []
        if restart:
            self.cache.reset(restart)
        if any(back):
            self.cache.rewind(back)
        return self.reader.read_rows(unread, rows, self.run.settings.prefill_chunk)

    # -- drafts --------------------------------------------------------------------------------------------------------

    def _draft(self, most: Mapping[int, int], logits: Tensor) -> dict[int, list[int]]:
        """The drafts of these rows in the assistant's ids. logits [R, V] after the ids that the rows hold"""
        drafted: dict[int, list[int]] = {row: [] for row in most}
        going = list(most)
        while True:
            chosen = logits.argmax(dim=-1)
            confident = [True] * len(going)
            if self.threshold:
                shares = logits.float().softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
                confident = (shares >= self.threshold).tolist()
            left = []
            for n, (row, token) in enumerate(zip(going, chosen.tolist(), strict=True)):
                drafted[row].append(token)
                if confident[n] and len(drafted[row]) < most[row] and token not in self.ends:
                    self.rows[row].more.append(token)
                    left.append(n)
            if not left:
                return drafted
            going, index = [going[n] for n in left], on_device(left, chosen.device)
            logits = self.reader.read_all(chosen[index, None], going)

    def _in_our_ids(self, row: _Row, text: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The draft in the model's ids, tokenized behind the row's last tokens; an incomplete last character is
        dropped."""
        stream, ended = stream_after(self.theirs, row.ids), drafted[-1] in self.ends
        new_text = "".join([stream.put(id) for id in (drafted[:-1] if ended else drafted)])
        start = max(len(text) - self.run.settings.target_lookbehind, 0)
        ids = ids_after(lambda one: self.ours.encode(one, special=False), row.spelling.since(start), new_text)
        if ended and not stream.held:
            ids += self._end(drafted[-1])
        if unfinished := row.spelling.unfinished:  # the draft must complete the character that the row ends in
            ids = ids[unfinished:] if ids[:unfinished] == list(text[-unfinished:]) else []
        unknown = next((n for n, id in enumerate(ids) if id >= self.run.model.vocab), len(ids))
        return ids[:unknown]

    def _end(self, id: int) -> list[int]:
        """The model's eos id for one of the assistant's: the same token if the model ends with it, else its first."""
        token = self.theirs.backend.id_to_token(id)
        same = None if token is None else self.ours.backend.token_to_id(token)
        return [same] if same in self.run.model.eos_ids else list(self.run.model.eos_ids[:1])


def _source(run: Run, model: Model, ours: Tokenizer, theirs: Tokenizer) -> Source | None:
    """The assistant's encoding of the text of the run's source; None for a decoder-only assistant."""
    if not model.start_ids:
        return None
    texts = [ours.decode([id for id in row if id >= 0]) for row in source_ids(run, model).tolist()]
    source = from_rows([theirs.encode(text) for text in texts])
    return model.encode(source.ids, source.counts)
