"""What a captured step knows of a cache: a row of numbers for each entry, and layers that pass them to kernels.

A row is pointers and sizes, in the columns that `lamina.kernels.columns` declares for host and kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lamina.attention.rotary import RopeTable
from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codec, Coding
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.spec import Attention, Convolution, Latent, Recurrent
from lamina.cache.storage.paged import PagedStorage
from lamina.errors import InputError
from lamina.kernels.columns import entry_row, header_row
from lamina.recurrence.rule import Tensors

if TYPE_CHECKING:
    from typing import TypeAlias

    from lamina.kernels.quant.encode import Coded
    from lamina.model import Model
    from lamina.nn.norm import RMSNorm
    from lamina.runtime.multi_token import CapturedPass
    from lamina.runtime.step import CapturedStep

    Captured: TypeAlias = CapturedStep | CapturedPass

PLAIN = Coding()


def tables_of(cache: Cache, counts: Tensor) -> list[list[int]]:
    """The rows of a cache's entries, in the order of its layers."""
    return [_row(layer, cache, counts) for entry in cache.layers for layer in entry.values()]


def _row(layer: Layer, cache: Cache, counts: Tensor) -> list[int]:
    row = {"lengths": cache.clock.lengths.data_ptr(), "counts": counts.data_ptr()}
    if isinstance(layer, TokenLayer):
        row |= {_column(name): part.data_ptr() for name, part in layer.data.items()}
        row |= {"slots": layer.slots, "ring": layer.layout.ring or 0, "keep": layer.layout.keep}
        if isinstance(layer.storage, PagedStorage):
            pages = layer.storage.table.tensor
            row |= {"slots": layer.storage.page, "pages": pages.data_ptr(), "pages_per_row": pages.shape[1]}
    else:
        row["k"] = layer.data["head"].data_ptr()
    return entry_row(row)


def _column(part: str) -> str:
    """
    >>> _column("v"), _column("latent.codes"), _column("latent.scales")
    ('v', 'k', 'k.scales')
    """
    field, _, rest = part.partition(".")
    field = field if field in ("k", "v") else "k"
    return field if rest in ("", "codes") else f"{field}.{rest}"


@dataclass(frozen=True)
class Written:
    """How caches are written that a captured step serves: those of another way have a step of their own.

    codecs    of each entry, in the order of the tables; nothing where all is plain
    page      slots of a page, 0 where tokens are in no pages
    codings   of each entry, once more, with what kernels need to know of them
    """

    codecs: tuple[Codec, ...] = ()
    page: int = 0
    codings: tuple[Coding, ...] = field(default=(), compare=False)

    @classmethod
    def like(cls, cache: Cache | None) -> Written:
        """As this cache is; plain without one."""
        if cache is None:
            return cls()
        codings = tuple(getattr(layer, "coding", PLAIN) for entry in cache.layers for layer in entry.values())
        codecs = tuple(one.codec for one in codings) if any(one.forms for one in codings) else ()
        return cls(codecs, 0 if cache.pool is None else cache.pool.page, codings)


PLAINLY = Written()


def stores_of(cache: Cache) -> list[tuple[int, int]]:
    """Where all lies that the tables point to: what must be compared to know whether they still do."""
    layers = (layer for entry in cache.layers for layer in entry.values())
    stores = [store for layer in layers for store in layer.data.values()]
    pages = () if cache.pages is None else cache.pages.tables.values()
    return [(store.data_ptr(), store.numel()) for store in (*stores, *(table.tensor for table in pages))]


def header_of(cache: Cache) -> list[int]:
    """The row of `lamina.kernels.columns.HEADER` for this cache."""
    assert cache._logits is not None
    clock, record = cache.clock, cache.record
    pointers = {"lengths": clock.lengths, "written": clock.written, "base": clock.base, "record": record}
    row = {name: tensor.data_ptr() for name, tensor in pointers.items()}
    return header_row(row | {"record_width": record.shape[1], "logits": cache._logits.data_ptr()})


def layers_of(
    model: Model, tables: Tensor, later: Tensor | None = None, written: Written = PLAINLY
) -> list[dict[str, Any]]:
    """For each layer of the model, name -> what answers `memory` calls in a captured step.

    later     the same tables with the accepted counts, where layers take tokens in when they are told to (`commit`)
    written   how the cache's entries are
    """
    none = [None] * len(tables)
    rows = zip(tables, none if later is None else later, written.codings or [PLAIN] * len(tables), strict=True)
    return [
        {name: KINDS[type(spec)](spec, *next(rows), written.page) for name, spec in entry.items()}
        for entry in model.specs
    ]


class DeviceLayer:
    """A store that is known by its row of the table alone."""

    fuses = True  # calls come with what stands around them, to be done in the same kernel

    def __init__(
        self, spec: Any, table: Tensor, later: Tensor | None = None, coding: Coding = PLAIN, page: int = 0
    ) -> None:
        self.spec, self.table, self.later, self.coding, self.page = spec, table, later, coding, page
        self.left: Any = None  # what a pass leaves for `commit`

    def commit(self) -> None:
        """Takes in the accepted tokens of the pass before, where that has not been done at once."""


