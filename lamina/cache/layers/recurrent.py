"""The layers that summarize the past in a state: causal convolutions and recurrences.

A convolution stores its last inputs, in a ring like that of a sliding window.

A recurrence stores the *head*, its state after the row's last token. To be rewound by up to `slack` tokens it also
stores a *base*, an older state at most 2·slack tokens behind the head, and a *log* of the inputs since the base. A
rewind folds: it runs the recurrence from the base over fewer of the logged inputs. That takes two states and 2·slack
inputs instead of `slack` states.

    tokens    0 1 2 3 4 5 6 7 8 9
                    ^base       ^head            slack 3: rows can be rewound to position 4
              the log holds the inputs of 4 … 9

When the log is full the base moves to `slack` tokens behind the head. A pass does not change the committed state:
commit replaces it, and if only some tokens were accepted it first folds the old state over those. One exception: a pass
over empty rows whose tokens will all be accepted writes the new states at once, since many rows of states would take as
much memory as the cache again (8 GiB for 64 rows of a 7b). If that pass is aborted the states are zeroed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from lamina.attention.window import Sliding
from lamina.cache.clock import Clock
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.layout import Layout
from lamina.cache.layers.newest import gather_tokens, newest_of_packed
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.storage.device import read_slots, write_slots
from lamina.cache.storage.host import storage_for
from lamina.recurrence.rule import Rule
from lamina.tracing import cast

if TYPE_CHECKING:
    from lamina.cache.packed_rows import PackedRows
    from lamina.cache.spec import Convolution, Keeping, Recurrent
    from lamina.cache.step import Step
    from lamina.cache.storage.prefetch import SlotRuns, StagedPass

Inputs = Mapping[str, Tensor]


class ConvolutionLayer(TokenLayer):
    """The last `kernel` inputs [B, S, C] of a causal depthwise convolution."""

    spec: Convolution
    pageable = False  # it has a few slots only, and every pass reads them

    def __init__(self, spec: Convolution, keeping: Keeping | None) -> None:
        super().__init__(spec, {"x": (spec.channels,)}, Sliding(spec.kernel), keeping)
        if keeping is not None:  # small, and every pass reads all of it: allocated whole, never grown
            assert self.layout.ring is not None
            self.grows = False
            self.storage.widen(self.data, self.layout.ring)

    @property
    def kind(self) -> str:
        return f"convolution {self.spec.kernel}"

    def past(self, step: Step, key: Key, x: Tensor) -> Tensor:
        """The K - 1 inputs [B, K - 1, C] before this pass's inputs x [B, T, C]; commit will store x."""
        if self.bare:
            return x.new_zeros(x.shape[0], self.spec.kernel - 1, x.shape[2])
        past = self._past(step)
        step.leave(key, self._newest(step, {"x": x}))
        return cast(past, x.dtype)

    def past_of_packed(self, step: Step, key: Key, x: Tensor, rows: PackedRows) -> Tensor:
        """`past` [R, K - 1, C] for rows side by side on one token axis, x [1, N, C]; see `packs`."""
        past, ring = self._past(step), self.layout.ring
        assert ring is not None
        step.leave(key, newest_of_packed({"x": x}, rows, ring))
        return cast(past, x.dtype)

    def _past(self, step: Step) -> Tensor:
        back, start = self.spec.kernel - 1, step.start
        if start is not None:  # rows of one length: ranges of slots
            held = [
                self.storage.read_run(self.data, step, *run)["x"]
                for run in self.layout.runs(max(start - back, 0), start)
            ]
            missing = back - min(start, back)
            if missing or not held:
                store = self.data["x"]
                held.insert(0, store.new_zeros(len(step.before), missing, store.shape[-1], device=step.before.device))
            return held[0] if len(held) == 1 else torch.cat(held, dim=1)
        positions = step.before[:, None] + torch.arange(-back, 0, device=step.before.device)  # [B, K - 1]
        past = self.storage.read(self.data, step.row_index, self.layout.slots(positions.clamp(min=0)))["x"]
        return past.masked_fill((positions < 0)[..., None], 0)


