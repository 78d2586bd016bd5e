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
from lamina.checking.choices import choices, differ, joined
from lamina.checking.watch import Watch
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
        self.elsewhere = torch.zeros(len(self.flat_ids), dtype=torch.bool)
        """[N]: tokens for which double precision chooses other experts, or other tokens to read, and those behind them
        in their row: `exact` and `truth` differ there by more than rounding."""

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
        others = torch.zeros_like(self.elsewhere, device=self.model.device)
        for i, block in enumerate(self.model.blocks):
            wide = in_double(block)
            for s, (step, row) in enumerate(zip(steps, self.rows, strict=True)):
                with choices([wide]) as made:
                    xs[s] = wide(xs[s], step.memory(i), shared[s])
                chosen, exactly = self.watches[s].chosen[i], joined(made[0])
                if chosen is not None and exactly is not None:
                    others[row.start : row.stop] |= differ(chosen, exactly)[0]
        self.elsewhere = self.behind(others.cpu())
        return torch.cat([self.model.unembed(x.to(self.model.dtype))[0] for x in xs])

    def behind(self, tokens: Tensor) -> Tensor:
        """[N] -> [N]: these tokens and all that come after one of them in its row."""
        return torch.cat([tokens[row.start : row.stop].cummax(0).values for row in self.rows])

    def chosen(self, block: int) -> Tensor | None:
        """[N, K]: what a block chose for each token in the uncached passes; None if it makes no choices."""
        made = [one for watch in self.watches if (one := watch.chosen[block]) is not None]
        return torch.cat([one[0] for one in made]) if made else None

    def blocks(self) -> list[BlockTable]:
        """Each block on the inputs it had in the uncached pass, in double precision."""
        steps = [self.step(s, double=True) for s in range(len(self.rows))]
        shared = [doubled(self.shared(ids, step)) for ids, step in zip(self.ids, steps, strict=True)]
        tables = []
        for i, block in enumerate(self.model.blocks):
            wide = block if self.single is not None else in_double(block)
            outs: list[Tensor] = []
            chosen_exactly: list[Tensor] = []
            for watch, step, more in zip(self.watches, steps, shared, strict=True):
                if self.single is not None:
                    outs.append(watch.outputs[i][0])
                    continue
                with choices([wide]) as made:
                    outs.append(wide(watch.inputs[i].double(), step.memory(i), more)[0])
                exactly = joined(made[0])
                chosen_exactly += [] if exactly is None else [exactly[0]]
            tables.append(
                BlockTable(
                    torch.cat([watch.inputs[i][0] for watch in self.watches]),
                    torch.cat([watch.outputs[i][0] for watch in self.watches]),
                    torch.cat(outs),
                    self.chosen(i) if chosen_exactly else None,
                    torch.cat(chosen_exactly) if chosen_exactly else None,
                )
            )
        return tables


class BlockTable:
    """One block in the uncached passes: inputs [N, W], exact [N, W] and scale [N], what it chose for each token."""

    def __init__(
        self, inputs: Tensor, made: Tensor, exact: Tensor, chosen: Tensor | None, chosen_exactly: Tensor | None
    ) -> None:
        self.inputs, self.exact, self.scale = inputs, exact, tolerance.scales(exact)
        self.chosen = chosen  # [N, K]
        self.rounding = tolerance.errors(made, exact, self.scale)  # [N] of the uncached pass
        self.ties = 0
        if self.chosen is not None and chosen_exactly is not None:
            # A near-tie: double precision chooses something else, so there is nothing to compare with.
            tied = differ(self.chosen, chosen_exactly)
            self.ties = int(tied.sum())
            self.chosen[tied] = -1
            self.rounding = self.rounding.masked_fill(tied, 0.0)

    def flipped(self, chosen: Tensor, places: Tensor) -> Tensor:
        """[n, K], [n] -> [n]: for which tokens the block chose something else than without a cache."""
        assert self.chosen is not None
        return differ(chosen, self.chosen[places])


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
