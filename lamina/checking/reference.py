"""The truth: what an uncached pass over each row alone gives, in the model's dtype and in double precision.

Tokens of all rows are numbered through, and a number is a *place*. All tables have places in front, so a pass over any
tokens in any order looks up what to feed and what to expect with one index, without asking the device anything.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from lamina.cache.layers.cross import Source
from lamina.cache.step import Step
from lamina.checking import tolerance
from lamina.checking.watch import Watch, routing
from lamina.model import Model


class Reference:
    """N tokens in all; row s has the places `rows[s]`. Call `record` for each row, in order, before anything else."""

    def __init__(self, model: Model, ids: list[Tensor], sources: list[Source] | None) -> None:
        self.model, self.ids, self.sources = model, ids, sources
        self.flat_ids = torch.cat(ids).tolist()
        self.rows: list[range] = []
        for row in ids:
            start = self.rows[-1].stop if self.rows else 0
            self.rows.append(range(start, start + len(row)))
        self.watches: list[Watch] = []  # by row
        self.logits: list[Tensor] = []  # by row: [T, vocab]
        self.single: str | None = None  # why there is no double precision, and `truth` stands for `exact`

    def record(self, row: int) -> None:
        """The uncached pass over a row that all others are compared with."""
        self.watches.append(Watch(self.model))
        self.logits.append(self.uncached(row, self.watches[row]))

    def uncached(self, row: int, watch: Watch) -> Tensor:
        """One uncached pass over a row, while it is watched; -> logits [T, vocab]"""
        with watch.on():
            logits = self.model.forward(self.ids[row][None].to(self.model.device), self.step(row))
        assert logits is not None
        return logits[0]

    @functools.cached_property
    def truth(self) -> Tensor:
        """[N, vocab]"""
        return torch.cat(self.logits)

    def step(self, row: int, double: bool = False) -> Step:
        """An uncached pass over one row."""
        model = self.model
        step = Step.alone(model.specs, (1, len(self.ids[row])), model.device)
        if self.sources is not None:
            crossed = model.cross_inputs(self.sources[row], 1)
            step.source = doubled(crossed) if double else crossed
        return step

    def shared(self, ids: Tensor, step: Step) -> Any:
        """What all blocks share in a pass over one row, ids [T]."""
        return self.model.enter(self.model.embed(ids[None].to(self.model.device)), step.positions)[1]

    def where(self, place: int) -> tuple[int, int]:
        """The row and position of a place."""
        return next((s, place - row.start) for s, row in enumerate(self.rows) if place in row)

    def exact(self) -> Tensor:
        """[N, vocab]: the logits of the same passes with every block in double precision, one block at a time.

        A block whose code insists on another dtype cannot run so; then it is `truth`, and `single` says why.
        """
        try:
            return self._exact()
        except (RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.single = str(error).strip().partition("\n")[0]
            return self.truth

    def _exact(self) -> Tensor:
        steps = [self.step(s, double=True) for s in range(len(self.rows))]
        shared = [doubled(self.shared(ids, step)) for ids, step in zip(self.ids, steps, strict=True)]
        xs = [watch.inputs[0].double() for watch in self.watches]
        for i, block in enumerate(self.model.blocks):
            wide = in_double(block)
            xs = [wide(x, step.memory(i), more) for x, step, more in zip(xs, steps, shared, strict=True)]
        return torch.cat([self.model.unembed(x.to(self.model.dtype))[0] for x in xs])

    def blocks(self) -> list[BlockTable]:
        """Each block on the inputs it had in the uncached pass, in double precision."""
        steps = [self.step(s, double=True) for s in range(len(self.rows))]
        shared = [doubled(self.shared(ids, step)) for ids, step in zip(self.ids, steps, strict=True)]
        tables = []
        for i, block in enumerate(self.model.blocks):
            wide = block if self.single is not None else in_double(block)
            outs: list[Tensor] = []
            routed: list[Tensor] = []
            for watch, step, more in zip(self.watches, steps, shared, strict=True):
                if self.single is not None:
                    outs.append(watch.outputs[i][0])
                    continue
                with routing(wide) as chosen:
                    outs.append(wide(watch.inputs[i].double(), step.memory(i), more)[0])
                routed += [chosen[0][0]] if chosen else []
            plain = [watch.chosen[i] for watch in self.watches]
            tables.append(
                BlockTable(
                    torch.cat([watch.inputs[i][0] for watch in self.watches]),
                    torch.cat([watch.outputs[i][0] for watch in self.watches]),
                    torch.cat(outs),
                    torch.cat([one[0] for one in plain if one is not None]) if routed else None,
                    torch.cat(routed) if routed else None,
                )
            )
        return tables


class BlockTable:
    """One block in the uncached passes: inputs [N, W], exact [N, W] and scale [N], the experts of each token."""

    def __init__(
        self, inputs: Tensor, made: Tensor, exact: Tensor, chosen: Tensor | None, chosen_exactly: Tensor | None
    ) -> None:
        self.inputs, self.exact, self.scale = inputs, exact, tolerance.scales(exact)
        self.chosen = None if chosen is None else chosen.sort(dim=-1).values  # [N, K]
        self.rounding = tolerance.errors(made, exact, self.scale)  # [N] of the uncached pass
        self.ties = 0
        if self.chosen is not None and chosen_exactly is not None:
            # A near-tie: in double precision the token goes to other experts, so there is nothing to compare with.
            tied = (self.chosen != chosen_exactly.sort(dim=-1).values).any(dim=-1)
            self.ties = int(tied.sum())
            self.chosen[tied] = -1
            self.rounding = self.rounding.masked_fill(tied, 0.0)

    def flipped(self, routed: Tensor, places: Tensor) -> Tensor:
        """[n, K], [n] -> [n]: which tokens went to other experts than without a cache."""
        assert self.chosen is not None
        return (routed.sort(dim=-1).values != self.chosen[places]).any(dim=-1)


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
