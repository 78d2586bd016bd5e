"""`StateLayer`: a state that a model computes by itself, such as that of a recurrence.

Lamina's own models give the inputs of a recurrence, so its state can be computed again (cache/layers/recurrent.py). A
model of transformers shows a state only at the end of each pass. With slack, the states at the ends of the last passes
are kept: that of position p in slot p % slack, if a pass ended there. A row can be rewound to those positions alone.

    slack 4, after passes of 7, 1, 1 and 2 tokens:    slot        0  1  2  3
                                                      position    8  9  -  7        and the state of position 11
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from lamina.cache.clock import Clock
from lamina.cache.layers.base import Layer
from lamina.cache.storage.device import Storage
from lamina.cache.storage.host import HostStorage
from lamina.errors import RewindError

if TYPE_CHECKING:
    from lamina.cache.spec import Keeping, Spec
    from lamina.cache.step import Step


class StateStorage(Storage):
    """On the host, in pinned memory if the device is a GPU. It is not staged: a model asks for a state when it runs,
    and gets a copy on the device."""

    residence = "host"

    def __init__(self, device: torch.device) -> None:
        self._host = HostStorage(device, by_token=False)

    def make_state(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, later: bool = False) -> Tensor:
        return self._host.make_state(shape, dtype, device)

    def select(self, tensor: Tensor, index: Tensor) -> Tensor:
        return self._host.select(tensor, index)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._host.join(tensors)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._host.device, non_blocking=True)


class Replacement(NamedTuple):
    """What commit writes: the new state, and the one before this pass."""

    new: Tensor
    old: Tensor


class StateLayer(Layer):
    """data: `state` [B, *shape]; with slack also `past` [B, slack, *shape], and `at` [B, slack], the position of each
    past state, -1 for none."""

    written_by_pass = True

    def __init__(self, spec: Spec, shape: Sequence[int], keeping: Keeping | None) -> None:
        super().__init__(spec)
        if keeping is None:
            return
        self.slack, device = keeping.slack, keeping.device
        self.storage = StateStorage(device) if keeping.residence == "host" else Storage()
        if keeping.dtype.is_floating_point:
            self.states = ("state", "past")
        self.data["state"] = self.storage.make_state((keeping.rows, *shape), keeping.dtype, device)
        if self.slack:
            self.data["past"] = self.storage.make_state((keeping.rows, self.slack, *shape), keeping.dtype, device)
            at = self.storage.make_state((keeping.rows, self.slack), torch.int64, device)
            self.data["at"] = at.fill_(-1)

    def live(self) -> Tensor:
        """The state, for a model that may change it in place in the next pass. With slack, or on the host, a copy."""
        if self.storage.residence == "device" and not self.slack:
            return self.data["state"]
        return self.storage.to_device(self.data["state"]).clone()

    # -- commit and rewind -----------------------------------------------------------------------------------------

    def fold(self, step: Step, pending: Tensor, accepted: Tensor) -> Replacement:
        return Replacement(pending, self.data["state"])

    def commit(self, step: Step, pending: Replacement, accepted: Tensor) -> None:
        new, old = pending
        if new is old:  # changed in place
            return
        if self.slack:
            rows, slots = self._rows(step.before), (step.before % self.slack).to(old.device)
            self.data["past"][rows, slots] = old
            self.data["at"][rows, slots] = step.before.to(old.device)
            self.data["state"] = self._stored(new)  # not in place: a commit that is repeated must find `old` unchanged
        else:
            old.copy_(new)

    def rewindable(self, clock: Clock) -> Tensor | None:
        lengths = clock.lengths
        if not self.slack:
            return torch.zeros_like(lengths)
        at = self.data["at"].to(lengths.device)
        back = lengths[:, None] - at  # [B, slack]
        return torch.where((at >= 0) & (back > 0), back, 0).amax(dim=1)

    def check_rewind(self, lengths: Sequence[int], kept: Sequence[int]) -> None:
        if not self.slack:
            return
        for row, (length, wanted, at) in enumerate(zip(lengths, kept, self.data["at"].tolist(), strict=True)):
            if wanted != length and wanted not in at:
                ends = ", ".join(str(position) for position in sorted(at) if position >= 0)
                raise RewindError(
                    f"row {row} of {length} tokens cannot be rewound to {wanted}: of its recurrent states, those after "
                    f"{ends} tokens are kept, where passes ended. Feed the tokens that may be dropped one by one, "
                    "which models do by themselves after lamina.bridge.attend(model)"
                )

    def rewind(self, clock: Clock, changed: Tensor) -> None:
        if not self.slack:
            return
        state, past, at = self.data["state"], self.data["past"], self.data["at"]
        lengths, back = clock.lengths.to(state.device), changed.to(state.device)
        rows, slots = self._rows(lengths), lengths % self.slack
        found = at[rows, slots] == lengths
        wanted = (back & found).reshape(-1, *(1,) * (state.dim() - 1))
        self.data["state"] = self._stored(torch.where(wanted, past[rows, slots], state))
        at.masked_fill_(at > lengths[:, None], -1)

    def reset(self, index: Tensor) -> None:
        for name, tensor in self.data.items():
            tensor.index_fill_(0, index.to(tensor.device), -1 if name == "at" else 0)

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        if self.slack and self.states:
            past = self.data["past"]
            unused = (self.data["at"] < 0).reshape(*past.shape[:2], *(1,) * (past.dim() - 2))
            past.masked_fill_(unused, value)

    def fit(self, like: Self, clock: Clock) -> Self:
        if self.slack == like.slack:
            return self
        rows, (_, *shape) = clock.rows, self.data["state"].shape
        state = self.data["state"]
        new = self._with({"state": state})
        new.slack = like.slack
        new.data["past"] = self.storage.make_state((rows, like.slack, *shape), state.dtype, state.device)
        new.data["at"] = self.storage.make_state((rows, like.slack), torch.int64, state.device).fill_(-1)
        if self.slack:
            row, slot = (self.data["at"] >= 0).nonzero(as_tuple=True)
            position = self.data["at"][row, slot]
            new.data["past"][row, position % like.slack] = self.data["past"][row, slot]
            new.data["at"][row, position % like.slack] = position
        return new

    def _stored(self, new: Tensor) -> Tensor:
        """A copy in memory of this layer's storage."""
        state = self.data["state"]
        copy = self.storage.make_state(state.shape, state.dtype, state.device)
        return copy.copy_(new)

    def _rows(self, like: Tensor) -> Tensor:
        return torch.arange(len(like), device=self.data["state"].device)
