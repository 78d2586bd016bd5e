"""Products of up to 64 vectors with a weight matrix, at the speed of reading the matrix once.

    product          (x Wᵀ + bias) · scale + residual
    gated_product    act(x Gᵀ) · x Uᵀ, with G and U one matrix, as `lamina.nn.GatedMLP` stores them

Both can take the norm in front of them. `linear` and `gated` are the references. The form of the kernel and its numbers
come from `choose`; the forms are described in `vector.py` (`Rows`, `Sweep`) and `tiles.py` (`Tiles`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lamina.activation import activation
from lamina.errors import InputError
from lamina.kernels import INTERPRETED
from lamina.kernels.finish import COUNTERS, PARTS, Act, act_kind, scratch
from lamina.kernels.launch import launch_options, pdl
from lamina.kernels.norm import rms_norm
from lamina.kernels.tiles import tiles_kernel
from lamina.kernels.vector import rows_kernel, sweep_kernel

MOST = 64  # vectors at a time


@dataclass(frozen=True)
class Norm:
    """The RMS norm in front of a product: x / rms(x) · weight, or · (1 + weight)."""

    weight: Tensor
    eps: float
    plus_one: bool = False


@dataclass(frozen=True)
class Rows:
    """A program owns `rows` outputs and walks along K, `block` numbers at a time; `splits` programs share a sum.

    unroll   steps that are written out one after the other, so that their loads are on their way together
    stages   more than 1: that many blocks are on their way into shared memory instead
    """

    rows: int = 2
    block: int = 1024
    warps: int = 4
    splits: int = 1
    unroll: int = 1
    stages: int = 1


@dataclass(frozen=True)
class Sweep:
    """`per_sm` programs on each multiprocessor walk down the matrix, `rows` outputs at a time, x in registers.

    stages   groups of rows on their way into shared memory
    ahead    groups of rows asked into L2 before the kernel in front has finished
    """

    rows: int = 2
    warps: int = 8
    stages: int = 3
    per_sm: int = 2
    ahead: int = 0


@dataclass(frozen=True)
class Tiles:
    """Matrix units: tiles of `rows` outputs × `block` of K, `stages` on their way, `splits` programs share a sum.

    tma   tiles are fetched by the copy engine; rows of x and of the weight must be multiples of 16 bytes
    """

    rows: int = 128
    block: int = 64
    warps: int = 4
    stages: int = 4
    splits: int = 1
    tma: bool = False


Form = Rows | Sweep | Tiles


def product(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    norm: Norm | None = None,
    form: Form | None = None,
) -> Tensor:
    """(norm(x) Wᵀ + bias) · scale + residual, summed in float32 and rounded once.

    x [N, K], weight [M, K], bias [M], residual [N, M] -> [N, M]; N up to 64; rows are contiguous.

    >>> x, weight = torch.randn(1, 64), torch.randn(24, 64)
    >>> product(x, weight).shape  # doctest: +SKIP
    torch.Size([1, 24])
    """
    return _launch(x, weight, weight.shape[0], bias, residual, scale, norm, None, form)


def gated_product(
    x: Tensor,
    weight: Tensor,
    act: Act,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    form: Form | None = None,
) -> Tensor:
    """act(gate) · up, where norm(x) Wᵀ + bias are the gate and then the up numbers.

    x [N, K], weight [2I, K], bias [2I] -> [N, I]; `act` by its name or as the function of `lamina.nn`.
    """
    return _launch(x, weight, weight.shape[0] // 2, bias, None, 1.0, norm, act_kind(act), form)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """What `product` computes, without a norm."""
    y = F.linear(x, weight, bias) * scale
    return y if residual is None else residual + y


def gated(x: Tensor, weight: Tensor, act: str, bias: Tensor | None = None) -> Tensor:
    """What `gated_product` computes, without a norm."""
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return activation(act)(gate) * up


@cache
def choose(n: int, m: int, k: int, itemsize: int, is_gated: bool) -> Form:
    """The form for n vectors, m outputs and sums over k."""
    if n > 1:
        block = 64 if is_gated or n > 16 else 128
        return _in_parts(Tiles(64, 2 * block // itemsize), n, m, k, programs=132 if n > 16 else 96, shortest=512)
    # Whole layers run best with one form for all products: the next launch fills the gaps that the last one leaves.
    block = max(16, min(1024, triton.next_power_of_2(k)))
    form = Rows(1 if is_gated else 2, block, unroll=4 if k >= 8 * block else 1)
    return form if m >= 1024 else _in_parts(form, n, m, k, programs=528, shortest=2 * form.block)


def _in_parts(form: Rows | Tiles, n: int, m: int, k: int, programs: int, shortest: int) -> Rows | Tiles:
    """The form with as many splits as give `programs`, of `shortest` numbers or more, if they fit the scratch store."""
    while form.splits < 8 and -(-m // form.rows) * form.splits < programs and k >= 2 * form.splits * shortest:
        more = replace(form, splits=2 * form.splits)
        counters, parts = parts_of(more, n, m)
        if counters > COUNTERS or parts > PARTS:
            break
        form = more
    return form


def parts_of(form: Rows | Tiles, n: int, m: int) -> tuple[int, int]:
    """How many counters, and how many parts of sums, a form with splits needs in the scratch store."""
    groups = -(-m // form.rows)
    numbers = 2 * m * max(16, triton.next_power_of_2(n)) if isinstance(form, Tiles) else n * (2 * m + groups)
    return groups, form.splits * numbers


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _launch(
    x: Tensor,
    weight: Tensor,
    m: int,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: float,
    norm: Norm | None,
    act: str | None,
    form: Form | None,
) -> Tensor:
    n, k = x.shape
    if not 1 <= n <= MOST:
        raise InputError(f"a product of {n} vectors; the kernels take 1 to {MOST}, beyond that use F.linear")
    if weight.shape[1] != k or x.stride(1) != 1 or weight.stride(1) != 1 or x.dtype != weight.dtype:
        raise InputError(
            f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype} must have rows of the same "
            f"length and dtype, each contiguous"
        )
    form = form or choose(n, m, k, weight.element_size(), act is not None)
    if norm is not None and isinstance(form, Tiles):
        x, norm = rms_norm(x, norm.weight, norm.eps, plus_one=norm.plus_one), None
    out = x.new_empty(n, m, dtype=None if residual is None else residual.dtype)
    pointers = (x, weight, x if bias is None else bias, x if residual is None else residual)
    strides = (x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0))
    flags: dict[str, Any] = dict(
        GATED=act is not None, ACT=act or "", BIAS=bias is not None, RESIDUAL=residual is not None, PDL=pdl(),
        num_warps=form.warps, **launch_options(),
    )  # fmt: skip
    if isinstance(form, Tiles):
        _launch_tiles(form, n, m, k, pointers, strides, scale, out, flags)
        return out
    flags |= dict(N=n, N_BLOCK=triton.next_power_of_2(n), NORM=norm is not None)
    flags |= dict(PLUS_ONE=norm is not None and norm.plus_one)
    factor, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
    if isinstance(form, Sweep):
        block = triton.next_power_of_2(k)
        groups = triton.cdiv(m, form.rows)
        row_bytes = weight.stride(0) * weight.element_size()
        ahead = 0 if INTERPRETED or row_bytes % 16 or weight.data_ptr() % 16 else form.ahead
        sweep_kernel[(min(form.per_sm * _multiprocessors(x.device), groups),)](
            *pointers, factor, out, m, k, *strides, scale, eps,
            ROWS=form.rows, BLOCK=block, STAGES=form.stages, AHEAD=ahead, EVEN=block == k, **flags,
        )  # fmt: skip
        return out
    parts, arrived = _meeting_place(form, n, m, x.device)
    rows_kernel[(triton.cdiv(m, form.rows), form.splits)](
        *pointers, factor, out, parts, arrived, m, k, *strides, scale, eps,
        ROWS=form.rows, BLOCK=form.block, SPLITS=form.splits, UNROLL=form.unroll, STAGES=form.stages,
        EVEN=k % form.block == 0, **flags,
    )  # fmt: skip
    return out


def _launch_tiles(
    form: Tiles, n: int, m: int, k: int, pointers: tuple[Tensor, ...], strides: tuple[int, ...], scale: float,
    out: Tensor, flags: dict[str, Any],
) -> None:  # fmt: skip
    x, weight, bias, residual = pointers
    n_block = max(16, triton.next_power_of_2(n))
    parts, arrived = _meeting_place(form, n, m, x.device)
    a: Any = TensorDescriptor(x, [n, k], [x.stride(0), 1], [n_block, form.block]) if form.tma else x
    b: Any = weight
    if form.tma:
        b = TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [form.rows, form.block])
    tiles_kernel[(triton.cdiv(m, form.rows), form.splits)](
        a, b, bias, residual, out, parts, arrived, m, k, n, *strides, scale,
        N_BLOCK=n_block, ROWS=form.rows, BLOCK=form.block, SPLITS=form.splits, STAGES=form.stages,
        EVEN=k % form.block == 0, TMA=form.tma, **flags,
    )  # fmt: skip


def _meeting_place(form: Rows | Tiles, n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The scratch store, checked for room."""
    counters, parts = parts_of(form, n, m)
    if form.splits > 1 and (parts > PARTS or counters > COUNTERS):
        raise InputError(
            f"{form}: {parts} parts of sums and {counters} counters, but the scratch store has room for {PARTS} and "
            f"{COUNTERS}; use fewer splits"
        )
    return scratch(device)
