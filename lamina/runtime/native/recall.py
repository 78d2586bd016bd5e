"""The memory call `recall` in a native program: storing the new vector, and reading back those that it sees.

How many tokens are read back is the shape of a tensor, which a program fixes: as many as the window shows, or, where
all tokens stay visible, `Captured.room`. A step whose rows get longer than that is recorded again. Vectors are in the
order of their positions, and followed by zeros, which no query sees. The reference is `PlainBackend.recall`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.native.arguments import TYPES, RecallArgs
from lamina.native.operations import NativeRecorder
from lamina.runtime.native.attend import prepare_heads, window_arguments
from lamina.runtime.native.coding import FieldCoding

if TYPE_CHECKING:
    from lamina.runtime.gpu.backend import TableEntry
    from lamina.runtime.native.step import NativeStep

NOTHING: dict[str, Any] = dict(rope=None, neighbours=False, norms=None, norms_last=False, factor=None)


def recall(recorder: NativeRecorder, one: NativeStep, entry: TableEntry, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, 1, D] -> vectors float32 [B, S, D], and which of them are tokens that the new one sees, bool [B, 1, S]"""
    spec, table, page, store = entry.spec, entry.table, entry.page, TYPES[one.model.dtype]
    coding, new = FieldCoding(entry.coding.formats.get("x"), spec.dim), x[:, None]
    codings = coding, FieldCoding(None, 0)
    prepare_heads(recorder, table, new[:, :0], new, new[..., :0], spec.window, page, store, codings, NOTHING)
    kind, size, keep = window_arguments(spec.window)
    rows, room = x.shape[0], one.room_of(spec.window)
    out, seen = recorder.new(rows, room, spec.dim), recorder.new(rows, 1, room, dtype=torch.bool)
    arguments = RecallArgs(
        out=out.data_ptr(), seen=seen.data_ptr(), table=table.data_ptr(), coding=coding.address, rows=rows, room=room,
        dim=spec.dim, window=kind, size=size, keep=keep, page=page, store_type=store,
    )  # fmt: skip
    recorder.add("recall", arguments, out, seen, table, coding, work=2 * out.numel())
    return out, seen
