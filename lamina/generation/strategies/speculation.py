"""Speculative decoding: a drafter (drafts.py) proposes several tokens per row, and one pass of the model verifies them.

A pass is fed each row's newest token and its draft, and so computes the scores after every one of them.

    text            … a b c          the cache holds … a b
    draft                   d e f
    fed                   c d e f    the scores after c choose d: accepted; after d they choose x: e is rejected
    new                     d x      c d is committed, x is fed in the next pass

Each row has its own draft length and number of accepted tokens; `commit` stores that many for every kind of layer.
Greedy: a draft token is accepted if the scores choose it. Sampling: the same rule for draft tokens that were not drawn,
so the tokens are those of the same run without a draft. A draft token that was drawn with probability q is accepted
with probability min(1, p / q), where p is its probability by the model; a rejected one is replaced by a draw from
max(p - q, 0), normalized. The result is distributed as p (https://arxiv.org/abs/2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.generation.feed import Reader, padded
from lamina.generation.run import Run, StrategyOutput
from lamina.generation.stopping import Reason
from lamina.generation.strategies.cross_tokenizer import CrossTokenizerAssistant
from lamina.generation.strategies.drafts import (
    Assistant,
    Draft,
    Drafter,
    DraftLengths,
    PromptLookup,
    assistant_of,
    same_ids,
)  # fmt: skip
from lamina.notices import notice
from lamina.sampling.chooser import Chooser
from lamina.sampling.exclusion import excluded
from lamina.sampling.history import History

NO_TOKEN = -1  # stands for a token if every id is excluded; an error only if the row gets that far
ACCEPT_STREAM = 2  # the noise stream that decides whether a drawn draft token is accepted


@dataclass
class SpeculationStats:
    """Counts of drafted and accepted tokens, per row.

    >>> one = SpeculationStats(drafted=[8, 2], accepted=[6, 0], passes=[3, 4], made=[9, 4])
    >>> one.acceptance_rate, one.row(1).acceptance_rate, one.row(0).tokens_per_pass
    (0.6, 0.0, 3.0)
    """

    drafted: list[int]
    accepted: list[int]
    passes: list[int]  # of the model, after the prompt
    made: list[int]  # new tokens

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / all draft tokens."""
        return sum(self.accepted) / max(sum(self.drafted), 1)

    @property
    def tokens_per_pass(self) -> float:
        """New tokens per pass that a row took part in; 1 without speculation."""
        return sum(self.made) / max(sum(self.passes), 1)

    def row(self, row: int) -> SpeculationStats:
        """The counts of one row."""
        return SpeculationStats([self.drafted[row]], [self.accepted[row]], [self.passes[row]], [self.made[row]])


@torch.no_grad()
def speculate(run: Run, drafter: Drafter | None = None, draft_lengths: DraftLengths | None = None) -> StrategyOutput:
    """Greedy or sampled speculative decoding. drafter, draft_lengths: None for those that the settings ask for"""
    cache = run.cache
    if drafter is None:
        drafter, draft_lengths = drafter_of(run)
    if draft_lengths is None:
        draft_lengths = DraftLengths(cache.rows, run.settings.num_assistant_tokens)
    reader = Reader(run.model, cache)
    rows = _Rows(run, reader.most)
    drafted, accepted, passes = ([0] * cache.rows for _ in range(3))
    history = run.history()
    row_ids = torch.tensor(run.row_ids, device=run.logits.device)
    scores = run.chooser.scores(run.logits, history)
    first = run.chooser.choose(scores, row_ids, history.lengths)
    if run.recorder is not None:
        run.recorder.add(range(cache.rows), run.logits, scores, first)
    for row, token in enumerate(run.to_host(first, scores, range(cache.rows))):
        rows.add(row, [token])
    rows.notify()

    live = list(range(cache.rows))  # rows whose newest token is still to be fed
    while live:
        going = [row for row in live if not rows.reasons[row]]
        draft = rows.draft(drafter, draft_lengths, going)
        drafts = dict(zip(going, draft.tokens, strict=True))
        ids, counts = padded([[rows.texts[row][-1], *drafts.get(row, ())] for row in live], cache.device)
        try:
            logits = reader.read(ids, live, counts)
            new = dict(zip(going, _verify(run, logits, ids, live, going, draft), strict=True))
            added = {row: rows.add(row, tokens) for row, tokens in new.items()}
            # Of a row's new tokens, this pass has fed all but the last one.
            fed = [1 + min(added[row], len(new[row]) - 1) if row in new else 1 for row in live]
            reader.commit(fed)
        except BaseException:
            reader.abort()
            raise
        for row in live:
            passes[row] += 1
        for row, tokens in new.items():
            drafted[row] += len(drafts[row])
            accepted[row] += min(added[row], len(tokens) - 1)
            draft_lengths.update(row, len(drafts[row]), len(tokens) - 1)
        live = [row for row, tokens in new.items() if added[row] == len(tokens)]
        rows.notify()
    made = [len(tokens) for tokens in rows.tokens]
    if run.recorder is not None:
        run.recorder.shorten(made)
    more = {"speculation": SpeculationStats(drafted, accepted, passes, made)}
    return StrategyOutput(rows.tokens, rows.reasons, cache, _how(reader, drafter), more)


