"""`Probe` and `Run`: feed rows to a transformers model over a cache, and compare each token with the truth.

A pass gives every row of a batch some places (see truth.py). Rows that get fewer than others are padded on the left, as
transformers pads, and the mask [B, slots] of everything fed so far is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.checking.transformers.caches import Kept, NotTried, told
from lamina.checking.transformers.recorder import Pass
from lamina.checking.transformers.subject import Sources, Subject
from lamina.checking.transformers.truth import BEFORE, OUTSIDE, Column, Truth
from lamina.errors import RewindError


class Found:
    """Errors of judged tokens: `places` and, for each column, the errors there."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.places: list[int] = []
        self.errors: dict[str, list[Tensor]] = {}

    def add(
        self, one: Pass, logits: Tensor, tokens: list[int], places: list[int], unknown: list[int] | None = None
    ) -> None:
        """The tokens of a pass, counted through all rows, which belong to these places; logits [B · T, vocab], except
        for the tokens numbered `unknown` among these."""
        if not places:
            return
        device = self.truth.subject.device
        index, at = torch.tensor(tokens, device=device), torch.tensor(places, device=device)
        made = {BEFORE: one.input, OUTSIDE: logits} | {f"layer {i}": out for i, out in enumerate(one.outputs)}
        for column in self.truth.columns:
            found = made.get(column.name)
            if found is None or found.shape[-1] != column.values.shape[-1]:
                errors = torch.full((len(places),), torch.nan)
            else:
                errors = column.errors(found[index], at).cpu()
                if column.name == OUTSIDE and unknown:
                    errors[unknown] = torch.nan
            self.errors.setdefault(column.name, []).append(errors)
        self.places += places

    def worst(self) -> float:
        """The largest error of the logits."""
        errors = torch.cat(self.errors[OUTSIDE]) if self.places else torch.zeros(1)
        return float(errors.nan_to_num(0.0).max())

    def first(self) -> tuple[Column, int, float] | None:
        """The first column that differs, if the logits do; the place where it first does; and the error there."""
        if not self.places:
            return None
        names = [column.name for column in self.truth.columns]
        columns = {column.name: column for column in self.truth.columns}
        errors = {name: torch.cat(self.errors[name]) for name in names}
        if not bool((errors[OUTSIDE] > columns[OUTSIDE].allowed).any()):
            return None
        for name in names:
            wrong = (errors[name] > columns[name].allowed).nonzero()[:, 0].tolist()
            if wrong:
                n = min(wrong, key=lambda n: self.truth.where(self.places[n])[::-1])  # by position, then row
                return columns[name], self.places[n], float(errors[name][n])
        return None


class Probe:
    """One path over one way of keeping: `probe.run(sequences)` begins a batch, `probe.found` has the errors."""

    def __init__(self, truth: Truth, kept: Kept, tries: int) -> None:
        self.truth, self.kept, self.tries = truth, kept, tries
        self.subject: Subject = truth.subject
        self.rows = truth.rows
        self.found: list[Found] = [Found(truth)]
        self.cases = 0

    @property
    def capacity(self) -> int:
        """Slots that a cache of a fixed size has: no path feeds more."""
        return max(len(row) for row in self.rows) + 4

    def sources(self, sequences: Sequence[int]) -> Sources | None:
        """Of a batch, as wide as the longest of all; of one row, as long as it is."""
        if self.truth.sources is None or len(sequences) > 1:
            return None if self.truth.sources is None else self.truth.sources.rows([*sequences])
        return self.truth.sources.alone(sequences[0])

    def run(self, sequences: Sequence[int], masked: bool = False, positioned: bool = False) -> Run:
        """A batch over an empty cache, whose row r will be fed sequence `sequences[r]`."""
        subject = self.subject
        if masked and subject.mask_name is None and not subject.encoder_decoder:
            raise NotTried("its forward takes no attention_mask")
        if positioned and subject.positions_name is None:
            raise NotTried("its forward takes no position_ids")
        self.cases += len(sequences)
        return Run(self, [*sequences], masked, positioned)


class Run:
    """A batch of rows over one cache."""

    def __init__(self, probe: Probe, sequences: list[int], masked: bool, positioned: bool) -> None:
        self.probe, self.sequences = probe, sequences
        self.masked, self.positioned = masked, positioned
        self.mask = torch.zeros(len(sequences), 0, dtype=torch.long)  # [B, slots]
        self.sources = probe.sources(sequences)
        self.cache: Any = probe.kept.make(probe.subject, probe.capacity, self.sources)

    def feed(self, parts: Sequence[Sequence[int]], judged: int | None = None) -> None:
        """Gives each row the tokens at these places, of which the first `judged` (None: all) are compared."""
        subject, truth = self.probe.subject, self.probe.truth
        width = max(len(part) for part in parts)
        ids = torch.full((len(parts), width), subject.pad)
        mask = torch.zeros_like(ids)
        tokens: list[int] = []
        places: list[int] = []
        for r, part in enumerate(parts):
            start = width - len(part)
            ids[r, start:] = torch.tensor([truth.flat_ids[place] for place in part], dtype=torch.long)
            mask[r, start:] = 1
            kept = part[:judged]
            tokens += [r * width + start + t for t in range(len(kept))]
            places += kept
        self.mask = torch.cat([self.mask, mask], dim=1)
        positions = (self.mask.cumsum(1) - 1).masked_fill(self.mask == 0, 0)[:, -width:]  # as `generate` makes them
        with truth.recorder.on():
            logits, self.cache = subject.cached(
                ids,
                self.cache,
                self.sources,
                self.mask.to(subject.device) if self.masked else None,
                positions.to(subject.device) if self.positioned else None,
            )
        if self.cache is None:
            raise NotTried("its forward returns no cache")
        (one,) = truth.recorder.take()
        self.probe.found[0].add(one, logits.flatten(0, 1), tokens, places)

    def crop(self, tokens: int) -> None:
        """Takes back the last tokens of every row."""
        try:
            self.cache.crop(-tokens)
        except RewindError as error:
            raise NotTried(f"refused: {error}") from error
        self.mask = self.mask[:, : self.mask.shape[1] - tokens]

    def reorder(self, verb: str, index: list[int]) -> None:
        """Row r becomes a copy of row index[r], by this verb of the cache."""
        self._verb(verb, torch.tensor(index, device=self.probe.subject.device))
        self._rows_are(index)

    def repeat(self, times: int) -> None:
        """Every row several times, one beside the other."""
        self._verb("batch_repeat_interleave", times)
        self._rows_are([r for r in range(len(self.sequences)) for _ in range(times)])

    def _verb(self, verb: str, argument: Any) -> None:
        try:
            getattr(self.cache, verb)(argument)
        except (AttributeError, NotImplementedError, TypeError) as error:
            raise NotTried(f"{verb} is missing ({told(error)})") from error

    def _rows_are(self, index: list[int]) -> None:
        self.sequences = [self.sequences[r] for r in index]
        self.mask, self.sources = self.mask[index], self.probe.sources(self.sequences)
