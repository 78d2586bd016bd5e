"""Products with packed weights against float64: an error of at most twice that of the plain product with the dense
weight in the same dtype; in float32 a vector is rounded to 16 bits, which is allowed too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.gemm.deferred_norm import LANES, DeferredNorm
from lamina.kernels.gemm.product import ProductConfig, Rows, Tiles, gated, linear, parts_of, product
from lamina.kernels.limits import CARDS
from lamina.kernels.packed.dequantize import dequantize
from lamina.kernels.packed.matrix import Kind, PackedMatrix
from lamina.kernels.packed.product import choose, packed_gated, packed_product
from lamina.kernels.workspace import COUNTERS, PARTS
from lamina.nn import RMSNorm

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS = {"rows": Rows(2, 64, 1), "rows, in parts": Rows(4, 32, 1, splits=2, unroll=2, held=1), "chosen": None}
TILES = {
    "tiles": Tiles(16, 128), "tiles, in parts": Tiles(16, 32, splits=2),
    "tiles in bulk": Tiles(16, 32, splits=2, apart=True, bulk=True),
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {
    "int8": dict(kind="int8", group=32),
    "int8, zeros": dict(kind="int8", group=32, zeros=True, scales=BF16),
    "int8, offsets": dict(kind="int8", group=32, offsets=True),
    "int8, one group": dict(kind="int8", group=0, scales=F32),
    "int4": dict(kind="int4", group=32),
    "int4, zeros": dict(kind="int4", group=64, zeros=True),
    "int4, four zeros": dict(kind="int4", group=32, zeros=True),
    "int4, offsets": dict(kind="int4", group=32, offsets=True),
    "int4, one group": dict(kind="int4", group=0, scales=BF16),
    "fp8": dict(kind="fp8", group=0, per="tensor"),
    "fp8, rows": dict(kind="fp8", group=0, per="row"),
    "fp8, blocks": dict(kind="fp8", group=128, per="block"),
    "mxfp4": dict(kind="mxfp4", group=32),
}


def packed(
    m: int, k: int, kind: Kind, group: int, zeros: bool = False, offsets: bool = False, scales: torch.dtype = F16,
    per: str = "", seed: int = 1,
) -> PackedMatrix:  # fmt: skip
    """Random codes, all of them; scales for values of about one."""
    noise = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (m, k if kind in ("int8", "fp8") else k // 2), dtype=torch.uint8, generator=noise)
    group = group or k
    shape, size = (m, -(-k // group)), {"int8": 1 / 64, "int4": 1 / 4, "fp8": 1 / 64, "mxfp4": 1.0}[kind]
    if kind == "fp8":
        codes[codes & 127 == 127] = 0  # nan
        shape = {"block": (-(-m // 128), -(-k // 128)), "row": (m, 1), "tensor": (1, 1)}[per]
        scales = F32
    values = (torch.rand(shape, generator=noise) + 0.5) * size
    if kind == "mxfp4":
        return PackedMatrix(kind, codes, torch.randint(120, 131, shape, dtype=torch.uint8, generator=noise), group)
    zero = torch.randint(0, 16, shape, dtype=torch.uint8, generator=noise) if zeros else None
    offset = torch.randn(shape, generator=noise).to(scales) if offsets else None
    return PackedMatrix(kind, codes, values.to(scales), group, zero, offset, 128 if per == "block" else 1)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, plain: Tensor, exact: Tensor) -> bool:
    assert got.dtype == plain.dtype and got.isfinite().all()
    floor = (2**-12 if got.dtype == F32 else torch.finfo(got.dtype).eps / 2) * exact.abs().max()
    return bool((got.double() - exact).abs().max() <= 2 * torch.maximum((plain.double() - exact).abs().max(), floor))


def check(n: int, m: int, k: int, how: dict[str, Any], dtype: torch.dtype, config: ProductConfig | None) -> None:
    """With everything around it, and gated."""
    weight, x = packed(m, k, **how), numbers(n, k, dtype=dtype)
    dense, exact = weight.dense(dtype), weight.dense(torch.float64)
    bias, residual, each = numbers(m, dtype=dtype, seed=2), numbers(n, m, dtype=dtype, seed=3), numbers(m, dtype=dtype)
    got = packed_product(
        x, weight, bias=bias, residual=residual, before=0.5, scale=each, softcap=2.0, act="silu", config=config
    )
    plain = linear(x, dense, bias, residual, 0.5, each, 2.0, act="silu")
    high = linear(x.double(), exact, bias.double(), residual.double(), 0.5, each.double(), 2.0, act="silu")
    assert close(got, plain, high)
    half = m // 2
    weight = packed(2 * half, k, **how)
    bias = numbers(2 * half, dtype=dtype, seed=2)
    got = packed_gated(x, weight, "gelu_new", bias=bias, scale=0.2, config=config)
    plain = gated(x, weight.dense(dtype), "gelu_new", bias, 0.2)
    assert close(got, plain, gated(x.double(), weight.dense(torch.float64), "gelu_new", bias.double(), 0.2))


@pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
def test_one_vector_times_each_format_is_the_product_with_its_dense_weight(how: dict[str, Any]) -> None:
    check(1, 3, 128, how, BF16, ROWS["rows"])
    check(1, 4, 160 if how["group"] in (0, 32) else 256, how, F32, ROWS["rows, in parts"])


@pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
def test_several_vectors_times_each_format_are_the_product_with_its_dense_weight(how: dict[str, Any]) -> None:
    check(3, 18, 160 if how["group"] in (0, 32) else 384, how, F32, TILES["tiles, in parts"])
    check(3, 20, 256, how, BF16, TILES["tiles"])
    check(3, 18, 160 if how["group"] in (0, 32) else 384, how, BF16, TILES["tiles in bulk"])


def test_the_most_vectors_times_4_bit_codes_are_the_product_with_their_dense_weight() -> None:
    check(64, 18, 96, FORMATS["int4, four zeros"], BF16, Tiles(16, 32, splits=4))  # the last split has no tile


@pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
def test_a_dequantized_weight_is_the_dense_one(how: dict[str, Any]) -> None:
    k = 160 if how["group"] in (0, 32) else 256
    weight = packed(10, k, **how)
    for dtype in (BF16, F32):
        got = dequantize(weight, torch.empty(10, k, dtype=dtype))
        torch.testing.assert_close(got, weight.dense(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["int4", "fp8, rows"])
@pytest.mark.parametrize("config", [Rows(16, 64, 1), Rows(2, 32, 1, splits=2, held=1)], ids=["whole", "in parts"])
def test_norms_in_front_and_behind_are_those_of_plain_products(kind: str, config: Rows) -> None:
    weight, x = packed(6, 128, **FORMATS[kind]), numbers(1, 128, dtype=F32)
    squares, norm = numbers(5, dtype=F32, seed=4).abs() * 128, RMSNorm(6, 1e-5)
    norm.weight.data.copy_(numbers(6, dtype=F32, seed=5))
    plain, own = (
        DeferredNorm(norm, torch.empty(1, 6), torch.zeros(LANES.value * 4, dtype=torch.int64)) for _ in range(2)
    )
    around: dict[str, Any] = dict(residual=numbers(1, 6, dtype=F32, seed=3), squares=squares, eps=0.1)
    want = product(x, weight.dense(F32), next_norm=plain, **around)
    got = packed_product(x, weight, next_norm=own, config=config, **around)
    assert torch.allclose(got, want, atol=2e-3) and torch.allclose(own.x, plain.x, atol=2e-3)
    assert torch.allclose(own.of(got).divided(), plain.of(want).divided(), atol=2e-3)


def test_configurations_of_one_vector_on_an_h200_are_those_that_were_measured() -> None:
    """`bench/results/2026-11-18-nvidia-h200-packed-products.md`"""
    narrow, pair, long = (6144, 4096, False), (14336, 4096, True), (4096, 14336, False)
    measured = {
        "int4": (Rows(8, 2048, 2), Rows(4, 2048, 2), Rows(4, 2048, 2, unroll=2)),
        "int8": (Rows(8, 2048, 4, unroll=2, held=1), Rows(2, 1024, 2, unroll=2), Rows(8, 2048, 4, unroll=2)),
        "fp8": (Rows(4, 2048, 4, unroll=2, held=1), Rows(2, 1024, 2, unroll=2), Rows(8, 2048, 4, unroll=2, held=3)),
    }
    for kind, configs in measured.items():
        assert tuple(choose(1, *size[:2], kind, size[2], CARDS[90]) for size in (narrow, pair, long)) == configs


@pytest.mark.parametrize("card", [86, 90, 120])
def test_a_configuration_is_chosen_for_every_shape_and_its_parts_fit_the_workspace(card: int) -> None:
    for n in (1, 2, 8, 17, 64):
        for m in (1, 7, 1024, 4096, 14336, 128256):
            for k in (32, 96, 2880, 4096, 14336):
                for kind in ("int8", "int4", "fp8", "mxfp4"):
                    for is_gated in (False, True):
                        config = choose(n, m, k, kind, is_gated, CARDS[card])
                        counters, parts = parts_of(config, n, m)
                        assert config.splits == 1 or (counters <= COUNTERS and parts <= PARTS), (config, n, m, k)


def test_more_vectors_than_the_kernels_take_are_refused_with_a_way_out() -> None:
    with pytest.raises(InputError, match="a product of 65 vectors; the kernels take 1 to 64, beyond that use"):
        packed_product(torch.empty(65, 32), packed(4, 32, **FORMATS["int4"]))
    with pytest.raises(
        InputError, match=r"int4 weight \[4, 64\]: groups of 16; the kernels read groups of a multiple of"
    ):
        PackedMatrix("int4", torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 4), 16)
