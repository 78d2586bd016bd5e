"""Attention of many queries on a GPU, for plain passes: kernels that never materialize a query × key mask.

    kernel      `lamina.kernels.attention.prefill`: any View without rules from outside, softcaps, sinks and biases
    two_parts   new tokens behind a long row without a window: cuDNN over the old keys, which all queries see, and over
                the new ones, merged by their log-sum-exp

Both are offered to `lamina.attention`, which picks them where they fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.bias import BucketForm, kernel_form
from lamina.attention.core import few_over_many, offer
from lamina.attention.reference import Bias
from lamina.attention.view import View
from lamina.attention.window import Chunked, Full, Sliding

FEWEST = 2  # queries of a row: one alone is a matrix product
WIDEST = 256  # values of a head
PARTS = 1024  # queries and keys of a part are a multiple of this, so that cuDNN plans few sizes


def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: View,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:
    from lamina.kernels.attention.prefill import attend_many  # imports Triton

    form = None if bias is None else kernel_form(bias)
    return attend_many(q, k, v, view, scale=scale, softcap=softcap, sinks=sinks, bias=form)


def kernel_fits(
    q: Tensor, k: Tensor, v: Tensor, view: View, softcap: float | None, sinks: Tensor | None, bias: Bias | None
) -> bool:
    if not q.is_cuda or q.shape[2] < FEWEST or torch.compiler.is_compiling() or not kernels.usable(q):
        return False
    if max(q.shape[-1], v.shape[-1]) > WIDEST or any(x.requires_grad for x in (q, k, v)) or k.dtype != q.dtype:
        return False
    if not view.positional or not isinstance(view.window, Full | Sliding | Chunked):
        return False
    changed = softcap is not None or sinks is not None or bias is not None
    if not changed and (view.unmasked or few_over_many(q, k)):
        return False
    form = None if bias is None else kernel_form(bias)
    if bias is not None and form is None:
        return False
    return view.causal or not isinstance(form, BucketForm)  # keys after the query have buckets of their own


offer("kernel", kernel, kernel_fits, masks_itself=True)
