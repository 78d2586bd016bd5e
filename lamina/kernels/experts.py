"""Mixtures of experts for few tokens: each (token, expert) pair reads its expert's rows where they are, unsorted.

    expert_gated    act(gate(x)) · up(x) of each chosen expert
    expert_down     what the chosen experts give, weighed and added up, with an optional residual

The reference is `lamina.nn.Experts`. Pairs are the fast dimension of the grid, so tokens that chose the same expert
read its rows at about the same time, from L2.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.finish import Act, act_kind, activate
from lamina.kernels.launch import begin, launch_options, pdl


@dataclass(frozen=True)
class Share:
    """A program's share: `rows` outputs, `block` numbers of their sums at a time."""

    rows: int = 1
    block: int = 2048
    warps: int = 4


def expert_gated(
    x: Tensor,
    gate_up: Tensor,
    chosen: Tensor,
    act: Act,
    input_weights: Tensor | None = None,
    *,
    share: Share | None = None,
) -> Tensor:
    """x [N, K], gate_up [E, 2I, K], chosen [N, k] -> [N, k, I]

    `input_weights` [N, k] are factors on what experts read; being factors of the products too, they are applied there.
    """
    (tokens, width), k, inner = x.shape, chosen.shape[1], gate_up.shape[1] // 2
    if share is None:
        block = min(1024, triton.next_power_of_2(width))
        share = Share(2, block, _warps(block, x))
    out = x.new_empty(tokens, k, inner)
    _gated_kernel[(tokens * k, triton.cdiv(inner, share.rows))](
        x, gate_up, chosen.contiguous(), x if input_weights is None else input_weights.contiguous(), out,
        inner, width, x.stride(0), CHOICES=k, ROWS=share.rows, BLOCK=share.block, EVEN=width % share.block == 0,
        ACT=act_kind(act), WEIGHTS=input_weights is not None, PDL=pdl(), num_warps=share.warps, **launch_options(),
    )  # fmt: skip
    return out


def expert_down(
    h: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    residual: Tensor | None = None,
    *,
    share: Share | None = None,
) -> Tensor:
    """h [N, k, I], down [E, W, I], chosen and weights [N, k], residual [N, W] -> [N, W]"""
    tokens, k, inner = h.shape
    width = down.shape[1]
    if share is None:
        block = min(512, triton.next_power_of_2(inner))
        share = Share(1, block, _warps(block, h))
    out = h.new_empty(tokens, width)
    _down_kernel[(tokens, triton.cdiv(width, share.rows))](
        h.contiguous(), down, chosen.contiguous(), h if weights is None else weights.contiguous(),
        h if residual is None else residual, out, inner, width, 0 if residual is None else residual.stride(0),
        CHOICES=k, ROWS=share.rows, BLOCK=share.block, EVEN=inner % share.block == 0,
        WEIGHTS=weights is not None, RESIDUAL=residual is not None, PDL=pdl(),
        num_warps=share.warps, **launch_options(),
    )  # fmt: skip
    return out


def _warps(block: int, x: Tensor) -> int:
    """No more than fill a block with 16 bytes for each thread: beyond that, threads would exchange what they hold."""
    return max(1, min(4, block * x.element_size() // 512))


@triton.jit
def _gated_kernel(
    x, gate_up, chosen, weights, out, INNER, K, x_stride, CHOICES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr, WEIGHTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, i): outputs i · ROWS and on of the pair p = token · CHOICES + choice."""
    begin(PDL)
    pair = tl.program_id(0)
    expert = tl.load(chosen + pair).to(tl.int64)
    x += tl.cast(pair // CHOICES, tl.int64) * x_stride
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    gate = gate_up + (expert * (2 * INNER) + tl.minimum(i, INNER - 1))[:, None] * K  # [ROWS, 1]
    up = gate + tl.cast(INNER, tl.int64) * K
    a = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    b = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        inside = (k < K) | EVEN
        w = tl.load(gate + k, mask=inside, other=0, eviction_policy="evict_first")
        u = tl.load(up + k, mask=inside, other=0, eviction_policy="evict_first")
        v = tl.load(x + k, mask=inside, other=0, eviction_policy="evict_last").to(tl.float32)
        a += w.to(tl.float32) * v
        b += u.to(tl.float32) * v
    y, z = tl.sum(a, 1), tl.sum(b, 1)
    if WEIGHTS:
        factor = tl.load(weights + pair).to(tl.float32)
        y, z = y * factor, z * factor
    y = activate(y, ACT) * z
    tl.store(out + tl.cast(pair, tl.int64) * INNER + i, y.to(out.dtype.element_ty), mask=i < INNER)


@triton.jit
def _down_kernel(
    h, down, chosen, weights, residual, out, INNER, W, residual_stride, CHOICES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, WEIGHTS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, w): outputs w · ROWS and on of token n, over all its choices.

    Choices and weights are all loaded before the first is used, so their rows are on their way together."""
    begin(PDL)
    n = tl.cast(tl.program_id(0), tl.int64)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(m, W - 1)[:, None]
    experts, factors = (), ()
    for j in tl.static_range(CHOICES):
        experts += (tl.load(chosen + n * CHOICES + j).to(tl.int64),)
        factors += (tl.load(weights + n * CHOICES + j).to(tl.float32) if WEIGHTS else 1.0,)
    acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, INNER, BLOCK):
        i = start + tl.arange(0, BLOCK)[None, :]
        inside = (i < INNER) | EVEN
        for j in tl.static_range(CHOICES):
            at = (experts[j] * W + row) * INNER + i
            w = tl.load(down + at, mask=inside, other=0, eviction_policy="evict_first")
            v = tl.load(h + (n * CHOICES + j) * INNER + i, mask=inside, other=0, eviction_policy="evict_last")
            acc += w.to(tl.float32) * (v.to(tl.float32) * factors[j])
    y = tl.sum(acc, 1)  # [ROWS]
    if RESIDUAL:
        y += tl.load(residual + n * residual_stride + m, mask=m < W, other=0).to(tl.float32)
    tl.store(out + n * W + m, y.to(out.dtype.element_ty), mask=m < W)
