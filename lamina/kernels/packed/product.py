"""Matrix products of vectors with a packed weight, in the time of reading its codes once.

    packed_product   softcap((x Wᵀ + bias) · scale) + residual, as `gemm/product.product`
    packed_gated     act(x Gᵀ · scale) · x Uᵀ, as `gemm/product.gated_product`

`choose` picks the kernel and its configuration: `Rows` for one vector (`gemv.py`), `Tiles` for 2 to 64 (`skinny.py`).
The reference is the plain product with `PackedMatrix.dense`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lamina.errors import InputError
from lamina.kernels.gemm.deferred_norm import DeferredNorm, norm_arguments
from lamina.kernels.gemm.epilogue import Act
from lamina.kernels.gemm.product import MOST, Around, ProductConfig, Rows, Tiles, padded, workspace_for
from lamina.kernels.launch import BY_ASSEMBLY, launch
from lamina.kernels.limits import KIB, Limits, first_fit, fitted, limits_of, smaller
from lamina.kernels.packed.gemv import packed_rows_kernel
from lamina.kernels.packed.matrix import SPANS, PackedMatrix
from lamina.kernels.packed.skinny import packed_tiles_kernel


def packed_product(
    x: Tensor,
    weight: PackedMatrix,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    before: float = 1.0,
    scale: float | Tensor = 1.0,
    act: Act | None = None,
    softcap: float | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    next_norm: DeferredNorm | None = None,
    out: Tensor | None = None,
    config: ProductConfig | None = None,
) -> Tensor:
    """softcap · tanh(act(((before · x) Wᵀ + bias) · scale) / softcap) + residual, summed in float32 and rounded once.

    x [N, K], weight [M, K], bias [M], residual [N, M] -> [N, M]; N up to 64; arguments as for `gemm/product.product`

    out   [N, M] rows of any stride: where the result goes

    >>> packed_product(torch.randn(1, 64), weight).shape  # doctest: +SKIP
    torch.Size([1, 24])
    """
    around = Around(bias, residual, before, scale, act, softcap)
    return _launch(x, weight, around, config, squares, eps, next_norm, out)


def packed_gated(
    x: Tensor,
    weight: PackedMatrix,
    act: Act,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    squares: Tensor | None = None,
    eps: float = 0.0,
    config: ProductConfig | None = None,
) -> Tensor:
    """act(gate · scale) · up, where gate and up are the first and second half of x Wᵀ + bias.

    x [N, K], weight [2I, K], bias [2I] -> [N, I]; arguments as for `gemm/product.gated_product`
    """
    return _launch(x, weight, Around(bias, scale=scale, act=act, is_gated=True), config, squares, eps)


@cache
def choose(n: int, m: int, k: int, kind: str, is_gated: bool, limits: Limits) -> ProductConfig:
    """The configuration for n vectors, m outputs and sums over k, on a device with these limits."""
    return _rows(m, k, kind, is_gated, limits) if n == 1 else _tiles(n, m, k, kind, is_gated, limits)


def _rows(m: int, k: int, kind: str, is_gated: bool, limits: Limits) -> Rows:
    """Threads own 16 bytes of a row, so a block is 32 · span values for each warp. Measured on an H200 for the matrices
    of llama-3.1-8b (`python -m bench.kernels.packed`)."""
    span = SPANS[kind]
    is_byte = span == 16
    most = 4 if is_byte and not is_gated else 2
    warps = next((warps for warps in (4, 2, 1) if warps <= most and k % (32 * span * warps) == 0), 1)
    block = min(32 * span * warps, max(span, triton.next_power_of_2(k)))
    blocks = -(-k // block)
    if is_byte:
        rows = 2 if is_gated else 4 if kind == "fp8" and blocks <= 2 else 8
        held = 1 if blocks <= 2 else 3 if kind == "fp8" and not is_gated else 2
    else:
        rows = (8 if blocks <= 2 else 4) // (2 if is_gated else 1)
        held = 2
    while rows > 1 and -(-m // rows) < 2 * limits.multiprocessors:
        rows //= 2
    held = min(blocks, held)
    return Rows(rows, block, warps, held=held, unroll=1 if blocks <= held else 2)


def _tiles(n: int, m: int, k: int, kind: str, is_gated: bool, limits: Limits) -> Tiles:
    """K is split as long as all programs run at once, up to three on an SM. Their loops have as many stages as leave
    room for that. Measured on an H200 (`python -m bench.kernels.packed_search --rows 32`)."""
    tiles = Tiles(64, 256, 4)
    groups, splits = -(-m // tiles.rows), 1
    while splits < 8 and groups * 2 * splits <= 3 * limits.multiprocessors and k >= 2 * splits * 512:
        splits *= 2
    programs = -(-groups * splits // limits.multiprocessors)  # of an SM
    deep = [replace(tiles, stages=stages, splits=splits) for stages in (4, 3, 2)]

    def need(one: Tiles) -> int:
        return tile_bytes(one, n, kind, is_gated, limits)

    for together in range(programs if programs <= 3 else 2, 0, -1):
        if found := first_fit(deep, need, limits.room(together)):
            return found
    return fitted(smaller(deep[1], 32), need, limits.shared)


def tile_bytes(tiles: Tiles, n: int, kind: str, is_gated: bool, limits: Limits) -> int:
    """Upper bound of a program's shared memory: for each stage codes, which become values in registers, and vectors;
    and where scales are exchanged."""
    codes = tiles.block * tiles.rows * (2 if is_gated else 1) // (2 if SPANS[kind] == 32 else 1)
    vectors = tiles.block * padded(n) * 2
    loop = codes * max(tiles.stages - 1, 1) + vectors * limits.buffers(tiles.stages, tiles.rows)
    return max(loop, tiles.rows * padded(n) * 4) + (1 if kind == "fp8" else 4) * KIB


def kernel_parts(weight: PackedMatrix) -> tuple[Any, ...]:
    """codes as words, scales, zeros or offsets (scales if there are none), and words and scales between rows."""
    zeros = weight.zeros if weight.offsets is None else weight.offsets
    stride = 0 if weight.scales.numel() == 1 else weight.scales.shape[1]
    words = weight.codes.view(torch.int32)
    return words, weight.scales, weight.scales if zeros is None else zeros, words.shape[1], stride


def native_fp8(x: Tensor) -> bool:
    """Whether the device of x has an instruction that converts fp8, and kernels may contain PTX."""
    return bool(BY_ASSEMBLY.value) and limits_of(x.device).capability >= (8, 9)


def scaling(weight: PackedMatrix) -> dict[str, Any]:
    """The constexprs of a kernel that say where scales and zeros are."""
    zeros = "integer" if weight.zeros is not None else "" if weight.offsets is None else "offset"
    return dict(
        KIND=weight.kind, GROUP=weight.group, SIDE=weight.side, ZEROS=zeros, SCALED=not weight.per_row,
        SIGNED=zeros != "integer",
    )  # fmt: skip


def _launch(
    x: Tensor,
    weight: PackedMatrix,
    around: Around,
    config: ProductConfig | None,
    squares: Tensor | None,
    eps: float,
    next_norm: DeferredNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    (n, k), m = x.shape, around.outputs(weight.shape[0])
    if not 1 <= n <= MOST:
        raise InputError(f"a product of {n} vectors; the kernels take 1 to {MOST}, beyond that use `many_product`")
    if weight.shape[1] != k or x.stride(1) != 1:
        raise InputError(
            f"x {list(x.shape)} and {weight.kind} weight {list(weight.shape)} must have rows of the same length, and "
            f"those of x must be contiguous"
        )
    span = SPANS[weight.kind]
    config = config or choose(n, m, k, weight.kind, around.is_gated, limits_of(x.device))
    out = around.new_out(x, m) if out is None else out
    words, scales, zeros, word_stride, scale_stride = kernel_parts(weight)
    pointers = (scales, zeros, *around.pointers(x), out, *workspace_for(config, n, m, x.device))
    flags, grid = around.flags(config, k) | scaling(weight), (triton.cdiv(m, config.rows), config.splits)
    if isinstance(config, Tiles):
        if squares is not None or next_norm is not None:
            raise InputError(f"{config}: norms are deferred for one vector and Rows alone")
        strides = (x.stride(0), scale_stride, around.residual_stride, out.stride(0))
        code_tiles: Any = weight.codes
        if config.bulk:
            parts = 2 if around.is_gated else 1
            tile = [parts, config.rows, config.block // span * 16]
            code_tiles = TensorDescriptor.from_tensor(weight.codes.view(parts, m, -1), tile)
        launch(
            packed_tiles_kernel, grid,
            x, weight.codes, code_tiles, *pointers, m, k, n, *strides, *around.bounds, N_BLOCK=padded(n),
            STAGES=config.stages, APART=config.apart, BULK=config.bulk, EXACT=x.dtype == torch.float32, **flags,
        )  # fmt: skip
    elif n == 1:
        if config.block % span:
            raise InputError(f"{config}: a block of {weight.kind} codes is a multiple of {span}")
        held = min(config.held, triton.cdiv(k, config.block) // config.splits)
        launch(
            packed_rows_kernel, grid,
            x, words, *pointers, squares, *norm_arguments(next_norm), m, k, word_stride, scale_stride, *around.bounds,
            eps, SPAN=span, NATIVE=native_fp8(x), SQUARES=0 if squares is None else len(squares),
            NEXT_NORM=next_norm is not None, HELD=held, REST=held * config.splits * config.block < k,
            UNROLL=config.unroll, early=config.early, **flags,
        )  # fmt: skip
    else:
        raise InputError(f"{config} takes one vector, not {n}; use Tiles")
    return out
