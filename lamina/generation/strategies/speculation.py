"""Speculation: several tokens a row in one pass, guessed by a draft (drafts.py) and checked by the model.

A pass reads each row's newest token and the guesses after it, and so gives the scores after every one of them.

    text            … a b c          the model has read … a b
    guessed                 d e f
    read                  c d e f    scores after c say d: right; after d say x: e is wrong
    new                     d x      c d is committed, x is read in the next pass

Every row has its own number of guesses and of right ones; `commit` takes in that many of its tokens, whatever kind its
layers are. Without sampling, a guess is right when it is the token that the scores give. With sampling it is the same
rule for guesses that no chance was involved in, so the tokens are those of the same run without a draft. A guess that
was drawn with probability q is right with probability min(1, p / q), where p is the model's, and is else replaced by a
draw from what p has more than q: together that is a draw from p (https://arxiv.org/abs/2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.generation.feed import Reader, padded
from lamina.generation.run import Made, Run
from lamina.generation.stopping import Reason
from lamina.generation.strategies.drafts import Assistant, Draft, Guess, Schedule, draft_of
from lamina.generation.strategies.universal import UniversalAssistant
from lamina.notices import notice
from lamina.sampling.chooser import Chooser
from lamina.sampling.exclusion import excluded
from lamina.sampling.history import History

NOTHING_LEFT = -1  # in place of a token where every id is excluded; an error only if the row gets that far
ACCEPTING = 2  # the stream of the noise that decides whether a drawn guess is right


@dataclass
class Speculated:
    """How well guesses did, by row.

    >>> one = Speculated(drafted=[8, 2], accepted=[6, 0], passes=[3, 4], made=[9, 4])
    >>> one.acceptance_rate, one.row(1).acceptance_rate, one.row(0).tokens_per_pass
    (0.6, 0.0, 3.0)
    """

    drafted: list[int]
    accepted: list[int]
    passes: list[int]  # of the model, after the prompt
    made: list[int]  # new tokens

    @property
    def acceptance_rate(self) -> float:
        """Guesses that were right, of all."""
        return sum(self.accepted) / max(sum(self.drafted), 1)

    @property
    def tokens_per_pass(self) -> float:
        """New tokens for each pass that a row took part in; 1 without speculation."""
        return sum(self.made) / max(sum(self.passes), 1)

    def row(self, row: int) -> Speculated:
        """One row by itself."""
        return Speculated([self.drafted[row]], [self.accepted[row]], [self.passes[row]], [self.made[row]])


@torch.no_grad()
def speculate(run: Run, draft: Draft | None = None, schedule: Schedule | None = None) -> Made:
    """Greedy or sampled, with the draft that the settings ask for, or a given one and its schedule."""
    cache = run.cache
    if draft is None:
        draft, schedule = draft_of(run)
    if schedule is None:
        schedule = Schedule(cache.rows, run.settings.num_assistant_tokens)
    reader = Reader(run.model, cache)
    rows = _Rows(run, reader.most)
    drafted, accepted, passes = ([0] * cache.rows for _ in range(3))
    history = run.history()
    numbers = torch.tensor(run.numbers, device=run.logits.device)
    scores = run.chooser.scores(run.logits, history)
    first = run.chooser.choose(scores, numbers, history.lengths)
    if run.kept is not None:
        run.kept.add(range(cache.rows), run.logits, scores, first)
    for row, token in enumerate(run.read(first, scores, range(cache.rows))):
        rows.take(row, [token])
    rows.tell()

    live = list(range(cache.rows))  # rows whose newest token is still to be read
    while live:
        going = [row for row in live if not rows.reasons[row]]
        guess = rows.draft(draft, schedule, going)
        guessed = dict(zip(going, guess.tokens, strict=True))
        ids, counts = padded([[rows.texts[row][-1], *guessed.get(row, ())] for row in live], cache.device)
        try:
            logits = reader.read(ids, live, counts)
            new = dict(zip(going, _check(run, logits, ids, live, going, guess), strict=True))
            taken = {row: rows.take(row, tokens) for row, tokens in new.items()}
            # The last new token of a row was not read in this pass, the ones before it were.
            read = [1 + min(taken[row], len(new[row]) - 1) if row in new else 1 for row in live]
            reader.commit(read)
        except BaseException:
            reader.abort()
            raise
        for row in live:
            passes[row] += 1
        for row, tokens in new.items():
            drafted[row] += len(guessed[row])
            accepted[row] += min(taken[row], len(tokens) - 1)
            schedule.learn(row, len(guessed[row]), len(tokens) - 1)
        live = [row for row, tokens in new.items() if taken[row] == len(tokens)]
        rows.tell()
    made = [len(tokens) for tokens in rows.tokens]
    if run.kept is not None:
        run.kept.shorten(made)
    more = {"speculation": Speculated(drafted, accepted, passes, made)}
    return Made(rows.tokens, rows.reasons, cache, _how(reader, draft), more)


def _how(reader: Reader, draft: Draft) -> str:
    """In words."""
    how = "captured passes of several tokens"
    if reader.reason is not None:
        notice(f"speculating by plain passes, since {reader.reason}")
        how = f"plain passes of several tokens, since {reader.reason}"
    elif isinstance(draft, Assistant | UniversalAssistant) and draft.reader.reason is not None:
        how += f"; drafts by plain passes, since {draft.reader.reason}"
    if isinstance(draft, UniversalAssistant):
        how += "; drafts by way of text, since the assistant has another tokenizer"
    return how


class _Rows:
    """What the rows hold and why they ended. texts: prompt and new tokens; tokens: the new ones."""

    def __init__(self, run: Run, most: int | None) -> None:
        self.run, self.most, self.limit = run, most, run.cache.limit  # tokens of a pass, and of a row
        self.texts = run.cache.tokens
        self.tokens: list[list[int]] = [[] for _ in self.texts]
        self.reasons = [""] * len(self.texts)
        self.untold: list[tuple[int, int, Reason | None]] = []

    def take(self, row: int, new: Sequence[int]) -> int:
        """Takes in new tokens up to one that ends the row; how many that were."""
        for n, token in enumerate(new, 1):
            if token == NOTHING_LEFT:
                raise self.run.nothing_left(row)
            self.texts[row].append(token)
            self.tokens[row].append(token)
            reason = self.run.stopping.put(row, token)
            self.untold.append((row, token, reason))
            if reason is not None:
                self.reasons[row] = reason
                return n
        return len(new)

    def tell(self) -> None:
        untold, self.untold = self.untold, []
        if self.run.told:
            for event in untold:
                self.run.told(*event)

    def draft(self, draft: Draft, schedule: Schedule, rows: Sequence[int]) -> Guess:
        most = [self._most(row, schedule.lengths[row]) for row in rows]
        return draft(rows, [self.texts[row] for row in rows], most) if any(most) else Guess([[] for _ in rows])

    def _most(self, row: int, most: int) -> int:
        """How many guesses can be of use. A row whose last token was guessed needs no pass more to read it."""
        most = min(most, self.run.stopping.rows[row].most - len(self.tokens[row]))
        if self.most is not None:
            most = min(most, self.most - 1)
        if self.limit is not None:
            most = min(most, self.limit - len(self.texts[row]))
        return max(most, 0)


def _check(
    run: Run, logits: Tensor, ids: Tensor, live: Sequence[int], going: Sequence[int], guess: Guess
) -> list[list[int]]:
    """The new tokens of the rows that go on: their guesses up to the first wrong one, and the token in its place.

    logits [L, T, V] and ids [L, T] are of the live rows.
    """
    if not going:
        return []
    device, chooser, T = ids.device, run.chooser, ids.shape[1]
    places_of = {row: place for place, row in enumerate(live)}
    lies = [places_of[row] for row in going]  # in ids and logits
    lengths = run.cache.clock.lengths[on_device(going, device)]
    after = run.history(going).and_then(ids[on_device(lies, device)]) if chooser.processors else None
    # Processors that read tokens may rely on those they allowed, so they are shown none that follow a wrong one.
    width = 1 if any(getattr(process, "needs_tokens", True) for process in chooser.processors) else T
    new: list[list[int]] = [[] for _ in going]
    unsettled = list(range(len(going)))
    for start in range(0, T, width):
        places = [(r, t) for r in unsettled for t in range(start, min(start + width, len(guess.tokens[r]) + 1))]
        if not places:
            break
        own, times = [r for r, _ in places], on_device([t for _, t in places], device)  # [N]
        rows = on_device(own, device)
        positions = lengths[rows] + times + 1
        guesses = on_device([guess.tokens[r][t] if t < len(guess.tokens[r]) else -1 for r, t in places], device)
        drawn = None if guess.scores is None else guess.scores[rows, times.clamp(max=guess.scores.shape[1] - 1)]
        seen = logits[on_device([lies[r] for r in own], device), times]
        scores = seen.float() if after is None else chooser.scores(seen, _until(after, own, positions))
        numbers = on_device([run.numbers[going[r]] for r in own], device)
        found, right = settle(chooser, scores, guesses, drawn, numbers, positions)
        settled: set[int] = set()
        taken: list[int] = []  # indices into `places`
        out = excluded(scores, found) if chooser.may_exclude_all else torch.zeros_like(right)
        answers = zip(places, *torch.stack([found, right.long(), out.long()]).tolist(), strict=True)
        for n, ((r, _), token, ok, is_out) in enumerate(answers):
            if r not in settled:
                new[r].append(NOTHING_LEFT if is_out else token)
                taken.append(n)
                if is_out or not ok:
                    settled.add(r)
        if run.kept is not None:
            run.kept.add([going[places[n][0]] for n in taken], seen[taken], scores[taken], found[taken])
        unsettled = [r for r in unsettled if r not in settled]
    return new


def _until(history: History, rows: Sequence[int], lengths: Tensor) -> History:
    """These rows [N] as they were when they had that many tokens."""
    some = history.take(rows)
    assert some.tokens is not None
    there = torch.arange(some.tokens.shape[1], device=lengths.device) < lengths[:, None]
    return replace(some, lengths=lengths, tokens=some.tokens.masked_fill(~there, -1), counts=None)


def settle(
    chooser: Chooser, scores: Tensor, guesses: Tensor, drawn: Tensor | None, numbers: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The token for each of N places, and whether it is the guess, accepted.

    scores [N, V] are the model's, guesses [N] is -1 where there is none, drawn [N, V] are the scores that the guesses
    were drawn from (None: they were not drawn), numbers and positions [N] are those of the noise.
    """
    if drawn is None or not chooser.sample:
        found = chooser.choose(scores, numbers, positions)
        return found, found == guesses
    there, at = guesses >= 0, guesses.clamp(min=0)[:, None]
    p = scores.softmax(dim=-1)
    q = drawn.softmax(dim=-1).masked_fill(~there[:, None], 0)
    chance = (p.gather(1, at) / q.gather(1, at))[:, 0].clamp(max=1)
    chance = chance.masked_fill(~there, 0)
    yes_or_no = torch.stack([chance, 1 - chance], dim=-1).log()
    right = chooser.choose(yes_or_no, numbers, positions, ACCEPTING) == 0
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)  # p = q but for rounding
    found = torch.where(right, guesses, chooser.choose(rest.log(), numbers, positions))
    return found, right
