"""How far an output may be from the reference: measured, and never more than a ceiling.

An error is relative to the largest output at its position, so it means the same for logits and for hidden states. What
rounding explains is measured: the uncached pass in the model's dtype beside the same pass in double precision. A cached
pass may be off by a few times that (other widths and batches add in another order), but never by more than the ceiling
of the dtype. So a model whose passes are noisy, or which computes something else in double precision, raises no
tolerance high enough to hide a fault.
"""

from __future__ import annotations

import torch
from torch import Tensor

CEILINGS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2**-5, torch.bfloat16: 2**-2}
"""The largest error that may count as rounding, by dtype: 32 steps of the last bit in float16 and bfloat16, where whole
models show up to 0.01 and 0.09; in float32 far above what they show (4e-6) and far below what a fault does. Norms and
rotary tables of a model in float64 compute in float32, hence the same there."""


def rounds_as(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype whose tolerances apply: where TF32 is on, products of float32 have the ten bits of float16."""
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return torch.float16 if tf32 and dtype == torch.float32 else dtype


def ceiling(dtype: torch.dtype) -> float:
    return CEILINGS.get(dtype, 2**-2)


def least(dtype: torch.dtype) -> float:
    """What another order of summation may add where the uncached pass happens to be nearly exact."""
    return max(4 * torch.finfo(dtype).eps, 4e-6)


def unmeasured(dtype: torch.dtype) -> float:
    """What the rounding of a pass is taken to be where it cannot be measured."""
    return ceiling(dtype) / 16


def allowed(measured: float, dtype: torch.dtype, times: float) -> float:
    """The tolerance, from the error of the uncached pass in this dtype.

    >>> allowed(1e-6, torch.float32, 4.0), allowed(0.78, torch.float32, 4.0)
    (8e-06, 0.001)
    """
    return min(times * measured + least(dtype), ceiling(dtype))


def scales(exact: Tensor) -> Tensor:
    """[N, W] -> [N]: the largest output at each position, at least a thousandth of the largest of all."""
    largest = exact.abs().amax(dim=-1)
    return largest.clamp(min=float(largest.max()) * 1e-3).clamp(min=1e-30)


def errors(found: Tensor, exact: Tensor, scale: Tensor) -> Tensor:
    """[N, W], [N, W], [N] -> [N]: the largest deviation at each position, relative to its scale; NaN is infinite."""
    wide = torch.promote_types(exact.dtype, torch.float32)
    relative = (found.to(wide) - exact.to(wide)).abs().amax(dim=-1) / scale.to(wide)
    return torch.where(relative.isfinite(), relative, torch.inf)
