"""Cross attention: keys and values of a source, written once for all passes, with lengths of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from lamina.attention.core import attention
from lamina.attention.view import View
from lamina.attention.window import Full
from lamina.cache.clock import Clock, allocate
from lamina.cache.layer import Key, Layer
from lamina.cache.layout import Layout
from lamina.cache.spec import Cross, Keeping
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.reordering import Moves
    from lamina.cache.step import Step


@dataclass(frozen=True)
class Source:
    """What an encoder made of its input: states [B, S, width] and how many of the S are real."""

    states: Tensor
    lengths: Tensor

    def select(self, rows: Sequence[int]) -> Source:
        """The given rows, in that order; a row may be named more than once."""
        index = torch.tensor(list(rows), device=self.states.device)
        return Source(self.states[index], self.lengths[index])


class CrossLayer(Layer):
    """Keys and values [B, H, S, D] of the source; `lengths` [B], 0 where a row has none."""

    spec: Cross

    def __init__(self, spec: Cross, keeping: Keeping | None) -> None:
        super().__init__(spec)
        if keeping is not None:
            for name, dim in (("k", spec.key_dim), ("v", spec.value_dim)):
                self.data[name] = allocate((keeping.rows, spec.kv_heads, 0, dim), keeping.dtype, keeping.device)
            self.data["lengths"] = allocate((keeping.rows,), torch.int64, keeping.device)

    @property
    def slots(self) -> int:
        return self.data["k"].shape[-2]

    def attach(self, k: Tensor, v: Tensor, lengths: Tensor, rows: Tensor) -> None:
        """k, v: [R, H, S, D] of these rows' source."""
        self.widen(k.shape[-2])
        slots = k.shape[-2]
        for name, new in (("k", k), ("v", v)):
            self.data[name].index_fill_(0, rows, 0)
            self.data[name][rows, :, :slots] = new.to(self.data[name].dtype)
        self.data["lengths"].index_copy_(0, rows, lengths)

    def widen(self, slots: int) -> None:
        for name in ("k", "v"):
            old = self.data[name]
            if old.shape[-2] < slots:
                self.data[name] = allocate((*old.shape[:-2], slots, old.shape[-1]), old.dtype, old.device)
                self.data[name][..., : old.shape[-2], :].copy_(old)

    def attend(self, step: Step, key: Key, q: Tensor, k: Tensor | None, v: Tensor | None, **how: object) -> Tensor:
        held = step.source_of(key) if self.bare else {name: step.take(t) for name, t in self.data.items()}
        if held is None or held["k"].shape[-2] == 0:
            raise InputError(
                "this model reads a source, and none is attached: make one with model.encode(ids) and give it to "
                "model.new_cache(rows, source=source), cache.attach(source) or, without a cache, model(ids, source=…)"
            )

        def make() -> View:
            positions = Layout().positions(held["k"].shape[-2], held["lengths"])
            return View(step.positions, positions, Full(), causal=False)

        view = step.view(("cross", held["k"].shape[-2]), make)
        return attention(q, held["k"], held["v"], view, backend=step.backend_of(key), **how)  # type: ignore[arg-type]

    def reset(self, index: Tensor) -> None:
        self.data["lengths"].index_fill_(0, index, 0)

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        unused = Layout().positions(self.slots, self.data["lengths"]) < 0
        for name in ("k", "v"):
            self.data[name].masked_fill_(unused[:, None, :, None], value)

    def reorder(self, moves: Moves) -> None:
        super().reorder(moves.unrelated)  # rows that share tokens share their source

    def fit(self, like: Self, clock: Clock) -> Self:
        new = self._with(dict(self.data))
        new.widen(like.slots)
        return new
