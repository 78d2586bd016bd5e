"""Attention of many queries on a GPU, for plain passes: ways that never materialize a query × key mask.

    kernel            any View without rules from outside, softcaps, sinks and biases
                      (`kernels/attention/prefill/many.py`)
    split-KV kernel   the same for a few queries over many keys (`kernels/attention/prefill/few.py`)
    cudnn             plain causal attention of a prompt, or of a chunk behind as long or longer a row: the fastest
                      there is, over the new keys and over old ones in pieces of the chunk's length, merged by their
                      log-sum-exp

cuDNN plans every new size of queries and keys, which takes longer than many prompts save by it. So a size is given to
the kernel until the time that cuDNN would have saved is as long as planning takes (`Planning`).

They are offered to `lamina.attention`, which picks them where they fit. `masked.py` has what positions do not decide.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.bias import BucketForm, KernelForm, kernel_form
from lamina.attention.core import FEW, MANY, OFFERS, Offer
from lamina.attention.reference import Bias
from lamina.attention.view import View
from lamina.attention.window import Chunked, Full, Near, Sliding
from lamina.kernels.limits import limits_of

FEWEST = 2  # queries of a row: one alone is a matrix product
WIDEST = 256  # values of a head
LEAST = 512  # queries from which on cuDNN is faster
SPEEDS = 370e12, 600e12  # FLOP/s of the kernel and of cuDNN on an H200


class Planning:
    """Which sizes cuDNN has planned, or may plan now.

    seconds   that planning of a size takes
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.saved: dict[Hashable, float] = {}

    def pays(self, size: Hashable, flops: float) -> bool:
        """Notes one more call of this size, and says whether cuDNN should run it.

        >>> planning = Planning(seconds=1.0)
        >>> [planning.pays("a size", flops=4e14) for _ in range(4)]
        [False, False, False, True]
        """
        saved = self.saved.get(size, 0.0)
        self.saved[size] = saved + flops / SPEEDS[0] - flops / SPEEDS[1]
        return saved >= self.seconds


PLANNING = Planning(seconds=0.3)


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
    """By splits of the keys if there are few queries."""
    from lamina.kernels.attention.prefill.few import attend_few  # imports Triton, as the next does
    from lamina.kernels.attention.prefill.many import attend_many

    run, form = attend_few if is_few(q, k) else attend_many, None if bias is None else kernel_form(bias)
    return run(q, k, v, view, scale=scale, softcap=softcap, sinks=sinks, bias=form)


def kernel_fits(
    q: Tensor, k: Tensor, v: Tensor, view: View, softcap: float | None, sinks: Tensor | None, bias: Bias | None
) -> bool:
    if not kernels.fuses(q) or q.shape[2] < FEWEST or not heads_fit(q, k, v):
        return False
    if not view.positional or not is_known(view):
        return False
    changed = softcap is not None or sinks is not None or bias is not None
    if not changed and view.unmasked and not view.triangular:
        return False
    return bias is None or biases(kernel_form(bias), view.causal)


def split_fits(
    q: Tensor, k: Tensor, v: Tensor, view: View, softcap: float | None, sinks: Tensor | None, bias: Bias | None
) -> bool:
    return kernel_fits(q, k, v, view, softcap, sinks, bias) and is_few(q, k)


def is_few(q: Tensor, k: Tensor) -> bool:
    """True for few queries over many keys, where programs for the queries alone would not fill the device."""
    return q.shape[2] <= FEW and k.shape[2] >= MANY


def heads_fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return max(q.shape[-1], v.shape[-1]) <= WIDEST and k.dtype == q.dtype


def is_known(view: View) -> bool:
    """Whether the kernels know the kind of window."""
    return isinstance(view.window, Full | Sliding | Chunked | Near)


def biases(form: KernelForm | None, causal: bool) -> bool:
    """Whether the kernel adds this bias; buckets of one way are for keys that are not after the query."""
    return form is not None and (causal or not isinstance(form, BucketForm) or form.both_ways)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, view: View, *, scale: float, softcap: None = None, sinks: None = None,
    bias: None = None,
) -> Tensor:  # fmt: skip
    T, S = q.shape[2], k.shape[2]
    out, lse = planned(q, k[:, :, S - T :], v[:, :, S - T :], scale, causal=True)
    if T == S:
        return out
    from lamina.kernels.attention.merge import merge_into  # imports Triton

    B, H, _, Dv = out.shape
    total, sums = out.transpose(1, 2).float().reshape(-1, Dv), by_token(lse, q)
    for start in range(0, S - T, T):
        piece = slice(start, start + T)
        more, more_lse = planned(q, k[:, :, piece], v[:, :, piece], scale, causal=False)
        last = q.new_empty(total.shape) if start + T == S - T else None
        total = merge_into(total, sums, more.transpose(1, 2).reshape(-1, Dv), by_token(more_lse, q), last)
    return total.view(B, T, H, Dv).transpose(1, 2)


def by_token(lse: Tensor, q: Tensor) -> Tensor:
    """[B, H, T, 1] or [B, H, T] -> [B · T · H]"""
    return lse.view(q.shape[:3]).transpose(1, 2).reshape(-1)


def planned(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's attention [B, H, T, D], and the log-sum-exp of the scores."""
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = run(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse


def cudnn_fits(
    q: Tensor, k: Tensor, v: Tensor, view: View, softcap: float | None, sinks: Tensor | None, bias: Bias | None
) -> bool:
    (B, Hq, T, D), S = q.shape, k.shape[2]
    if softcap is not None or sinks is not None or bias is not None or not kernels.fuses(q) or not has_cudnn(q):
        return False
    if not (view.exact and view.positional and view.causal and view.window.spares(S)):
        return False
    if T < LEAST or S % T or D > WIDEST or D % 8 or v.shape[-1] != D or q.element_size() != 2:
        return False
    size = (q.device, q.dtype, tuple(q.shape), k.shape[1], S == T)
    return q.is_meta or PLANNING.pays(size, 4.0 * B * Hq * D * T * (S - T / 2))


def has_cudnn(q: Tensor) -> bool:
    """Whether PyTorch has cuDNN's attention for this device, which is worth planning for from Hopper on."""
    if q.is_meta:  # a rehearsal: it needs more memory than the kernel
        return limits_of(q.device).capability[0] >= 9
    return q.is_cuda and torch.backends.cuda.cudnn_sdp_enabled() and torch.cuda.get_device_capability(q.device)[0] >= 9


OFFERS["cudnn"] = Offer(cudnn, cudnn_fits)
OFFERS["split-KV kernel"] = Offer(kernel, split_fits, masks_itself=True)
OFFERS["kernel"] = Offer(kernel, kernel_fits, masks_itself=True)
