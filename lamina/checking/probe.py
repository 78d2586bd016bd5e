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
from lamina.checking.choices import choices, differ, joined
from lamina.checking.laws import Way
from lamina.checking.reference import Reference
from lamina.errors import InputError

FLIPPED = -1.0
"""In place of an error: at a near-tie, rounding chose another expert for the token, or other tokens for it to read, so
there is nothing to compare."""

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
        rounding = tolerance.errors(reference.truth, exact, self.scale).cpu().masked_fill(reference.elsewhere, 0.0)
        self.rounding = float(rounding.max())  # of the uncached pass
        self.roughest = int(rounding.argmax())
        self._inputs = torch.cat([watch.inputs[0][0] for watch in reference.watches])  # [N, W] of the first block
        self._input_scale = tolerance.scales(self._inputs)
        self._chosen = [reference.chosen(i) for i in range(len(self.model.blocks))]
        self._made: list[Tensor | None] = []  # what each block chose in the last pass
        self._entered: list[Tensor] = []  # [R, T, W]: what the first block was given there
        self._flips: list[Tensor] = []  # for each of `found`: which tokens blocks chose something else for
        self.flipped = torch.zeros(0, dtype=torch.bool)  # the same for all that `take` gave last

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
        self._entered = []
        hook = self.model.blocks[0].register_forward_pre_hook(lambda _, given: self._entered.append(given[0]))
        try:
            with choices(self.model.blocks) as made:
                out = self.model.forward(ids, step, "all" if judged else None)
        finally:
            hook.remove()
        self._made = [joined(one) for one in made]
        return [] if out is None else [out]

    def _padding(self, n: int) -> list[int]:
        return [self._chance.randrange(self.model.vocab) for _ in range(n)]

    def _errors(self, out: list[Tensor], tokens: Tensor, places: Tensor) -> Tensor:
        found = out[0].flatten(0, 1)[tokens]
        self._flips.append(self._flipped(tokens, places))
        return tolerance.errors(found, self.exact[places], self.scale[places])[:, None]

    def _flipped(self, tokens: Tensor, places: Tensor) -> Tensor:
        """[n]: for which tokens some block chose something else than without a cache, though the first block was given
        the same: a fault in front of the blocks is no near-tie."""
        flips = torch.zeros_like(places, dtype=torch.bool)
        for chosen, made in zip(self._chosen, self._made, strict=False):  # a compiled model tells no choices
            if chosen is not None and made is not None:
                flips |= differ(made.flatten(0, 1)[tokens], chosen[places])
        if not self._entered:
            return flips & False
        entered = self._entered[0].flatten(0, 1)[tokens]
        error = tolerance.errors(entered, self._inputs[places], self._input_scale[places])
        return flips & (error <= tolerance.least(self.model.dtype))

    def take(self) -> tuple[list[int], Tensor]:
        self.flipped = torch.cat(self._flips).cpu() if self._flips else torch.zeros(0, dtype=torch.bool)
        self._flips = []
        return super().take()

    def unsure(self, places: list[int]) -> Tensor:
        """[n]: which of the tokens that `take` gave may differ since a near-tie was decided otherwise, for them or for
        one before them in their row: in double precision, or in one of these passes. More than a quarter of the tokens
        are not at a near-tie."""
        others = torch.zeros_like(self.reference.elsewhere)
        if 4 * int(self.flipped.sum()) <= len(places):
            others[torch.tensor(places)[self.flipped]] = True
        return (self.reference.behind(others) | self.reference.elsewhere)[places]


class EachBlock(Probe):
    """Vectors to vectors: every block, on what the uncached pass gave it at the same places."""

    def __init__(self, reference: Reference, residence: str) -> None:
        super().__init__(reference, residence)
        self.tables = reference.blocks()
        self.rounding = torch.stack([table.rounding.amax() for table in self.tables]).tolist()
        self._made: list[Tensor | None] = []  # what each block chose in the last pass
        self._ids = torch.tensor(reference.flat_ids).to(self.model.device)

    def _forward(
        self, parts: Sequence[Sequence[int]], step: Step, judged: bool, blocks: int | None = None
    ) -> list[Tensor]:
        places = torch.tensor([[*part, *[-1] * (step.T - len(part))] for part in parts]).to(self.model.device)
        padding = (places < 0)[..., None]
        ids = self._ids[places.clamp(min=0)]
        shared = self.model.enter(self.model.embed(ids), step.positions)[1]
        outs: list[Tensor] = []
        self._made = []
        for i, (block, table) in enumerate(zip(self.model.blocks[:blocks], self.tables, strict=False)):
            self.running = i
            x = table.inputs[places.clamp(min=0)]
            x = torch.where(padding, 3 * table.inputs[-1], x)  # seen if anything looks at it
            with choices([block]) as made:
                outs.append(block(x, step.memory(i), shared))
            self._made.append(joined(made[0]))
        self.running = None
        return outs

    def _errors(self, out: list[Tensor], tokens: Tensor, places: Tensor) -> Tensor:
        columns = []
        for found, table, made in zip(out, self.tables, self._made, strict=True):
            errors = tolerance.errors(found.flatten(0, 1)[tokens], table.exact[places], table.scale[places])
            if made is not None and table.chosen is not None:
                flipped = table.flipped(made.flatten(0, 1)[tokens], places)
                errors = torch.where(flipped, FLIPPED, errors)
            columns.append(errors)
        return torch.stack(columns, dim=1)
