"""The memory call `attend` in a native program: norm and RoPE, storing the new token, and attention, two kernels.

The reference is `PlainBackend.attend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.attention.bias import BucketForm, KernelForm, SlopeForm
from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.cache.spec import Cross, Shared
from lamina.errors import InputError
from lamina.native.arguments import MOST_SPLITS, TYPES, AttentionArgs, HeadsArgs, pointer
from lamina.native.operations import NativeRecorder
from lamina.native.weights import type_of
from lamina.runtime.gpu.attend import form_of
from lamina.runtime.native.coding import FieldCoding

if TYPE_CHECKING:
    from lamina.cache.backend import AttendOptions
    from lamina.runtime.captured import Captured
    from lamina.runtime.gpu.backend import TableEntry

Codings = tuple[FieldCoding, FieldCoding]
"""Of keys and of values."""
BIASES = {SlopeForm: 1, BucketForm: 2}


def attend(
    recorder: NativeRecorder, one: Captured, entry: TableEntry, q: Tensor, k: Tensor | None, v: Tensor | None,
    options: AttendOptions,
) -> Tensor:  # fmt: skip
    """q [B, Hq, 1, D], k [B, Hk, 1, D], v [B, Hk, 1, Dv] -> [B, Hq, 1, Dv]"""
    spec, added = entry.spec, 1
    if isinstance(spec, Shared):
        layer, name = spec.reads_from
        entry = one.entries[layer][name]
        spec = entry.spec
    elif isinstance(spec, Cross):
        added = 0
    elif k is None or v is None:
        raise InputError("attend without keys and values is for layers that read another layer's or a source's")
    window = Full() if isinstance(spec, Cross) else spec.window
    page = 0 if isinstance(spec, Cross) else entry.page
    store = TYPES[one.model.dtype]
    forms = entry.coding.formats
    codings = FieldCoding(forms.get("k"), spec.key_dim), FieldCoding(forms.get("v"), spec.value_dim)
    q = prepare_heads(recorder, entry.table, q, k, v, window, page, store, codings, options)
    sizes = spec.kv_heads, spec.value_dim, spec.value_dim
    return attention(recorder, entry.table, q, sizes, window, page, store, codings, added, options)


def prepare_heads(
    recorder: NativeRecorder, table: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, window: Window, page: int,
    store: int, codings: Codings, options: Any, *, rotate_queries: bool = False,
) -> Tensor:  # fmt: skip
    """The queries after norm, RoPE and factor, [B, Hq, D]; keys, which get the same, and values go into their slots.

    rotate_queries   by the Hadamard matrix, as quantized keys are
    """
    rows, q_heads, _, dim = q.shape
    q = _heads(q)
    out = recorder.new(rows, q_heads, dim)
    rope, norms, factor = options["rope"], options["norms"], options["factor"]
    cos, sin = (None, None) if rope is None else (part.float().reshape(-1, part.shape[-1]) for part in rope)
    factor = None if factor is None else factor.float().expand(rows, 1).contiguous()
    keys = {} if k is None or v is None else _keys(_heads(k), _heads(v))
    weights = [None, None] if norms is None else [norm.weight for norm in norms]
    if len({weight.dtype for weight in weights if weight is not None}) > 1:
        weights = [None if weight is None else weight.float() for weight in weights]
    types = {type_of(weight) for weight in weights if weight is not None} or {0}
    arguments = HeadsArgs(
        q=q.data_ptr(), out=out.data_ptr(), cos=pointer(cos), sin=pointer(sin), q_weight=pointer(weights[0]),
        k_weight=pointer(weights[1]), factor=pointer(factor), table=table.data_ptr(), rows=rows, q_heads=q_heads,
        dim=dim, q_row=q.stride(0), q_head=q.stride(1),
        rope_row=0 if cos is None or cos.shape[0] == 1 else cos.stride(0), factor_row=1,
        pairs=0 if cos is None else cos.shape[-1], neighbours=options["neighbours"],
        norms=0 if norms is None else 2 if options["norms_last"] else 1, weight_type=types.pop(),
        keep=window_arguments(window)[2], page=page, store_type=store, k_coding=codings[0].address,
        v_coding=codings[1].address, rotate_queries=rotate_queries,
        q_eps=0.0 if norms is None else norms[0].eps, k_eps=0.0 if norms is None else norms[1].eps,
        q_plus=0.0 if norms is None else float(norms[0].plus_one),
        k_plus=0.0 if norms is None else float(norms[1].plus_one),
        **{name: value for name, value in keys.items() if name != "keep_alive"},
    )  # fmt: skip
    recorder.add(
        "heads",
        arguments,
        q,
        out,
        cos,
        sin,
        *weights,
        factor,
        table,
        *keys.get("keep_alive", ()),
        codings,
        work=4 * out.numel(),
    )
    return out


def _keys(k: Tensor, v: Tensor) -> dict[str, Any]:
    """The arguments of `heads` for new keys and values."""
    return dict(
        k=k.data_ptr(), v=v.data_ptr(), k_heads=k.shape[1], value_dim=v.shape[3], k_row=k.stride(0),
        k_head=k.stride(1), v_row=v.stride(0), v_head=v.stride(1), keep_alive=(k, v),
    )  # fmt: skip


def _heads(x: Tensor) -> Tensor:
    """float32 [B, H, 1, D] with the values of a head next to each other."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(
    recorder: NativeRecorder, table: Tensor, q: Tensor, sizes: tuple[int, int, int], window: Window, page: int,
    store: int, codings: Codings, added: int, options: Any, chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [B, Hq, D] over the tokens that are stored -> [B, Hq, 1, Dv]

    sizes    heads of keys, values of a head, stride of a token's values (0: they are the first values of its key)
    added    1 if the new token is in its slot already, 0 if there is none
    chosen   int32 [B, 1, top] positions of the tokens that are read; None: all that are visible
    """
    rows, q_heads, dim = q.shape
    k_heads, value_dim, value_stride = sizes
    out = recorder.new(rows, 1, q_heads, value_dim)
    parts = recorder.scratch(rows, q_heads, MOST_SPLITS, value_dim + 2)
    arrived = recorder.scratch(rows, k_heads, dtype=torch.int32)
    sinks, bias, gate = options["sinks"], form_of(options["bias"]), options["gate"]
    gate = None if gate is None else _heads(gate)
    kind, size, keep = window_arguments(window)
    weight, bucket_of = _bias(bias)
    arguments = AttentionArgs(
        q=q.data_ptr(), out=out.data_ptr(), table=table.data_ptr(), sinks=pointer(sinks), bias=pointer(weight),
        bucket_of=pointer(bucket_of), gate=pointer(gate), parts=parts.data_ptr(), arrived=arrived.data_ptr(),
        chosen=pointer(chosen), top=0 if chosen is None else chosen.shape[-1],
        rows=rows, q_heads=q_heads, k_heads=k_heads, dim=dim, value_dim=value_dim, window=kind, size=size, keep=keep,
        page=page, store_type=store, k_coding=codings[0].address, v_coding=codings[1].address,
        sinks_type=0 if sinks is None else type_of(sinks),
        bias_kind=BIASES.get(type(bias), 0), bias_type=0 if weight is None else type_of(weight),
        farthest=0 if bucket_of is None else bucket_of.shape[0] - 1, added=added,
        gate_row=0 if gate is None else gate.stride(0), gate_head=0 if gate is None else gate.stride(1),
        value_stride=value_stride, scale=options["scale"], softcap=options["softcap"] or 0.0,
    )  # fmt: skip
    kept = (q, out, table, sinks, weight, bucket_of, gate, parts, arrived, codings, chosen)
    recorder.add("attention", arguments, *kept, work=1 << 20)
    return out.transpose(1, 2)


def _bias(form: KernelForm | None) -> tuple[Tensor | None, Tensor | None]:
    match form:
        case SlopeForm(slopes=slopes):
            return slopes.float().contiguous(), None
        case BucketForm(weight=weight, bucket_of=bucket_of, both_ways=both_ways):
            own = (len(bucket_of) - 1) // 2 if both_ways else 0  # a decoder has no keys after its queries
            return weight, bucket_of[own:]
    return None, None


def window_arguments(window: Window) -> tuple[int, int, int]:
    """A window as native kernels take it: (kind, size, first tokens that it keeps)."""
    match window:
        case Full():
            return 0, 1, 0
        case Sliding(size=size, keep=keep):
            return 1, size, keep
        case Chunked(size=size):
            return 2, size, 0
    raise InputError(f"the native kernels know Full, Sliding and Chunked, not {window}")
