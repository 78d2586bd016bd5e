"""How a kernel computes the `bias` of `memory.attend`.

A bias is any function bias(head, q_pos, kv_pos) (`reference.Bias`), and a kernel cannot call it. An object that has a
method `kernel_form` names a formula that kernels know instead, with its tensors. Captured steps read these tensors in
place, so they may change; a bias without a form is for plain passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SlopeForm:
    """slopes[head] · (kv_pos - q_pos), as `AlibiBias`. slopes float32 [H]"""

    slopes: Tensor


@dataclass(frozen=True)
class BucketForm:
    """weight[bucket_of[min(q_pos - kv_pos, farthest)], head], for keys that are not after the query, as `RelativeBias`.

    weight [buckets, H], bucket_of int64 [farthest + 1], both contiguous
    both_ways   keys after the query have buckets too: bucket_of [2 · farthest + 1], of distances from -farthest on
    """

    weight: Tensor
    bucket_of: Tensor
    both_ways: bool = False


KernelForm = SlopeForm | BucketForm


def kernel_form(bias: object) -> KernelForm | None:
    """The formula by which kernels add this bias; None if it names none.

    >>> kernel_form(lambda head, q, kv: kv - q) is None
    True
    """
    named = getattr(bias, "kernel_form", None)
    return None if named is None else named()