def drafter_of(run: Run) -> tuple[Drafter, DraftLengths]:
    """The drafter that the settings ask for, and the lengths of its drafts."""
    s, rows = run.settings, run.cache.rows
    if s.prompt_lookup_num_tokens is not None:
        return PromptLookup(s.max_matching_ngram_size), DraftLengths(rows, s.prompt_lookup_num_tokens)
    lengths = DraftLengths(rows, s.num_assistant_tokens, s.num_assistant_tokens_schedule)
    assistant, threshold = assistant_of(run.model, s), s.assistant_confidence_threshold
    kind = Assistant if same_ids(run.model, assistant) else CrossTokenizerAssistant
    return kind(run, assistant, lengths.most, threshold), lengths


def _how(reader: Reader, drafter: Drafter) -> str:
    """The text of `Result.how`."""
    how = "captured passes of several tokens"
    if reader.reason is not None:
        notice(f"speculating by plain passes, since {reader.reason}")
        how = f"plain passes of several tokens, since {reader.reason}"
    elif isinstance(drafter, Assistant | CrossTokenizerAssistant) and drafter.reader.reason is not None:
        how += f"; drafts by plain passes, since {drafter.reader.reason}"
    if isinstance(drafter, CrossTokenizerAssistant):
        how += "; drafts converted through text, since the assistant has another tokenizer"
    return how


class _Rows:
    """The ids of the rows and why they ended. texts: prompt and new tokens; tokens: new tokens only"""

    def __init__(self, run: Run, most: int | None) -> None:
        self.run, self.most, self.limit = run, most, run.cache.limit  # max tokens of a pass, of a row
        self.texts = run.cache.tokens
        self.tokens: list[list[int]] = [[] for _ in self.texts]
        self.reasons = [""] * len(self.texts)
        self.unsent: list[tuple[int, int, Reason | None]] = []

    def add(self, row: int, new: Sequence[int]) -> int:
        """Adds new tokens up to the first that ends the row. -> the number of tokens added"""
        for n, token in enumerate(new, 1):
            if token == NO_TOKEN:
                raise self.run.no_token_error(row)
            self.texts[row].append(token)
            self.tokens[row].append(token)
            reason = self.run.stopping.put(row, token)
            self.unsent.append((row, token, reason))
            if reason is not None:
                self.reasons[row] = reason
                return n
        return len(new)

    def notify(self) -> None:
        """Passes tokens to `on_token` once their pass is committed."""
        unsent, self.unsent = self.unsent, []
        if self.run.on_token:
            for event in unsent:
                self.run.on_token(*event)

    def draft(self, drafter: Drafter, draft_lengths: DraftLengths, rows: Sequence[int]) -> Draft:
        most = [self._most(row, draft_lengths.lengths[row]) for row in rows]
        return drafter(rows, [self.texts[row] for row in rows], most) if any(most) else Draft([[] for _ in rows])

    def _most(self, row: int, most: int) -> int:
        """The draft length of a row, limited by the tokens that it may still get, the width of captured passes and the
        cache's capacity. The draft may include the row's last token, so that no further pass has to feed it."""
        most = min(most, self.run.stopping.rows[row].most - len(self.tokens[row]))
        if self.most is not None:
            most = min(most, self.most - 1)
        if self.limit is not None:
            most = min(most, self.limit - len(self.texts[row]))
        return max(most, 0)


