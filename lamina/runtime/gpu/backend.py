"""`KernelBackend`: the memory calls of a captured pass as Triton kernels.

A captured program serves any cache of its shape, so its entries are not layers but rows of a table on the device
(`TableEntry`): addresses and sizes in the columns of `lamina.kernels.columns`. Each method launches the kernels of one
memory call.

A pass of several tokens may not write rings, convolutions and states before it is known how many tokens are accepted.
Such a call leaves with its entry what commit has to launch (`TableEntry.at_commit`).

A kind that is defined outside this package may bring kernels too:

    @register_kernels(MySpec)
    class MyKernels:
        reads_prompts = True                           # calls may have hundreds of tokens: for captured prompts too

        @staticmethod
        def why_not(spec, layer, dtype): ...           # a reason, or None if the kernels serve this spec
        @staticmethod
        def my_call(entry, x): ...                     # launches kernels; entry.table is the row of the table
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

import torch
from torch import Tensor

from lamina.cache.backend import AttendOptions, Backend
from lamina.cache.codec.codec import Coding
from lamina.cache.layers.base import Key, Layer
from lamina.cache.spec import (
    Attention,
    Convolution,
    Cross,
    IndexKeys,
    Latent,
    Recurrent,
    Shared,
    SharedIndex,
    Spec,
    Tokens,
)
from lamina.errors import InputError
from lamina.kernels.eligibility import why_no_attention, why_no_index, why_no_vectors
from lamina.recurrence import RGLRU, SSD, WKV, ChannelDelta, GatedDelta, SelectiveScan
from lamina.runtime.gpu.attend import attend
from lamina.runtime.gpu.logged import recur_logged
from lamina.runtime.gpu.recall import recall
from lamina.runtime.gpu.select import select

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable
    from lamina.nn.norm import RMSNorm
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm
    from lamina.nn.recurrent.short_conv import ShortConvolution
    from lamina.recurrence.rule import Tensors
    from lamina.runtime.captured import Captured

# Kernel modules import Triton at their top, so the methods below import them when they first launch.


@dataclass
class TableEntry:
    """One entry of whatever cache the program is given.

    table     [columns] int64, on the device; the counts it points to are those of the pass
    later     the same with the accepted counts, in a pass that is committed by a second graph; None where the pass
              itself commits
    coding    how a codec quantizes its fields
    page      slots of a page; 0 where tokens are not in pages
    logs      whether recurrences log their inputs, since the cache has slack
    is_read   whether another layer reads its keys and values in the same pass (`Shared`)
    new       for that layer: this pass's keys and values, as tensors or `Coded`, where they are not just in their slots
    """

    spec: Any
    table: Tensor
    later: Tensor | None = None
    coding: Coding = field(default_factory=Coding)
    page: int = 0
    logs: bool = False
    is_read: bool = False
    new: Any = None
    at_commit: Callable[[], object] | None = None

    @property
    def waits_for(self) -> Tensor | None:
        """The table of the commit that stores this pass's keys and values. None where the pass stores them at once: not
        in a ring if a second graph commits, since its old tokens are still read."""
        return None if self.spec.window.span is None else self.later

    def leave(self, new: Any) -> None:
        """Keeps this pass's keys and values for a layer that reads them."""
        if self.is_read:
            self.new = new

    def commit(self) -> None:
        """Launches what the pass left for commit, if anything."""
        if self.at_commit is not None:
            self.at_commit()


