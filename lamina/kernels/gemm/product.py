"""Matrix products of up to 64 vectors with a weight, in the time of reading the weight once.

    product          softcap((x Wᵀ + bias) · scale) + residual
    gated_product    act(x Gᵀ · scale) · x Uᵀ, with G and U stacked in one matrix, as `lamina.nn.GatedMLP` stores them

x may be `Unnormed`, and the product then divides its sums; it may also prepare the norm behind it (`deferred_norm.py`).
A layer norm of x may be part of the product (`inline_norm.py`).

`linear` and `gated` are the PyTorch references. `choose` picks the kernel and its configuration: `Rows` for one vector
(`gemv.py`), `Tiles` for several (`skinny.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

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

if TYPE_CHECKING:
    from lamina.nn.norm import LayerNorm

MOST = 64  # vectors of one product
HELD_BYTES, HELD_BLOCKS = 16_000_000, 5  # of a weight whose programs hold whole rows: its size, blocks of a row


@dataclass(frozen=True)
class Rows:
    """GEMV: a program computes `rows` outputs and loops over K in steps of `block`; `splits` programs share K.

    unroll   loop iterations that are unrolled, so that their loads are in flight together
    held     blocks of the weight that are loaded before the kernel in front has finished
    early    whether the next kernel may start while this one still waits (`launch`)
    """

    rows: int = 2
    block: int = 1024
    warps: int = 4
    splits: int = 1
    unroll: int = 1
    held: int = 2
    early: bool = False


@dataclass(frozen=True)
class Tiles:
    """Skinny GEMM on tensor cores: tiles of `rows` outputs × `block` of K, `stages` loads in flight, `splits` programs
    share K.

    Of packed weights alone:

    apart   the product of a tile is added to the sum when it is complete. Where it is not, ptxas may make each
            instruction of a product wait for the one before (`python -m bench.kernels.packed_tiles` tells where)
    bulk    codes are copied by the tensor memory accelerator (TMA), past the L1 cache, from Hopper on
    """

    rows: int = 128
    block: int = 64
    warps: int = 4
    stages: int = 4
    splits: int = 1
    apart: bool = False
    bulk: bool = False


ProductConfig = Rows | Tiles
"""How a product kernel is launched."""
AConfig = TypeVar("AConfig", Rows, Tiles)


@dataclass(frozen=True)
class Around:
    """What a product kernel does around its sums (`product`); gated: act(gate · scale) · up."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    before: float = 1.0
    scale: float | Tensor = 1.0
    act: Act | None = None
    softcap: float | None = None
    is_gated: bool = False

    def outputs(self, weight_rows: int) -> int:
        return weight_rows // 2 if self.is_gated else weight_rows

    def new_out(self, x: Tensor, m: int) -> Tensor:
        return x.new_empty(x.shape[0], m, dtype=None if self.residual is None else self.residual.dtype)

    def pointers(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """bias, factors and residual of a kernel; x where there is none, which is not read."""
        factors = self.scale if isinstance(self.scale, Tensor) else None
        bias, factors, residual = (x if one is None else one for one in (self.bias, factors, self.residual))
        return bias, factors, residual

    @property
    def residual_stride(self) -> int:
        return 0 if self.residual is None else self.residual.stride(0)

    @property
    def bounds(self) -> tuple[float, float, float]:
        """before, scale and softcap of a kernel."""
        scale = 1.0 if isinstance(self.scale, Tensor) else self.scale
        return self.before, scale, 1.0 if self.softcap is None else self.softcap

    def flags(self, config: ProductConfig, k: int) -> dict[str, Any]:
        """The constexprs that all product kernels have."""
        return dict(
            ROWS=config.rows, BLOCK=config.block, SPLITS=config.splits, EVEN=k % config.block == 0,
            GATED=self.is_gated, ACT="" if self.act is None else act_kind(self.act), BIAS=self.bias is not None,
            FACTORS=isinstance(self.scale, Tensor), RESIDUAL=self.residual is not None,
            SOFTCAP=self.softcap is not None, num_warps=config.warps,
        )  # fmt: skip


def product(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    before: float = 1.0,
    scale: float | Tensor = 1.0,
    act: Act | None = None,
    softcap: float | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    norm: LayerNorm | None = None,
    next_norm: DeferredNorm | None = None,
    config: ProductConfig | None = None,
) -> Tensor:
    """softcap · tanh(act(((before · x) Wᵀ + bias) · scale) / softcap) + residual, summed in float32 and rounded once.

    x [N, K], weight [M, K], bias [M], residual [N, M] -> [N, M]; N up to 64; rows are contiguous

    scale       a number, or one for each output, [M]
    act         a name, or the function of `lamina.activation`; None: no activation
    softcap     None: no tanh
    squares     [P] x is one vector, still to be divided by √(Σ squares / K + eps): see `Unnormed`
    norm        x is one vector, to be normed first; the config must hold whole rows, as that of `whole_rows` does
    next_norm   the norm of the result, for one vector, is prepared there
    config      in place of what `choose` says

    >>> x, weight = torch.randn(1, 64), torch.randn(24, 64)
    >>> product(x, weight).shape  # doctest: +SKIP
    torch.Size([1, 24])
    """
    around = Around(bias, residual, before, scale, act, softcap)
    return _launch(x, weight, around, config, squares, eps, norm, next_norm)


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
    """act(gate · scale) · up, where gate and up are the first and second half of x Wᵀ + bias.

    x [N, K], weight [2I, K], bias [2I] -> [N, I]

    act             a name, or the function of `lamina.activation`
    squares, eps    as in `product`
    """
    return _launch(x, weight, Around(bias, scale=scale, act=act, is_gated=True), config, squares, eps)


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
    act: str | None = None,
) -> Tensor:
    """The reference of `product`."""
    if squares is not None:
        x = Unnormed(x, squares, eps).divided()
    y = F.linear(x * before, weight, bias) * scale
    y = y if act is None else activation(act)(y)
    y = y if softcap is None else (y / softcap).tanh() * softcap
    return y if residual is None else residual + y


