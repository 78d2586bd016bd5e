"""The memory call `attend_latent` in a native program: attention in the latent, as plain passes do for one token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lamina.attention.window import Full
from lamina.errors import CaptureError
from lamina.native.arguments import TYPES, LatentArgs, LatentOutArgs, pointer
from lamina.native.operations import NativeRecorder
from lamina.native.weights import type_of
from lamina.runtime.native.attend import attention, window_arguments
from lamina.runtime.native.coding import FieldCoding

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable
    from lamina.nn.norm import RMSNorm
    from lamina.runtime.captured import Captured
    from lamina.runtime.gpu.backend import TableEntry

NOTHING: dict[str, Any] = dict(sinks=None, bias=None, gate=None, softcap=None)


def attend_latent(
    recorder: NativeRecorder, one: Captured, entry: TableEntry, q: Tensor, kv: Tensor, *, norm: RMSNorm,
    rope: RopeTable, neighbours: bool, up: Tensor, scale: float, chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [B, H, 1, N + P], kv [B, 1, rank + P], up [H, N + V, rank] -> [B, H, 1, V]

    chosen   int32 [B, 1, top] positions of the tokens that are read; None: all that are visible
    """
    spec, store = entry.spec, TYPES[one.model.dtype]
    (rows, heads, _, whole), (_, inner, rank) = q.shape, up.shape
    nope = whole - spec.rope_dim
    value = inner - nope
    if chosen is not None and spec.window != Full():
        raise CaptureError(f"a selection for latents with the window {spec.window}: an indexer selects of all tokens")
    if up.stride(2) != 1 or up.stride(1) != rank:
        up = up.contiguous()
    q, kv = q.float(), kv.float()
    q, kv = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, kv))
    cos, sin = (part.float().reshape(-1, part.shape[-1]) for part in rope)
    coding, plain = FieldCoding(entry.coding.formats.get("latent"), rank + spec.rope_dim), FieldCoding(None, 0)
    wide = recorder.new(rows, heads, rank + spec.rope_dim)
    held = type_of(up) if up.is_contiguous() else TYPES[up.dtype]
    arguments = LatentArgs(
        q=q.data_ptr(), kv=kv.data_ptr(), up=up.data_ptr(), weight=pointer(norm.weight), cos=cos.data_ptr(),
        sin=sin.data_ptr(), out=wide.data_ptr(), table=entry.table.data_ptr(), rows=rows, heads=heads, nope=nope,
        rope=spec.rope_dim, rank=rank, up_head=up.stride(0), up_type=held,
        weight_type=0 if norm.weight is None else type_of(norm.weight), q_row=q.stride(0), q_head=q.stride(1),
        kv_row=kv.stride(0), rope_row=0 if cos.shape[0] == 1 else cos.stride(0), neighbours=neighbours,
        pairs=cos.shape[-1], keep=window_arguments(spec.window)[2], page=entry.page, store_type=store,
        coding=coding.address, eps=norm.eps, plus=float(norm.plus_one),
    )  # fmt: skip
    kept = (q, kv, up, norm.weight, cos, sin, wide, entry.table, coding)
    recorder.add("latent", arguments, *kept, work=rows * heads * nope * rank)
    mix = attention(
        recorder,
        entry.table,
        wide,
        (1, rank, 0),
        spec.window,
        entry.page,
        store,
        (coding, plain),
        1,
        {**NOTHING, "scale": scale},
        chosen,
    )
    out = recorder.new(rows, 1, heads, value)
    after = LatentOutArgs(
        mix=mix.data_ptr(), up=up.data_ptr() + nope * rank * up.element_size(), out=out.data_ptr(), rows=rows,
        heads=heads, value=value, rank=rank, up_head=up.stride(0), up_type=held,
    )  # fmt: skip
    recorder.add("latent_out", after, mix, up, out, work=rows * heads * value * rank)
    return out.transpose(1, 2)
