"""What the laws are tried on: the whole model, or one of its blocks alone.

Both are a function from a row's inputs to a row's outputs, with the truth known for every position: the model from ids
to logits, a block from the vectors that the uncached pass gave it to those it made of them. So a law is written once.
On a block alone, errors of the layers before do not add up, and the layer at fault shows itself.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.cache.cache import Cache
from lamina.cache.cross import Source
from lamina.cache.spec import Shared
from lamina.cache.step import Step
from lamina.model import Model
from lamina.nn.experts import Experts


class Subject:
    """inputs[s], truth[s], exact[s]: of sequence s, what is fed, what comes out without a cache, and the same computed
    in double precision."""

    name: str
    kinds: frozenset[str]
    inputs: list[Tensor]
    truth: list[Tensor]
    exact: list[Tensor]
    model: Model
    sources: list[Source] | None

    def __init__(self, model: Model, sources: list[Source] | None, residence: str) -> None:
        self.model, self.sources, self.residence = model, sources, residence
        self.flips = 0  # tokens that went to other experts than without a cache
        self._padding = random.Random(0)

    def new_cache(self, sequences: Sequence[int], capacity: int | None, slack: int) -> Cache:
        """A cache whose row r will hold sequence `sequences[r]`."""
        cache = self.model.new_cache(len(sequences), capacity, slack, residence=self.residence)
        if self.sources is not None:
            for row, sequence in enumerate(sequences):
                cache.attach(self.sources[sequence], rows=[row])
        return cache

    def feed(
        self,
        cache: Cache,
        parts: Sequence[Tensor],
        *,
        rows: list[int] | None = None,
        accepted: list[int] | None = None,
        fail: bool = False,
    ) -> list[Tensor]:
        """One pass that gives each row its part (parts may differ in length); -> each row's outputs."""
        counts = [len(part) for part in parts]
        width = max(counts)
        step = cache.step(width, None if min(counts) == width else counts, rows)
        batch = self._padded(parts, width)
        out = self._forward(batch, step, fail)
        if fail:
            step.abort()
            return []
        step.ran = True  # the subject may be one block, and the others of the model are not looked at
        step.commit(accepted)
        return [out[r, :count] for r, count in enumerate(counts)]

    def _padded(self, parts: Sequence[Tensor], width: int) -> Tensor:
        raise TypeError("a subject says how it pads")

    def _forward(self, batch: Tensor, step: Step, fail: bool) -> Tensor:
        raise TypeError("a subject says how it runs")