def gated(x: Tensor, weight: Tensor, act: str, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """The reference of `gated_product`."""
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return activation(act)(gate * scale) * up


@cache
def choose(n: int, m: int, k: int, itemsize: int, is_gated: bool, limits: Limits) -> ProductConfig:
    """The configuration for n vectors, m outputs and sums over k, on a device with these limits."""
    if n > 1:
        programs = limits.multiprocessors * 8 // 11  # 96 on the 132 SMs of an H200, in proportion elsewhere
        tiles = _in_parts(Tiles(64, 256 // itemsize), n, m, k, programs=programs, shortest=512)
        if (n > 16 or tiles.splits > 1) and not is_gated and limits.pdl:
            tiles = replace(tiles, stages=6)
        return fitted(smaller(tiles), lambda one: shared_bytes(one, n, itemsize, is_gated, limits), limits.shared)
    whole = None if is_gated else whole_rows(m, k, itemsize)
    if whole is not None and (whole.block < 512 or whole.held not in (2, 3, 4)):  # the choice below holds two blocks
        return whole
    # One configuration for all products of a layer is fastest: the next launch starts on SMs that the last one leaves.
    block = next((size for size in (1024, 512) if k % size == 0), max(16, min(1024, triton.next_power_of_2(k))))
    long = k >= 8 * block
    held = 4 if is_gated or long else 2
    config = Rows(1 if is_gated else 2, block, max(1, block // 256), unroll=4 if long else 1, held=held)
    programs = 4 * limits.multiprocessors
    return config if m >= 1024 else _in_parts(config, n, m, k, programs=programs, shortest=2 * config.block)


def whole_rows(m: int, k: int, itemsize: int) -> Rows | None:
    """The configuration for one vector in which a program loads its rows of the weight whole before it waits; None for
    rows that are more than HELD_BLOCKS blocks of a power of two, and for large weights whose blocks are long.

    >>> whole_rows(5120, 1280, 2)
    Rows(rows=4, block=256, warps=1, splits=1, unroll=1, held=5, early=True)
    """
    block = min(1024, k & -k)
    large = m * k * itemsize > HELD_BYTES
    if block < 16 or k // block > HELD_BLOCKS or (large and block >= 512):
        return None
    rows = 4 if m > 2048 and itemsize == 2 else 2
    return Rows(rows, block, max(1, block // 256), held=k // block, early=not large)


def shared_bytes(tiles: Tiles, n: int, itemsize: int, is_gated: bool, limits: Limits) -> int:
    """Upper bound of a program's shared memory: per stage, tiles of the weight (gate and up if gated) and of x."""
    each = tiles.block * (tiles.rows * (2 if is_gated else 1) + padded(n)) * itemsize
    return each * limits.buffers(tiles.stages, tiles.rows) + 2 * KIB


def padded(n: int) -> int:
    """Vectors of a tile: a power of two, and at least the 16 of a tensor core instruction."""
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
    """Counters and partial sums in the workspace: one counter per tile of outputs, one sum per output and split."""
    vectors = padded(n) if isinstance(config, Tiles) else 1
    return -(-m // config.rows), config.splits * 2 * m * vectors


def _launch(
    x: Tensor,
    weight: Tensor,
    around: Around,
    config: ProductConfig | None,
    squares: Tensor | None,
    eps: float,
    norm: LayerNorm | None = None,
    next_norm: DeferredNorm | None = None,
) -> Tensor:
    (n, k), m = x.shape, around.outputs(weight.shape[0])
    if not 1 <= n <= MOST:
        raise InputError(f"a product of {n} vectors; the kernels take 1 to {MOST}, beyond that use F.linear")
    if weight.shape[1] != k or x.stride(1) != 1 or weight.stride(1) != 1 or x.dtype != weight.dtype:
        raise InputError(
            f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype} must have rows of the same "
            f"length and dtype, each contiguous"
        )
    if norm is not None:
        config = config or whole_rows(m, k, weight.element_size())
    config = config or choose(n, m, k, weight.element_size(), around.is_gated, limits_of(x.device))
    out = around.new_out(x, m)
    pointers = (x, weight, *around.pointers(x), out, *workspace_for(config, n, m, x.device))
    flags, grid = around.flags(config, k), (triton.cdiv(m, config.rows), config.splits)
    if isinstance(config, Tiles):
        if squares is not None or norm is not None or next_norm is not None:
            raise InputError(f"{config}: norms are deferred for one vector and Rows alone")
        launch(
            tiles_kernel, grid,
            *pointers, m, k, n, x.stride(0), weight.stride(0), around.residual_stride, *around.bounds,
            N_BLOCK=padded(n), STAGES=config.stages, APART=x.dtype == torch.float32, **flags,
        )  # fmt: skip
    elif n == 1:
        held = config.held if triton.cdiv(k, config.block) >= config.held * config.splits else 0
        if norm is not None and (held * config.block != k or config.splits > 1):
            raise InputError(f"{config}: an inline norm needs held blocks that are all of {k}, and no splits")
        norms = (None, None) if norm is None else (norm.weight, norm.bias)
        launch(
            rows_kernel, grid,
            *pointers, squares, *norms, *norm_arguments(next_norm), m, k, weight.stride(0), *around.bounds,
            eps if norm is None else norm.eps, SQUARES=0 if squares is None else len(squares),
            NEXT_NORM=next_norm is not None, NORM=norm is not None, HELD=held, UNROLL=config.unroll,
            early=config.early, **flags,
        )  # fmt: skip
    else:
        raise InputError(f"{config} takes one vector, not {n}; use Tiles")
    return out


def workspace_for(config: ProductConfig, n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums and their counters, [PARTS] float32 and [COUNTERS] int32, after a check that the splits fit."""
    counters, parts = parts_of(config, n, m)
    if config.splits > 1 and (parts > PARTS or counters > COUNTERS):
        raise InputError(
            f"{config}: {parts} partial sums and {counters} counters, but the workspace has room for {PARTS} and "
            f"{COUNTERS}; use fewer splits"
        )
    return scratch(device)
