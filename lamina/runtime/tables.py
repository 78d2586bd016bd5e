"""What a captured step knows of a cache: a row of numbers for each entry, and layers that pass them to kernels.

A row is [k or latent or ring or state, v, slots, ring, keep, lengths, counts, –]: pointers and sizes, as every kernel
of `lamina.kernels` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lamina.attention.rotary import Table
from lamina.cache.cache import Cache
from lamina.cache.layer import Key, Layer
from lamina.cache.spec import Attention, Convolution, Latent, Recurrent
from lamina.cache.store import TokenLayer
from lamina.recurrence.rule import Tensors

if TYPE_CHECKING:
    from typing import TypeAlias

    from lamina.kernels.following import Unnormed
    from lamina.model import Model
    from lamina.nn.norm import RMSNorm
    from lamina.runtime.capture import CapturedStep
    from lamina.runtime.passes import CapturedPass

    Captured: TypeAlias = CapturedStep | CapturedPass

WIDTH = 8


def tables_of(cache: Cache, counts: Tensor) -> list[list[int]]:
    """The rows of a cache's entries, in the order of its layers."""
    return [_row(layer, cache, counts) for entry in cache.layers for layer in entry.values()]


def _row(layer: Layer, cache: Cache, counts: Tensor) -> list[int]:
    clock = [cache.lengths.data_ptr(), counts.data_ptr(), 0]
    if isinstance(layer, TokenLayer):
        first, *second = (tensor.data_ptr() for tensor in layer.data.values())
        return [first, *(second or [0]), layer.slots, layer.layout.ring or 0, layer.layout.keep, *clock]
    return [layer.data["head"].data_ptr(), 0, 0, 0, 0, *clock]


def header_of(cache: Cache) -> list[int]:
    """As `lamina.kernels.step.HEADER` names them."""
    assert cache.logits is not None
    marks = [cache.clock.lengths, cache.clock.written, cache.clock.base, cache.record]
    return [*(mark.data_ptr() for mark in marks), cache.record.shape[1], cache.logits.data_ptr()]


def layers_of(model: Model, tables: Tensor, later: Tensor | None = None) -> list[dict[str, Any]]:
    """For each layer of the model, name -> what answers `memory` calls in a captured step.

    later   the same tables with the accepted counts, where layers take tokens in when they are told to (`commit`)
    """
    rows = zip(tables, [None] * len(tables) if later is None else later, strict=True)
    return [{name: KINDS[type(spec)](spec, *next(rows)) for name, spec in entry.items()} for entry in model.specs]


class DeviceLayer:
    """A store that is known by its row of the table alone."""

    fuses = True  # calls come with what stands around them, to be done in the same kernel

    def __init__(self, spec: Any, table: Tensor, later: Tensor | None = None) -> None:
        self.spec, self.table, self.later = spec, table, later
        self.left: Any = None  # what a pass leaves for `commit`

    def commit(self) -> None:
        """Takes in the accepted tokens of the pass before, where that has not been done at once."""


class DeviceAttention(DeviceLayer):
    def attend(
        self, step: Captured, key: Key, q: Tensor, k: Tensor | None, v: Tensor | None,
        *, scale: float, softcap: float | None, sinks: Tensor | None, bias: Any, gate: Tensor | None, **before: Any,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.attend import decode_attention
        from lamina.kernels.norm import sigmoid_gated
        from lamina.kernels.rope import rotate_and_append
        from lamina.kernels.token import attend_token, takes

        assert k is not None and v is not None and bias is None
        waits = self.later is not None and self.spec.window.span is not None  # a ring, whose tokens are still read
        if not waits and takes(q, k, v):
            return attend_token(
                q, k, v, table=self.table, window=self.spec.window, gate=gate,
                scale=scale, softcap=softcap, sinks=sinks, **before,
            )  # fmt: skip
        q, k, v = rotate_and_append(q, k, v, table=self.table, write=not waits, **before)
        self.left = (k, v) if waits else None
        out = decode_attention(q, k, v, self.table, self.spec.window, scale=scale, softcap=softcap, sinks=sinks)
        return out if gate is None else sigmoid_gated(out, gate)

    def commit(self) -> None:
        from lamina.kernels.rope import append

        if self.left is not None and self.later is not None:
            k, v = self.left
            append(k, v, self.later)


class DeviceLatent(DeviceLayer):
    def attend_latent(
        self, step: Captured, key: Key, q: Tensor, kv: Tensor,
        *, norm: RMSNorm, rope: Table, neighbours: bool, up: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.absorb import into_latent, out_of_latent
        from lamina.kernels.latent import decode_latent

        assert norm.weight is not None and not norm.plus_one
        up_k, up_v = up.tensor_split([q.shape[-1] - self.spec.rope_dim], dim=1)
        q, new = into_latent(q, kv, up_k, norm.weight, norm.eps, rope, self.table, neighbours=neighbours)
        parts = decode_latent(q, new, self.table, rank=self.spec.rank, scale=scale, window=self.spec.window)
        return out_of_latent(parts, up_v, self.table)


class DeviceConvolution(DeviceLayer):
    def convolve(
        self, step: Captured, key: Key, x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None,
        gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.conv import convolve_step

        self.left = (x, weight, bias, gates) if self.later is not None else None
        return convolve_step(x, weight, bias, self.table, act=act, gates=gates, write=self.later is None)

    def commit(self) -> None:
        from lamina.kernels.conv import convolve_step

        if self.later is not None:
            x, weight, bias, gates = self.left
            convolve_step(x, weight, bias, self.later, gates=gates)


class DeviceRecurrent(DeviceLayer):
    def recur(self, step: Captured, key: Key, inputs: Tensors, constants: Tensors, around: Mapping[str, Any]) -> Tensor:
        from lamina.kernels.recur import recur_step

        self.left = (inputs, constants, around) if self.later is not None else None
        return recur_step(self.spec.rule, inputs, constants, self.table, **around, write=self.later is None)

    def commit(self) -> None:
        from lamina.kernels.recur import recur_step

        if self.later is not None:
            inputs, constants, around = self.left
            recur_step(self.spec.rule, inputs, constants, self.later, **around)

    def mixes(self, x: Tensor) -> bool:
        """Whether `mix` is the way for as many rows and tokens as x [B, T, C] has."""
        from lamina.kernels.mix import pays

        return self.later is None and pays(self.spec.rule, *x.shape[:2])

    def mix(
        self, step: Captured, key: Key, ring: DeviceConvolution, x: Tensor, inputs: Tensors, constants: Tensors,
        **how: Any,
    ) -> Tensor | Unnormed:  # fmt: skip
        from lamina.kernels.mix import mix_step

        return mix_step(self.spec.rule, x, inputs, constants, ring.table, self.table, **how)


KINDS: dict[type, type[DeviceLayer]] = {
    Attention: DeviceAttention,
    Latent: DeviceLatent,
    Convolution: DeviceConvolution,
    Recurrent: DeviceRecurrent,
}