class KernelBackend:
    """Has no state: all that belongs to a pass is in the pass and its entries."""

    def attend(
        self, one: Captured, key: Key, entry: TableEntry, q: Tensor, k: Tensor | None, v: Tensor | None,
        **options: Unpack[AttendOptions],
    ) -> Tensor:  # fmt: skip
        return attend(one, entry, q, k, v, options)

    def attend_latent(
        self, one: Captured, key: Key, entry: TableEntry, q: Tensor, kv: Tensor,
        *, norm: RMSNorm, rope: RopeTable, neighbours: bool, up: Tensor, scale: float,
        restrict: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.attention.mla import decode_latent
        from lamina.kernels.attention.mla_project import into_latent, out_of_latent
        from lamina.kernels.quant.encode import Side, encode

        if norm.weight is None or norm.plus_one:
            raise InputError("attend_latent: the kernels know a norm with a weight that is not one more than stored")
        spec, table, page, form = entry.spec, entry.table, entry.page, entry.coding.formats.get("latent")
        up_k, up_v = up.tensor_split([q.shape[-1] - spec.rope_dim], dim=1)
        q, new = into_latent(
            q, kv, up_k, norm.weight, norm.eps, rope, table, neighbours=neighbours, write=form is None, page=page
        )
        seen: Any = new
        if form is not None:
            new = new[:, None]
            seen = encode(new, new, None, table, Side.of(form, new.shape[-1]), write=True, page=page)
        how: dict[str, Any] = dict(window=spec.window, chosen=restrict, page=page)
        parts = decode_latent(q, seen, table, rank=spec.rank, scale=scale, **how)
        return out_of_latent(parts, up_v, table)

    def convolve(
        self, one: Captured, key: Key, entry: TableEntry, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, act: str | None, gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.recurrent.conv import convolve_step

        if entry.later is not None:
            entry.at_commit = partial(convolve_step, x, weight, bias, entry.later, gates=gates)
        return convolve_step(x, weight, bias, entry.table, act=act, gates=gates, write=entry.later is None)

    def convolve_product(
        self, one: Captured, key: Key, entry: TableEntry, x: Tensor, conv: ShortConvolution, product: Any
    ) -> tuple[Tensor, Tensor] | None:
        """One kernel for both where that is faster, and the pass commits itself."""
        from lamina.kernels.recurrent.conv_product import convolve_product_step, one_launch_is_faster

        if entry.later is not None or not one_launch_is_faster(product, *x.shape[:2]):
            return None
        return convolve_product_step(x, conv, product.weight, entry.table)

    def recur(
        self, one: Captured, key: Key, entry: TableEntry, inputs: Tensors, constants: Tensors,
        around: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.recurrent.recur import recur_step, with_products

        if entry.logs:
            return recur_logged(one, key, entry, inputs, constants, around)
        rule = entry.spec.rule
        if entry.later is not None:
            inputs, around = with_products(rule, inputs, around)  # which commit need not compute again
            entry.at_commit = partial(recur_step, rule, inputs, constants, entry.later, **around)
        return recur_step(rule, inputs, constants, entry.table, **around, write=entry.later is None)

    def mix(
        self, one: Captured, key: Key, entry: TableEntry, ring: TableEntry, x: Tensor, inputs: Tensors,
        constants: Tensors, *, conv: ShortConvolution, gate: Tensor, norm: GatedRMSNorm | None,
        around: Mapping[str, Any],
    ) -> Tensor | None:  # fmt: skip
        """One kernel for the whole mixer where that is faster, the pass commits itself, and no inputs are logged."""
        from lamina.kernels.recurrent.mixer import mix_is_faster, mix_step

        rule = entry.spec.rule
        if entry.later is not None or entry.logs or not mix_is_faster(rule, *x.shape[:2]):
            return None
        how = dict(conv=conv, gate=gate, norm=norm, **around)
        return mix_step(rule, x, inputs, constants, ring.table, entry.table, **how)

    def recall(self, one: Captured, key: Key, entry: TableEntry, x: Tensor) -> tuple[Tensor, Tensor]:
        return recall(one, entry, x)

    def select(
        self, one: Captured, key: Key, entry: TableEntry, q: Tensor | None, k: Tensor | None, weights: Tensor | None,
        *, rope: RopeTable | None, neighbours: bool,
    ) -> Tensor:  # fmt: skip
        """-> positions of the selected tokens, int32 [B, T, top]"""
        if isinstance(entry.spec, SharedIndex):
            layer, name = entry.spec.reads_from
            return one.entries[layer][name].new
        if q is None or k is None or weights is None:
            raise InputError("select without keys is for layers that read another layer's selection")
        chosen = select(entry, q, k, weights, rope, neighbours)
        entry.leave(chosen)
        return chosen

    def call(self, one: Captured, key: Key, entry: TableEntry, name: str, *args: Any, **how: Any) -> Any:
        """The kernels that were registered for this kind."""
        launch = getattr(_registered[type(entry.spec)], name)
        return launch(entry, *args, **how)


KERNELS = KernelBackend()
_checked: Backend[Captured, TableEntry] = KERNELS


# -- which kinds have kernels ----------------------------------------------------------------------------------------


class Kernels(Protocol):
    """The kernels of one kind: a reason why they do not serve a spec, and one function per memory call."""

    @staticmethod
    def why_not(spec: Any, layer: Layer | None, dtype: torch.dtype) -> str | None: ...


K = TypeVar("K", bound=Kernels)
_registered: dict[type[Spec], Any] = {}


def register_kernels(kind: type[Spec]) -> Callable[[type[K]], type[K]]:
    """Makes the class below it the kernels of this kind of spec: see the top of this file."""

    def register(kernels: type[K]) -> type[K]:
        _registered[kind] = kernels
        return kernels

    return register


def kernels_for_prompts(spec: Spec) -> Kernels | None:
    """The kernels of a kind, if their class says that they read the many tokens of captured prompts."""
    found = _registered.get(type(spec))
    return found if getattr(found, "reads_prompts", False) else None


def why_unserved(spec: Spec, layer: Layer | None, dtype: torch.dtype) -> str | None:
    """Why no kernel of a captured pass serves this entry, in words; None where kernels do.

    layer   the entry of the cache that is to be served; None: any
    """
    if type(spec) not in _registered:
        return f"there is no kernel for {type(spec).__name__}"
    return _registered[type(spec)].why_not(spec, layer, dtype)


@register_kernels(Attention)
@register_kernels(Latent)
@register_kernels(Cross)
class _AttentionKernels:
    @staticmethod
    def why_not(spec: Attention | Latent | Cross, layer: Layer | None, dtype: torch.dtype) -> str | None:
        return why_no_attention(spec, None if layer is None else layer.coding.formats, dtype)


@register_kernels(IndexKeys)
class _IndexKernels:
    @staticmethod
    def why_not(spec: IndexKeys, layer: Layer | None, dtype: torch.dtype) -> str | None:
        return why_no_index(spec, None if layer is None else layer.coding.formats)


@register_kernels(Tokens)
class _TokensKernels:
    @staticmethod
    def why_not(spec: Tokens, layer: Layer | None, dtype: torch.dtype) -> str | None:
        return why_no_vectors(spec, None if layer is None else layer.coding.formats)


@register_kernels(Shared)
@register_kernels(SharedIndex)
class _SharedKernels:
    @staticmethod
    def why_not(spec: Shared | SharedIndex, layer: Layer | None, dtype: torch.dtype) -> str | None:
        return None  # the entry that it reads is asked itself


@register_kernels(Convolution)
class _ConvolutionKernels:
    @staticmethod
    def why_not(spec: Convolution, layer: Layer | None, dtype: torch.dtype) -> str | None:
        return None


RULES = (SSD, SelectiveScan, GatedDelta, ChannelDelta, RGLRU, WKV)


@register_kernels(Recurrent)
class _RecurrentKernels:
    @staticmethod
    def why_not(spec: Recurrent, layer: Layer | None, dtype: torch.dtype) -> str | None:
        if type(spec.rule) not in RULES:
            return f"there is no kernel for the rule {type(spec.rule).__name__}"
        return None