def _verify(
    run: Run, logits: Tensor, ids: Tensor, live: Sequence[int], going: Sequence[int], draft: Draft
) -> list[list[int]]:
    """The new tokens of the rows in `going`: the accepted draft tokens, and one token of the model's after them.

    ids [L, T] and logits [L, T, V] are of the rows in `live`; `draft` is of those in `going`.
    """
    if not going:
        return []
    device, chooser, T = ids.device, run.chooser, ids.shape[1]
    index_of = {row: index for index, row in enumerate(live)}
    at = [index_of[row] for row in going]  # rows of ids and logits
    lengths = run.cache.clock.lengths[on_device(going, device)]
    after = run.history(going).and_then(ids[on_device(at, device)]) if chooser.processors else None
    # Processors that read tokens may rely on having allowed them, so none may see tokens after a rejected one: such
    # processors verify one position at a time, others all T at once.
    width = 1 if any(getattr(process, "needs_tokens", True) for process in chooser.processors) else T
    new: list[list[int]] = [[] for _ in going]
    open_rows = list(range(len(going)))  # rows without a rejected draft token
    for start in range(0, T, width):
        places = [(r, t) for r in open_rows for t in range(start, min(start + width, len(draft.tokens[r]) + 1))]
        if not places:
            break
        own, times = [r for r, _ in places], on_device([t for _, t in places], device)  # [N]
        rows = on_device(own, device)
        positions = lengths[rows] + times + 1
        drafted = on_device([draft.tokens[r][t] if t < len(draft.tokens[r]) else -1 for r, t in places], device)
        drawn_from = None if draft.scores is None else draft.scores[rows, times.clamp(max=draft.scores.shape[1] - 1)]
        seen = logits[on_device([at[r] for r in own], device), times]  # [N, V]
        scores = seen.float() if after is None else chooser.scores(seen, _until(after, own, positions))
        row_ids = on_device([run.row_ids[going[r]] for r in own], device)
        found, accepted = accept_or_replace(chooser, scores, drafted, drawn_from, row_ids, positions)
        closed: set[int] = set()
        used: list[int] = []  # indices into `places` of the tokens that become new
        out = excluded(scores, found) if chooser.may_exclude_all else torch.zeros_like(accepted)
        answers = zip(places, *torch.stack([found, accepted.long(), out.long()]).tolist(), strict=True)
        for n, ((r, _), token, ok, is_out) in enumerate(answers):
            if r not in closed:
                new[r].append(NO_TOKEN if is_out else token)
                used.append(n)
                if is_out or not ok:
                    closed.add(r)
        if run.recorder is not None:
            run.recorder.add([going[places[n][0]] for n in used], seen[used], scores[used], found[used])
        open_rows = [r for r in open_rows if r not in closed]
    return new


def _until(history: History, rows: Sequence[int], lengths: Tensor) -> History:
    """The history of these rows [N] when they had `lengths` [N] tokens."""
    some = history.take(rows)
    assert some.tokens is not None
    there = torch.arange(some.tokens.shape[1], device=lengths.device) < lengths[:, None]
    return replace(some, lengths=lengths, tokens=some.tokens.masked_fill(~there, -1), counts=None)


def accept_or_replace(
    chooser: Chooser, scores: Tensor, drafted: Tensor, drawn_from: Tensor | None, row_ids: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Verifies N draft tokens. -> the token at each position [N], and whether it is the accepted draft token [N]

    scores       [N, V] of the model
    drafted      [N] draft tokens, -1 for none
    drawn_from   [N, V] scores that the draft tokens were drawn from; None if they were not drawn
    row_ids      [N] and positions [N]: what the noise depends on
    """
    if drawn_from is None or not chooser.sample:
        found = chooser.choose(scores, row_ids, positions)
        return found, found == drafted
    there, at = drafted >= 0, drafted.clamp(min=0)[:, None]
    p = scores.softmax(dim=-1)
    q = drawn_from.softmax(dim=-1).masked_fill(~there[:, None], 0)
    chance = (p.gather(1, at) / q.gather(1, at))[:, 0].clamp(max=1)
    chance = chance.masked_fill(~there, 0)
    yes_or_no = torch.stack([chance, 1 - chance], dim=-1).log()
    accepted = chooser.choose(yes_or_no, row_ids, positions, ACCEPT_STREAM) == 0
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)  # all zero if p equals q up to rounding
    found = torch.where(accepted, drafted, chooser.choose(rest.log(), row_ids, positions))
    return found, accepted
