"""The memory call `select` in a native program: RoPE and storing the key, scores of all tokens, the highest of them.

The reference is `PlainBackend.select`. A selection is a list of positions, not a mask, as in captured passes of a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.attention.window import Full
from lamina.errors import CaptureError
from lamina.native.arguments import TYPES, IndexScoresArgs, SelectTokensArgs
from lamina.native.operations import NativeRecorder
from lamina.runtime.native.attend import prepare_heads
from lamina.runtime.native.coding import FieldCoding

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable
    from lamina.cache.layers.base import Key
    from lamina.runtime.captured import Captured
    from lamina.runtime.gpu.backend import TableEntry


def select(
    recorder: NativeRecorder, one: Captured, entry: TableEntry, q: Tensor, k: Tensor, weights: Tensor,
    rope: RopeTable | None, neighbours: bool,
) -> Tensor:  # fmt: skip
    """q [B, H, 1, D], k [B, 1, D], weights [B, 1, H] -> positions of the selected tokens, int32 [B, 1, top]"""
    spec, table, page, store = entry.spec, entry.table, entry.page, TYPES[one.model.dtype]
    form, keys = entry.coding.formats.get("x"), k[:, None]  # one head
    coding = FieldCoding(form, spec.dim)
    options: dict[str, Any] = dict(rope=rope, neighbours=neighbours, norms=None, norms_last=False, factor=None)
    q = prepare_heads(
        recorder, table, q, keys, keys[..., :0], Full(), page, store, (coding, FieldCoding(None, 0)), options,
        rotate_queries=form is not None and form.rotation is not None,
    )  # fmt: skip
    rows, heads, dim = q.shape
    weights = weights.float().reshape(rows, heads)
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    scores = IndexScoresArgs(
        q=q.data_ptr(), weights=weights.data_ptr(), table=table.data_ptr(), coding=coding.address, rows=rows,
        heads=heads, dim=dim, top=spec.top, weights_row=weights.stride(0), page=page, store_type=store,
    )  # fmt: skip
    recorder.add("index_scores", scores, q, weights, table, coding, work=1 << 20)
    chosen = recorder.new(rows, 1, spec.top, dtype=torch.int32)
    highest = SelectTokensArgs(table=table.data_ptr(), chosen=chosen.data_ptr(), rows=rows, top=spec.top)
    recorder.add("select_tokens", highest, table, chosen, work=1 << 20)
    return chosen


def selection_of(one: Captured, key: Key, entry: TableEntry) -> Tensor:
    """What another layer has selected in this pass."""
    layer, name = entry.spec.reads_from
    chosen = one.entries[layer][name].new
    if chosen is None:
        raise CaptureError(f"layer {key[0]} shares layer {layer} entry {name!r}, which has not selected in this pass")
    return chosen
