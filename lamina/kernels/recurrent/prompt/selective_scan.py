"""The selective scan of Mamba-1 over prompts: one launch, in which each program walks the tokens of a few channels.

    h = exp(dt · A) · h + (dt · x) ⊗ B        h [C, N], dt and x [C], in float32
    y = h · C

A token is 5 instructions for each value of the state, of which the exponential is the slowest, and a scan in chunks
would need each exponential twice. So tokens are walked one after the other; channels are what runs in parallel, one
warp for 8 of them if they have 16 states (5,120 channels are 640 warps, some 5 for every SM of an H200). The next GROUP
tokens are loaded while those before them are computed.

The reference is `lamina.recurrence.SelectiveScan`.
"""

# Kernels gather tensors in tuples that grow:
# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.cache.packed_rows import PackedRows
from lamina.kernels.attention.online_softmax import LOG2E
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, limits_of
from lamina.recurrence import SelectiveScan
from lamina.recurrence.rule import Tensors


@dataclass(frozen=True)
class Tile:
    """Values of the state that one program holds, its warps, and tokens that are loaded together."""

    values: int
    warps: int
    group: int


VALUES = 128  # of the state: four for each thread of a warp, so that a warp needs no shared memory
TOGETHER = 8  # warps of 255 registers per thread that fit an SM at once


def selective_scan_prompt(
    rule: SelectiveScan,
    state: Tensor,
    inputs: Tensors,
    constants: Tensors,
    counts: Tensor | None,
    *,
    packed: PackedRows | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """x, dt [B, T, C], B, C [B, T, N], constant A [C, N], state [B, C, N] -> (out [B, T, C], new state)

    packed   the rows are side by side in the inputs [1, N, …], and in the result
    tile     in place of what `tile_for` says
    """
    x, dt, B, C = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs[n] for n in rule.input_shapes))
    rows, tokens, channels = x.shape
    if tokens == 0:
        return torch.zeros_like(x), state
    out = torch.empty(rows, tokens, channels, dtype=x.dtype, device=x.device)
    starts, strides = None, [one.stride()[:2] for one in (x, dt, B, C)]
    if packed is not None:
        rows, tokens, counts, starts = len(packed), packed.longest, packed.counts, packed.starts
        strides = [(0, token) for _, token in strides]
    wide = triton.next_power_of_2(rule.state)
    tile = tile or tile_for(rows * channels * wide, x.element_size(), limits_of(x.device))
    block = min(max(tile.values // wide, 1), triton.next_power_of_2(channels))
    group = min(tile.group, triton.next_power_of_2(tokens))
    new = torch.empty(rows, channels, rule.state, dtype=torch.float32, device=x.device)
    launch(
        _scan_tokens, (triton.cdiv(channels, block), rows),
        out, new, state.contiguous(), x, dt, B, C, constants["A"].contiguous(), counts, starts, tokens,
        *(stride for both in strides for stride in both),
        CHANNELS=channels, N=rule.state, BLOCK=block, N_BLOCK=wide, GROUP=group,
        num_warps=tile.warps,
    )  # fmt: skip
    return out, new


def tile_for(values: int, itemsize: int, limits: Limits) -> Tile:
    """The tile for states of this many values in all: tokens loaded far ahead if registers are left for them."""
    few = values <= VALUES * TOGETHER * limits.multiprocessors and itemsize == 2
    return Tile(VALUES, warps=1, group=16 if few else 8)


@triton.jit
def _loaded(first, count, x, dt, B, C, x_token, dt_token, B_token, C_token, c_mask, n_mask, GROUP: tl.constexpr):
    """x, dt, B and C of token `first`, of the next one, and so on."""
    found = ()
    for i in tl.static_range(GROUP):
        t = tl.cast(first + i, tl.int64)
        real = t < count
        found += (tl.load(x + t * x_token, mask=c_mask & real, other=0.0),)
        found += (tl.load(dt + t * dt_token, mask=c_mask & real, other=0.0),)
        found += (tl.load(B + t * B_token, mask=n_mask & real, other=0.0),)
        found += (tl.load(C + t * C_token, mask=n_mask & real, other=0.0),)
    return found


@triton.jit
def _scan_tokens(
    out, new, state,  # [R, T, CHANNELS], float32 [R, CHANNELS, N] twice, for R rows
    x, dt, B, C, A,  # [R, T, CHANNELS] twice, [R, T, N] twice, [CHANNELS, N]
    counts, starts,  # [R] or None; [R] of `PackedRows`, or None: rows have strides
    T, x_row, x_token, dt_row, dt_token, B_row, B_token, C_row, C_token,  # strides
    CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row): channels i · BLOCK … of the row, over all its tokens.

    Behind the row's count everything is loaded as zero: with dt = 0, h stays what it is.
    """
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    c, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
    c_mask, n_mask = c < CHANNELS, n < N
    held = c_mask[:, None] & n_mask[None, :]
    cell = c[:, None] * N + n[None, :]
    count = T if counts is None else tl.minimum(tl.load(counts + row).to(tl.int32), T)
    h = tl.load(state + row * (CHANNELS * N) + cell, mask=held, other=0.0)
    a = tl.load(A + cell, mask=held, other=0.0).to(tl.float32) * LOG2E
    x += row * x_row + c
    dt += row * dt_row + c
    B += row * B_row + n
    C += row * C_row + n
    begins, end = row * T, T  # where the row's outputs begin, and how many there are
    if starts is not None:
        begins, end = tl.load(starts + row), count
        x += begins * x_token
        dt += begins * dt_token
        B += begins * B_token
        C += begins * C_token
    out += begins * CHANNELS + c
    now = _loaded(0, count, x, dt, B, C, x_token, dt_token, B_token, C_token, c_mask, n_mask, GROUP)
    for first in range(0, count, GROUP):
        ahead = first + GROUP
        later = _loaded(ahead, count, x, dt, B, C, x_token, dt_token, B_token, C_token, c_mask, n_mask, GROUP)
        for i in tl.static_range(GROUP):
            t = tl.cast(first + i, tl.int64)
            size = now[4 * i + 1].to(tl.float32)
            added = (size * now[4 * i].to(tl.float32))[:, None] * now[4 * i + 2].to(tl.float32)[None, :]
            h = tl.exp2(size[:, None] * a) * h + added
            y = tl.sum(h * now[4 * i + 3].to(tl.float32)[None, :], 1)
            tl.store(out + t * CHANNELS, y.to(out.dtype.element_ty), mask=c_mask & (t < count))
        now = later
    tl.store(new + row * (CHANNELS * N) + cell, h, mask=held)
    for t in range(count, end):
        at = tl.cast(t, tl.int64) * CHANNELS
        tl.store(out + at, tl.zeros([BLOCK], out.dtype.element_ty), mask=c_mask)
