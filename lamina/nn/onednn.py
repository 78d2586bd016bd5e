"""Matrix products of many rows on a CPU by oneDNN, with what follows them computed as results are stored.

PyTorch computes float32 products by MKL. oneDNN is 5 to 20 % faster where there are many rows, and it applies an
activation, a factor or a residual to each tile while that is in the cache. It has no gradients, and prepares each new
number of rows once, in about a millisecond.

These are operations that PyTorch's compiler calls; where a build lacks them, `fits` is False and `F.linear` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS, LEAST_WEIGHT = 65, 2**16  # below, other ways are faster: see linear.py
AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

ACTS = {F.silu: ("swish", ""), F.relu: ("relu", ""), F.gelu: ("gelu", "none"), torch.tanh: ("tanh", "")}


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether a product x Wᵀ of x [..., in] and weight [out, in] runs by oneDNN.

    >>> with torch.no_grad():
    ...     fits(torch.ones(2, 512), torch.ones(512, 512))
    False
    """
    if not AVAILABLE or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if (
        not isinstance(weight, Tensor)
        or x.device.type != "cpu"
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
    ):
        return False
    enough = weight.numel() >= LEAST_WEIGHT and x.numel() >= LEAST_ROWS * weight.shape[1]
    return enough and weight.stride(1) == 1 and bool(torch.backends.mkldnn.enabled)


def act_of(act: Callable[[Tensor], Tensor]) -> tuple[str, str] | None:
    """The name and variant that oneDNN has for an activation; None if it has none.

    >>> act_of(F.silu)
    ('swish', '')
    """
    if isinstance(act, partial):
        tanh = act.func is F.gelu and act.keywords == {"approximate": "tanh"}
        return ("gelu", "tanh") if tanh else None
    return ACTS.get(act)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, act: tuple[str, str] | None = None) -> Tensor:
    """act(x Wᵀ + b), [..., out]; act as from `act_of`"""
    name, variant = act or ("none", "")
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, [], variant)


def product_with(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor, how: str) -> Tensor:
    """x Wᵀ + b, plus ("add") or times ("mul") other [..., out]"""
    return torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, how)
