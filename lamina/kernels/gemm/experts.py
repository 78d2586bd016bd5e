"""Mixture of experts in a captured step. Several tokens take `grouped_experts.py`; the kernels here are for one or few.

    expert_gated    act(gate(x)) · up(x) of each chosen expert, or act(up(x)), times the router's weight
    expert_down     the sum of the chosen experts' down products, plus an optional residual

A shared expert, which every token visits, is part of both launches; its size may differ. The router's weight multiplies
the input of the down matrix, which is the same as multiplying its output. The reference is `lamina.nn.Mixture`.

Each (token, expert) pair reads its expert's weights in place, without sorting. Pairs are the fast dimension of the
grid, so tokens that chose the same expert read its rows at about the same time and share them in L2. Rows of the shared
expert stay in registers while a program loops over tokens. All sizes are constexpr: a program issues all loads of a
weight before it uses the first.

Identity experts, whose indices follow those of the others, have no matrices: `expert_gated` writes zeros for them, and
`expert_down` adds their input.

Rows whose address is known are loaded before the kernel in front has finished. For the shared expert that is always so.
For `expert_down` it holds for all rows, since the router ran before `expert_gated` began.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment
from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from lamina.activation import Gating
from lamina.kernels.gemm.deferred_norm import DeferredNorm, norm_arguments, norm_factor, prepare_norm
from lamina.kernels.gemm.epilogue import Act, act_kind, joined
from lamina.kernels.gemm.grouped_experts import grouped_down, grouped_gated, grouped_tiles
from lamina.kernels.gemm.product import Tiles
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import limits_of

TOGETHER = 8  # most tokens that one program loops over, where all of them read the same rows
PIECES = 24  # [rows, block] pieces of weights that fit the registers of a program for one token


@dataclass(frozen=True)
class Share:
    """What one program computes: `rows` outputs, whose sums are loaded in pieces of `block`.

    early   rows with a known address are loaded before the kernel in front has finished
    """

    rows: int = 1
    block: int = 2048
    warps: int = 4
    early: bool = True


def expert_gated(
    x: Tensor,
    first: Tensor,
    chosen: Tensor,
    weights: Tensor,
    act: Act | Gating,
    *,
    gated: bool = True,
    bias: Tensor | None = None,
    identity: bool = False,
    weigh_input: bool = False,
    shared: Tensor | None = None,
    shared_factor: float = 1.0,
    opening: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    share: Share | Tiles | None = None,
) -> Tensor:
    """x [N, K], first [E, 2I, K] (gates, then ups), chosen and weights [N, k] -> [N, k · I + S]

    gated         False: there is no gate, and first is [E, I, K]
    bias          [E, 2I], or [E, I] if not gated
    identity      True: experts from E on have no matrices
    weigh_input   weights multiply the experts' input: they are applied to the gate and up products, which is the same
    shared        [2S, K] gate and up of the shared expert, or [S, K] if not gated
    opening       [N, 1] weight of the shared expert; None: 1
    squares       [P] x is one vector, still to be divided, as for `product`
    share         None: chosen by `_config`
    """
    (tokens, width), k, matrices = x.shape, chosen.shape[1], 1 + gated
    share = share or _config(x, first, k)
    if isinstance(share, Tiles):
        return grouped_gated(
            x, first, chosen, weights, act, share, gated=gated, bias=bias, weigh_input=weigh_input, shared=shared,
            shared_factor=shared_factor, opening=opening,
        )  # fmt: skip
    inner, size = first.shape[1] // matrices, 0 if shared is None else shared.shape[0] // matrices
    share = share or _first_share(x, gated)
    out = x.new_empty(tokens, k * inner + size)
    together = min(tokens, TOGETHER)
    for_all = triton.cdiv(size, share.rows) * triton.cdiv(tokens, together)
    gating = act if isinstance(act, Gating) else Gating()
    launch(
        _gated_kernel, (for_all + tokens * k * triton.cdiv(inner, share.rows),),
        x, first, x if shared is None else shared, x if bias is None else bias, chosen.contiguous(),
        weights.contiguous(), x if opening is None else opening.contiguous(), squares, out, tokens, x.stride(0),
        for_all, eps, SQUARES=0 if squares is None else len(squares), CHOICES=k, EXPERTS=first.shape[0], INNER=inner,
        SHARED=size, K=width, ROWS=share.rows, BLOCK=share.block, TOGETHER=together, EARLY=share.early, GATED=gated,
        ACT=act_kind(act.act if isinstance(act, Gating) else act), LIMIT=gating.limit or 0.0, PLUS=gating.plus,
        SLOPE=gating.slope, BIAS=bias is not None, IDENTITY=identity, WEIGH_INPUT=weigh_input,
        OPENING=opening is not None, SHARED_FACTOR=shared_factor, num_warps=share.warps,
    )  # fmt: skip
    return out


def expert_down(
    h: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    identity: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm: DeferredNorm | None = None,
    share: Share | Tiles | None = None,
) -> Tensor:
    """h [N, k · I + S], down [E, W, I], chosen [N, k], shared [W, S], residual [N, W] -> [N, W]

    `chosen` must be written before the launch in front of this one begins, as it is if that is `expert_gated`.

    bias        [E, W], times the weights [N, k], is added
    identity    [N, W] the input of experts, which those from E on return, times the weights
    squares     [P] the input is one vector, still to be divided, as for `product`
    next_norm   the norm of the result, for one token, is prepared there
    """
    tokens, k, (experts, width, inner) = h.shape[0], chosen.shape[1], down.shape
    size = 0 if shared is None else shared.shape[1]
    if weights is None:
        assert bias is None and identity is None
        weights = h
    if isinstance(share := share or _config(h, down, k), Tiles):
        return grouped_down(
            h, down, chosen, weights, share, bias=bias, identity=identity, shared=shared, residual=residual
        )
    if share is None:
        block = 512 if inner % 512 == 0 or inner % 256 else 256  # 768 is three blocks of 256 and no masked half
        share = replace(_share(2, block, h, [*[inner] * k, size]), early=tokens == 1)
    out = h.new_empty(tokens, width, dtype=None if residual is None else residual.dtype)
    together = min(tokens, TOGETHER)
    launch(
        _down_kernel, (triton.cdiv(width, share.rows), triton.cdiv(tokens, together)),
        h, down, h if shared is None else shared, h if bias is None else bias, chosen.contiguous(),
        weights.contiguous(), h if identity is None else identity, squares, h if residual is None else residual, out,
        *norm_arguments(next_norm), tokens, 0 if identity is None else identity.stride(0),
        0 if residual is None else residual.stride(0), eps, SQUARES=0 if squares is None else len(squares),
        CHOICES=k, EXPERTS=experts, INNER=inner, SHARED=size, W=width, ROWS=share.rows, BLOCK=share.block,
        TOGETHER=together, EARLY=share.early, BIAS=bias is not None, IDENTITY=identity is not None,
        RESIDUAL=residual is not None, NEXT_NORM=next_norm is not None, num_warps=share.warps,
    )  # fmt: skip
    return out


def _config(x: Tensor, matrices: Tensor, each: int) -> Tiles | None:
    """The tiles for x [N, …] and matrices [E, M, K], if tokens that chose the same expert are to share it.

    They do not in a product of dtypes that differ, which tensor cores do not have."""
    experts, _, k = matrices.shape
    if x.dtype != matrices.dtype:
        return None
    return grouped_tiles(x.shape[0], each, experts, k, x.element_size(), limits_of(x.device))


def _first_share(x: Tensor, gated: bool) -> Share:
    """The share of `expert_gated`. For one token and narrow matrices: one row each of gate and up, in one piece."""
    tokens, width = x.shape
    if tokens == 1 and gated and width <= 2048:
        share = _share(1, 2048, x, [width] * 2)
        return replace(share, warps=min(share.warps, 4))
    return _share(2 if gated else 4, 1024, x, [width] * 4)


def _share(rows: int, block: int, x: Tensor, held: list[int]) -> Share:
    """The share of a program that holds rows of these sizes in registers.

    Blocks double until the rows are few enough pieces. Warps are no more than fill a block with 16 bytes per thread:
    beyond that, the layout of the loads would have threads exchange values."""
    block, most = min(block, triton.next_power_of_2(max(held))), PIECES if x.shape[0] == 1 else PIECES * 2 // 3
    while sum(triton.cdiv(size, block) for size in held) > most:
        block *= 2
    return Share(rows, block, max(1, min(8, block * x.element_size() // 512)))


@triton.jit
def pieces(rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, POLICY: tl.constexpr, keep=None):
    """Loads rows of SIZE elements, pointers [ROWS, 1], as a tuple of pieces [ROWS, BLOCK], zero beyond the end.

    keep   a boolean; False: nothing is read, all is zero"""
    found = ()
    for start in tl.static_range(0, SIZE, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        if keep is not None:
            found += (tl.load(rows + k, mask=keep & (k < SIZE), other=0, eviction_policy=POLICY),)
        elif start + BLOCK <= SIZE:
            found += (tl.load(rows + k, eviction_policy=POLICY),)
        else:
            found += (tl.load(rows + k, mask=k < SIZE, other=0, eviction_policy=POLICY),)
    return found


@triton.jit
def products(acc, rows, x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """acc [ROWS, BLOCK] + rows · x element by element; rows and x are tuples of pieces, [ROWS, BLOCK] and [1, BLOCK].

    Summed over BLOCK only once, by the caller."""
    for i in tl.static_range((SIZE + BLOCK - 1) // BLOCK):
        acc += rows[i].to(tl.float32) * x[i].to(tl.float32)
    return acc


@triton.jit
def _gated_kernel(
    x,  # [N, K]
    first, shared, bias,  # [E, 2 · INNER, K], [2 · SHARED, K], [E, 2 · INNER]: gate rows, then up rows; or up alone
    chosen, weights, opening,  # [N, CHOICES] expert ids, [N, CHOICES], [N, 1]; opening is read if OPENING
    squares,  # [SQUARES] of the norm in front, float32 or int64
    out,  # [N, CHOICES · INNER + SHARED]
    N, x_stride, for_all, eps,  # tokens, elements between rows of x, programs of the shared expert, eps of the norm
    SQUARES: tl.constexpr,  # 0: x is divided already
    CHOICES: tl.constexpr, EXPERTS: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr,  # sizes
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr,  # `Share`
    GATED: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, PLUS: tl.constexpr, SLOPE: tl.constexpr,  # `Gating`
    BIAS: tl.constexpr, IDENTITY: tl.constexpr, WEIGH_INPUT: tl.constexpr, OPENING: tl.constexpr,
    SHARED_FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first `for_all` programs are (i, t) of the shared expert: outputs i · ROWS … + ROWS for the tokens
    t · TOGETHER … + TOGETHER. The others are (i, p): such outputs of the pair p = token · CHOICES + choice.

    The shared expert first: its weights can be loaded before the kernel in front, the router, has finished."""
    program = tl.program_id(0)
    HIDDEN: tl.constexpr = CHOICES * INNER + SHARED
    if program < for_all:
        if not EARLY:
            begin(PDL)
        groups = tl.cdiv(N, TOGETHER)
        i = program // groups * ROWS + tl.arange(0, ROWS)
        rows = shared + tl.minimum(i, SHARED - 1)[:, None] * K
        gate = pieces(rows, K, BLOCK, "evict_first")
        up = pieces(rows + SHARED * K, K, BLOCK, "evict_first") if GATED else gate
        if EARLY:
            begin(PDL)
        for t in range(TOGETHER):
            n = (program % groups * TOGETHER + t).to(tl.int64)
            if n < N:
                factor = SHARED_FACTOR * tl.load(opening + n).to(tl.float32) if OPENING else SHARED_FACTOR
                y, z = _two(gate, up, x + n * x_stride, squares, eps, SQUARES, K, ROWS, BLOCK, GATED)
                y = joined(y, z, ACT, GATED, LIMIT, PLUS, SLOPE) * factor
                tl.store(out + n * HIDDEN + CHOICES * INNER + i, y.to(out.dtype.element_ty), mask=i < SHARED)
    else:
        begin(PDL)
        pairs = N * CHOICES
        pair = (program - for_all) % pairs
        expert, factor = tl.load(chosen + pair).to(tl.int64), tl.load(weights + pair).to(tl.float32)
        n = (pair // CHOICES).to(tl.int64)
        i = (program - for_all) // pairs * ROWS + tl.arange(0, ROWS)
        keep = None
        if IDENTITY:
            keep = expert < EXPERTS
            factor, expert = tl.where(keep, factor, 0.0), tl.minimum(expert, EXPERTS - 1)
        MATRICES: tl.constexpr = 1 + GATED
        rows = first + expert * (MATRICES * INNER * K) + tl.minimum(i, INNER - 1)[:, None] * K
        gate = pieces(rows, K, BLOCK, "evict_first", keep)
        up = pieces(rows + INNER * K, K, BLOCK, "evict_first", keep) if GATED else gate
        if BIAS:  # asked for before the products, which hide its latency
            own = bias + expert * (MATRICES * INNER) + i
            gate_bias = tl.load(own, mask=i < INNER, other=0)
            up_bias = tl.load(own + INNER, mask=i < INNER, other=0) if GATED else gate_bias
        y, z = _two(gate, up, x + n * x_stride, squares, eps, SQUARES, K, ROWS, BLOCK, GATED)
        if WEIGH_INPUT:
            y, z = y * factor, z * factor
        if BIAS:
            y, z = y + gate_bias.to(tl.float32), z + up_bias.to(tl.float32)
        y = joined(y, z, ACT, GATED, LIMIT, PLUS, SLOPE)
        if not WEIGH_INPUT:
            y *= factor
        tl.store(out + n * HIDDEN + pair % CHOICES * INNER + i, y.to(out.dtype.element_ty), mask=i < INNER)


@triton.jit
def _two(gate, up, x, squares, eps, SQUARES: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
         GATED: tl.constexpr):  # fmt: skip
    """gate x and up x for one token, [ROWS] float32 each; the first twice if not GATED

    gate and up are tuples of pieces [ROWS, BLOCK], x points at [K]; squares, eps and SQUARES are of a deferred norm,
    whose factor is computed while the loads of x are in flight"""
    zeros = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    v = pieces(x, K, BLOCK, "evict_last")
    division = norm_factor(squares, K, eps, SQUARES)
    y = tl.sum(products(zeros, gate, v, K, BLOCK), 1) * division
    z = y
    if GATED:
        z = tl.sum(products(zeros, up, v, K, BLOCK), 1) * division
    return y, z


@triton.jit
def _down_kernel(
    h,  # [N, CHOICES · INNER + SHARED], from `_gated_kernel`
    down, shared, bias,  # [E, W, INNER], [W, SHARED], [E, W]; bias is read if BIAS
    chosen, weights,  # [N, CHOICES] expert ids, [N, CHOICES]; weights are read if BIAS or IDENTITY
    x, squares,  # the input of experts [N, W], read if IDENTITY, and [SQUARES] of the norm in front
    residual, out,  # [N, W] each; residual is read if RESIDUAL
    next_weight, next_out, next_squares, next_plus,  # the norm behind: [W], [W], [LANES, 4] int64, 0.0 or 1.0
    N, x_stride, residual_stride, eps,  # tokens, elements between rows of x and of the residual, eps of the norm
    SQUARES: tl.constexpr,  # 0: x is divided already
    CHOICES: tl.constexpr, EXPERTS: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, W: tl.constexpr,  # sizes
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr,  # `Share`
    BIAS: tl.constexpr, IDENTITY: tl.constexpr, RESIDUAL: tl.constexpr, NEXT_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (w, t): outputs w · ROWS … + ROWS of the tokens t · TOGETHER … + TOGETHER, summed over all their experts.

    EARLY, for one token: weights are loaded before the wait for `_gated_kernel`, which writes h and not `chosen`."""
    if not EARLY:
        begin(PDL)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(m, W - 1)[:, None]
    for_all = pieces(shared + row * SHARED, SHARED, BLOCK, "evict_first")
    next_factor = 1.0
    if NEXT_NORM:
        next_factor = tl.load(next_weight + m, mask=m < W, other=0).to(tl.float32) + next_plus
    for t in range(TOGETHER):
        n = (tl.program_id(1) * TOGETHER + t).to(tl.int64)
        if n < N:
            experts, own = (), ()
            for j in tl.static_range(CHOICES):  # past the L1 cache, which may hold values from before the choice
                experts += (tl.load(chosen + n * CHOICES + j, cache_modifier=".cg").to(tl.int64),)
            for j in tl.static_range(CHOICES):
                keep = None
                if IDENTITY:
                    keep = experts[j] < EXPERTS
                own += (pieces(down + experts[j] * (W * INNER) + row * INNER, INNER, BLOCK, "evict_first", keep),)
            if EARLY:
                begin(PDL)
            inside = h + n * (CHOICES * INNER + SHARED)
            acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            rest = tl.zeros([ROWS], dtype=tl.float32)
            if RESIDUAL:
                rest = tl.load(residual + n * residual_stride + m, mask=m < W, other=0).to(tl.float32)
            if BIAS:
                for j in tl.static_range(CHOICES):
                    one = tl.load(bias + experts[j] * W + m, mask=(m < W) & (experts[j] < EXPERTS), other=0)
                    rest += tl.load(weights + n * CHOICES + j).to(tl.float32) * one.to(tl.float32)
            if IDENTITY:
                own_input = tl.load(x + n * x_stride + m, mask=m < W, other=0).to(tl.float32)
                own_input *= norm_factor(squares, W, eps, SQUARES)
                for j in tl.static_range(CHOICES):
                    factor = tl.load(weights + n * CHOICES + j).to(tl.float32)
                    rest += tl.where(experts[j] < EXPERTS, 0.0, factor) * own_input
            for j in tl.static_range(CHOICES):
                v = pieces(inside + j * INNER, INNER, BLOCK, "evict_last")
                acc = products(acc, own[j], v, INNER, BLOCK)
            v = pieces(inside + CHOICES * INNER, SHARED, BLOCK, "evict_last")
            y = (tl.sum(products(acc, for_all, v, SHARED, BLOCK), 1) + rest).to(out.dtype.element_ty)
            tl.store(out + n * W + m, y, mask=m < W)
            if NEXT_NORM:
                prepare_norm(y, next_factor, next_out + m, next_squares, m < W)