@dataclass
class PendingUpdate:
    """What a pass leaves for commit."""

    inputs: Inputs  # name -> [R, T, *shape]
    constants: Inputs
    state: Tensor | None  # [R, *state] after all real tokens of the pass; None: the pass has written it


@dataclass
class StateUpdate:
    """What commit writes."""

    pending: PendingUpdate
    head: Tensor | None  # [R, *state] after the accepted tokens; None: the pass has written it
    base: Tensor | None  # [R, *state]; None: unchanged


@dataclass
class HostStateUpdate:
    """What commit writes to a layer that is stored on the host."""

    pending: PendingUpdate
    device_copy: RecurrentLayer | None  # the layer in a staging buffer, with its new values; None: nothing was folded


class RecurrentLayer(Layer):
    """data: `head` [B, *state]; with slack also `base` and `log.<input>` [B, 2·slack, *shape]."""

    spec: Recurrent
    states = ("head", "base")
    written_by_pass = True

    def __init__(self, spec: Recurrent, keeping: Keeping | None) -> None:
        super().__init__(spec)
        self.slack = keeping.slack if keeping else 0
        self.log = Layout(ring=max(2 * self.slack, 1))
        self.storage = storage_for(keeping, by_token=False)
        if keeping is not None:
            state = (keeping.rows, *self.rule.state_shape)
            exact = torch.promote_types(keeping.dtype, torch.float32)
            self.data["head"] = self.storage.make_state(state, exact, keeping.device, later=True)
            if self.slack:
                self.data["base"] = self.storage.make_state(state, exact, keeping.device, later=True)
                for name, shape in self.rule.input_shapes.items():
                    entry = (keeping.rows, 2 * self.slack, *shape)
                    dtype = exact if name in self.rule.exact else keeping.dtype
                    self.data[f"log.{name}"] = self.storage.make_state(entry, dtype, keeping.device, later=True)

    @property
    def rule(self) -> Rule:
        return self.spec.rule

    @property
    def kind(self) -> str:
        return type(self.rule).__name__

    def columns(self) -> dict[str, int]:
        columns = {"k": self.data["head"].data_ptr()}
        if self.slack:
            columns |= {"slack": self.slack, "base": self.data["base"].data_ptr()}
            columns |= {
                f"log.{i}": self.data[f"log.{name}"].data_ptr() for i, name in enumerate(self.rule.input_shapes)
            }
        return columns

    def state(self, step: Step, inputs: Mapping[str, Tensor]) -> Tensor:
        """The state [B, *state] before this pass's inputs [B, T, *shape]."""
        if not self.bare:
            return self.storage.take(step, self.data["head"])
        like = next(iter(inputs.values()))
        exact = torch.promote_types(like.dtype, torch.float32)
        return like.new_zeros((like.shape[0], *self.rule.state_shape), dtype=exact)

    def leave(self, step: Step, key: Key, inputs: Inputs, constants: Inputs, state: Tensor) -> None:
        """Hands the inputs of this pass, and the state after its real tokens, over to commit."""
        if self.bare:
            return
        if self.writes_at_once(step):
            step.write_at_once(self)
            self.storage.put(step, self.data["head"], state)
            step.leave(key, PendingUpdate({}, constants, None))
        else:
            step.leave(key, PendingUpdate({} if self.needs_state_alone(step) else inputs, constants, state))

    def needs_state_alone(self, step: Step) -> bool:
        """Whether commit needs the new state and no inputs: all tokens will be taken, and there is no log of them."""
        return self.bare or (step.whole and not self.slack)

    def writes_at_once(self, step: Step) -> bool:
        """Whether the new state need not wait for commit: all tokens will be taken, and an abort knows the old state,
        which was zero."""
        alone = self.needs_state_alone(step) and step.empty_before and not step.exported
        return alone and step.staged is None and self.storage.residence == "device"

    # -- commit and rewind -----------------------------------------------------------------------------------------

    def fold(self, step: Step, pending: PendingUpdate, accepted: Tensor) -> StateUpdate:
        old, base = self.storage.take(step, self.data["head"]), None
        head = pending.state
        if accepted is not step.all_counts:
            head = self._fold(old, pending.inputs, accepted, pending.constants)
        if self.slack and step.moves_base:
            base = self._moved_base(step, pending, old, accepted)
        return StateUpdate(pending, head, base)

    def commit(self, step: Step, update: StateUpdate, accepted: Tensor) -> None:
        if not step.exported:  # an exported program has those of the pass before it was traced
            self.constants = update.pending.constants
        if update.base is not None:
            self.storage.put(step, self.data["base"], update.base)
        if self.slack:
            self._write_log(step, update.pending.inputs, accepted)
        if update.head is not None:
            self.storage.put(step, self.data["head"], update.head)

    def _fold(self, state: Tensor, inputs: Inputs, counts: Tensor, constants: Inputs) -> Tensor:
        """The state after the first `counts` [B] of the inputs [B, N, *shape]."""
        tokens = next(iter(inputs.values())).shape[1]
        valid = torch.arange(tokens, device=counts.device) < counts[:, None]
        return self.rule.chunk(state, inputs, constants, valid)[1]

    def _moved_base(self, step: Step, pending: PendingUpdate, head: Tensor, accepted: Tensor) -> Tensor:
        """The new base [R, *state] of each row: `slack` tokens behind the new head if its log would overflow."""
        base_at, target = step.base, step.base_after(accepted)  # [R]
        logged = torch.minimum(target, step.before) - base_at
        base = self.storage.take(step, self.data["base"])
        from_log = self._fold(base, self._logged(base_at, self.storage.rows(step)), logged, pending.constants)
        from_pass = self._fold(head, pending.inputs, (target - step.before).clamp(min=0), pending.constants)
        beyond = (target > step.before).reshape(-1, *(1,) * (base.dim() - 1))
        return torch.where(beyond, from_pass, from_log)

    def _logged(self, base: Tensor, rows: Tensor) -> Inputs:
        """The log in order of position, from each row's base on: name -> [R, 2·slack, *shape]."""
        positions = base[:, None] + torch.arange(2 * self.slack, device=base.device)
        slots = self.log.slots(positions)
        return {
            name: self.storage.to_device(self._read_log(name, rows, slots)).reshape(*slots.shape, *shape)
            for name, shape in self.rule.input_shapes.items()
        }

    def _read_log(self, name: str, rows: Tensor, slots: Tensor) -> Tensor:
        log = self._flat(name)
        return read_slots(log, rows.to(log.device), slots.to(log.device))

    def _flat(self, name: str) -> Tensor:
        return (
            self.data[f"log.{name}"].flatten(2) if self.rule.input_shapes[name] else self.data[f"log.{name}"][..., None]
        )

    def _write_log(self, step: Step, inputs: Inputs, accepted: Tensor) -> None:
        last = accepted[:, None] - 1
        newest = last - torch.arange(min(2 * self.slack, step.T), device=last.device)
        tokens = torch.where(newest >= 0, newest, last).clamp(min=0)
        slots = self.log.slots(step.positions.gather(1, tokens))
        for name in self.rule.input_shapes:
            flat = self._flat(name)
            new = gather_tokens(inputs[name].reshape(*inputs[name].shape[:2], -1), tokens)
            rows = self.storage.rows(step)
            kept = read_slots(flat, rows, slots)
            write_slots(flat, rows, slots, torch.where((accepted > 0)[:, None, None], new.to(kept.dtype), kept))

    # -- on the host -----------------------------------------------------------------------------------------------

    def needed(self, lengths: list[int]) -> SlotRuns:
        return self._whole("head", len(lengths))

    def _whole(self, name: str, rows: int) -> SlotRuns:
        return {name: [(row, 0, self.data[name].shape[1]) for row in range(rows)]}

    def offload(self, pending: PendingUpdate, staged: StagedPass) -> PendingUpdate:
        if not staged.all_rows or pending.state is None:
            return pending
        return replace(pending, state=staged.copy_to_host(pending.state, self.data["head"].dtype))

    def fold_from_host(
        self, staged: StagedPass, step: Step, pending: PendingUpdate, accepted: Tensor
    ) -> HostStateUpdate:
        rows, whole = len(staged.rows), staged.taken == staged.counts
        if not self.slack and whole:
            return HostStateUpdate(pending, None)
        reads: SlotRuns = self._whole("head", rows) if step.moves_base or not whole else {}
        for name in self.data if step.moves_base else ():
            reads |= self._whole(name, rows)
        device_copy = staged.stage(self, step, reads)
        head = device_copy.data["head"]
        if self.slack:
            if step.moves_base:
                device_copy.data["base"].copy_(device_copy._moved_base(step, pending, head, accepted))
            device_copy._write_log(step, pending.inputs, accepted)
        if not whole:
            head.copy_(device_copy._fold(head, pending.inputs, accepted, pending.constants))
        return HostStateUpdate(pending, device_copy)

    def commit_to_host(self, staged: StagedPass, step: Step, update: HostStateUpdate, accepted: Tensor) -> None:
        rows, whole, device_copy = len(staged.rows), staged.taken == staged.counts, update.device_copy
        self.constants, new = update.pending.constants, update.pending.state
        assert new is not None  # states on the host are written by commit alone
        if device_copy is not None:
            changed: SlotRuns = {} if whole else self._whole("head", rows)
            if self.slack:
                changed |= self._whole("base", rows) if step.moves_base else {}
                for name in self.rule.input_shapes:
                    starts = enumerate(zip(staged.lengths, staged.taken, strict=True))
                    changed[f"log.{name}"] = [(r, *run) for r, (at, n) in starts for run in self.log.runs(at, at + n)]
            staged.write_back(self, device_copy.data, changed)
        if whole and staged.all_rows:
            self.data["head"] = new  # in host memory: its copy started in the pass (`offload`)
        elif whole:
            state = new.to(self.data["head"].dtype).contiguous()
            staged.write_back(self, {"head": state}, self._whole("head", rows))

    # -- verbs -----------------------------------------------------------------------------------------------------

    def rewindable(self, clock: Clock) -> Tensor | None:
        return clock.lengths - clock.base

    def rewind(self, clock: Clock, changed: Tensor) -> None:
        if self.slack and self.constants is not None:
            self.storage.settle()
            rows = torch.arange(clock.rows, device=changed.device)
            logged = self._logged(clock.base, rows)
            base, kept = self.storage.to_device(self.data["base"]), self.data["head"]
            exact = torch.promote_types(base.dtype, torch.float32)  # a snapshot may store states in a smaller dtype
            head = self._fold(base.to(exact), logged, clock.lengths - clock.base, self.constants).to(kept.dtype)
            changed = changed.to(kept.device).reshape(-1, *(1,) * (kept.dim() - 1))
            kept.copy_(torch.where(changed, head.to(kept.device), kept))

    def reset(self, index: Tensor) -> None:
        self.storage.settle()
        for tensor in self.data.values():
            tensor.index_fill_(0, index.to(tensor.device), 0)

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        if self.slack:
            self.storage.settle()
            held = self.log.positions(2 * self.slack, clock.lengths)
            unused = held < clock.base[:, None]
            for name in self.rule.input_shapes:
                log = self.data[f"log.{name}"]
                log.masked_fill_(unused.to(log.device).reshape(*unused.shape, *(1,) * (log.dim() - 2)), value)

    def fit(self, like: Self, clock: Clock) -> Self:
        self.storage.settle()
        exact = like.data["head"].dtype  # a snapshot may store states in a smaller dtype
        states = {name: x.to(exact) if name in self.states else x for name, x in self.data.items()}
        if self.slack == like.slack:
            return self._with(states)
        new = self._with({"head": states["head"], "base": states.get("base", states["head"])})
        held = like.log.positions(2 * like.slack, clock.lengths).clamp(min=0)
        rows = torch.arange(len(held), device=held.device)
        for name in self.rule.input_shapes:
            old = like.data[f"log.{name}"]
            log = self.storage.make_state((len(held), *old.shape[1:]), old.dtype, old.device)
            new.data[f"log.{name}"] = log
            if self.slack:
                log.copy_(self._read_log(name, rows, self.log.slots(held)).reshape(log.shape))
        new.slack, new.log = like.slack, like.log
        return new

    @classmethod
    def join(cls, layers: list[Self]) -> Self:
        new = super().join(layers)
        new.constants = next((one.constants for one in layers if one.constants is not None), None)
        return new
