"""Mixtures of experts in a native program: the router's choice, and the products of the chosen experts."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.errors import CaptureError
from lamina.native.arguments import ExpertsArgs, ExpertSumArgs, RouteArgs, pointer
from lamina.native.operations import BLOCK_BYTES, NativeRecorder, act_kind, rows_of
from lamina.native.weights import expert_segments, nbytes_of, quantized, type_of

if TYPE_CHECKING:
    from lamina.nn.moe.experts import Experts
    from lamina.nn.moe.router import Choice, Router

SCORES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
MOST_EXPERTS = 1024


def route(recorder: NativeRecorder, router: Router, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """`Router.forward`"""
    logits, opening = recorder.product(x, router.weight), None
    if router.opens:
        logits, opening = logits[..., :-1], logits[..., -1:].sigmoid()
    if router.logit_bias is not None:
        logits = logits + router.logit_bias
    chosen, weights = choose(recorder, router.choice, rows_of(logits), router.bias, router.scales)
    shape = (*x.shape[:-1], router.choice.each)
    return chosen.view(shape), weights.view(shape), opening


def choose(
    recorder: NativeRecorder, choice: Choice, logits: Tensor, bias: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`Choice.of`: logits [N, E] -> experts and their weights, [N, each] both"""
    rows, experts = logits.shape
    if experts > MOST_EXPERTS:
        raise CaptureError(f"{experts} experts; native kernels choose from up to {MOST_EXPERTS}")
    chosen, weights = recorder.new(rows, choice.each, dtype=torch.int64), recorder.new(rows, choice.each)
    bias, scales = (None if one is None else one.float().contiguous() for one in (bias, scales))
    arguments = RouteArgs(
        logits=logits.data_ptr(), bias=pointer(bias), scales=pointer(scales), chosen=chosen.data_ptr(),
        weights=weights.data_ptr(), rows=rows, stride=logits.stride(0), experts=experts, each=choice.each,
        score=SCORES[choice.score], normed=choice.normed, groups=choice.groups, groups_each=choice.groups_each,
        group_best=choice.group_best, factor=choice.factor, least=choice.least, eps=choice.eps, jitter=choice.jitter,
    )  # fmt: skip
    recorder.add("route", arguments, logits, bias, scales, chosen, weights, work=4 * logits.numel())
    return chosen, weights


def experts_sum(
    recorder: NativeRecorder, experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor, onto: Tensor | None = None
) -> Tensor:
    """`Experts.forward`, plus a residual."""
    kind = act_kind(experts.act)
    if kind is None:
        raise CaptureError(f"no native kernel computes the activation {experts.gating.act!r} of experts")
    flat = rows_of(x).contiguous()
    picked, factors = chosen.reshape(-1).contiguous(), weights.float().reshape(-1).contiguous()
    rows, each, count = flat.shape[0], chosen.shape[-1], experts.down.shape[0]
    gating = experts.gating
    h = _products(
        recorder, experts.first, experts.first_bias, flat, picked, each, count, act=kind, gated=experts.gated,
        weights=factors if experts.weigh_input else None, gating=(gating.limit or 0.0, gating.plus, gating.slope),
    )  # fmt: skip
    pairs = _products(recorder, experts.down, experts.down_bias, h, picked, 1, count)
    out, residual = recorder.new(*flat.shape), None if onto is None else rows_of(onto).contiguous()
    factor = None if experts.weigh_input else factors
    arguments = ExpertSumArgs(
        pairs=pairs.data_ptr(), chosen=picked.data_ptr(), weights=pointer(factor), x=flat.data_ptr(),
        residual=pointer(residual), out=out.data_ptr(), rows=rows, each=each, width=flat.shape[1], experts=count,
    )  # fmt: skip
    recorder.add("expert_sum", arguments, pairs, picked, factor, flat, residual, out, work=pairs.numel())
    return out.view(x.shape)


def _products(
    recorder: NativeRecorder, weight: Tensor, bias: Tensor | None, x: Tensor, chosen: Tensor, x_each: int, count: int,
    *, act: int = 0, gated: bool = False, weights: Tensor | None = None,
    gating: tuple[float, float, float] = (0.0, 0.0, 1.0),
) -> Tensor:  # fmt: skip
    """The products of each pair of a token and an expert, [pairs, outputs]."""
    segments, steps, integer, kept = expert_segments(recorder, weight)
    pairs, width = chosen.shape[0], x.shape[1]
    outputs = weight.shape[1] // 2 if gated else weight.shape[1]
    out = recorder.new(pairs, outputs)
    wide = recorder.scratch(pairs, 2 * outputs) if gated else out
    codes, scales, sums = quantized(recorder, x) if integer else (None, None, None)
    row_bytes = nbytes_of(weight) // max(weight.shape[0] * weight.shape[1], 1)
    block = max(4, min(BLOCK_BYTES // max(row_bytes, 1), -(-outputs // 4)) // 4 * 4)
    limit, plus, slope = gating
    bias = None if bias is None else bias.contiguous()
    arguments = ExpertsArgs(
        weight=ctypes.addressof(segments), steps=ctypes.addressof(steps), bias=pointer(bias),
        chosen=chosen.data_ptr(), weights=pointer(weights), x=x.data_ptr(), wide=wide.data_ptr(), out=out.data_ptr(),
        segments=len(segments), experts=count, pairs=pairs, width=width, outputs=outputs, x_each=x_each, gated=gated,
        act=act, bias_type=0 if bias is None else type_of(bias), block=block, qx=pointer(codes),
        qx_scales=pointer(scales), qx_sums=pointer(sums), limit=limit, plus=plus, slope=slope,
    )  # fmt: skip
    held = (segments, steps, kept, bias, chosen, weights, x, wide, out, codes, scales, sums)
    recorder.add("experts", arguments, *held, work=pairs * outputs * width)
    return out
