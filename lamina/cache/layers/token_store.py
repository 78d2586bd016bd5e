"""`TokenStore`: tensors with one slot per token, laid out as a line or a ring, and the verbs of a cache over them.

A field is a tensor [B, *lead, S, D] with slots on the second last axis. A codec stores a field as several such parts
(codes, scales …); parts are written and read by slot like fields. A `Storage` says where the parts are: on the device,
on the host, or in pages. What a pass reads and writes is in `tokens.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from lamina.attention.window import Chunked, Sliding, Window
from lamina.cache.clock import Clock, allocate, allocate_several
from lamina.cache.codec.codec import Coding, Role
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Layer, grown
from lamina.cache.layers.layout import Layout
from lamina.cache.storage.device import Storage
from lamina.cache.storage.host import storage_for

if TYPE_CHECKING:
    from lamina.cache.ops.reorder import Moves
    from lamina.cache.spec import Keeping, Spec
    from lamina.cache.storage.paged import PagedPart
    from lamina.cache.storage.prefetch import SlotRuns

SMALLEST = 32  # slots a growing store starts with


def layout_for(window: Window, slack: int) -> Layout:
    """The layout that holds the tokens that a window can see, and `slack` more to rewind to.

    >>> layout_for(Sliding(4), slack=2)
    Layout(ring=6, keep=0)
    """
    if window.span is None:
        return Layout()
    keep = window.keep if isinstance(window, Sliding) else 0
    return Layout(ring=window.span + slack, keep=keep)


@cache
def column_of(part: str) -> str:
    """The kernel-table column for the address of a part.

    >>> column_of("v"), column_of("latent.codes"), column_of("latent.scales")
    ('v', 'k', 'k.scales')
    """
    field, _, rest = part.partition(".")
    field = field if field in ("k", "v") else "k"
    return field if rest in ("", "codes") else f"{field}.{rest}"


class TokenStore(Layer):
    """The memory of a layer with one slot per token."""

    layout: Layout

    roles: Mapping[str, Role] = {}
    """Field -> its role for the codec (key, value …); a field without a role is stored unquantized."""

    pageable = True

    def __init__(
        self, spec: Spec, fields: Mapping[str, tuple[int, ...]], window: Window, keeping: Keeping | None
    ) -> None:
        super().__init__(spec)
        self.window = window
        self.slack = keeping.slack if keeping else 0
        self.layout = layout_for(window, self.slack)
        self.grows = keeping is not None and keeping.capacity is None
        self.storage = storage_for(keeping)
        if keeping is None:
            self.coding = Coding()
        else:
            self.coding = Coding.of(keeping, self.roles, {name: dim for name, (*_, dim) in fields.items()})
            most = self.layout.most
            slots = keeping.capacity if keeping.capacity is not None else 0
            slots = slots if most is None else min(slots, most)
            for name, (*lead, dim) in fields.items():
                for part, (width, dtype) in self.coding.parts(name, dim, keeping.dtype).items():
                    self.data[part] = self.storage.make(keeping.rows, lead, slots, width, dtype, keeping.device)

    @property
    def slots(self) -> int:
        return self.storage.slots(self.data)

    @property
    def in_line(self) -> bool:
        return self.layout.ring is None and type(self.storage) is Storage

    @property
    def limit(self) -> int | None:
        if self.grows or self.bare or self.slots == self.layout.most:
            return None
        return self.slots

    @property
    def kind(self) -> str:
        name = super().kind
        match self.window:
            case Sliding(size=size, keep=keep):
                return f"{name}, sliding {size}" + (f" + first {keep}" if keep else "")
            case Chunked(size=size):
                return f"{name}, chunks of {size}"
        return name

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes(self.data)

    @property
    def format(self) -> str:
        return str(self.coding.codec) if self.coding.formats else super().format

    def columns(self) -> dict[str, int]:
        columns = self.storage.columns(self.data)
        columns["ring"], columns["keep"] = self.layout.ring or 0, self.layout.keep
        for name, part in self.data.items():
            columns[column_of(name)] = part.data_ptr()
        return columns

    # -- room ------------------------------------------------------------------------------------------------------

    @property
    def can_twin(self) -> bool:
        return not self.bare and self.slots == 0

    def reserve(self, tokens: int) -> None:
        if self.grows and not self.bare:
            self.widen(self._slots_for(tokens))

    def reserve_twins(self, twins: Sequence[Self], tokens: int) -> None:
        if not twins or type(self.storage) is not Storage or not self.grows:
            super().reserve_twins(twins, tokens)
            return
        slots = self._slots_for(tokens)
        if slots == 0:
            return
        every, stores = (self, *twins), []
        for old in self.data.values():
            shape = (*old.shape[:-2], slots, old.shape[-1])
            stores.append(allocate_several(len(every), shape, old.dtype, old.device))
        grows = slots != self.layout.most
        for one, *parts in zip(every, *stores, strict=True):
            one.data = dict(zip(self.data, parts, strict=True))
            one.grows = grows

    def _slots_for(self, tokens: int) -> int:
        """How many slots a layer that grows has after `reserve`."""
        most, have = self.layout.most, self.slots
        needed = tokens if most is None else min(tokens, most)
        slots = max(SMALLEST, grown(have, needed, self.expected)) if needed > have else have
        return slots if most is None else min(slots, most)

    def widen(self, slots: int) -> None:
        if slots > self.slots:
            self.storage.widen(self.data, slots)
        if (most := self.layout.most) is not None:
            self.grows = self.grows and self.slots != most

    def used(self, longest: int, written: int) -> Self:
        wrapped = self.layout.most is not None and written > self.layout.most
        end = self.slots if wrapped else longest  # slot == position until the ring wraps
        new = self._with(self.storage.cut(self.data, end))
        new.storage = self.storage.first(end)
        if end < self.slots == self.layout.most:
            new.grows = True  # a full ring that was cut may grow to its full size again
        return new

    def join_lines(self, parts: Sequence[Layer], rows: int, capacity: int | None, longest: int, slack: int) -> Self:
        """Joins the rows of layers that are all `in_line`, with room for the longest row. Each token is copied once."""
        slots = max(longest, SMALLEST, *(part.slots or 0 for part in parts)) if capacity is None else capacity
        new = self._with({})
        new.slack, new.grows = slack, capacity is None
        for name, like in self.data.items():
            store = allocate((rows, *like.shape[1:-2], slots, like.shape[-1]), like.dtype, like.device)
            at = 0
            for part in parts:
                old = part.data[name]
                count, *_, tokens, _ = old.shape
                store.narrow(0, at, count).narrow(-2, 0, tokens).copy_(old)
                at += count
            new.data[name] = store
        return new

    def row_line(self, row: int, tokens: int) -> Self:
        """The first tokens of one row of a layer that is `in_line`, as a view."""
        return self._with({name: store[row : row + 1, ..., :tokens, :] for name, store in self.data.items()})

    # -- on the host -----------------------------------------------------------------------------------------------

    def needed(self, lengths: list[int]) -> SlotRuns:
        span, layout, pieces = self.window.span, self.layout, []
        for row, length in enumerate(lengths):
            first = 0 if span is None else max(0, length + 1 - span)  # first position that the first new token sees
            if first:
                pieces += [(row, 0, min(layout.keep, first))]
            pieces += [(row, *run) for run in layout.runs(first, length)]
        return {name: pieces for name in self.data}

    def written(self, lengths: list[int], new: list[int]) -> SlotRuns:
        runs = [(row, *run) for row, n in enumerate(new) for run in self.layout.runs(lengths[row], lengths[row] + n)]
        return {name: runs for name in self.data}

    # -- verbs -----------------------------------------------------------------------------------------------------

    def rewindable(self, clock: Clock) -> Tensor | None:
        if self.layout.ring is None:
            return None
        kept = (self.slack + 1 - (clock.written - clock.lengths)).clamp(min=0, max=self.slack)
        never_overwritten = clock.written - self.layout.keep <= self.layout.ring
        return torch.where(never_overwritten, clock.lengths, kept)

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        if not self.slots:
            return
        held = self.layout.positions(self.slots, clock.lengths)  # [B, S]
        free = held < 0
        if self.layout.ring is not None:  # slots that a token overwrote which was then rejected or rewound
            free |= (held >= self.layout.keep) & (held + self.layout.ring < clock.written[:, None])
        self.storage.fill(self.data, free, value)

    def reorder(self, moves: Moves) -> None:
        self.storage.reorder(self.data, moves, self.layout)

    @property
    def like(self) -> Fields:
        return self.storage.like(self.data)

    def copied(self, index: Tensor) -> Self:
        if not self.storage.paged:
            return self.select(index)
        new = self._with(self.storage.copied(self.data, index))
        new.storage = Storage()
        return new

    def part(self, name: str, shape: Sequence[int]) -> Tensor | PagedPart:
        return self.storage.part(self.data, name, shape)

    def fit(self, like: Self, clock: Clock) -> Self:
        if self.layout == like.layout and self.slots == like.slots:
            return self
        held = like.layout.positions(like.slots, clock.lengths)  # [B, S of like]
        source = self.layout.slots(held.clamp(min=0)).clamp(max=max(self.slots - 1, 0))
        rows = torch.arange(len(held), device=held.device)
        new = self._with(dict(like.select(torch.zeros_like(rows)).data))
        new.slack, new.layout, new.grows, new.storage = like.slack, like.layout, like.grows, like.storage
        if self.slots:
            slots = torch.arange(like.slots, device=held.device).expand(len(held), -1)
            new.storage.write(new.data, rows, slots, self.storage.read(self.data, rows, source))
        return new
