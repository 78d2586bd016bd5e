"""Mixture of experts for several tokens: the matrices of a chosen expert are read once for all tokens that chose it.

    grouped_gated   `expert_gated` in one launch
    grouped_down    `expert_down` in two: the down products of (token, expert) pairs, then the sum over a token's pairs

A program multiplies a tile of one expert's matrix with the vectors of all tokens on tensor cores, and keeps the columns
of those that chose the expert. So nothing is sorted or gathered: a tensor core instruction takes 16 columns anyway, and
vectors of other tokens are masked, not read. Which tokens these are, each program finds in `chosen`.

Programs belong to experts, or to (token, expert) pairs where there are fewer of those than experts; the first pair of
an expert then works for all. Programs without tokens end at once. The sum adds pairs in the order of `chosen`, so
results repeat bit for bit.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, no-redef"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.activation import Gating
from lamina.kernels.gemm.epilogue import Act, act_kind, joined, plus
from lamina.kernels.gemm.product import MOST, Tiles, padded, shared_bytes
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, first_fit, fitted, smaller

SUMMED = 512  # outputs of one program of the sum


def grouped_tiles(tokens: int, each: int, experts: int, k: int, itemsize: int, limits: Limits) -> Tiles | None:
    """The tiles for `tokens` that chose `each` of the experts, with sums over k; None where pairs are faster.

    Pairs read an expert once for each token, so they are for few tokens, which seldom choose the same one. Two programs
    share an SM where they fit: one starts while the other streams.
    """
    if not 1 < tokens <= MOST or 4 * tokens * each < experts:
        return None
    tiles = Tiles(64, max(16, min(256 // itemsize, triton.next_power_of_2(k))), stages=4)

    def need(one: Tiles) -> int:
        return shared_bytes(one, tokens, itemsize, False, limits)

    return first_fit(smaller(tiles), need, limits.room(2)) or fitted(smaller(tiles), need, limits.shared)


def grouped_gated(
    x: Tensor,
    first: Tensor,
    chosen: Tensor,
    weights: Tensor,
    act: Act | Gating,
    tiles: Tiles,
    *,
    gated: bool,
    bias: Tensor | None,
    weigh_input: bool,
    shared: Tensor | None,
    shared_factor: float,
    opening: Tensor | None,
) -> Tensor:
    """As `expert_gated`. Outputs of identity experts are not written: `grouped_down` does not read them."""
    (tokens, width), (experts, rows, _), matrices = x.shape, first.shape, 1 + gated
    inner, size, outputs = (
        rows // matrices,
        0 if shared is None else shared.shape[0] // matrices,
        tiles.rows // matrices,
    )
    k = chosen.shape[1]
    out = x.new_empty(tokens, k * inner + size)
    for_all = triton.cdiv(size, outputs)
    gating = act if isinstance(act, Gating) else Gating()
    launch(
        _grouped_gated, (for_all + min(experts, tokens * k) * triton.cdiv(inner, outputs),),
        x, first, x if shared is None else shared, x if bias is None else bias, chosen.contiguous(),
        weights.contiguous(), x if opening is None else opening.contiguous(), out, tokens, x.stride(0), for_all,
        INNER=inner, SHARED=size, K=width, GATED=gated,
        ACT=act_kind(act.act if isinstance(act, Gating) else act), LIMIT=gating.limit or 0.0, PLUS=gating.plus,
        SLOPE=gating.slope, WEIGH_INPUT=weigh_input, OPENING=opening is not None, SHARED_FACTOR=shared_factor,
        EVEN=width % tiles.block == 0, **_common(tiles, x, k, experts, bias),
    )  # fmt: skip
    return out


def grouped_down(
    h: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    tiles: Tiles,
    *,
    bias: Tensor | None,
    identity: Tensor | None,
    shared: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """As `expert_down`, without norms."""
    tokens, k, (experts, width, inner) = h.shape[0], chosen.shape[1], down.shape
    size = 0 if shared is None else shared.shape[1]
    chosen, weights = chosen.contiguous(), weights.contiguous()
    parts = h.new_empty(tokens, k + (size > 0), width, dtype=torch.float32)
    out = h.new_empty(tokens, width, dtype=None if residual is None else residual.dtype)
    across = triton.cdiv(width, tiles.rows)
    for_all = across if size else 0
    launch(
        _grouped_down, (for_all + min(experts, tokens * k) * across,),
        h, down, h if shared is None else shared, h if bias is None else bias, chosen, weights, parts, tokens, for_all,
        INNER=inner, SHARED=size, W=width, EVEN=inner % tiles.block == 0 and size % tiles.block == 0,
        **_common(tiles, h, k, experts, bias),
    )  # fmt: skip
    launch(
        _sum_pairs, (triton.cdiv(width, SUMMED), tokens),
        parts, chosen, weights, h if identity is None else identity, h if residual is None else residual, out,
        0 if identity is None else identity.stride(0), 0 if residual is None else residual.stride(0),
        CHOICES=k, EXPERTS=experts, PARTS=parts.shape[1], W=width, BLOCK=SUMMED, IDENTITY=identity is not None,
        RESIDUAL=residual is not None, num_warps=4,
    )  # fmt: skip
    return out


def _common(tiles: Tiles, x: Tensor, each: int, experts: int, bias: Tensor | None) -> dict[str, Any]:
    tokens = x.shape[0]
    return dict(
        CHOICES=each, CHOICES_BLOCK=triton.next_power_of_2(each), EXPERTS=experts, N_BLOCK=padded(tokens),
        ROWS=tiles.rows, BLOCK=tiles.block, STAGES=tiles.stages, APART=x.dtype == torch.float32,
        BY_PAIR=tokens * each < experts, BIAS=bias is not None, num_warps=tiles.warps,
    )  # fmt: skip


@triton.jit
def _grouped_gated(
    x,  # [N, K]
    first, shared, bias,  # [E, 2 · INNER, K], [2 · SHARED, K], [E, 2 · INNER]: gate rows, then up rows; or up alone
    chosen, weights, opening,  # [N, CHOICES] expert ids, [N, CHOICES], [N, 1]; opening is read if OPENING
    out,  # [N, CHOICES · INNER + SHARED]
    N, x_stride, for_all,  # tokens, elements between rows of x, programs of the shared expert
    INNER: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,  # sizes; with gate rows
    ACT: tl.constexpr, LIMIT: tl.constexpr, PLUS: tl.constexpr, SLOPE: tl.constexpr,  # `Gating`
    WEIGH_INPUT: tl.constexpr, OPENING: tl.constexpr, SHARED_FACTOR: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK divides K: no masks
    CHOICES: tl.constexpr, CHOICES_BLOCK: tl.constexpr, EXPERTS: tl.constexpr,  # CHOICES padded to a power of two
    N_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,  # N padded; `Tiles`
    APART: tl.constexpr, BY_PAIR: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,  # as in skinny.py; of `_tokens`
):  # fmt: skip
    """The first `for_all` programs compute tiles of the shared expert, the others (s, i) the tile i of slot s.

    A tile has ROWS matrix rows: as many gate rows as up rows if GATED, which give ROWS / 2 outputs."""
    begin(PDL)
    MATRICES: tl.constexpr = 1 + GATED
    OUTPUTS: tl.constexpr = ROWS // MATRICES
    TILES: tl.constexpr = (INNER + OUTPUTS - 1) // OUTPUTS
    n, program = tl.arange(0, N_BLOCK), tl.program_id(0)
    is_shared = program < for_all
    slot = tl.maximum(program - for_all, 0) // TILES
    tile = tl.where(is_shared, program, (program - for_all) % TILES)
    expert, place, mine, active = _tokens(chosen, slot, n, N, CHOICES, CHOICES_BLOCK, EXPERTS, BY_PAIR)
    matrix = first + expert.to(tl.int64) * (MATRICES * INNER * K)
    column = place * INNER
    size = tl.where(is_shared, SHARED, INNER)
    if SHARED > 0:
        if is_shared:
            matrix = shared
        mine, active = tl.where(is_shared, n < N, mine), active | is_shared
        column = tl.where(is_shared, CHOICES * INNER, column)
    if active:
        r = tl.arange(0, ROWS)
        row = r // OUTPUTS * size + tl.minimum(tile * OUTPUTS + r % OUTPUTS, size - 1)
        acc = _products(matrix + row[:, None] * K, x + (n * x_stride)[None, :], mine, K, ROWS, N_BLOCK, BLOCK, STAGES,
                        APART, EVEN)  # fmt: skip
        y, z = acc, acc
        if GATED:
            y, z = tl.split(tl.permute(tl.reshape(acc, [2, OUTPUTS, N_BLOCK]), (1, 2, 0)))
        i = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        weight = tl.load(weights + n * CHOICES + place, mask=mine, other=0).to(tl.float32)
        if SHARED > 0:
            weight = tl.where(is_shared, 1.0, weight)
        if WEIGH_INPUT:
            y, z = y * weight[None, :], z * weight[None, :]
        if BIAS:
            own, keep = bias + expert.to(tl.int64) * (MATRICES * INNER) + i, (i < INNER) & (not is_shared)
            y += tl.load(own, mask=keep, other=0).to(tl.float32)[:, None]
            if GATED:
                z += tl.load(own + INNER, mask=keep, other=0).to(tl.float32)[:, None]
        y = joined(y, z, ACT, GATED, LIMIT, PLUS, SLOPE)
        if not WEIGH_INPUT:
            y *= weight[None, :]
        if SHARED > 0:
            factor = tl.zeros([N_BLOCK], tl.float32) + SHARED_FACTOR
            if OPENING:
                factor *= tl.load(opening + n, mask=n < N, other=0).to(tl.float32)
            y *= tl.where(is_shared, factor, 1.0)[None, :]
        at = (n * (CHOICES * INNER + SHARED) + column)[None, :] + i[:, None]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=mine[None, :] & (i < size)[:, None])


@triton.jit
def _grouped_down(
    h,  # [N, CHOICES · INNER + SHARED], from `_grouped_gated`
    down, shared, bias,  # [E, W, INNER], [W, SHARED], [E, W]; bias is read if BIAS
    chosen, weights,  # [N, CHOICES] expert ids, [N, CHOICES]; weights are read if BIAS
    parts,  # [N, CHOICES + 1 if SHARED, W] float32: products of each pair, and of the shared expert
    N, for_all,  # tokens, programs of the shared expert
    INNER: tl.constexpr, SHARED: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr,  # BLOCK divides INNER and SHARED
    CHOICES: tl.constexpr, CHOICES_BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    N_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    APART: tl.constexpr, BY_PAIR: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs as in `_grouped_gated`; a tile has ROWS outputs."""
    begin(PDL)
    TILES: tl.constexpr = (W + ROWS - 1) // ROWS
    n, program = tl.arange(0, N_BLOCK), tl.program_id(0)
    is_shared = program < for_all
    slot = tl.maximum(program - for_all, 0) // TILES
    m = tl.where(is_shared, program, (program - for_all) % TILES) * ROWS + tl.arange(0, ROWS)
    expert, place, mine, active = _tokens(chosen, slot, n, N, CHOICES, CHOICES_BLOCK, EXPERTS, BY_PAIR)
    matrix = down + expert.to(tl.int64) * (W * INNER)
    size = tl.where(is_shared, SHARED, INNER)
    if SHARED > 0:
        if is_shared:
            matrix = shared
        mine, active = tl.where(is_shared, n < N, mine), active | is_shared
        place = tl.where(is_shared, CHOICES, place)
    if active:
        inside = h + (n * (CHOICES * INNER + SHARED) + place * INNER)[None, :]
        row = matrix + (tl.minimum(m, W - 1) * size)[:, None]
        y = _products(row, inside, mine, size, ROWS, N_BLOCK, BLOCK, STAGES, APART, EVEN)
        if BIAS:
            own = tl.load(bias + expert.to(tl.int64) * W + m, mask=(m < W) & (not is_shared), other=0).to(tl.float32)
            weight = tl.load(weights + n * CHOICES + place, mask=mine & (not is_shared), other=0).to(tl.float32)
            y += own[:, None] * weight[None, :]
        PARTS: tl.constexpr = CHOICES + (SHARED > 0)
        tl.store(parts + ((n * PARTS + place) * W)[None, :] + m[:, None], y, mask=mine[None, :] & (m < W)[:, None])


