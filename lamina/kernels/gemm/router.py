"""The router of a mixture of experts in one launch: token -> chosen experts and their weights.

Each program computes the logits of a few experts for some tokens. The last program of these tokens to arrive chooses
(`epilogue.arrive`). It finds the best experts one after the other, of equal logits the one with the lower index. The
experts of the layer wait for this, so it has to be quick: logits become int32 keys of the same order, and a program is
one warp where it can be, which has an instruction for the maximum of such keys.

The reference is `lamina.nn.Router`. Logits stay in float32 here, whatever the dtype of the weight.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.gemm.deferred_norm import norm_factor
from lamina.kernels.gemm.epilogue import arrive
from lamina.kernels.gemm.experts import pieces, products
from lamina.kernels.launch import begin, launch
from lamina.kernels.workspace import COUNTERS, PARTS, scratch

if TYPE_CHECKING:
    from lamina.nn.moe.router import Choice

CHOOSERS = 8  # most programs that choose; with more tokens each chooses for several
ONE_WARP = 8 << 10  # most bytes of a weight row that one warp loads at once
LOWEST = tl.constexpr(-(1 << 31))


def route(
    x: Tensor,
    weight: Tensor,
    choice: Choice,
    bias: Tensor | None = None,
    *,
    logit_bias: Tensor | None = None,
    scales: Tensor | None = None,
    opens: bool = False,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [N, K], weight [E, K], bias [E] -> chosen [N, each] int32, weights [N, each] float32, the best first

    logit_bias   [E] is added to the logits
    scales       [E] multiply the weights of the chosen experts
    opens        the weight has one more row; the third result is the sigmoid of its logit, [N, 1]
    squares      [P] x is one vector, still to be divided, as for `product`
    """
    (tokens, width), outputs = x.shape, weight.shape[0]
    experts = outputs - opens
    if choice.each > experts or experts % choice.groups or choice.groups_each > choice.groups:
        raise InputError(f"{choice} cannot choose from {experts} experts")
    if choice.groups > 1 and choice.group_best not in (1, 2):
        raise InputError(f"{choice}: there is a kernel for group_best=1 and 2 alone")
    if tokens > COUNTERS or tokens * outputs > PARTS:
        raise InputError(
            f"{tokens} tokens × {outputs} logits, but the workspace has room for {PARTS}; use fewer tokens"
        )
    logits, arrived = scratch(x.device)
    chosen = torch.empty(tokens, choice.each, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, choice.each, device=x.device)
    opening = torch.empty(tokens, 1, device=x.device) if opens else None
    rows, block = 1 if outputs <= 264 else 2, min(2048, triton.next_power_of_2(width))
    together = triton.cdiv(tokens, CHOOSERS)
    warps = 1 if rows * width * weight.element_size() <= ONE_WARP else 4
    rule: dict[str, Any] = dict(
        EACH=choice.each, EACH_BLOCK=triton.next_power_of_2(choice.each), SOFTMAX=choice.score == "softmax",
        SPARSEMIXER=choice.score == "sparsemixer", JITTER=choice.jitter, NORMED=choice.normed, LEAST=choice.least,
        EPS=choice.eps, BIAS=bias is not None, LOGIT_BIAS=logit_bias is not None, SCALED=scales is not None,
        PAIRS=choice.group_best == 2, GROUPS=choice.groups, GROUPS_EACH=choice.groups_each,
        GROUPS_BLOCK=triton.next_power_of_2(choice.groups), SIZE=experts // choice.groups,
        SIZE_BLOCK=triton.next_power_of_2(experts // choice.groups), OPENS=opens,
    )  # fmt: skip
    launch(
        _route_kernel, (triton.cdiv(outputs, rows), triton.cdiv(tokens, together)),
        x, weight, x if bias is None else bias, x if logit_bias is None else logit_bias,
        x if scales is None else scales, logits, arrived, chosen, weights,
        weights if opening is None else opening, squares, tokens, x.stride(0), choice.factor, eps, K=width,
        OUTPUTS=outputs, SQUARES=0 if squares is None else len(squares),
        ROWS=rows, BLOCK=block, TOKENS=together, STRETCHES=triton.cdiv(outputs, rows), num_warps=warps,
        **rule,
    )  # fmt: skip
    return chosen, weights, opening


@triton.jit
def _route_kernel(
    x, weight,  # [N, K], [OUTPUTS, K]
    bias, logit_bias, scales,  # [GROUPS · SIZE] each, read if BIAS, LOGIT_BIAS and SCALED
    logits, arrived,  # workspace: [N, OUTPUTS] float32, [N / TOKENS] int32 counters, zero between launches
    chosen, weights, opening,  # [N, EACH] int32, [N, EACH] float32, [N, 1] float32, written if OPENS
    squares,  # [SQUARES] of the norm in front, float32 or int64
    N, x_stride, factor, eps,  # tokens, elements between rows of x, factor on the weights, eps of the norm in front
    K: tl.constexpr, OUTPUTS: tl.constexpr, SQUARES: tl.constexpr,  # sizes; SQUARES 0: x is divided already
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,  # of one program
    STRETCHES: tl.constexpr,  # programs of one group of tokens
    EACH: tl.constexpr, EACH_BLOCK: tl.constexpr, SOFTMAX: tl.constexpr, SPARSEMIXER: tl.constexpr,
    JITTER: tl.constexpr, NORMED: tl.constexpr, LEAST: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr,
    LOGIT_BIAS: tl.constexpr, SCALED: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_EACH: tl.constexpr, GROUPS_BLOCK: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    OPENS: tl.constexpr, PDL: tl.constexpr,  # the rule, as in `Choice`
):  # fmt: skip
    """Program (s, t): the logits s · ROWS … + ROWS of the tokens t · TOKENS … + TOKENS; the last of the STRETCHES
    programs of these tokens chooses their experts.

    Weights are loaded first, before the kernel in front has finished, since no kernel writes them."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w = pieces(weight + tl.minimum(m, OUTPUTS - 1)[:, None] * K, K, BLOCK, "evict_first")
    more = tl.zeros([ROWS], dtype=tl.float32)
    if LOGIT_BIAS:
        more = tl.load(logit_bias + m, mask=m < GROUPS * SIZE, other=0).to(tl.float32)
    begin(PDL)
    for t in range(TOKENS):
        n = tl.program_id(1) * TOKENS + t
        if n < N:
            v = pieces(x + n.to(tl.int64) * x_stride, K, BLOCK, "evict_last")
            division = norm_factor(squares, K, eps, SQUARES)  # while the loads of x are in flight
            sums = products(tl.zeros([ROWS, BLOCK], dtype=tl.float32), w, v, K, BLOCK)
            own = tl.sum(sums, 1) * division
            tl.store(logits + n * OUTPUTS + m, own + more if LOGIT_BIAS else own, mask=m < OUTPUTS)
    if arrive(arrived, tl.program_id(1), STRETCHES):
        for t in range(TOKENS):
            n = tl.program_id(1) * TOKENS + t
            if n < N:
                own = logits + n * OUTPUTS
                _choose(
                    own, bias, scales, chosen + n * EACH, weights + n * EACH, factor, EACH, EACH_BLOCK, SOFTMAX,
                    SPARSEMIXER, JITTER, NORMED, LEAST, EPS, BIAS, SCALED, PAIRS, GROUPS, GROUPS_EACH, GROUPS_BLOCK,
                    SIZE, SIZE_BLOCK,
                )  # fmt: skip
                if OPENS:
                    tl.store(opening + n, tl.sigmoid(tl.load(own + OUTPUTS - 1, cache_modifier=".cg")))


@triton.jit
def _choose(
    logits, bias, scales, chosen, weights, factor, EACH: tl.constexpr, EACH_BLOCK: tl.constexpr,
    SOFTMAX: tl.constexpr, SPARSEMIXER: tl.constexpr, JITTER: tl.constexpr, NORMED: tl.constexpr, LEAST: tl.constexpr,
    EPS: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_EACH: tl.constexpr, GROUPS_BLOCK: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
):  # fmt: skip
    """`Choice.of` for one token: logits, bias and scales [GROUPS · SIZE] -> chosen and weights [EACH]"""
    g, s = tl.arange(0, GROUPS_BLOCK), tl.arange(0, SIZE_BLOCK)
    inside = (g < GROUPS)[:, None] & (s < SIZE)[None, :]
    expert = g[:, None] * SIZE + s[None, :]
    # Other programs of this launch wrote these: read past the L1 cache.
    merit = tl.load(logits + expert, mask=inside, other=float("-inf"), cache_modifier=".cg")
    top, total = 0.0, 1.0
    if SOFTMAX:
        top = _value(tl.max(_ordered(merit, inside)))
        total = tl.sum(tl.exp(merit - top))
    if BIAS:
        merit = _score(merit, top, total, SOFTMAX)
        merit += tl.load(bias + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if GROUPS > 1:
        of_group = tl.max(merit, 1)  # [GROUPS_BLOCK]
        if PAIRS:
            leaders = _lowest(merit == of_group[:, None], expert, inside, 1)
            of_group += tl.max(tl.where(expert == leaders[:, None], float("-inf"), merit), 1)
        standing = _ordered(of_group, g < GROUPS)
        shut = g >= 0
        for _ in range(GROUPS_EACH):
            best_group = _lowest(standing == tl.max(standing), g, g < GROUPS, 0)
            shut = shut & (g != best_group)
            standing = tl.where(g == best_group, LOWEST, standing)
        merit = tl.where(shut[:, None], float("-inf"), merit)

    keys = _ordered(merit, inside)
    j, picked = tl.arange(0, EACH_BLOCK), tl.zeros([EACH_BLOCK], dtype=tl.int32)
    best_keys, shares = picked, tl.zeros([EACH_BLOCK], dtype=tl.float32)
    for step in range(EACH):
        best = tl.max(keys)
        place = _lowest(keys == best, expert, inside, None)
        picked, best_keys = tl.where(j == step, place, picked), tl.where(j == step, best, best_keys)
        if SPARSEMIXER:
            top = _value(best)
            far = top - merit > 2 * JITTER * tl.maximum(tl.abs(merit), top)
            others = tl.sum(tl.where(far | (expert == place) | (keys == LOWEST), 0.0, tl.exp(merit - top)))
            shares = tl.where(j == step, 1 / (1 + others), shares)
        keys = tl.where(expert == place, LOWEST, keys)
    if SPARSEMIXER:
        weight = shares
    else:
        own = _value(best_keys)
        if BIAS:
            own = tl.load(logits + picked, mask=j < EACH, other=float("-inf"), cache_modifier=".cg")
        weight = tl.where(j < EACH, _score(own, top, total, SOFTMAX), 0.0)
    if NORMED:
        divisor = tl.sum(weight)
        if LEAST > 0:
            divisor = tl.maximum(divisor, LEAST)
        weight /= divisor + EPS
    if SCALED:
        weight *= tl.load(scales + picked, mask=j < EACH, other=0).to(tl.float32)
    tl.store(chosen + j, picked, mask=j < EACH)
    tl.store(weights + j, weight * factor, mask=j < EACH)


@triton.jit
def _score(logits, top, total, SOFTMAX: tl.constexpr):
    """Scores of logits: softmax with maximum `top` and sum `total`, or sigmoid."""
    return tl.exp(logits - top) / total if SOFTMAX else tl.sigmoid(logits)


@triton.jit
def _ordered(values, inside):
    """int32 keys that sort like the float32 values; LOWEST if not inside, and above it otherwise."""
    return tl.where(inside, tl.maximum(_mirrored(values.to(tl.int32, bitcast=True)), LOWEST + 1), LOWEST)


@triton.jit
def _value(keys):
    """The float32 values of keys of `_ordered`."""
    return _mirrored(keys).to(tl.float32, bitcast=True)


@triton.jit
def _mirrored(bits):
    """The bits of negative floats sort in reverse: inverts all of them but the sign."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _lowest(here, places, inside, AXIS: tl.constexpr):
    """The lowest of the indices `places` where `here`, along an axis or of all."""
    return tl.min(tl.where(here & inside, places, 0x7FFFFFFF), AXIS)
