"""An RMS norm between two products without a launch of its own: the division is deferred to the product behind it.

An RMS norm needs the whole vector before it can divide any element. But the divisor is a single number, so it may
divide the sums of the next product instead of their inputs. The product in front writes its result twice, plain and
multiplied by the norm's weight, and adds Σ y² to counters. The product behind reads the second copy, `Unnormed`.

    y = x + o(…)                  product in front: y, weight · y, and Σ y²
    qkv(norm(y))                  product behind:   qkv(weight · y) / √(Σ y² / W + eps)

Which norm is deferred is in the model's fusion plan (`fusion.py`).

Σ y² is a sum of integers, so the order in which programs add does not matter and results repeat bit for bit. There are
three counters by size of the term: below 2^8 in units of 2^-42, below 2^30 in units of 2^-20, above in units of 4. So
the sum is exact to rounding for values from 10^-4 to 10^8. Each counter exists LANES times, since atomic additions to
one address wait for each other.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lamina.kernels.workspace import NORM_COUNTERS, fusions, sums

if TYPE_CHECKING:
    from lamina.nn.norm import RMSNorm

LANES = tl.constexpr(NORM_COUNTERS // 4)

UNITS = (2.0**-42, 2.0**-20, 2.0**2)
SMALL, MIDDLE, LARGE = tl.constexpr(UNITS[0]), tl.constexpr(UNITS[1]), tl.constexpr(UNITS[2])


class Unnormed(Tensor):
    """One vector that its RMS norm has multiplied by the weight and not divided yet.

    x         [..., W] multiplied by the norm's weight
    squares   sums of squares of the norm's input that add up to the whole: [P] float32, one for each program that wrote
              x, or [LANES * 4] int64 counters of `add_squares`

    Products of `lamina.nn` divide their sums. For any other operation it is the tensor that the norm returns: it is
    divided first, by PyTorch.
    """

    x: Tensor
    squares: Tensor
    eps: float

    @staticmethod
    def __new__(cls, x: Tensor, squares: Tensor, eps: float) -> Unnormed:
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, x: Tensor, squares: Tensor, eps: float) -> None:
        self.x, self.squares, self.eps = x, squares, eps

    def divided(self) -> Tensor:
        """The norm's result, [..., W], by PyTorch operations."""
        total = self.squares.sum()
        if self.squares.dtype == torch.int64:
            kinds = self.squares.view(LANES.value, 4).sum(0).double()
            total = kinds[0] * UNITS[0] + kinds[1] * UNITS[1] + kinds[2] * UNITS[2]
        return (self.x * torch.rsqrt(total.float() / self.x.shape[-1] + self.eps)).to(self.x.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unnormed({self.x!r}, {self.squares!r}, {self.eps})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(lambda a: a.divided() if isinstance(a, Unnormed) else a, (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class DeferredNorm:
    """The norm behind a product, and the memory where the product leaves its part of that norm."""

    norm: RMSNorm
    x: Tensor  # [1, W] the product's result multiplied by the norm's weight
    squares: Tensor  # [LANES * 4] int64 counters

    def of(self, y: Tensor) -> Unnormed:
        """The norm of the product's result y [..., W], before the division."""
        return Unnormed(self.x.view(y.shape), self.squares, self.norm.eps)


def operand(x: Tensor) -> tuple[Tensor, Tensor | None, float]:
    """What a product reads: a vector, and if the norm of that vector is `Unnormed`, its squares and eps."""
    return (x.x, x.squares, x.eps) if isinstance(x, Unnormed) else (x, None, 0.0)


def deferred_norm(product: nn.Module, x: Tensor, width: int) -> DeferredNorm | None:
    """The norm that a product of x with `width` outputs prepares, by the fusion plan of the program in use.

    None without such a norm, for several vectors, and where the step has more norms than there are counters.
    """
    after = fusions(x.device).norm_after(product)
    if after is None or x.numel() != x.shape[-1]:
        return None
    counters = sums(x.device).take()
    return None if counters is None else DeferredNorm(after.norm, x.new_empty(1, width, dtype=after.dtype), counters)


def made(product: nn.Module, y: Tensor, deferred: DeferredNorm | None, nbytes: int) -> Tensor:
    """Hands what the product prepared of the next norm to that norm; -> y

    nbytes   of weights that the product reads
    """
    return fusions(y.device).made(product, y, None if deferred is None else deferred.of(y), nbytes=nbytes)


def norm_arguments(deferred: DeferredNorm | None) -> tuple[Any, ...]:
    """next_weight, next_out, next_squares and next_plus of a kernel."""
    if deferred is None:
        return None, None, None, 0.0
    return deferred.norm.weight, deferred.x, deferred.squares, float(deferred.norm.plus_one)


# -- in kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def add_squares(squares, total):
    """Adds a sum of squares, a float32 scalar, to the counters squares [LANES, 4] int64 (column 3 is unused)."""
    counter = tl.where(total < 256.0, 0, tl.where(total < 1073741824.0, 1, 2))
    units = tl.where(counter == 0, total / SMALL, tl.where(counter == 1, total / MIDDLE, total / LARGE))
    lane = tl.program_id(0) % LANES
    tl.atomic_add(squares + lane * 4 + counter, units.to(tl.int64), sem="relaxed")


@triton.jit
def prepare_norm(y, factor, out, squares, keep):
    """Leaves the next norm its part: y · factor at the pointers `out`, and Σ y² in the counters `squares` [LANES, 4].

    y, factor, out and keep are [ROWS]; factor is the norm's weight. y is rounded as it was stored, since that is what
    the norm would read."""
    y = y.to(tl.float32)
    tl.store(out, (y * factor).to(out.dtype.element_ty), mask=keep)
    add_squares(squares, tl.sum(tl.where(keep, y * y, 0.0), 0))


@triton.jit
def partial_squares(squares, COUNT: tl.constexpr):
    """squares [COUNT], float32 sums or int64 counters -> float32 terms that add up to Σ y², padded to a power of two.

    Loaded apart from their sum, so that a kernel can issue other loads in between."""
    part = tl.arange(0, triton.next_power_of_2(COUNT))
    terms = tl.load(squares + part, mask=part < COUNT, other=0).to(tl.float32)
    if squares.dtype.element_ty == tl.int64:
        kind = part % 4
        terms *= tl.where(kind == 0, SMALL, tl.where(kind == 1, MIDDLE, LARGE))
    return terms


@triton.jit
def norm_factor(squares, width, eps, COUNT: tl.constexpr):
    """1 / √(Σ y² / width + eps) from squares [COUNT]; 1 if COUNT is 0, which means that there is no deferred norm."""
    if COUNT == 0:
        return 1.0
    else:
        return tl.rsqrt(tl.sum(partial_squares(squares, COUNT), 0) / width + eps)