class WholeModel(Subject):
    """Ids to logits."""

    def __init__(
        self, model: Model, ids: list[Tensor], sources: list[Source] | None, residence: str = "device"
    ) -> None:
        super().__init__(model, sources, residence)
        self.name, self.kinds = "model", frozenset()
        self.inputs = ids
        recorded = [record(model, row, sources[s] if sources else None) for s, row in enumerate(ids)]
        self.records = [blocks for blocks, _ in recorded]
        self.truth = [logits for _, logits in recorded]
        self.exact = [self._in_double(s) for s in range(len(ids))]

    def _in_double(self, sequence: int) -> Tensor:
        """The same pass with every block in double precision, one block at a time."""
        source = self.sources[sequence] if self.sources else None
        step = bare_step(self.model, len(self.inputs[sequence]), source, double=True)
        x = self.records[sequence][0][0][None].double()
        shared = doubled(self.model.prepare(step.positions))
        for i, block in enumerate(self.model.blocks):
            x = in_double(block)(x, step.memory(i), shared)
        return self.model.unembed(x.to(self.model.dtype))[0]

    def _padded(self, parts: Sequence[Tensor], width: int) -> Tensor:
        batch = torch.empty(len(parts), width, dtype=torch.int64)
        for r, part in enumerate(parts):
            batch[r, : len(part)] = part
            batch[r, len(part) :] = self._padding.randrange(self.model.vocab)
        return batch.to(self.model.device)

    def _forward(self, batch: Tensor, step: Step, fail: bool) -> Tensor:
        if fail:  # half the layers have run when it stops
            x, shared = self.model.enter(self.model.embed(batch), step.positions)
            for i, block in enumerate(self.model.blocks[: len(self.model.blocks) // 2 + 1]):
                x = block(x, step.memory(i), shared)
            return x
        out = self.model.forward(batch, step)
        assert out is not None
        return out


class OneBlock(Subject):
    """Vectors to vectors: block `index` on what the uncached pass gave it."""

    def __init__(self, whole: WholeModel, index: int) -> None:
        super().__init__(whole.model, whole.sources, whole.residence)
        self.index, self.name = index, f"layer {index}"
        self.block = whole.model.blocks[index]
        self.records = whole.records
        self.inputs = [blocks[index][0] for blocks in whole.records]
        self.truth = [blocks[index][1] for blocks in whole.records]
        # A layer that reads another's keys needs that one run too, on its own recorded inputs.
        specs = self.model.specs[index]
        self.before = sorted({spec.source for spec in specs.values() if isinstance(spec, Shared)})
        cache = self.model.new_cache()
        self.kinds = frozenset(layer.kind for layer in cache.layers[index].values())
        self.exact, self.chosen = [], []
        for s, x in enumerate(self.inputs):
            source = self.sources[s] if self.sources else None
            with routing(self.block) as chosen:
                self._alone(self.block, x, bare_step(self.model, len(x), source), s)
            self.chosen.append(chosen[0][0] if chosen else None)
            step = bare_step(self.model, len(x), source, double=True)
            self.exact.append(self._alone(in_double(self.block), x.double(), step, s, double=True))

    def _alone(self, block: nn.Module, x: Tensor, step: Step, sequence: int, double: bool = False) -> Tensor:
        shared = self.model.prepare(step.positions)
        for i in self.before:
            other = self.records[sequence][i][0][None]
            if double:
                in_double(self.model.blocks[i])(other.double(), step.memory(i), doubled(shared))
            else:
                self.model.blocks[i](other, step.memory(i), shared)
        return block(x[None], step.memory(self.index), doubled(shared) if double else shared)[0]

    def _padded(self, parts: Sequence[Tensor], width: int) -> Tensor:
        return torch.stack([_padded(part, width) for part in parts])

    def feed(self, cache: Cache, parts: Sequence[Tensor], **options: Any) -> list[Tensor]:
        # Inputs carry their sequence and position, for the other layers' inputs and the routing.
        outs = super().feed(cache, parts, **options)
        if not options.get("fail"):
            self._count_flips(parts, outs)
        return outs

    def _forward(self, batch: Tensor, step: Step, fail: bool) -> Tensor:
        shared = self.model.prepare(step.positions)
        for i in self.before:
            self.model.blocks[i](self._inputs_of(i, batch), step.memory(i), shared)
        with routing(self.block) as chosen:
            out = self.block(batch, step.memory(self.index), shared)
        self._routed = chosen[0] if chosen else None
        return out

    def _where(self, x: Tensor) -> tuple[int, int] | None:
        """The sequence and position that this input vector was recorded at."""
        for s, row in enumerate(self.inputs):
            at = (row == x).all(dim=-1).nonzero()
            if len(at):
                return s, int(at[0, 0])
        return None

    def _inputs_of(self, index: int, batch: Tensor) -> Tensor:
        """What layer `index` was given where this block was given `batch`."""
        other = torch.zeros(
            *batch.shape[:2], self.records[0][index][0].shape[-1], dtype=batch.dtype, device=batch.device
        )
        for r, row in enumerate(batch):
            for t, x in enumerate(row):
                if (place := self._where(x)) is not None:
                    other[r, t] = self.records[place[0]][index][0][place[1]]
        return other

    def _count_flips(self, parts: Sequence[Tensor], outs: list[Tensor]) -> None:
        """A token at a near-tie may go to another expert after rounding: its output is left out, and counted."""
        if self._routed is None:
            return
        for r, part in enumerate(parts):
            for t, x in enumerate(part):
                place = self._where(x)
                expected = None if place is None else self.chosen[place[0]]
                if expected is None or place is None:
                    continue
                if set(self._routed[r, t].tolist()) != set(expected[place[1]].tolist()):
                    self.flips += 1
                    outs[r][t] = self.exact[place[0]][place[1]].to(outs[r].dtype)


def bare_step(model: Model, tokens: int, source: Source | None, double: bool = False) -> Step:
    """One row without a cache."""
    layers = [{name: spec.layer(None) for name, spec in entry.items()} for entry in model.specs]
    step = Step.alone(layers, (1, tokens), model.device)
    if source is not None:
        step.source = doubled(model.crossed(source, 1)) if double else model.crossed(source, 1)
    return step


def record(model: Model, ids: Tensor, source: Source | None) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """One uncached pass over one row: what each block was given and made [T, width], and the logits [T, vocab]."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        block.register_forward_hook(lambda _, given, made: seen.append((given[0][0].clone(), made[0].clone())))
        for block in model.blocks
    ]
    try:
        logits = model.forward(ids[None].to(model.device), bare_step(model, len(ids), source))
    finally:
        for hook in hooks:
            hook.remove()
    assert logits is not None
    return seen, logits[0]


@contextlib.contextmanager
def routing(block: nn.Module) -> Iterator[list[Tensor]]:
    """Collects which experts tokens were sent to: chosen [B, T, K]."""
    chosen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
        for module in block.modules()
        if isinstance(module, Experts)
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def in_double(block: nn.Module) -> nn.Module:
    return copy.deepcopy(block).double()


def doubled(shared: Any) -> Any:
    """Every floating tensor in it in double precision."""
    if isinstance(shared, Tensor):
        return shared.double() if shared.is_floating_point() else shared
    if isinstance(shared, tuple | list):
        parts = [doubled(part) for part in shared]
        return type(shared)(*parts) if hasattr(shared, "_fields") else type(shared)(parts)
    if isinstance(shared, dict):
        return {name: doubled(part) for name, part in shared.items()}
    return shared


def _padded(part: Tensor, width: int) -> Tensor:
    """Padding that would be seen if anything looked at it."""
    out = torch.full((width, *part.shape[1:]), 3.0, dtype=part.dtype, device=part.device)
    out[: len(part)] = part
    return out
