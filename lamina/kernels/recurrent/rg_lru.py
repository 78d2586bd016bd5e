"""RG-LRU for a few tokens per row, on the states that a cache keeps: its gates, the recurrence, and the output gate.

    opened = sigmoid(W_open x + b)        g = rate · sigmoid(W_decay x + b)        per block of channels (head)
    h = exp(g) · h + √(1 - exp(2g)) · opened · x        a row's first token has the factor 1

The state is one value per channel; what must be moved are the weights of the gates. So a program holds the rows of both
weights for a few channels in registers, loaded before it waits for the launch in front, and applies them to the tokens
of several rows. Reference: `lamina.recurrence.RGLRU`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.entry import COUNTS, count_of
from lamina.kernels.gemm.epilogue import act_kind, activate
from lamina.kernels.launch import begin, launch
from lamina.kernels.recurrent.state import Tile, contiguous_tokens, output_dtype, row_and_token_strides, state_of
from lamina.recurrence.rg_lru import Gates
from lamina.recurrence.rule import Tensors

TILE = Tile(4096, 4)  # values of one gate's weight per program
ROWS = 4  # rows per program


@triton.jit
def _rg_lru(
    x, g,  # [R, T, C]; log decays [R, T, C], or None: GATED
    open_weight, open_bias, decay_weight, decay_bias, rate,  # GATED: [C, W], [C], [C, W], [C], [C]
    positions, gate,  # GATED: [R, T] int64; [R, T, C] or None
    out, table,  # [R, T, C]; the entry's table row, whose store is the states, float32 [R, C]
    ready_x, ready_g,  # [R, T, C] or None: get the inputs of the rule itself
    R, x_row, x_token, g_row, g_token, position_row, position_token, gate_row, gate_token,  # rows, strides
    T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BLOCK: tl.constexpr, W_BLOCK: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, i, j): channels i · BLOCK … of the head's W, of the rows j · ROWS …, over all T tokens."""
    head, inside = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c, c_mask, d = head * W + inside, inside < W, tl.arange(0, W_BLOCK)
    if GATED:
        at, tile = c[:, None] * W + d[None, :], c_mask[:, None] & (d < W)[None, :]
        opens = tl.load(open_weight + at, mask=tile, other=0.0).to(tl.float32)  # [BLOCK, W]
        decays = tl.load(decay_weight + at, mask=tile, other=0.0).to(tl.float32)
        open_from = tl.load(open_bias + c, mask=c_mask, other=0.0).to(tl.float32)
        decay_from = tl.load(decay_bias + c, mask=c_mask, other=0.0).to(tl.float32)
        most = tl.load(rate + c, mask=c_mask, other=0.0).to(tl.float32)
    states, counts = state_of(table), tl.load(table + COUNTS)
    begin(PDL)
    first = tl.program_id(2) * ROWS
    for i in range(ROWS):
        row = (first + i).to(tl.int64)
        c_mask = (inside < W) & (row < R)
        count = count_of(counts, tl.minimum(row, R - 1), T)
        state = states + row * C + c
        h = tl.load(state, mask=c_mask, other=0.0)
        for t in range(T):
            token = x + row * x_row + t * x_token
            new = tl.load(token + c, mask=c_mask, other=0.0).to(tl.float32)
            if GATED:
                whole = tl.load(token + head * W + d, mask=(d < W) & (row < R), other=0.0).to(tl.float32)[None, :]
                opened = tl.sigmoid(tl.sum(opens * whole, axis=1) + open_from)
                log = most * tl.sigmoid(tl.sum(decays * whole, axis=1) + decay_from)
                start = tl.load(positions + row * position_row + t * position_token, mask=row < R, other=0) == 0
                new *= opened * tl.where(start, 1.0, tl.sqrt(_room(log)))
            else:
                log = tl.load(g + row * g_row + t * g_token + c, mask=c_mask, other=0.0).to(tl.float32)
            if ready_x is not None:
                tl.store(ready_x + (row * T + t) * C + c, new, mask=c_mask)
                tl.store(ready_g + (row * T + t) * C + c, log, mask=c_mask)
            h = tl.where(t < count, tl.exp(log) * h + new, h)
            y = h
            if gate is not None:
                z = tl.load(gate + row * gate_row + t * gate_token + c, mask=c_mask, other=0.0).to(tl.float32)
                y *= activate(z, ACT)
            tl.store(out + (row * T + t) * C + c, tl.where(t < count, y, 0.0), mask=c_mask)
        if WRITE:
            tl.store(state, h, mask=c_mask & (count > 0))


@triton.jit
def _room(log):
    """1 - exp(2 · log) for log <= 0. Near zero the difference would lose digits: there a few terms of its series."""
    u = 2.0 * log
    series = -u * (1.0 + u * (0.5 + u * (0.16666667 + u * 0.041666668)))
    return tl.where(u > -0.05, series, 1.0 - tl.exp(u))


def rg_lru_step(
    inputs: Tensors,
    constants: Tensors,
    table: Tensor,
    *,
    gates: Gates | None = None,
    positions: Tensor | None = None,
    gate: Tensor | None = None,
    act: str = "silu",
    write: bool = True,
    ready: Tensors | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """RG-LRU: x and g [B, T, C]; the state is [B, C] -> [B, T, C].

    gates, positions   `Gates` and [B, T]: only x is given, and both inputs of the rule are made of it
    gate, act          z [B, T, C]: multiplies by act(z), in the dtype of z
    ready              `x` and `g` in it are filled with the inputs of the rule itself
    """
    x = contiguous_tokens(inputs["x"])
    g = None if gates is not None else contiguous_tokens(inputs["g"])
    rows, tokens, channels = x.shape
    z = None if gate is None else contiguous_tokens(gate)
    out = torch.empty(rows, tokens, channels, dtype=output_dtype(x, None, gate), device=x.device)
    tile = tile or TILE
    width = channels if gates is None else gates.open_weight.shape[1]
    wide = 1 if gates is None else triton.next_power_of_2(width)
    block = min(max(tile.values // wide, 1), triton.next_power_of_2(width), 256)
    weights = gates or (None,) * 5
    launch(
        _rg_lru, (channels // width, triton.cdiv(width, block), triton.cdiv(rows, ROWS)),
        x, g, *weights, positions, z, out, table, *((ready or {}).get(name) for name in ("x", "g")),
        rows, *x.stride()[:2], *row_and_token_strides(g), *row_and_token_strides(positions), *row_and_token_strides(z),
        tokens, channels, width, gates is not None, act_kind(act), block, wide, ROWS, write,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
