"""The short causal convolution over many tokens, and the activation that follows, in one launch.

A program computes a tile of tokens × channels. It loads the tile once for each tap, shifted by a token: all but the
first load are of lines that the SM has in its cache.

Reference: `lamina.recurrence.conv.causal_convolution`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.cache.packed_rows import PackedRows
from lamina.kernels.gemm.epilogue import Act, act_kind, activate
from lamina.kernels.launch import begin, launch

TOKENS, CHANNELS, WARPS = 32, 128, 4  # of a program


def conv_prompt(
    past: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: Act | None = None,
    counts: Tensor | None = None,
    *,
    packed: PackedRows | None = None,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """past [B, K-1, C] (zeros before the first token), x [B, T, C] of any strides, weight [C, K], bias [C]
    -> act(convolution) [B, T, C] in x's dtype, summed and activated in float32.

    act      a name or function that `act_kind` knows
    counts   [B]: outputs past the first counts[b] tokens of row b are zero, whatever x holds there
    packed   the rows are side by side in x [1, N, C], and in the result
    tile     tokens, channels and warps of a program, for measuring other configurations
    """
    x, past = (one if one.stride(2) == 1 else one.contiguous() for one in (x, past))
    rows, tokens, channels, x_row = *x.shape, x.stride(0)
    out = torch.empty(rows, tokens, channels, dtype=x.dtype, device=x.device)
    starts = None
    if packed is not None:
        rows, tokens, counts, starts, x_row = len(packed), packed.longest, packed.counts, packed.starts, 0
    if out.numel() == 0:
        return out
    length, width, warps = tile or (TOKENS, CHANNELS, WARPS)
    length, width = min(length, triton.next_power_of_2(tokens)), min(width, triton.next_power_of_2(channels))
    launch(
        _convolve_prompt, (triton.cdiv(channels, width), triton.cdiv(tokens, length), rows),
        out, x, past, weight.contiguous(), bias, counts, starts, tokens, x_row, x.stride(1), *past.stride()[:2],
        C=channels, TAPS=weight.shape[1], ACT=None if act is None else act_kind(act), LENGTH=length, WIDTH=width,
        num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])
def _convolve_prompt(
    out, x, past, weight, bias,  # [R, T, C] twice, [R, TAPS - 1, C], [C, TAPS], [C] or None
    counts, starts,  # [R] or None; [R] of `PackedRows`, or None: rows have strides
    T, x_row, x_token, past_row, past_token,
    C: tl.constexpr, TAPS: tl.constexpr, ACT: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j, row): channels i · WIDTH … of tokens j · LENGTH …"""
    row, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * LENGTH
    c, t = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), first + tl.arange(0, LENGTH)
    has_c = (c < C)[None, :]
    begin(PDL)
    count = T
    if counts is not None:
        count = tl.minimum(tl.load(counts + row), T).to(tl.int32)
    begins, end = row * T, T  # where the row's outputs begin, and how many there are
    if starts is not None:
        begins, end = tl.load(starts + row), count
        x += begins * x_token
    y = tl.zeros([LENGTH, WIDTH], tl.float32)
    if first < count:
        if bias is not None:
            y += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            w = tl.load(weight + c * TAPS + tap, mask=c < C, other=0.0).to(tl.float32)[None, :]
            s = t + (tap - (TAPS - 1))  # the token that this tap multiplies; before the row's first one, it is in past
            there = (s >= 0) & (s < count)
            at = x + row * x_row + s.to(tl.int64)[:, None] * x_token + c[None, :]
            y += w * tl.load(at, mask=there[:, None] & has_c, other=0.0).to(tl.float32)
            if first < TAPS - 1:
                at = past + row * past_row + (s + TAPS - 1).to(tl.int64)[:, None] * past_token + c[None, :]
                y += w * tl.load(at, mask=(s < 0)[:, None] & has_c, other=0.0).to(tl.float32)
        if ACT is not None:
            y = activate(y, ACT)
        y = tl.where((t < count)[:, None], y, 0.0)
    at = out + (begins + t)[:, None] * C + c[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=(t < end)[:, None] & has_c)
