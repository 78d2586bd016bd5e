"""Beam search and beam sampling: keeps the best `num_beams` sequences (beams) of each prompt.

Each prompt is computed once and its row repeated. All live beams of a prompt have the same length; finished sequences
are kept as ids. After every token the beams are chosen among all continuations of all beams. The best continuation of a
beam stays in its row, and further ones move to the rows of dropped beams: only the tokens that two beams do not share
are copied (`Cache.reorder`).

    row 0  the cat ──── sat           stays in row 0
                   └─── is            moves to row 1, which then differs from row 0 in one token
    row 1  the dog ×                  dropped

A beam's score is the sum of its processed log-probabilities; a finished sequence is ranked by
sum / length ** length_penalty. Prompts are independent: each is searched as it would be alone, and its rows leave the
batch when its search is over. At the end, the returned sequences are fed in one pass to rows of the prompts' cache,
which can then be continued.
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
from lamina.generation.out_of_room import reason_of
from lamina.generation.result import Recorder
from lamina.generation.row_ids import beam_row_ids
from lamina.generation.run import Run, StrategyOutput
from lamina.generation.stopping import Reason, RowState
from lamina.sampling.noise import gumbel, noise

NO_SCORE = -1e9
"""Below every sum of log-probabilities: the score of placeholder beams, which only fill rows."""


@dataclass
class Beam:
    """A live sequence in one row of its prompt.

    score    sum of log-probabilities
    tokens   new ids
    path     for each token, the row of the beam that it continued
    ranks    for each token, the rank of that beam among the prompt's beams, 0 for the best
    state    the row's state in `Stopping`
    rank     its own rank
    """

    score: float
    tokens: list[int]
    path: list[int]
    ranks: list[int]
    state: RowState
    rank: int = 0

    @property
    def real(self) -> bool:
        """False for a placeholder."""
        return self.score > NO_SCORE / 2

    def shared(self, other: Beam) -> int:
        """New tokens that two live beams share: those before they last continued the same row."""
        return next((t for t in reversed(range(len(self.path))) if self.path[t] == other.path[t]), 0)


class FinishedBeam(NamedTuple):
    """A finished sequence, and its score divided by length ** length_penalty."""

    score: float
    beam: Beam
    reason: Reason


class Candidate(NamedTuple):
    """A continuation of the beam in row `row` of its prompt by one token."""

    score: float
    row: int
    token: int


class PromptSearch:
    """The beam search of one prompt, which is row `row` of the run."""

    def __init__(self, run: Run, row: int) -> None:
        self.row, self.settings, self.stopping = row, run.settings, run.stopping
        state = self.stopping.rows[row]
        # All rows hold the same prompt: only the first is real, or every continuation would be a candidate many times.
        scores = [0.0] + [NO_SCORE] * (self.settings.num_beams - 1)
        self.beams = [Beam(score, [], [], [], state, rank) for rank, score in enumerate(scores)]
        self.finished: list[FinishedBeam] = []  # best first
        self.over = False
        self.first_rows: list[int] = []  # for each step, the first row of the prompt in the batch

    def advance(self, found: Sequence[Candidate]) -> list[int]:
        """Makes the best candidates (best or first drawn first) the new beams. -> for each row, the row it continues"""
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
                    penalized = score / len(tokens) ** self.settings.length_penalty
                    self.finished.append(FinishedBeam(penalized, beam, reason))
                beam.score = NO_SCORE + score
        self.finished = sorted(self.finished, key=lambda one: -one.score)[:count]
        best = sorted(made, key=lambda beam: -beam.score)[:count]
        for rank, beam in enumerate(best):
            beam.rank = rank
        self.over = not best[0].real or not self._can_improve(best[0])
        self.beams = _assign_rows(best)
        return [beam.path[-1] for beam in self.beams]

    def _can_improve(self, best: Beam) -> bool:
        """Whether a live beam may still beat the worst finished one, by the rule of `early_stopping`."""
        if len(self.finished) < len(self.beams):
            return True
        early, penalty = self.settings.early_stopping, self.settings.length_penalty
        if early is True:
            return False
        length = self.beams[0].state.most if early == "never" and penalty > 0 else len(best.tokens)
        return best.score / length**penalty > self.finished[-1].score

    def end(self, reason: Reason) -> None:
        """Ends the search now: live beams become finished ones with this reason."""
        penalty = self.settings.length_penalty
        live = [
            FinishedBeam(beam.score / len(beam.tokens) ** penalty, beam, reason) for beam in self.beams if beam.real
        ]
        self.finished = sorted([*self.finished, *live], key=lambda one: -one.score)[: len(self.beams)]
        self.over = True

    def returned(self) -> list[FinishedBeam]:
        """The best `num_return_sequences` sequences. If there are fewer, the best ones are repeated."""
        return [self.finished[i % len(self.finished)] for i in range(self.settings.num_return_sequences)]


def _assign_rows(beams: Sequence[Beam]) -> list[Beam]:
    """Beams (best first) by row: the best continuation of a row stays in it, others move to rows that have none."""
    placed: dict[int, Beam] = {}
    for beam in beams:
        placed.setdefault(beam.path[-1], beam)
    moved = iter([beam for beam in beams if placed[beam.path[-1]] is not beam])
    return [placed[row] if row in placed else next(moved) for row in range(len(beams))]


@torch.no_grad()
def beam_search(run: Run) -> StrategyOutput:
    """Searches with `num_beams` beams for each row of the run. -> `num_return_sequences` adjacent rows for each

    The run's own cache is not changed. Afterwards `run.stopping` and `run.recorder` have a row for each sequence, and
    `more` has for each sequence
    sequences_scores   the sum of its log-probabilities / length ** length_penalty
    beam_indices       for each token, the beam that it continued: prompt · num_beams + rank

    If the cache runs out of room, `run` is changed to the best sequences so far, and the CapacityError is raised.
    """
    searches = [PromptSearch(run, row) for row in range(len(run.prompt_lengths))]
    beam_caches = [run.cache.repeat(run.settings.num_beams)]
    steps: list[tuple[Tensor, Tensor]] = []  # logits and scores of each step, if they are recorded
    try:
        _search(run, searches, steps, beam_caches)
    except CapacityError as error:
        beam_caches.pop().release()  # frees memory for the best sequences
        for search in searches:
            if not search.over:
                search.end(reason_of(error))
        run.prompt_lengths, run.cache = _returned_lengths(run, searches), _output(run, searches, steps).cache
        raise
    del beam_caches
    return _output(run, searches, steps)


def _search(
    run: Run, searches: Sequence[PromptSearch], steps: list[tuple[Tensor, Tensor]], beam_caches: list[Cache]
) -> None:
    """Runs every search to its end.

    beam_caches   a list of one cache, of all live beams; a list, so that the caller can release the latest
    """
    count = run.settings.num_beams
    live = list(range(len(run.prompt_lengths)))
    cache, logits = beam_caches[0], run.logits.repeat_interleave(count, dim=0)
    while True:
        beams = _beams_run(run, cache, live)
        scores = run.chooser.scores(logits.float().log_softmax(dim=-1), beams.history())
        if run.recorder is not None:
            steps.append((logits, scores))
        parents: list[int] = []
        since: list[int] = []
        candidates = _best_candidates(beams, scores, [searches[i] for i in live])
        for at, (row, found) in enumerate(zip(live, candidates, strict=True)):
            search, before = searches[row], searches[row].beams
            search.first_rows.append(at * count)
            sources = search.advance(found)
            if search.over and not search.finished:
                raise run.no_token_error(row)
            if not search.over:
                parents += [at * count + source for source in sources]
                since += [
                    run.prompt_lengths[row] + before[r].shared(before[source]) for r, source in enumerate(sources)
                ]
        going = [row for row in live if not searches[row].over]
        if not going:
            return
        cache = beam_caches[0] = cache.reorder(parents, since) if going == live else cache.select(parents)
        live = going
        last = [beam.tokens[-1] for row in live for beam in searches[row].beams]
        logits = _beams_run(run, cache, live).feed(on_device(last, cache.device), range(cache.rows))


def _beams_run(run: Run, cache: Cache, live: Sequence[int]) -> Run:
    """The run over all beams of the live prompts. Each beam has its own row id for sampling; processors see it as row
    prompt · num_beams + row."""
    count = run.settings.num_beams
    beams = run.repeat(cache, live, count)
    row_ids = beam_row_ids([run.row_ids[row] for row in live], count)
    return replace(beams, row_ids=row_ids, call_rows=[row * count + beam for row in live for beam in range(count)])


def _best_candidates(beams: Run, scores: Tensor, searches: Sequence[PromptSearch]) -> list[list[Candidate]]:
    """The best continuations of each prompt's beams; for beam sampling, continuations drawn without replacement.

    scores [R, V] of all beams. There are enough candidates for `num_beams` live beams even if all eos ids are among
    them.
    """
    settings, vocab = beams.settings, scores.shape[-1]
    count, device = settings.num_beams, scores.device
    before = torch.tensor([beam.score for search in searches for beam in search.beams], dtype=torch.float32)
    sums = (scores + before.to(device)[:, None]).view(len(searches), -1)  # [prompts, num_beams · V]
    many = min(max(2, 1 + len(settings.eos_token_id)) * count, sums.shape[1])
    if beams.chooser.sample:
        row_ids = on_device(beams.row_ids, device)
        added = gumbel(noise(beams.chooser.seed, row_ids, beams.cache.clock.lengths, vocab))
        where = (sums + added.view_as(sums)).topk(many).indices
        best = sums.gather(1, where)
    else:
        best, where = sums.topk(many)
    both = torch.stack([best.double(), where.double()], dim=-1).tolist()  # one copy from the device
    return [[Candidate(score, int(at) // vocab, int(at) % vocab) for score, at in row] for row in both]


def _returned_lengths(run: Run, searches: Sequence[PromptSearch]) -> list[int]:
    """The prompt length of each sequence that is returned."""
    return [run.prompt_lengths[row] for row, search in enumerate(searches) for _ in search.returned()]


def _feed_fitting(run: Run, cache: Cache, tokens: Sequence[Sequence[int]]) -> tuple[int, CapacityError | None]:
    """Feeds each row its tokens, or fewer if they do not fit: in a pool, beams share pages of common tokens, and the
    sequences that are fed here do not. -> the most tokens fed to a row, and the error if not all fitted"""
    lack, most = None, max(map(len, tokens))
    while most:
        try:
            feed_rows(run.model, cache, [row[:most] for row in tokens])
            break
        except CapacityError as error:
            lack, most = lack or error, most // 2
    return most, lack


def _output(run: Run, searches: Sequence[PromptSearch], steps: Sequence[tuple[Tensor, Tensor]]) -> StrategyOutput:
    """Feeds the returned sequences to rows of the run's cache, and passes them to `run.recorder` and `run.on_token`."""
    returned = [(row, one) for row, search in enumerate(searches) for one in search.returned()]
    tokens, count = [one.beam.tokens for _, one in returned], run.settings.num_beams
    run.stopping.rows = [one.beam.state.fork() for _, one in returned]
    run.recorder = Recorder.of(run.settings, len(returned))
    for i, (row, one) in enumerate(returned if run.recorder is not None else ()):
        assert run.recorder is not None
        rows = [first + own for first, own in zip(searches[row].first_rows, one.beam.path, strict=False)]
        logits, scores = (
            torch.stack([step[kind][at] for step, at in zip(steps, rows, strict=False)]) for kind in range(2)
        )
        run.recorder.add([i] * len(rows), logits, scores, on_device(one.beam.tokens, logits.device))
    cache = run.cache.select([row for row, _ in returned])
    most, lack = _feed_fitting(run, cache, tokens)
    if run.on_token:
        for i, (_, one) in enumerate(returned):
            fed = one.beam.tokens[:most]
            reason = one.reason if lack is None or fed == one.beam.tokens else reason_of(lack)
            for t, token in enumerate(fed, start=1):
                run.on_token(i, token, reason if t == len(fed) else None)
    if lack is not None:
        run.prompt_lengths, run.cache = _returned_lengths(run, searches), cache
        raise lack
    more = {
        "sequences_scores": [one.score for _, one in returned],
        "beam_indices": [[row * count + rank for rank in one.beam.ranks] for row, one in returned],
    }
    return StrategyOutput(tokens, [one.reason for _, one in returned], cache, "beam search by plain passes", more)
