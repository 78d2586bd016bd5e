"""Cross-attention: keys and values of a source (encoder output), written once when it is attached.

Passes read the whole store under a mask, without a copy. Slots past a source's end are read too, so they are zero:
`attach` clears them, and nothing else writes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from lamina.attention.view import View
from lamina.attention.window import Full
from lamina.cache.clock import Clock, allocate, on_device
from lamina.cache.codec.codec import KEY, VALUE, Coding
from lamina.cache.counts import row_indices
from lamina.cache.layers.attention import KeysValues
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.layout import Layout
from lamina.cache.layers.token_store import column_of
from lamina.cache.storage.host import storage_for
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.ops.reorder import Moves
    from lamina.cache.spec import Cross, Keeping
    from lamina.cache.step import Step
    from lamina.cache.storage.prefetch import SlotRuns


@dataclass(frozen=True)
class Source:
    """The output of an encoder: states [B, S, width], and lengths [B], how many of the S are real."""

    states: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        for name, given, axes in (("states", self.states, 3), ("lengths", self.lengths, 1)):
            if not isinstance(given, Tensor) or given.dim() != axes or given.is_floating_point() != (name == "states"):
                what = list(given.shape) if isinstance(given, Tensor) else repr(given)
                raise InputError(
                    f"{name} of a source is {what}: states are floats [B, S, width], lengths whole numbers [B]"
                )
        if len(self.states) != len(self.lengths):
            raise InputError(f"a source has states of {len(self.states)} rows and lengths of {len(self.lengths)}")

    def select(self, rows: int | Sequence[int] | Tensor) -> Source:
        """The given rows, in that order; a row may be named more than once."""
        index = on_device(row_indices(rows, len(self.lengths)), self.states.device)
        return Source(self.states[index], self.lengths[index])

    def inputs(self, k: Tensor, v: Tensor, rows: int) -> dict[str, Tensor]:
        """Keys and values [B, H, S, D] of this source, as a pass of `rows` rows without a cache reads them."""
        if len(self.lengths) not in (1, rows):
            raise InputError(f"the source has {len(self.lengths)} rows, and {rows} rows of ids were given")
        k, v = (part.expand(rows, -1, -1, -1) for part in (k, v))
        return {"k": k, "v": v, "lengths": self.lengths.expand(rows)}


class CrossLayer(Layer):
    """Keys and values [B, H, S, D] of the source, plain or quantized; `lengths` [B], 0 for rows without a source."""

    spec: Cross

    def __init__(self, spec: Cross, keeping: Keeping | None) -> None:
        super().__init__(spec)
        self.coding, self.storage = Coding(), storage_for(keeping)
        if keeping is not None:
            dims = {"k": spec.key_dim, "v": spec.value_dim}
            self.coding = Coding.of(keeping, {"k": KEY, "v": VALUE}, dims)
            for name, dim in dims.items():
                for part, (width, dtype) in self.coding.parts(name, dim, keeping.dtype).items():
                    lead = [spec.kv_heads]
                    self.data[part] = self.storage.make(keeping.rows, lead, 0, width, dtype, keeping.device)
            self.data["lengths"] = allocate((keeping.rows,), torch.int64, keeping.device)

    @property
    def slots(self) -> int:
        return next(iter(self.data.values())).shape[-2]

    @property
    def format(self) -> str:
        return str(self.coding.codec) if self.coding.formats else super().format

    def attach(self, k: Tensor, v: Tensor, lengths: Tensor, rows: Tensor) -> None:
        """Stores the keys and values k, v [R, H, S, D] of a source with `lengths` [R] for the rows [R]."""
        self.widen(k.shape[-2])
        self.storage.settle()
        slots = k.shape[-2]
        beyond = torch.arange(slots, device=lengths.device) >= lengths[:, None]  # [R, S]: padding, with any values
        for name, new in self.coding.encode({"k": k, "v": v}).items():
            part = self.data[name]
            at = rows.to(part.device)
            part.index_fill_(0, at, 0)
            part[at, :, :slots] = new.masked_fill(beyond[:, None, :, None], 0).to(part)
        self.data["lengths"].index_copy_(0, rows, lengths)

    def attach_exported(self, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """The same inside an exported program, for all rows: those with a length of 0 keep what they have."""
        some, slot = lengths > 0, torch.arange(self.slots, device=lengths.device)
        beyond = slot >= lengths[:, None]  # [B, slots]
        for name, new in self.coding.encode({"k": k, "v": v}).items():
            part = self.data[name]  # [B, H, slots, width]
            wide = new.index_select(-2, slot.clamp(max=new.shape[-2] - 1))  # padding to a width that varies adds guards
            wide = wide.masked_fill(beyond[:, None, :, None], 0).to(part.dtype)
            part.copy_(torch.where(some[:, None, None, None], wide, part))
        self.data["lengths"].copy_(torch.where(some, lengths, self.data["lengths"]))

    @property
    def parts(self) -> dict[str, Tensor]:
        """Keys and values as stored, [B, H, S, width] each; a codec stores several parts per field."""
        return {name: tensor for name, tensor in self.data.items() if name != "lengths"}

    def columns(self) -> dict[str, int]:
        """The lengths are those of the sources, in place of the clock's."""
        columns = {column_of(name): part.data_ptr() for name, part in self.parts.items()}
        return columns | {"slots": self.slots, "lengths": self.data["lengths"].data_ptr()}

    def source_inputs(self) -> dict[str, Tensor]:
        """Keys and values [B, H, S, D] of all rows' sources, dequantized, as a pass without this cache reads them."""
        self.storage.settle()
        parts = {name: self.storage.to_device(part) for name, part in self.parts.items()}
        return self.coding.decode(parts) | {"lengths": self.data["lengths"]}

    def widen(self, slots: int) -> None:
        if slots > self.slots:
            parts = self.parts
            self.storage.widen(parts, slots)
            self.data.update(parts)

    def keys_values(self, step: Step, key: Key, k: Tensor | None, v: Tensor | None) -> KeysValues:
        if self.bare:
            held = step.source_of(key)
        else:
            parts = {name: self.storage.take(step, x) for name, x in self.parts.items()}
            held = self.coding.decode(parts) | {"lengths": self.storage.take(step, self.data["lengths"])}
        if held is None or held["k"].shape[-2] == 0:
            raise InputError(
                "this model reads a source, and none is attached: make one with model.encode(ids) and give it to "
                "model.new_cache(rows, source=source), cache.attach(source) or, without a cache, model(ids, source=…)"
            )

        def make() -> View:
            positions = Layout().positions(held["k"].shape[-2], held["lengths"])
            return View(step.positions, positions, Full(), causal=False, finite=not self.bare)

        return held["k"], held["v"], step.view(("cross", held["k"].shape[-2]), make)

    def needed(self, lengths: list[int]) -> SlotRuns:
        whole = [(row, 0, self.slots) for row in range(len(lengths))]
        return {name: whole for name in self.parts}

    def reset(self, index: Tensor) -> None:
        self.data["lengths"].index_fill_(0, index, 0)

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        """Fills slots past a source's end with zeros whatever `value` is: passes depend on them being zero."""
        if self.slots:
            unused = Layout().positions(self.slots, self.data["lengths"]) < 0
            for part in self.parts.values():
                part.masked_fill_(unused.to(part.device)[:, None, :, None], 0)

    def reorder(self, moves: Moves) -> None:
        super().reorder(moves.unrelated)  # rows with tokens in common have the same source

    def fit(self, like: Self, clock: Clock) -> Self:
        new = self._with(dict(self.data))
        new.widen(like.slots)
        return new