class DeviceAttention(DeviceLayer):
    def __init__(
        self, spec: Any, table: Tensor, later: Tensor | None = None, coding: Coding = PLAIN, page: int = 0
    ) -> None:
        super().__init__(spec, table, later, coding, page)
        if coding.forms:
            from lamina.kernels.quant.encode import Side

            self.keys = Side.of(coding.forms.get("k"), spec.key_dim)
            self.values = Side.of(coding.forms.get("v"), spec.value_dim)

    def attend(
        self, step: Captured, key: Key, q: Tensor, k: Tensor | None, v: Tensor | None,
        *, scale: float, softcap: float | None, sinks: Tensor | None, bias: Any, gate: Tensor | None, **before: Any,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.attention.decode import decode_attention
        from lamina.kernels.attention.decode_fused import attend_token, supports
        from lamina.kernels.attention.quantized import decode_codes
        from lamina.kernels.attention.rope_append import rotate_and_append
        from lamina.kernels.norm import sigmoid_gated
        from lamina.kernels.quant.encode import encode

        if k is None or v is None:
            raise InputError("attend without keys and values reads another layer's, and no kernel does that")
        if bias is not None:
            raise InputError("attend(bias=…): no kernel adds a bias to the scores")
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "page": self.page}
        waits = self.later is not None and self.spec.window.span is not None  # a ring, whose tokens are still read
        if not waits and not self.coding.forms and supports(q, k, v):
            return attend_token(q, k, v, table=self.table, window=self.spec.window, gate=gate, **how, **before)
        at_once = self.coding.forms and not waits and self.keys.form != "plain"  # `encode` rotates
        if not at_once:
            write = not waits and not self.coding.forms
            q, k, v = rotate_and_append(q, k, v, table=self.table, write=write, page=self.page, **before)
            before = {}
        self.left = (k, v) if waits else None
        if self.coding.forms:
            coded = encode(q, k, v, self.table, self.keys, self.values, write=not waits, page=self.page, **before)
            out = decode_codes(coded, self.table, self.spec.window, q.dtype, **how)
        else:
            out = decode_attention(q, k, v, self.table, self.spec.window, **how)
        return out if gate is None else sigmoid_gated(out, gate)

    def commit(self) -> None:
        from lamina.kernels.attention.rope_append import append
        from lamina.kernels.quant.encode import append_codes

        if self.left is None or self.later is None:
            return
        k, v = self.left
        if self.coding.forms:
            append_codes(k, v, self.later, self.keys, self.values, self.page)
        else:
            append(k, v, self.later, self.page)


class DeviceLatent(DeviceLayer):
    def attend_latent(
        self, step: Captured, key: Key, q: Tensor, kv: Tensor,
        *, norm: RMSNorm, rope: RopeTable, neighbours: bool, up: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.attention.mla import decode_latent
        from lamina.kernels.attention.mla_project import into_latent, out_of_latent

        if norm.weight is None or norm.plus_one:
            raise InputError("attend_latent: the kernels know a norm with a weight that is not one more than stored")
        up_k, up_v = up.tensor_split([q.shape[-1] - self.spec.rope_dim], dim=1)
        form = self.coding.forms.get("latent")
        q, new = into_latent(
            q, kv, up_k, norm.weight, norm.eps, rope, self.table,
            neighbours=neighbours, write=form is None, page=self.page,
        )  # fmt: skip
        seen = new if form is None else self._encoded(new[:, None])
        parts = decode_latent(
            q, seen, self.table, rank=self.spec.rank, scale=scale, window=self.spec.window, page=self.page
        )
        return out_of_latent(parts, up_v, self.table)

    def _encoded(self, new: Tensor) -> Coded:
        from lamina.kernels.quant.encode import Side, encode

        side = Side.of(self.coding.forms["latent"], new.shape[-1])
        return encode(new, new, None, self.table, side, write=True, page=self.page)


class DeviceConvolution(DeviceLayer):
    def convolve(
        self, step: Captured, key: Key, x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None,
        gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.recurrent.conv import convolve_step

        self.left = (x, weight, bias, gates) if self.later is not None else None
        return convolve_step(x, weight, bias, self.table, act=act, gates=gates, write=self.later is None)

    def commit(self) -> None:
        from lamina.kernels.recurrent.conv import convolve_step

        if self.later is not None:
            x, weight, bias, gates = self.left
            convolve_step(x, weight, bias, self.later, gates=gates)


class DeviceRecurrent(DeviceLayer):
    def recur(self, step: Captured, key: Key, inputs: Tensors, constants: Tensors, around: Mapping[str, Any]) -> Tensor:
        from lamina.kernels.recurrent.recur import recur_step

        self.left = (inputs, constants, around) if self.later is not None else None
        return recur_step(self.spec.rule, inputs, constants, self.table, **around, write=self.later is None)

    def commit(self) -> None:
        from lamina.kernels.recurrent.recur import recur_step

        if self.later is not None:
            inputs, constants, around = self.left
            recur_step(self.spec.rule, inputs, constants, self.later, **around)

    def mixes(self, x: Tensor) -> bool:
        """Whether `mix` is the way for as many rows and tokens as x [B, T, C] has."""
        from lamina.kernels.recurrent.mixer import mix_is_faster

        return self.later is None and mix_is_faster(self.spec.rule, *x.shape[:2])

    def mix(
        self, step: Captured, key: Key, ring: DeviceConvolution, x: Tensor, inputs: Tensors, constants: Tensors,
        **how: Any,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.recurrent.mixer import mix_step

        return mix_step(self.spec.rule, x, inputs, constants, ring.table, self.table, **how)


KINDS: dict[type, type[DeviceLayer]] = {
    Attention: DeviceAttention,
    Latent: DeviceLatent,
    Convolution: DeviceConvolution,
    Recurrent: DeviceRecurrent,
}
