"""`OpaqueState`: what a recurrent layer of transformers keeps of a row, as tensors of which only shapes are known.

transformers shows a state after a call, and not how it came about, so it cannot be folded over fewer tokens like a
`Recurrent` state. The layer therefore stores the states after each of the last `slack` + 1 tokens, in a ring:

    data[name]   [B, R, *shape]    the state after n tokens is in slot n % R;  R = slack + 2, or 1 without slack

One more than needed, as for the tokens of a ring: a row that was rewound by n tokens and then got n + 1 others can
still be rewound by the slack. A row without tokens has no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from lamina.cache.clock import Clock, allocate
from lamina.cache.layers.base import Key, Layer
from lamina.cache.spec import Keeping, Spec
from lamina.cache.step import Step

States = Mapping[str, Tensor]


class StatesOfPass(Protocol):
    """What a pass leaves for commit: the states of all layers."""

    def after(self, accepted: Tensor) -> Mapping[Key, States]:
        """The states after each row's last accepted tokens: [R, N, *shape], the newest first. Changes nothing."""
        ...


@dataclass(frozen=True)
class OpaqueState(Spec):
    """The states of one layer of a transformers model."""

    uses_positions = False
    parts: tuple[tuple[str, tuple[int, ...], str], ...]
    """(name, shape for one row, dtype) of each tensor"""

    def layer(self, keeping: Keeping | None) -> Layer:
        return OpaqueLayer(self, keeping)


@dataclass
class Pending:
    """One entry of what a pass leaves."""

    key: Key
    states: StatesOfPass


class OpaqueLayer(Layer):
    spec: OpaqueState
    written_by_pass = True

    def __init__(self, spec: OpaqueState, keeping: Keeping | None) -> None:
        super().__init__(spec)
        self.slack = keeping.slack if keeping else 0
        self.states = tuple(name for name, _, dtype in spec.parts if getattr(torch, dtype).is_floating_point)
        if keeping is not None:
            for name, shape, dtype in spec.parts:
                full = (keeping.rows, self.ring, *shape)
                self.data[name] = allocate(full, getattr(torch, dtype), keeping.device)

    @property
    def ring(self) -> int:
        return self.slack + 2 if self.slack else 1

    @property
    def kind(self) -> str:
        return "state"

    def head(self, step: Step) -> dict[str, Tensor]:
        """The state [R, *shape] of each row of the pass before it; meaningless for a row without tokens."""
        return {name: states[step.row_index, step.before % self.ring] for name, states in self.data.items()}

    def leave(self, step: Step, key: Key, states: StatesOfPass) -> None:
        """Hands the states of this pass over to commit."""
        if not self.bare:
            step.leave(key, Pending(key, states))

    def fold(self, step: Step, pending: Pending, accepted: Tensor) -> States:
        return pending.states.after(accepted).get(pending.key, {})

    def commit(self, step: Step, new: States, accepted: Tensor) -> None:
        if not new:  # a pass of padding alone
            return
        for name, states in self.data.items():
            for back in range(new[name].shape[1]):
                slots = (step.before + accepted - back) % self.ring
                some = (accepted > back).reshape(-1, *(1,) * (states.dim() - 2))
                old = states[step.row_index, slots]
                states[step.row_index, slots] = torch.where(some, new[name][:, back].to(old.dtype), old)

    # -- verbs -----------------------------------------------------------------------------------------------------

    def rewindable(self, clock: Clock) -> Tensor:
        kept = (self.slack + 1 - (clock.written - clock.lengths)).clamp(min=0, max=self.slack)
        return torch.minimum(kept, clock.lengths - clock.base)

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        back = clock.lengths[:, None] - torch.arange(self.ring, device=clock.lengths.device)  # [B, R] how many tokens
        kept = (back > 0) & (clock.lengths[:, None] - back <= self.rewindable(clock)[:, None])
        unused = torch.ones_like(kept).scatter(1, back % self.ring, ~kept)
        for name in self.states:
            states = self.data[name]
            states.masked_fill_(unused.reshape(*unused.shape, *(1,) * (states.dim() - 2)), value)

    def fit(self, like: Self, clock: Clock) -> Self:
        kept = {name: states.to(like.data[name].dtype) for name, states in self.data.items()}
        if self.slack == like.slack:
            return self._with(kept)
        back = torch.arange(like.ring, device=clock.lengths.device)
        after = (clock.lengths[:, None] - back).clamp(min=0)  # [B, R of like] numbers of tokens, the newest first
        rows = torch.arange(len(after), device=after.device)[:, None]
        new = self._with({name: states[rows, after % self.ring] for name, states in kept.items()})
        for name, states in new.data.items():  # from the newest first to the slots of like
            new.data[name] = torch.empty_like(states).index_put_((rows, after % like.ring), states)
        new.slack = like.slack
        return new
