"""States and inputs that a cache carries from pass to pass, read and written through its table, for captured prompts.

The kernels of this package take a state, or the inputs before a convolution, as a tensor. Here such a tensor is filled
from the memory that a table points to (`load_state`, `load_inputs`), and the new state is stored there (`store_state`;
new inputs of a convolution: `lamina.kernels.attention.prompt.store`); `store_base` stores the
state that a cache with slack is rewound from. A state is a few megabytes, read and written in
microseconds. Rows without new tokens are not written.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.entry import BASE, COUNTS, count_of
from lamina.kernels.launch import begin, launch
from lamina.kernels.recurrent.conv import ring_of
from lamina.kernels.recurrent.state import state_of

BLOCK = 4096  # values of a program


def load_state(table: Tensor, rows: int, shape: tuple[int, ...]) -> Tensor:
    """The states of all rows, float32 [rows, *shape], as a tensor of its own."""
    out = torch.empty(rows, *shape, dtype=torch.float32, device=table.device)
    _launch_copy(out, table, None, rows, math.prod(shape), store=False)
    return out


def store_state(state: Tensor, table: Tensor) -> None:
    """Stores the states float32 [B, *shape] of rows that have new tokens."""
    _store(state, table, None)


def store_base(state: Tensor, table: Tensor, counts: Tensor) -> None:
    """Stores the base states float32 [B, *shape] of rows whose count [B] is not zero."""
    _store(state, table, counts)


def _store(state: Tensor, table: Tensor, counts: Tensor | None) -> None:
    state = state.to(torch.float32).contiguous()
    _launch_copy(state, table, counts, state.shape[0], state[0].numel(), store=True)


def _launch_copy(values: Tensor, table: Tensor, counts: Tensor | None, rows: int, size: int, store: bool) -> None:
    launch(
        _copy_state, (triton.cdiv(size, BLOCK), rows), values, table, counts, SIZE=size, STORE=store, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _copy_state(values, table, counts, SIZE: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (i, row): values i · BLOCK … of the row's state, values [R, SIZE]; STORE: to the cache. With counts [R]
    the base states, where they are not zero."""
    begin(PDL)
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    states = state_of(table) if counts is None else state_of(table, BASE)
    held, own = states + row * SIZE + i, values + row * SIZE + i
    if STORE:
        live = count_of(tl.load(table + COUNTS), row, 1) > 0 if counts is None else tl.load(counts + row) > 0
        tl.store(held, tl.load(own, mask=i < SIZE), mask=(i < SIZE) & live)
    else:
        tl.store(own, tl.load(held, mask=i < SIZE), mask=i < SIZE)


def load_inputs(table: Tensor, like: Tensor, taps: int) -> Tensor:
    """The inputs before the new ones of a convolution of `taps` taps, [B, taps - 1, C] in the dtype of like [B, T, C];
    zeros before a row's first token."""
    rows, _, channels = like.shape
    out = like.new_empty(rows, taps - 1, channels)
    if taps > 1:
        block = min(1024, triton.next_power_of_2(channels))
        launch(
            _load_inputs, (triton.cdiv(channels, block), taps - 1, rows),
            out, table, C=channels, BACK=taps - 1, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _load_inputs(out, table, C: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (i, t, row): channels i · BLOCK … of the input at position length - BACK + t, out [R, BACK, C]."""
    begin(PDL)
    row, t = tl.program_id(2).to(tl.int64), tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ring, size, length = ring_of(table, row, C, out.dtype.element_ty)
    p = length - BACK + t
    x = tl.load(ring + tl.maximum(p, 0) % size * C + c, mask=(c < C) & (p >= 0), other=0.0)
    tl.store(out + (row * BACK + t) * C + c, x, mask=c < C)
