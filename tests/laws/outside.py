"""A kind of memory defined outside the package: the largest input so far, by channel.

It shows all that a new kind needs: a spec, and a layer that says how a pass reads and writes it, what commit does, how
far it can be taken back and how it is laid out for another slack. The verbs and the laws are then the same as for the
kinds inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lamina.cache import Keeping, Layer, Spec, Step
from lamina.cache.clock import Clock, allocate
from lamina.cache.layers.base import Key
from lamina.cache.layers.layout import Layout


@dataclass(frozen=True)
class Peak(Spec):
    """The largest input so far, by channel."""

    calls = ("highest",)
    channels: int

    def layer(self, keeping: Keeping | None) -> PeakLayer:
        return PeakLayer(self, keeping)


class PeakLayer(Layer):
    """`peaks` [B, slack + 2, C]: a ring with the peak after each of the last tokens.

    One slot is the peak itself, `slack` are to go back to, and one is lost to a token that was given and not taken.
    """

    def __init__(self, spec: Peak, keeping: Keeping | None) -> None:
        super().__init__(spec)
        self.slack = keeping.slack if keeping else 0
        self.ring = Layout(ring=self.slack + 2)
        if keeping is not None:
            self.data["peaks"] = allocate((keeping.rows, self.slack + 2, spec.channels), keeping.dtype, keeping.device)

    def highest(self, step: Step, key: Key, x: Tensor) -> Tensor:
        """x [B, T, C] -> the largest so far [B, T, C]"""
        if self.bare:
            return step.packed(step.unpacked(x).cummax(dim=1).values)
        slot = self.ring.slots((step.before - 1).clamp(min=0))[:, None, None].expand(-1, 1, x.shape[-1])
        past = step.take(self.data["peaks"]).gather(1, slot)
        past = past.masked_fill((step.before == 0)[:, None, None], -torch.inf)
        x = x if step.valid is None else x.masked_fill(~step.valid[..., None], -torch.inf)
        peaks = torch.cat([past, x], dim=1).cummax(dim=1).values[:, 1:]
        step.leave(key, peaks)
        return peaks

    def commit(self, step: Step, left: Tensor, accepted: Tensor) -> None:
        old = step.take(self.data["peaks"])
        held = self.ring.positions(old.shape[1], step.before + accepted)  # [R, S]
        token = held - step.before[:, None]
        new = left.gather(1, token.clamp(0, step.T - 1)[..., None].expand(-1, -1, left.shape[-1]))
        step.put(self.data["peaks"], torch.where((token >= 0)[..., None], new, old))

    def rewindable(self, clock: Clock) -> Tensor:
        kept = (self.slack + 1 - (clock.written - clock.lengths)).clamp(0, self.slack)
        return torch.where(clock.written <= self.slack + 2, clock.lengths, kept)

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        held = self.ring.positions(self.slack + 2, clock.lengths)
        unused = (held < 0) | (
            held + self.slack + 2 < clock.written[:, None]
        )  # or taken by a token that was taken back
        self.data["peaks"].masked_fill_(unused[..., None], value)

    def fit(self, like: Self, clock: Clock) -> Self:
        held = like.ring.positions(like.slack + 2, clock.lengths).clamp(min=0)
        index = self.ring.slots(held)[..., None].expand(-1, -1, self.data["peaks"].shape[-1])
        new = self._with({"peaks": self.data["peaks"].gather(1, index)})
        new.slack, new.ring = like.slack, like.ring
        return new
