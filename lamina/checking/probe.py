"""What the laws are tried on: the whole model, or each of its blocks alone, all in the same passes.

Both feed tokens by their places (see reference.py) and compare what comes out with the reference: the model from ids to
logits, a block from the vectors that the uncached pass gave it to those it made of them. So a law is written once. On
blocks alone, errors of the layers before do not add up, and the layer at fault shows itself.

Errors stay on the device until a law is through: a pass waits for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.step import Step
from lamina.checking import tolerance
from lamina.checking.laws import Way
from lamina.checking.reference import Reference
from lamina.checking.watch import routing
from lamina.errors import InputError

FLIPPED = -1.0
"""In place of an error: at a near-tie, rounding sent the token to another expert, so there is nothing to compare."""

Errors = tuple[list[int], Tensor]  # places [n], and the errors there [n, parts]


class Probe:
    """`found` has the errors of all tokens that were fed and judged since the last `take`."""

    running: int | None = None
    """The block that runs alone now, for the report of an exception."""

    def __init__(self, reference: Reference, residence: str) -> None:
        self.reference, self.model, self.residence = reference, reference.model, residence
        self.rows = reference.rows
        self.found: list[Errors] = []
        self.judged = 0  # tokens, between the last two `take`s
        self._chance = random.Random(0)

    def new_cache(self, sequences: Sequence[int], way: Way) -> Cache:
        """A cache whose row r will hold sequence `sequences[r]`."""
        cache = self.model.new_cache(len(sequences), way.capacity, way.slack, residence=self.residence)
        if self.reference.sources is not None:
            for row, sequence in enumerate(sequences):
                cache.attach(self.reference.sources[sequence], rows=[row])
        return cache

    def feed(
        self,
        cache: Cache,
        parts: Sequence[Sequence[int]],
        *,
        rows: list[int] | None = None,
        accepted: list[int] | None = None,
    ) -> None:
        """One pass that gives each row the tokens at these places; the accepted ones (None: all) are judged."""
        step = self._opened(cache, parts, rows)
        try:
            out = self._forward(parts, step, judged=True)
        except BaseException:
            step.abort()
            raise
        taken = [len(part) for part in parts] if accepted is None else accepted
        places = [place for part, n in zip(parts, taken, strict=True) for place in part[:n]]
        tokens = [row * step.T + t for row, n in enumerate(taken) for t in range(n)]
        if places:
            where = torch.tensor([tokens, places]).to(self.model.device)
            self.found.append((places, self._errors(out, where[0], where[1])))
        step.ran = True  # the subject may be one block, and the others of the model are not looked at
        step.commit(accepted)

    def stray(self, cache: Cache, parts: Sequence[Sequence[int]], blocks: int | None = None) -> None:
        """A pass that nobody judges, because it will be taken back; or which ends after `blocks` blocks, as if it
        failed there."""
        step = self._opened(cache, parts, None)
        try:
            self._forward(parts, step, judged=False, blocks=blocks)
        except BaseException:
            step.abort()
            raise
        step.ran = True
        step.commit() if blocks is None else step.abort()

    def take(self) -> tuple[list[int], Tensor]:
        """All places judged since the last time, and the errors there [n, parts], on the host."""
        places = [place for some, _ in self.found for place in some]
        errors = torch.cat([errors for _, errors in self.found]).cpu() if places else torch.zeros(0, 1)
        self.found, self.judged = [], len(places)
        return places, errors

    def _opened(self, cache: Cache, parts: Sequence[Sequence[int]], rows: list[int] | None) -> Step:
        self.running = None
        counts = [len(part) for part in parts]
        return cache.step(max(counts), None if min(counts) == max(counts) else counts, rows)

    def _forward(
        self, parts: Sequence[Sequence[int]], step: Step, judged: bool, blocks: int | None = None
    ) -> list[Tensor]:
        """The outputs [R, T, W] of each part that is compared."""
        raise InputError("a subject says how it runs")

    def _errors(self, out: list[Tensor], tokens: Tensor, places: Tensor) -> Tensor:
        """The errors [n, parts] of these tokens, counted through all rows, which belong to these places."""
        raise InputError("a subject says how it compares")


class WholeModel(Probe):
    """Ids to logits."""

    def __init__(self, reference: Reference, exact: Tensor, residence: str) -> None:
        super().__init__(reference, residence)
        self.exact, self.scale = exact, tolerance.scales(exact)
        rounding = tolerance.errors(reference.truth, exact, self.scale)
        self.rounding = float(rounding.max())  # of the uncached pass
        self.roughest = int(rounding.argmax())

    def _forward(
        self, parts: Sequence[Sequence[int]], step: Step, judged: bool, blocks: int | None = None
    ) -> list[Tensor]:
        ids = torch.tensor(
            [
                [*(self.reference.flat_ids[place] for place in part), *self._padding(step.T - len(part))]
                for part in parts
            ]
        ).to(self.model.device)
        if blocks is not None:
            x, shared = self.model.enter(self.model.embed(ids), step.positions)
            for i, block in enumerate(self.model.blocks[:blocks]):
                x = block(x, step.memory(i), shared)
            return []
        out = self.model.forward(ids, step, "all" if judged else None)
        return [] if out is None else [out]

    def _padding(self, n: int) -> list[int]:
        return [self._chance.randrange(self.model.vocab) for _ in range(n)]

    def _errors(self, out: list[Tensor], tokens: Tensor, places: Tensor) -> Tensor:
        found = out[0].flatten(0, 1)[tokens]
        return tolerance.errors(found, self.exact[places], self.scale[places])[:, None]


class EachBlock(Probe):
    """Vectors to vectors: every block, on what the uncached pass gave it at the same places."""

    def __init__(self, reference: Reference, residence: str) -> None:
        super().__init__(reference, residence)
        self.tables = reference.blocks()
        self.rounding = torch.stack([table.rounding.amax() for table in self.tables]).tolist()
        self._routed: list[Tensor | None] = []
        self._ids = torch.tensor(reference.flat_ids).to(self.model.device)

    def _forward(
        self, parts: Sequence[Sequence[int]], step: Step, judged: bool, blocks: int | None = None
    ) -> list[Tensor]:
        places = torch.tensor([[*part, *[-1] * (step.T - len(part))] for part in parts]).to(self.model.device)
        padding = (places < 0)[..., None]
        ids = self._ids[places.clamp(min=0)]
        shared = self.model.enter(self.model.embed(ids), step.positions)[1]
        outs: list[Tensor] = []
        self._routed = []
        for i, (block, table) in enumerate(zip(self.model.blocks[:blocks], self.tables, strict=False)):
            self.running = i
            x = table.inputs[places.clamp(min=0)]
            x = torch.where(padding, 3 * table.inputs[-1], x)  # seen if anything looks at it
            with routing(block) as chosen:
                outs.append(block(x, step.memory(i), shared))
            self._routed.append(chosen[0] if chosen else None)
        self.running = None
        return outs

    def _errors(self, out: list[Tensor], tokens: Tensor, places: Tensor) -> Tensor:
        columns = []
        for made, table, routed in zip(out, self.tables, self._routed, strict=True):
            errors = tolerance.errors(made.flatten(0, 1)[tokens], table.exact[places], table.scale[places])
            if routed is not None and table.chosen is not None:
                flipped = table.flipped(routed.flatten(0, -2)[tokens], places)
                errors = torch.where(flipped, FLIPPED, errors)
            columns.append(errors)
        return torch.stack(columns, dim=1)
