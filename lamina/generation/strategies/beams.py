"""Beam search and beam sampling: the best `num_beams` sequences of each prompt are followed side by side.

A prompt is computed once and its row repeated. All live beams of a prompt have one length; sequences that ended are
kept as tokens. After every token the beams are chosen anew among all continuations of all beams. A beam that goes on
keeps its row, and a beam with several continuations takes the rows of beams that were dropped: these rows get only the
tokens that the two do not share (`Cache.reorder`).

    row 0  the cat ──── sat           goes on in row 0
                   └─── is            takes row 1, which then differs from row 0 in one token
    row 1  the dog ×

Scores are sums of processed log-probabilities, and a sequence that ends is ranked by sum / length ** length_penalty.
Prompts do not know of each other: each one is searched as it would be alone, and leaves when its search is over. In
the end the returned sequences are fed in one pass to rows of the prompts' cache, which can then be continued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.errors import CapacityError
from lamina.generation.feed import feed_rows
from lamina.generation.kept import Kept
from lamina.generation.out_of_room import reason_of
from lamina.generation.row_ids import beam_numbers
from lamina.generation.run import Made, Run
from lamina.generation.stopping import Reason, State
from lamina.sampling.noise import gumbel, noise

NOTHING = -1e9
"""Below every sum of log-probabilities: the score of beams that are there to fill rows."""


@dataclass
class Beam:
    """A sequence that is followed in one row of its prompt."""

    score: float  # the sum of log-probabilities
    tokens: list[int]
    path: list[int]  # for each token, the row that held the sequence it was put after
    ranks: list[int]  # for each token, the rank of that sequence among the prompt's, best first
    state: State  # as `Stopping` sees it
    rank: int = 0

    @property
    def real(self) -> bool:
        return self.score > NOTHING / 2

    def shared(self, other: Beam) -> int:
        """How many first tokens two live beams have in common: they were in one row then."""
        return next((t for t in reversed(range(len(self.path))) if self.path[t] == other.path[t]), 0)


class Ended(NamedTuple):
    """A sequence that is over, and its score by the length penalty."""

    score: float
    beam: Beam
    reason: Reason


class Candidate(NamedTuple):
    score: float
    row: int  # of its prompt's rows
    token: int


class Search:
    """The beams of one prompt, which is row `row` of the run."""

    def __init__(self, run: Run, row: int) -> None:
        self.row, self.settings, self.stopping = row, run.settings, run.stopping
        state = self.stopping.rows[row]
        # All rows are the prompt: only the first counts, or every continuation would be there many times.
        scores = [0.0] + [NOTHING] * (self.settings.num_beams - 1)
        self.beams = [Beam(score, [], [], [], state, rank) for rank, score in enumerate(scores)]
        self.ended: list[Ended] = []  # best first
        self.over = False
        self.firsts: list[int] = []  # at each step, where the prompt's rows begin

    def advance(self, found: Sequence[Candidate]) -> list[int]:
        """Takes up the best continuations, best (or drawn) first. -> for each row, the row that it goes on from"""
        count, made = len(self.beams), []
        for place, (score, row, token) in enumerate(found):
            before = self.beams[row]
            tokens, path, ranks = [*before.tokens, token], [*before.path, row], [*before.ranks, before.rank]
            made.append(beam := Beam(score, tokens, path, ranks, before.state))
            if not beam.real:
                continue
            beam.state, reason = self.stopping.branch(self.row, before.state, token)
            if reason is not None:
                if place < count:
                    self.ended.append(Ended(score / len(tokens) ** self.settings.length_penalty, beam, reason))
                beam.score = NOTHING + score
        self.ended = sorted(self.ended, key=lambda one: -one.score)[:count]
        best = sorted(made, key=lambda beam: -beam.score)[:count]
        for rank, beam in enumerate(best):
            beam.rank = rank
        self.over = not best[0].real or not self._can_improve(best[0])
        self.beams = _in_rows(best)
        return [beam.path[-1] for beam in self.beams]

    def _can_improve(self, best: Beam) -> bool:
        """Whether a beam may still end better than all that is kept, as far as early_stopping wants to know."""
        if len(self.ended) < len(self.beams):
            return True
        early, penalty = self.settings.early_stopping, self.settings.length_penalty
        if early is True:
            return False
        length = self.beams[0].state.most if early == "never" and penalty > 0 else len(best.tokens)
        return best.score / length**penalty > self.ended[-1].score

    def cut(self, reason: Reason) -> None:
        """Ends the search here: live beams are ranked beside those that ended."""
        penalty = self.settings.length_penalty
        live = [Ended(beam.score / len(beam.tokens) ** penalty, beam, reason) for beam in self.beams if beam.real]
        self.ended = sorted([*self.ended, *live], key=lambda one: -one.score)[: len(self.beams)]
        self.over = True

    def returned(self) -> list[Ended]:
        """The best sequences. Where there were not as many ways to go on, the best ones are returned again."""
        return [self.ended[i % len(self.ended)] for i in range(self.settings.num_return_sequences)]


def _in_rows(beams: Sequence[Beam]) -> list[Beam]:
    """Beams by row: the best continuation of a row stays in it, others go where none does."""
    placed: dict[int, Beam] = {}
    for beam in beams:
        placed.setdefault(beam.path[-1], beam)
    moved = iter([beam for beam in beams if placed[beam.path[-1]] is not beam])
    return [placed[row] if row in placed else next(moved) for row in range(len(beams))]


@torch.no_grad()
def beam_search(run: Run) -> Made:
    """Follows `num_beams` beams for each row of the run, and returns `num_return_sequences` for each, side by side.

    The run's own cache stays as it is; `stopping` and `kept` then have a row for each sequence. `more` has of each
    sequences_scores   its sum of log-probabilities, divided as the length penalty says
    beam_indices       for each token the beam that it continued: prompt · num_beams + rank

    Where there is no room for the search to go on, the run becomes that of the best sequences so far, and it raises.
    """
    searches = [Search(run, row) for row in range(len(run.prompts))]
    followed = [run.cache.repeat(run.settings.num_beams)]
    steps: list[tuple[Tensor, Tensor]] = []  # logits and scores, where someone wants them
    try:
        _search(run, searches, steps, followed)
    except CapacityError as error:
        followed.pop().release()  # which makes room
        for search in searches:
            if not search.over:
                search.cut(reason_of(error))
        run.prompts, run.cache = _each(run, searches), _made(run, searches, steps).cache
        raise
    del followed
    return _made(run, searches, steps)


def _search(run: Run, searches: Sequence[Search], steps: list[tuple[Tensor, Tensor]], followed: list[Cache]) -> None:
    """Runs every search to its end. followed: the cache of all live beams"""
    count = run.settings.num_beams
    live = list(range(len(run.prompts)))
    cache, logits = followed[0], run.logits.repeat_interleave(count, dim=0)
    while True:
        beams = _beams_run(run, cache, live)
        scores = run.chooser.scores(logits.float().log_softmax(dim=-1), beams.history())
        if run.kept is not None:
            steps.append((logits, scores))
        parents: list[int] = []
        since: list[int] = []
        for at, (row, found) in enumerate(zip(live, _best(beams, scores, [searches[i] for i in live]), strict=True)):
            search, before = searches[row], searches[row].beams
            search.firsts.append(at * count)
            sources = search.advance(found)
            if search.over and not search.ended:
                raise run.nothing_left(row)
            if not search.over:
                parents += [at * count + source for source in sources]
                since += [run.prompts[row] + before[r].shared(before[source]) for r, source in enumerate(sources)]
        going = [row for row in live if not searches[row].over]
        if not going:
            return
        cache = followed[0] = cache.reorder(parents, since) if going == live else cache.select(parents)
        live = going
        last = [beam.tokens[-1] for row in live for beam in searches[row].beams]
        logits = _beams_run(run, cache, live).feed(on_device(last, cache.device), range(cache.rows))


def _beams_run(run: Run, cache: Cache, live: Sequence[int]) -> Run:
    """The run over all beams of the live prompts. Beams draw by numbers of their own, and processors know each as
    prompt · num_beams + row."""
    count = run.settings.num_beams
    beams = run.spread(cache, live, count)
    numbers = beam_numbers([run.numbers[row] for row in live], count)
    return replace(beams, numbers=numbers, places=[row * count + beam for row in live for beam in range(count)])


def _best(beams: Run, scores: Tensor, searches: Sequence[Search]) -> list[list[Candidate]]:
    """The best continuations of each prompt's beams, or ones that are drawn without replacement.

    There are so many of them that enough go on even if every end token is among them. scores [R, V]
    """
    settings, vocab = beams.settings, scores.shape[-1]
    count, device = settings.num_beams, scores.device
    before = torch.tensor([beam.score for search in searches for beam in search.beams], dtype=torch.float32)
    sums = (scores + before.to(device)[:, None]).view(len(searches), -1)  # [prompts, num_beams · V]
    many = min(max(2, 1 + len(settings.eos_token_id)) * count, sums.shape[1])
    if beams.chooser.sample:
        numbers = on_device(beams.numbers, device)
        added = gumbel(noise(beams.chooser.seed, numbers, beams.cache.clock.lengths, vocab))
        where = (sums + added.view_as(sums)).topk(many).indices
        best = sums.gather(1, where)
    else:
        best, where = sums.topk(many)
    both = torch.stack([best.double(), where.double()], dim=-1).tolist()  # one look at the device
    return [[Candidate(score, int(at) // vocab, int(at) % vocab) for score, at in row] for row in both]


def _each(run: Run, searches: Sequence[Search]) -> list[int]:
    """Tokens of the prompt of each sequence that is returned."""
    return [run.prompts[row] for row, search in enumerate(searches) for _ in search.returned()]


def _feed(run: Run, cache: Cache, tokens: Sequence[Sequence[int]]) -> tuple[int, CapacityError | None]:
    """Feeds each row its tokens; where there is no room for all of them, fewer. -> how many of each row at most, and
    what was lacking. In a pool beams share what they have in common, and sequences that are fed anew do not."""
    lack, most = None, max(map(len, tokens))
    while most:
        try:
            feed_rows(run.model, cache, [row[:most] for row in tokens])
            break
        except CapacityError as error:
            lack, most = lack or error, most // 2
    return most, lack


def _made(run: Run, searches: Sequence[Search], steps: Sequence[tuple[Tensor, Tensor]]) -> Made:
    returned = [(row, one) for row, search in enumerate(searches) for one in search.returned()]
    tokens, count = [one.beam.tokens for _, one in returned], run.settings.num_beams
    run.stopping.rows = [one.beam.state.fork() for _, one in returned]
    run.kept = Kept.of(run.settings, len(returned))
    for i, (row, one) in enumerate(returned if run.kept is not None else ()):
        assert run.kept is not None
        rows = [first + own for first, own in zip(searches[row].firsts, one.beam.path, strict=False)]
        logits, scores = (
            torch.stack([step[kind][at] for step, at in zip(steps, rows, strict=False)]) for kind in range(2)
        )
        run.kept.add([i] * len(rows), logits, scores, on_device(one.beam.tokens, logits.device))
    cache = run.cache.select([row for row, _ in returned])
    most, lack = _feed(run, cache, tokens)
    if run.told:
        for i, (_, one) in enumerate(returned):
            fed = one.beam.tokens[:most]
            reason = one.reason if lack is None or fed == one.beam.tokens else reason_of(lack)
            for t, token in enumerate(fed, start=1):
                run.told(i, token, reason if t == len(fed) else None)
    if lack is not None:
        run.prompts, run.cache = _each(run, searches), cache
        raise lack
    more = {
        "sequences_scores": [one.score for _, one in returned],
        "beam_indices": [[row * count + rank for rank in one.beam.ranks] for row, one in returned],
    }
    return Made(tokens, [one.reason for _, one in returned], cache, "beam search by plain passes", more)
