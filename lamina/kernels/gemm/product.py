"""Products of up to 64 vectors with a weight matrix, at the speed of reading the matrix once.

    product          (x Wᵀ + bias) · scale, softly capped, + residual
    gated_product    act(x Gᵀ · scale) · x Uᵀ, with G and U one matrix, as `lamina.nn.GatedMLP` stores them

A vector may come `Unnormed`: all of its RMS norm is done but the division, which is left to the product. And a product
may do the same for the norm behind it (`deferred_norm.py`).

`linear` and `gated` are the references. The form of the kernel and its numbers come from `choose`; the configs are
described in `gemv.py` (`Rows`) and `skinny.py` (`Tiles`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from lamina.activation import activation
from lamina.errors import InputError
from lamina.kernels.gemm.deferred_norm import DeferredNorm, Unnormed, norm_arguments
from lamina.kernels.gemm.epilogue import Act, act_kind
from lamina.kernels.gemm.gemv import rows_kernel
from lamina.kernels.gemm.skinny import tiles_kernel
from lamina.kernels.launch import launch
from lamina.kernels.limits import KIB, Limits, fitted, limits_of, smaller
from lamina.kernels.workspace import COUNTERS, PARTS, scratch

MOST = 64  # vectors at a time


@dataclass(frozen=True)
class Rows:
    """For one vector: a program owns `rows` outputs and walks along K, `block` numbers at a time; `splits` programs
    share a sum.

    unroll   steps that are written out one after the other, so that their loads are on their way together
    held     blocks of the weight that are asked for before the kernel in front has finished
    """

    rows: int = 2
    block: int = 1024
    warps: int = 4
    splits: int = 1
    unroll: int = 1
    held: int = 2


@dataclass(frozen=True)
class Tiles:
    """Matrix units: tiles of `rows` outputs × `block` of K, `stages` on their way, `splits` programs share a sum."""

    rows: int = 128
    block: int = 64
    warps: int = 4
    stages: int = 4
    splits: int = 1


ProductConfig = Rows | Tiles
AConfig = TypeVar("AConfig", Rows, Tiles)


def product(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    before: float = 1.0,
    scale: float | Tensor = 1.0,
    softcap: float | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    next_norm: DeferredNorm | None = None,
    config: ProductConfig | None = None,
) -> Tensor:
    """((before · x) Wᵀ + bias) · scale, capped as softcap · tanh(y / softcap), + residual, summed in float32 and
    rounded once.

    x [N, K], weight [M, K], bias [M], residual [N, M] -> [N, M]; N up to 64; rows are contiguous. `scale` is a number
    or one for each output, [M]. With `squares` x is one vector that is still to be divided by √(their sum / K + eps),
    see `Unnormed`. With a `follower` the result of one vector is also put there.

    >>> x, weight = torch.randn(1, 64), torch.randn(24, 64)
    >>> product(x, weight).shape  # doctest: +SKIP
    torch.Size([1, 24])
    """
    return _launch(
        x, weight, weight.shape[0], bias, residual, before, scale, softcap, None, config, squares, eps, next_norm
    )


def gated_product(
    x: Tensor,
    weight: Tensor,
    act: Act,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    squares: Tensor | None = None,
    eps: float = 0.0,
    config: ProductConfig | None = None,
) -> Tensor:
    """act(gate · scale) · up, where x Wᵀ + bias are the gate and then the up numbers.

    x [N, K], weight [2I, K], bias [2I] -> [N, I]; `act` by its name or as the function of `lamina.nn`. `squares` as in
    `product`.
    """
    return _launch(
        x, weight, weight.shape[0] // 2, bias, None, 1.0, scale, None, act_kind(act), config, squares, eps, None
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    before: float = 1.0,
    scale: float | Tensor = 1.0,
    softcap: float | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """What `product` computes."""
    if squares is not None:
        x = Unnormed(x, squares, eps).divided()
    y = F.linear(x * before, weight, bias) * scale
    y = y if softcap is None else (y / softcap).tanh() * softcap
    return y if residual is None else residual + y


def gated(x: Tensor, weight: Tensor, act: str, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """What `gated_product` computes."""
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return activation(act)(gate * scale) * up


@cache
def choose(n: int, m: int, k: int, itemsize: int, is_gated: bool, limits: Limits) -> ProductConfig:
    """The form for n vectors, m outputs and sums over k, on a device with these limits."""
    if n > 1:
        programs = limits.multiprocessors * 8 // 11  # 96 of an H200, and as many for each of its SMs elsewhere
        tiles = _in_parts(Tiles(64, 256 // itemsize), n, m, k, programs=programs, shortest=512)
        if (n > 16 or tiles.splits > 1) and not is_gated and limits.pdl:
            tiles = replace(tiles, stages=6)
        return fitted(smaller(tiles), lambda one: shared_bytes(one, n, itemsize, is_gated, limits), limits.shared)
    # Whole layers run best with one form for all products: the next launch fills the gaps that the last one leaves.
    block = next((size for size in (1024, 512) if k % size == 0), max(16, min(1024, triton.next_power_of_2(k))))
    long = k >= 8 * block
    held = 4 if is_gated or long else 2
    config = Rows(1 if is_gated else 2, block, max(1, block // 256), unroll=4 if long else 1, held=held)
    programs = 4 * limits.multiprocessors
    return config if m >= 1024 else _in_parts(config, n, m, k, programs=programs, shortest=2 * config.block)


def shared_bytes(tiles: Tiles, n: int, itemsize: int, is_gated: bool, limits: Limits) -> int:
    """Shared memory of a program, at most: blocks of the weight, of its partner and of the vectors, for each stage."""
    each = tiles.block * (tiles.rows * (2 if is_gated else 1) + _padded(n)) * itemsize
    return each * limits.buffers(tiles.stages, tiles.rows) + 2 * KIB


def _padded(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _in_parts(config: AConfig, n: int, m: int, k: int, programs: int, shortest: int) -> AConfig:
    """The config with enough splits for `programs`, each at least `shortest` long, if their partial sums fit the
    workspace."""
    while config.splits < 8 and -(-m // config.rows) * config.splits < programs and k >= 2 * config.splits * shortest:
        more = replace(config, splits=2 * config.splits)
        counters, parts = parts_of(more, n, m)
        if counters > COUNTERS or parts > PARTS:
            break
        config = more
    return config


def parts_of(config: ProductConfig, n: int, m: int) -> tuple[int, int]:
    """How many counters, and how many parts of sums, a config with splits needs in the scratch store."""
    vectors = _padded(n) if isinstance(config, Tiles) else 1
    return -(-m // config.rows), config.splits * 2 * m * vectors


def _launch(
    x: Tensor,
    weight: Tensor,
    m: int,
    bias: Tensor | None,
    residual: Tensor | None,
    before: float,
    scale: float | Tensor,
    softcap: float | None,
    act: str | None,
    config: ProductConfig | None,
    squares: Tensor | None,
    eps: float,
    next_norm: DeferredNorm | None,
) -> Tensor:
    n, k = x.shape
    if not 1 <= n <= MOST:
        raise InputError(f"a product of {n} vectors; the kernels take 1 to {MOST}, beyond that use F.linear")
    if weight.shape[1] != k or x.stride(1) != 1 or weight.stride(1) != 1 or x.dtype != weight.dtype:
        raise InputError(
            f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype} must have rows of the same "
            f"length and dtype, each contiguous"
        )
    config = config or choose(n, m, k, weight.element_size(), act is not None, limits_of(x.device))
    out = x.new_empty(n, m, dtype=None if residual is None else residual.dtype)
    parts, arrived = _meeting_place(config, n, m, x.device)
    factors = scale if isinstance(scale, Tensor) else None
    pointers = (x, weight, *(x if one is None else one for one in (bias, factors, residual)), out, parts, arrived)
    numbers = (before, 1.0 if isinstance(scale, Tensor) else scale, 1.0 if softcap is None else softcap)
    flags: dict[str, Any] = dict(
        ROWS=config.rows, BLOCK=config.block, SPLITS=config.splits, EVEN=k % config.block == 0, GATED=act is not None,
        ACT=act or "", BIAS=bias is not None, FACTORS=factors is not None, RESIDUAL=residual is not None,
        SOFTCAP=softcap is not None, num_warps=config.warps,
    )  # fmt: skip
    grid = (triton.cdiv(m, config.rows), config.splits)
    if isinstance(config, Tiles):
        if squares is not None or next_norm is not None:
            raise InputError(f"{config} knows nothing of norms in front or behind; those are for one vector and Rows")
        strides = (x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0))
        launch(
            tiles_kernel, grid,
            *pointers, m, k, n, *strides, *numbers, N_BLOCK=_padded(n), STAGES=config.stages,
            APART=x.dtype == torch.float32, **flags,
        )  # fmt: skip
    elif n == 1:
        held = config.held if k % config.block == 0 and k // config.block >= config.held * config.splits else 0
        sums = 0 if squares is None else len(squares)
        launch(
            rows_kernel, grid,
            *pointers, squares, *norm_arguments(next_norm), m, k, weight.stride(0), *numbers, eps, SQUARES=sums,
            NEXT_NORM=next_norm is not None, HELD=held, UNROLL=config.unroll, **flags,
        )  # fmt: skip
    else:
        raise InputError(f"{config} takes one vector, not {n}; use Tiles")
    return out


def _meeting_place(config: ProductConfig, n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The scratch store, checked for room."""
    counters, parts = parts_of(config, n, m)
    if config.splits > 1 and (parts > PARTS or counters > COUNTERS):
        raise InputError(
            f"{config}: {parts} parts of sums and {counters} counters, but the scratch store has room for {PARTS} and "
            f"{COUNTERS}; use fewer splits"
        )
    return scratch(device)
