"""Stores many new tokens per row in their slots, through a cache's table: of keys and values, or of any one field.

A program takes a tile of tokens of one head, so a launch has few programs. A line, a ring and pages differ in the slot
of a token alone (`rope_append.slot_at`). Of a pass that is longer than a ring only the newest tokens are stored, so
that no slot is written twice; padding is not stored.

The reference is `lamina.cache.layers.layout.Layout.slots`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.attention.rope_append import cell_at, keeps_slot, slot_at
from lamina.kernels.columns import ENTRY_AT
from lamina.kernels.entry import COUNTS, V_STORE, count_of, lengths_of, store_pointer
from lamina.kernels.launch import begin, launch

VALUES = 8192  # of a program's tile


def store_tokens(k: Tensor, v: Tensor | None, table: Tensor, page: int = 0, column: str = "k") -> None:
    """Stores keys [B, H, T, D] and values [B, H, T, Dv]: the first `counts` tokens of each row, in their slots.

    v      None for an entry with one field: latents, or the inputs of a convolution
    page   slots per page; 0 without pages
    column of the table, that points to the store of k
    """
    k = k if k.stride(-1) == 1 else k.contiguous()
    values = k if v is None else v if v.stride(-1) == 1 else v.contiguous()
    (B, H, T, D), Dv = k.shape, 0 if v is None else values.shape[-1]
    wide = min(max(16, triton.next_power_of_2(max(D, Dv))), 1024)
    tokens = min(triton.next_power_of_2(T), max(1, VALUES // wide))
    launch(
        _store_tokens, (triton.cdiv(T, tokens), H, B),
        k, values, table, T, *k.stride()[:3], *values.stride()[:3],
        HEADS=H, D=D, DV=Dv, WIDE=wide, TOKENS=tokens, PAGE=page, COLUMN=ENTRY_AT[column],
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _store_tokens(
    k, v, table,  # [B, HEADS, T, D], [B, HEADS, T, DV]; the entry's table row
    T, k_row, k_head, k_token, v_row, v_head, v_token,  # strides
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, COLUMN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): tokens i · TOKENS … of one head. DV is 0 for an entry with one field. COLUMN: of k."""
    begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length, count = tl.load(lengths_of(table) + row).to(tl.int32), count_of(tl.load(table + COUNTS), row, T)
    first = tl.program_id(0) * TOKENS
    if first < count:
        t = first + tl.arange(0, TOKENS)
        stored = (t < count) & keeps_slot(table, length + t, length + count)
        slot = tl.where(stored, slot_at(table, length + t), 0)
        cell = cell_at(table, row, head, slot, stored, HEADS, PAGE).to(tl.int64)
        k += row * k_row + head * k_head
        _copy(store_pointer(table, COLUMN, k.dtype), k, cell, t, k_token, stored, D, WIDE)
        if DV:
            v += row * v_row + head * v_head
            _copy(store_pointer(table, V_STORE, v.dtype), v, cell, t, v_token, stored, DV, WIDE)


@triton.jit
def _copy(store, x, cell, t, token, stored, D: tl.constexpr, WIDE: tl.constexpr):
    """Copies D values of each token t of x to its cell of the store, WIDE at a time."""
    for start in range(0, D, WIDE):
        d = start + tl.arange(0, WIDE)
        inside = stored[:, None] & (d < D)[None, :]
        values = tl.load(x + t[:, None] * token + d[None, :], mask=inside)
        tl.store(store + cell[:, None] * D + d[None, :], values, mask=inside)