@triton.jit
def _tokens(chosen, slot, n, N, CHOICES: tl.constexpr, CHOICES_BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
            BY_PAIR: tl.constexpr):  # fmt: skip
    """The expert of a slot and the tokens that chose it.

    -> expert; for each token its index among the token's choices, and whether it is there, [N_BLOCK] both; whether the
    slot has work

    BY_PAIR: slots are the pairs token · CHOICES + choice, of which the first with an expert has work; otherwise experts
    """
    j = tl.arange(0, CHOICES_BLOCK)
    pair = n[:, None] * CHOICES + j[None, :]
    picked = tl.load(chosen + pair, mask=(n < N)[:, None] & (j < CHOICES)[None, :], other=-1).to(tl.int32)
    expert = slot
    if BY_PAIR:
        expert = tl.load(chosen + slot).to(tl.int32)
    place = tl.max(tl.where(picked == expert, j[None, :], -1), 1)
    if BY_PAIR:
        first_pair = tl.min(tl.where(place >= 0, n * CHOICES + place, 1 << 30), 0)
        active = (first_pair == slot) & (expert < EXPERTS)
    else:
        active = tl.max(place, 0) >= 0
    return expert, tl.maximum(place, 0), place >= 0, active


@triton.jit
def _products(rows, columns, mine, K, ROWS: tl.constexpr, N_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
              STAGES: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Matrix rows of K elements, pointers [ROWS, 1], times vectors, pointers [1, N_BLOCK], read where `mine` ->
    [ROWS, N_BLOCK] float32"""
    k = tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, N_BLOCK], tl.float32)
    lost = acc
    for at in tl.range(0, K, BLOCK, num_stages=STAGES):
        inside = (at + k < K) | EVEN
        w = tl.load(rows + (at + k)[None, :], mask=inside[None, :], other=0, eviction_policy="evict_first")
        v = tl.load(columns + (at + k)[:, None], mask=inside[:, None] & mine[None, :], other=0)
        if APART:
            acc, lost = plus(acc, lost, tl.dot(w, v, input_precision="ieee"))
        else:
            acc = tl.dot(w, v, acc)
    return acc


@triton.jit
def _sum_pairs(
    parts,  # [N, PARTS, W] float32, from `_grouped_down`: CHOICES pairs, then the shared expert
    chosen, weights, x,  # [N, CHOICES] each, and the input of experts [N, W]; read if IDENTITY
    residual, out,  # [N, W] each; residual is read if RESIDUAL
    x_stride, residual_stride,  # elements between rows
    CHOICES: tl.constexpr, EXPERTS: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    IDENTITY: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (w, n): outputs w · BLOCK … + BLOCK of token n. Parts of identity experts are not there: x instead."""
    begin(PDL)
    m, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    keep = m < W
    total = tl.zeros([BLOCK], tl.float32)
    own = total
    if IDENTITY:
        own = tl.load(x + n * x_stride + m, mask=keep, other=0).to(tl.float32)
    for j in tl.static_range(PARTS):
        part = parts + (n * PARTS + j) * W + m
        if IDENTITY and j < CHOICES:
            has_matrices = tl.load(chosen + n * CHOICES + j) < EXPERTS
            weight = tl.load(weights + n * CHOICES + j).to(tl.float32)
            total += tl.where(has_matrices, tl.load(part, mask=keep & has_matrices, other=0), weight * own)
        else:
            total += tl.load(part, mask=keep, other=0)
    if RESIDUAL:
        total += tl.load(residual + n * residual_stride + m, mask=keep, other=0).to(tl.float32)
    tl.store(out + n * W + m, total.to(out.dtype.element_ty), mask=keep)
