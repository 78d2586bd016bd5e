"""`NativeBackend`: the memory calls of a native program. Its entries are rows of a table, as in `KernelBackend`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.window import Chunked, Full, Sliding
from lamina.cache.backend import AttendOptions, Backend
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
from lamina.errors import CaptureError, InputError
from lamina.native.arguments import MOST_HEAD
from lamina.native.operations import NativeRecorder
from lamina.runtime.native.attend import attend
from lamina.runtime.native.coding import why_no_coding
from lamina.runtime.native.latent import attend_latent
from lamina.runtime.native.recall import recall
from lamina.runtime.native.recur import convolve, recur, why_no_rule
from lamina.runtime.native.select import select, selection_of

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable
    from lamina.nn.norm import RMSNorm
    from lamina.recurrence.rule import Tensors
    from lamina.runtime.captured import Captured
    from lamina.runtime.gpu.backend import TableEntry
    from lamina.runtime.native.step import NativeStep


def recorder() -> NativeRecorder:
    """The recorder of the program that this thread records."""
    found = kernels.recorder()
    assert isinstance(found, NativeRecorder)
    return found


class NativeBackend:
    """Has no state: all that belongs to a pass is in the pass and its entries."""

    def attend(
        self, one: Captured, key: Key, entry: TableEntry, q: Tensor, k: Tensor | None, v: Tensor | None,
        **options: Unpack[AttendOptions],
    ) -> Tensor:  # fmt: skip
        return attend(recorder(), one, entry, q, k, v, options)

    def attend_latent(
        self, one: Captured, key: Key, entry: TableEntry, q: Tensor, kv: Tensor,
        *, norm: RMSNorm, rope: RopeTable, neighbours: bool, up: Tensor, scale: float, restrict: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        how: dict[str, Any] = dict(norm=norm, rope=rope, neighbours=neighbours, up=up, scale=scale, chosen=restrict)
        return attend_latent(recorder(), one, entry, q, kv, **how)

    def convolve(
        self, one: Captured, key: Key, entry: TableEntry, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, act: str | None, gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        return convolve(recorder(), entry.table, one.model.dtype, x, weight, bias, act=act, gates=gates)

    def convolve_product(self, *args: Any) -> None:
        """Composed of `convolve` and the product."""
        return None

    def recur(
        self, one: NativeStep, key: Key, entry: TableEntry, inputs: Tensors, constants: Tensors,
        around: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        one.constants[key] = constants
        return recur(recorder(), entry.table, one.model.dtype, entry.spec.rule, inputs, constants, around)

    def mix(self, *args: Any, **how: Any) -> None:
        """Composed of the other calls."""
        return None

    def recall(self, one: NativeStep, key: Key, entry: TableEntry, x: Tensor) -> tuple[Tensor, Tensor]:
        return recall(recorder(), one, entry, x)

    def select(
        self, one: Captured, key: Key, entry: TableEntry, q: Tensor | None, k: Tensor | None, weights: Tensor | None,
        *, rope: RopeTable | None, neighbours: bool,
    ) -> Tensor:  # fmt: skip
        """-> positions of the selected tokens, int32 [B, 1, top]"""
        if isinstance(entry.spec, SharedIndex):
            return selection_of(one, key, entry)
        if q is None or k is None or weights is None:
            raise InputError(f"layer {key[0]} entry {key[1]!r} stores keys: select(q, k, weights) needs all three")
        chosen = select(recorder(), one, entry, q, k, weights, rope, neighbours)
        entry.leave(chosen)
        return chosen

    def call(self, one: Captured, key: Key, entry: TableEntry, name: str, *args: Any, **how: Any) -> Any:
        raise _refused(key, f"the call {name!r}")


def _refused(key: Key, what: str) -> CaptureError:
    return CaptureError(f"layer {key[0]} entry {key[1]!r}: there is no native kernel for {what}")


NATIVE = NativeBackend()
_checked: Backend[NativeStep, TableEntry] = NATIVE


SERVED = (Attention, Latent, Tokens, IndexKeys, Cross, Shared, SharedIndex, Convolution, Recurrent)
"""A subclass of these is a kind from outside the package: its layer may store something else."""


def why_unserved(spec: Spec, layer: Layer | None, dtype: torch.dtype) -> str | None:
    """Why no native kernel serves this entry, in words; None where kernels do.

    layer   the entry of the cache that is to be served; None: any
    """
    if type(spec) not in SERVED:
        return f"there is no native kernel for {type(spec).__name__}"
    if isinstance(spec, Shared | SharedIndex | Convolution):
        return None  # what another layer stores is asked itself
    if isinstance(spec, Recurrent):
        return why_no_rule(spec.rule, 0 if layer is None else layer.slack)
    assert isinstance(spec, Attention | Latent | Tokens | Cross)
    if layer is not None and (reason := why_no_coding(layer.coding.formats)):
        return reason
    if not isinstance(spec, Cross) and not isinstance(spec.window, Full | Sliding | Chunked):
        return f"no native kernel for the window {spec.window}; there are kernels for Full, Sliding and Chunked"
    if (widest := _widest(spec)) > MOST_HEAD:
        return f"vectors of {widest} values; the native kernels take up to {MOST_HEAD}"
    return None


def _widest(spec: Attention | Latent | Tokens | Cross) -> int:
    """Values of the widest vector that an entry stores for a head."""
    match spec:
        case Latent(rank=rank, rope_dim=rope_dim):
            return rank + rope_dim
        case Tokens(dim=dim):
            return dim
        case Attention(key_dim=key_dim, value_dim=value_dim) | Cross(key_dim=key_dim, value_dim=value_dim):
            return max(key_dim, value_dim)
