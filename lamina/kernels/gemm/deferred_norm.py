"""A product that knows the norm behind it, so that a norm between two products is no launch of its own.

An RMS norm needs all of a vector before it can divide any of it. But what it divides by is one number, which may as
well divide the sums of the product behind it. So the product in front writes its numbers twice, as they are and with
the norm's weight on them, and adds their squares to a sum; the product behind gets the second ones, `Unnormed`.

    y = x + o(…)                  product in front: y, weight · y, and Σ y²
    qkv(norm(y))                  product behind:   qkv(weight · y) / √(Σ y² / W + eps)

Which norm stands behind which product is seen by running a step: the first run notes it, the next ones use it. Model
code knows nothing of it. Large products are left alone: while a norm waits for one of them, the weights of the next are
already on their way, and its launch costs nothing.

The sum is of whole numbers, whose order of adding does not matter: results repeat bit for bit. It is kept in three
counters, for small terms (below 2^8, in units of 2^-42), middle ones (below 2^30, of 2^-20) and large ones (of 4), so
that it is exact to rounding for numbers from 10^-4 to 10^8. Of those there are LANES, since additions to one place wait
for each other.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lamina.kernels.workspace import NORM_COUNTERS, sums

if TYPE_CHECKING:
    from lamina.nn.norm import RMSNorm

MOST_BYTES = 30_000_000  # of a weight, in front of a norm that is worth it
LANES = tl.constexpr(NORM_COUNTERS // 4)

UNITS = (2.0**-42, 2.0**-20, 2.0**2)
SMALL, MIDDLE, LARGE = tl.constexpr(UNITS[0]), tl.constexpr(UNITS[1]), tl.constexpr(UNITS[2])


class Unnormed(Tensor):
    """One vector that its RMS norm has not divided yet, so that whoever wrote parts of it did not wait for each other.

    x        [..., W] with the norm's weight on it
    squares  the sum of squares of what the norm divides, in parts: [P] float32, or int64 as `add_squares` counts

    Products of `lamina.nn` divide as they go. To anybody else it is the tensor that the norm gives: it is divided then.
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
        """x as the norm gives it, by plain operations."""
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
class Follower:
    """The norm that stands behind a product, and where the product leaves what it has done of it."""

    norm: RMSNorm
    x: Tensor  # [1, W] the result with the norm's weight on it
    squares: Tensor  # [LANES * 4] int64


def parted(x: Tensor) -> tuple[Tensor, Tensor | None, float]:
    """What a product is given: the vector, the squares of its norm and the norm's eps, if it has not divided yet."""
    return (x.x, x.squares, x.eps) if isinstance(x, Unnormed) else (x, None, 0.0)


# -- who follows whom ------------------------------------------------------------------------------------------------

_known: WeakKeyDictionary[nn.Module, tuple[RMSNorm, torch.dtype]] = WeakKeyDictionary()


def follower_of(product: nn.Module, x: Tensor, width: int, nbytes: int) -> Follower | None:
    """The norm behind this product of x with `width` outputs, as earlier runs have seen it; None where none was seen,
    or x is several vectors, or the product reads so many bytes that it does not pay."""
    known = _known.get(product)
    if known is None or x.numel() != x.shape[-1] or nbytes > MOST_BYTES:
        return None
    norm, dtype = known
    counters = sums(x.device).take()
    if counters is None:
        return None
    return Follower(norm, x.new_empty(1, width, dtype=dtype), counters)


def behind(follower: Follower | None) -> tuple[Any, ...]:
    """What a kernel is given of a follower: the norm's weight, where numbers and squares go, what is added to the
    weight."""
    if follower is None:
        return None, None, None, 0.0
    return follower.norm.weight, follower.x, follower.squares, float(follower.norm.plus_one)


def made(y: Tensor, product: nn.Module, follower: Follower | None) -> Tensor:
    """Marks y as what the product has made."""
    y._made_by, y._follower = product, follower  # type: ignore[attr-defined]
    return y


def unnormed(norm: RMSNorm, x: Tensor, dtype: torch.dtype) -> Unnormed | None:
    """The norm of x as far as the product that made x has done it; else None, and the next run's product will."""
    product, follower = getattr(x, "_made_by", None), getattr(x, "_follower", None)
    if follower is not None and follower.norm is norm and follower.x.dtype == dtype:
        return Unnormed(follower.x.view(x.shape), follower.squares, norm.eps)
    if product is not None and norm.weight is not None:
        _known[product] = (norm, dtype)
    return None


# -- in kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def add_squares(squares, total):
    """Adds a sum of squares, float32, to the counters."""
    counter = tl.where(total < 256.0, 0, tl.where(total < 1073741824.0, 1, 2))
    units = tl.where(counter == 0, total / SMALL, tl.where(counter == 1, total / MIDDLE, total / LARGE))
    lane = tl.program_id(0) % LANES
    tl.atomic_add(squares + lane * 4 + counter, units.to(tl.int64), sem="relaxed")


@triton.jit
def follow(y, factor, out, squares, keep):
    """Leaves a norm behind what it needs of numbers y: the numbers with its weight on them, and their squares."""
    y = y.to(tl.float32)
    tl.store(out, (y * factor).to(out.dtype.element_ty), mask=keep)
    add_squares(squares, tl.sum(tl.where(keep, y * y, 0.0), 0))


@triton.jit
def parts_of_squares(squares, COUNT: tl.constexpr):
    """What adds up to the sum, float32, from COUNT parts or from counters."""
    part = tl.arange(0, triton.next_power_of_2(COUNT))
    terms = tl.load(squares + part, mask=part < COUNT, other=0).to(tl.float32)
    if squares.dtype.element_ty == tl.int64:
        kind = part % 4
        terms *= tl.where(kind == 0, SMALL, tl.where(kind == 1, MIDDLE, LARGE))
    return terms


@triton.jit
def norm_factor(squares, width, eps, COUNT: tl.constexpr):
    """What a norm of `width` numbers multiplies by; 1 where COUNT is 0 and there is no norm."""
    if COUNT == 0:
        return 1.0
    else:
        return tl.rsqrt(tl.sum(parts_of_squares(squares, COUNT), 0) / width + eps)
