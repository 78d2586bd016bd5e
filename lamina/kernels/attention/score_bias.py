"""A bias by head and distance that is added to scores: ALiBi and T5's relative positions.

`lamina.attention.bias` has the formulas. BIAS is a constant of the kernel, "" without a bias, so such a kernel has no
trace of one. The references are `lamina.nn.AlibiBias` and `lamina.nn.RelativeBias`.

    "slopes"     bias float [H]               -bias[h] · distance
    "buckets"    bias float [buckets, H]      bias[buckets[min(distance, farthest)], h]
                 buckets int64 [farthest + 1]
    "both ways"  the same where keys after the query have buckets too: bias[buckets[farthest + distance], h],
                 the distance between -farthest and farthest; buckets int64 [2 · farthest + 1]
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lamina.attention.bias import KernelForm, SlopeForm
from lamina.kernels.attention.online_softmax import LOG2E

# Shared memory per score of a block, for the loads of `add_bias`; slopes are loaded before the loop.
SCORE_BYTES = {"": 0, "slopes": 0, "buckets": 8, "both ways": 8}


@triton.jit
def slopes_of(bias, h, real, BIAS: tl.constexpr):
    """The slopes of query heads h where `real`, in powers of two, loaded once before the loop; zeros without slopes."""
    slopes = h.to(tl.float32) * 0
    if BIAS == "slopes":
        slopes = tl.load(bias + h, mask=real, other=0.0).to(tl.float32) * LOG2E
    return slopes


@triton.jit
def add_bias(scores, slopes, bias, buckets, farthest, h, real, distance, HEADS: tl.constexpr, BIAS: tl.constexpr):
    """Adds the bias to scores in powers of two, of query heads h at `distance` = q_pos - kv_pos from their keys.

    slopes, h, real and distance broadcast to the shape of scores. HEADS: query heads in all
    """
    if BIAS == "slopes":
        scores -= slopes * distance.to(tl.float32)
    elif BIAS != "":
        if BIAS == "both ways":
            near = farthest + tl.minimum(tl.maximum(distance, -farthest), farthest)
        else:
            near = tl.minimum(tl.maximum(distance, 0), farthest)
        at = tl.load(buckets + near).to(tl.int32) * HEADS + h
        scores += tl.load(bias + at, mask=real & (at >= 0), other=0.0).to(tl.float32) * LOG2E
    return scores


def bias_arguments(form: KernelForm | None) -> tuple[tuple[Any, ...], str]:
    """-> ((bias, buckets, farthest) as kernels take them, BIAS). What a kernel does not read is None."""
    if form is None:
        return (None, None, None), ""
    if isinstance(form, SlopeForm):
        return (form.slopes, None, None), "slopes"
    farthest = (len(form.bucket_of) - 1) // (2 if form.both_ways else 1)
    return (form.weight, form.bucket_of, farthest), "both ways" if form.both_ways else "buckets"
