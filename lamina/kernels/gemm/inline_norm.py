"""A layer norm without a launch of its own: the product that reads its result computes it, in every program.

An RMS norm can be deferred (`deferred_norm.py`), since its divisor is a single number. For a layer norm this way would
subtract the mean from the product's sums, times the sums of weight rows: with a mean much larger than the deviation
the difference has few correct digits. But a program of a GEMV reads all of x anyway. If the weight is small, it has
loaded its rows of the weight before x is there, and then mean and variance take a fraction of the time of a launch:

    qkv(norm(x))      every program: mean and variance of x in float32, then its rows of W · (weight · (x - mean))

Which norms are inline is in the model's fusion plan (`fusion.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lamina.kernels.gemm.deferred_norm import operand
from lamina.kernels.gemm.fusion import version_of
from lamina.kernels.gemm.product import whole_rows
from lamina.kernels.norm import layer_norm
from lamina.kernels.workspace import fusions

if TYPE_CHECKING:
    from lamina.nn.norm import LayerNorm


class Inlined(Tensor):
    """The layer norm of one vector x [..., W], which the products that read it compute.

    For any other operation it is the tensor that the norm returns, by a launch.

    launches   called when it is launched after all, with whether x is still as it was
    """

    x: Tensor
    norm: LayerNorm
    launches: Callable[[bool], None]
    version: int

    @staticmethod
    def __new__(cls, x: Tensor, norm: LayerNorm, launches: Callable[[bool], None]) -> Inlined:
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, x: Tensor, norm: LayerNorm, launches: Callable[[bool], None]) -> None:
        self.x, self.norm, self.launches, self.version = x, norm, launches, version_of(x)

    @property
    def unchanged(self) -> bool:
        """False if x was changed in place since the norm was called."""
        return self.version == version_of(self.x)

    def launched(self) -> Tensor:
        """The norm's result, [..., W]."""
        self.launches(self.unchanged)
        flat = self.x.reshape(-1, self.x.shape[-1])
        return layer_norm(flat, self.norm.weight, self.norm.bias, self.norm.eps).view(self.x.shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Inlined({self.x!r}, {self.norm})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(lambda a: a.launched() if isinstance(a, Inlined) else a, (args, kwargs or {}))
        return func(*args, **kwargs)


def inlined(norm: LayerNorm, x: Tensor, dtype: torch.dtype) -> Inlined | None:
    """norm(x) for the products behind it to compute, by the fusion plan of the program in use; None for a launch, as
    for several vectors."""
    if x.numel() != x.shape[-1] or x.dtype != dtype:
        return None
    launches = fusions(x.device).inlines(norm, dtype)
    return None if launches is None else Inlined(x, norm, launches)


def operand_and_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The vector that `product` reads, and its arguments for the norm of that vector that was left to it, if any."""
    if isinstance(x, Inlined):
        m, k = weight.shape
        if x.dtype == weight.dtype and x.unchanged and whole_rows(m, k, weight.element_size()) is not None:
            return x.x, {"norm": x.norm}
        x = x.launched()
    x, squares, eps = operand(x)
    return x, {"squares": squares, "eps": eps}
