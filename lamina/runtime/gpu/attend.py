"""The memory call `attend` in a captured pass: which kernels it launches for each kind of entry.

Attention   norm and RoPE, storing the new tokens, attention: one launch for one token per row, else two or three
Shared      the same without storing: the layer that is read has stored this pass's tokens, or left them
            (`TableEntry.new`) where they wait for commit
Cross       attention over a source, which no pass writes
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lamina.attention.bias import KernelForm, kernel_form
from lamina.attention.window import Full
from lamina.cache.spec import Cross, Shared
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.backend import AttendOptions
    from lamina.runtime.captured import Captured
    from lamina.runtime.gpu.backend import TableEntry

# Kernel modules import Triton at their top, so the functions below import them when they first launch.

BEFORE = ("rope", "neighbours", "norms", "norms_last", "factor")  # what is done to q and k first


def attend(
    one: Captured, entry: TableEntry, q: Tensor, k: Tensor | None, v: Tensor | None, options: AttendOptions
) -> Tensor:
    """q [B, Hq, T, D], k [B, Hk, T, D], v [B, Hk, T, Dv] -> [B, Hq, T, Dv]"""
    given: dict[str, Any] = {**options}
    how = {name: given[name] for name in ("scale", "softcap", "sinks")} | {"bias": form_of(given["bias"])}
    before = {name: given[name] for name in BEFORE}
    if isinstance(entry.spec, Cross):
        return _attend_source(entry, q, how, before, given["gate"])
    if isinstance(entry.spec, Shared):
        layer, name = entry.spec.reads_from
        return _attend_shared(one.entries[layer][name], q, how, before, given["gate"])
    if k is None or v is None:
        raise InputError("attend without keys and values is for layers that read another layer's or a source's")
    return _attend_own(entry, q, k, v, how, before, given["gate"])


def form_of(bias: object) -> KernelForm | None:
    form = kernel_form(bias)
    if bias is not None and form is None:
        name = getattr(bias, "__name__", type(bias).__name__)
        raise InputError(
            f"attend(bias=…): no kernel adds a bias to the scores that has no kernel_form, as {name}; AlibiBias and "
            "RelativeBias have one"
        )
    return form


def _attend_own(
    entry: TableEntry, q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any], before: dict[str, Any], gate: Tensor | None
) -> Tensor:
    """Over the keys and values that the layer stores itself."""
    from lamina.kernels.attention.decode import decode_attention
    from lamina.kernels.attention.decode_fused import attend_token, supports
    from lamina.kernels.attention.quantized import decode_codes
    from lamina.kernels.attention.rope_append import append, rotate_and_append
    from lamina.kernels.quant.encode import append_codes, encode

    spec, table, page, later = entry.spec, entry.table, entry.page, entry.waits_for
    waits = later is not None
    how = {**how, "page": page}
    if not waits and not entry.coding.formats and supports(q, k, v):
        return attend_token(q, k, v, table=table, window=spec.window, gate=gate, **how, **before)
    sides = sides_of(entry)
    if sides is None or waits or sides[0].form == "plain":  # else `encode` rotates
        q, k, v = rotate_and_append(q, k, v, table=table, write=not waits and sides is None, page=page, **before)
        before = {}
    if sides is not None:
        if later is not None:
            entry.at_commit = partial(append_codes, k, v, later, *sides, page)
        coded = encode(q, k, v, table, *sides, write=not waits, page=page, **before)
        entry.leave(coded)
        return _gated(decode_codes(coded, table, spec.window, q.dtype, **how), gate)
    if later is not None:
        entry.at_commit = partial(append, k, v, later, page)
    entry.leave((k, v))
    return _gated(decode_attention(q, k, v, table, spec.window, **how), gate)


def _attend_shared(
    source: TableEntry, q: Tensor, how: dict[str, Any], before: dict[str, Any], gate: Tensor | None
) -> Tensor:
    """Over the keys and values of another layer, which has run in this pass."""
    from lamina.kernels.attention.decode import decode_attention
    from lamina.kernels.attention.decode_fused import attend_stored, supports_heads
    from lamina.kernels.attention.quantized import decode_codes
    from lamina.kernels.attention.rope_append import rotate_queries
    from lamina.kernels.quant.encode import encode_queries
    from lamina.kernels.quant.field import Coded

    spec, table, new = source.spec, source.table, source.new
    how = {**how, "page": source.page}
    heads = spec.kv_heads, spec.value_dim
    if source.waits_for is None and not source.coding.formats and supports_heads(q, *heads):
        return attend_stored(q, table, spec.kv_heads, spec.value_dim, spec.window, new=True, gate=gate, **how, **before)
    if new is None:
        raise InputError(
            f"{q.shape[1]} query heads that read another layer's {spec.kv_heads} key heads: the kernel takes as many "
            "per key head as that layer has itself"
        )
    if isinstance(new, Coded):
        if new.keys.form == "plain":
            coded = replace(new, q=rotate_queries(q, table, **before))
        else:
            coded = encode_queries(q, new, table, **before)
        return _gated(decode_codes(coded, table, spec.window, q.dtype, **how), gate)
    q, (k, v) = rotate_queries(q, table, **before), new
    return _gated(decode_attention(q, k, v, table, spec.window, **how), gate)


def _attend_source(
    entry: TableEntry, q: Tensor, how: dict[str, Any], before: dict[str, Any], gate: Tensor | None
) -> Tensor:
    """Over the keys and values of an encoder's output. They are never in pages."""
    from lamina.kernels.attention.decode import attend_source
    from lamina.kernels.attention.decode_fused import attend_stored, supports_heads
    from lamina.kernels.attention.quantized import decode_codes
    from lamina.kernels.attention.rope_append import rotate_queries
    from lamina.kernels.quant.encode import encode_queries
    from lamina.kernels.quant.field import Coded

    if how.pop("bias") is not None:
        raise InputError("attend(bias=…): no kernel adds a bias to the scores of cross-attention")
    spec, table, sides = entry.spec, entry.table, sides_of(entry)
    heads = spec.kv_heads, spec.value_dim
    if sides is None and supports_heads(q, *heads):
        return attend_stored(q, table, spec.kv_heads, spec.value_dim, Full(), new=False, gate=gate, **how, **before)
    if sides is None:
        return _gated(attend_source(rotate_queries(q, table, **before), table, *heads, **how), gate)
    k, v = (side.empty(q, spec.kv_heads, 1) for side in sides)  # of no token: only their dtypes are used
    coded = Coded(q, k.codes, k, v, *sides, stored=True)
    if sides[0].form == "plain":
        coded = replace(coded, q=rotate_queries(q, table, **before))
    else:
        coded = encode_queries(q, coded, table, **before)
    return _gated(decode_codes(coded, table, Full(), q.dtype, new=False, **how), gate)


def sides_of(entry: TableEntry) -> tuple[Any, Any] | None:
    """How a codec quantizes keys and values; None where it does not."""
    from lamina.kernels.quant.field import Side

    forms, spec = entry.coding.formats, entry.spec
    return (Side.of(forms.get("k"), spec.key_dim), Side.of(forms.get("v"), spec.value_dim)) if forms else None


def _gated(out: Tensor, gate: Tensor | None) -> Tensor:
    from lamina.kernels.norm import sigmoid_gated

    return out if gate is None else sigmoid_gated(out, gate)
