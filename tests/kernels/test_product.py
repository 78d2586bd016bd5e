"""Products against PyTorch in float64: an error of at most twice that of the plain computation in the same dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.activation import ACTIVATIONS
from lamina.errors import InputError
from lamina.kernels.gemm.epilogue import act_kind
from lamina.kernels.gemm.product import (
    ProductConfig,
    Rows,
    Tiles,
    choose,
    gated,
    gated_product,
    linear,
    parts_of,
    product,
)
from lamina.kernels.launch import Launched, dry
from lamina.kernels.limits import CARDS
from lamina.kernels.workspace import COUNTERS, PARTS, scratch

CONFIGS: dict[str, ProductConfig] = {
    "rows": Rows(rows=2, block=32),
    "rows, in parts": Rows(rows=4, block=16, splits=2, unroll=2),
    "tiles": Tiles(rows=16, block=16),
    "tiles, in parts": Tiles(rows=16, block=16, splits=4),
}


def vectors(config: ProductConfig) -> int:
    """How many a test gives to this config."""
    return 1 if isinstance(config, Rows) else 3


def close(got: Tensor, plain: Tensor, exact: Tensor) -> bool:
    """At most twice the error of the plain computation; where that was lucky, of a rounding of the largest number, or
    in float32, where sums are rounded too, of a few."""
    assert got.dtype == plain.dtype and got.isfinite().all()
    roundings = 4 if got.dtype == torch.float32 else 1
    floor = roundings * torch.finfo(got.dtype).eps / 2 * exact.abs().max()
    return bool((got.double() - exact).abs().max() <= 2 * torch.maximum((plain.double() - exact).abs().max(), floor))


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_all_that_stands_around_it_is_the_linear_map(config: ProductConfig, dtype: torch.dtype) -> None:
    n = vectors(config)
    for m, k in ((8, 64), (7, 40)):
        x, weight = numbers(n, k, dtype=dtype), numbers(m, k, dtype=dtype, seed=1)
        bias, residual = numbers(m, dtype=dtype, seed=2), numbers(n, m, dtype=dtype, seed=3)
        inputs, high = (x, weight, bias, residual), [t.double() for t in (x, weight, bias, residual)]
        around = {"bias": bias, "residual": residual, "before": 0.5}
        got = product(x, weight, **around, scale=0.3, config=config)  # type: ignore[arg-type]
        assert close(got, linear(*inputs, 0.5, 0.3), linear(*high, 0.5, 0.3))
        each = numbers(m, dtype=torch.float32, seed=4)
        got = product(x, weight, **around, scale=each, softcap=2.0, config=config)  # type: ignore[arg-type]
        plain = linear(*inputs, 0.5, each.to(dtype), 2.0)
        assert close(got, plain, linear(*high, 0.5, each.double(), 2.0))
    assert close(product(x, weight, config=config), F.linear(x, weight), F.linear(x.double(), weight.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [None, CONFIGS["rows"], CONFIGS["rows, in parts"]], ids=["chosen", "rows", "parts"])
def test_a_product_divides_a_vector_by_its_root_mean_square(config: ProductConfig | None, dtype: torch.dtype) -> None:
    for k, parts in ((64, 1), (40, 5), (600, 20)):
        x, weight, bias = (
            numbers(1, k, dtype=dtype),
            numbers(7, k, dtype=dtype, seed=1),
            numbers(7, dtype=dtype, seed=2),
        )
        residual, squares = numbers(1, 7, dtype=dtype, seed=3), numbers(parts, dtype=torch.float32, seed=4).abs() * k
        inputs, high = (x, weight, bias, residual), [t.double() for t in (x, weight, bias, residual)]
        plain = linear(*inputs, 0.5, 0.3, squares=squares, eps=0.1)
        exact = linear(*high, 0.5, 0.3, squares=squares.double(), eps=0.1)
        around = {"bias": bias, "residual": residual, "before": 0.5, "scale": 0.3}
        got = product(x, weight, **around, squares=squares, eps=0.1, config=config)  # type: ignore[arg-type]
        assert close(got, plain, exact)
    normed = x.float() * (x.float().square().mean() + 1e-5).rsqrt()
    got = product(x, weight, squares=x.float().view(20, -1).square().sum(1), eps=1e-5, config=config)
    assert close(got, F.linear(normed.to(dtype), weight), F.linear(normed.double(), weight.double()))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_gated_product_is_the_activation_of_the_gate_times_up(config: ProductConfig) -> None:
    n = vectors(config)
    for dtype, inner, with_bias, scale in ((torch.float32, 7, True, 0.7), (torch.bfloat16, 8, False, 1.0)):
        x, weight = numbers(n, 48, dtype=dtype), numbers(2 * inner, 48, dtype=dtype, seed=1) * 0.2
        bias = numbers(2 * inner, dtype=dtype, seed=2) if with_bias else None
        exact = gated(x.double(), weight.double(), "silu", None if bias is None else bias.double(), scale)
        got = gated_product(x, weight, "silu", bias=bias, scale=scale, config=config)
        assert close(got, gated(x, weight, "silu", bias, scale), exact)


@pytest.mark.parametrize("n", [1, 4])
def test_long_sums_in_float32_are_those_of_many_short_ones(n: int) -> None:
    x, weight = numbers(n, 700, dtype=torch.float32), numbers(5, 700, dtype=torch.float32, seed=1)
    assert close(product(x, weight), F.linear(x, weight), F.linear(x.double(), weight.double()))
    weight = numbers(10, 700, dtype=torch.float32, seed=1) * 0.05
    got = gated_product(x, weight, "silu")
    assert close(got, gated(x, weight, "silu"), gated(x.double(), weight.double(), "silu"))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_of_the_models_has_a_kernel(name: str) -> None:
    x, weight = numbers(1, 16, dtype=torch.float32), numbers(8, 16, dtype=torch.float32, seed=1)
    want = gated(x, weight, name)
    assert torch.allclose(gated_product(x, weight, name), want, atol=1e-5)
    assert torch.allclose(gated_product(x, weight, ACTIVATIONS[name]), want, atol=1e-5)
    assert torch.allclose(product(x, weight, act=name, scale=0.7), linear(x, weight, scale=0.7, act=name), atol=1e-5)
    with pytest.raises(InputError, match=r"activation 'mish' has no kernel; known: silu"):
        act_kind("mish")


@pytest.mark.parametrize("n", [1, 2, 4, 5, 17, 64])
def test_the_form_chosen_for_a_number_of_rows_gives_the_product(n: int) -> None:
    x, weight = numbers(n, 96, dtype=torch.bfloat16), numbers(12, 96, dtype=torch.bfloat16, seed=1)
    assert close(product(x, weight), F.linear(x, weight), F.linear(x.double(), weight.double()))


def test_a_form_is_chosen_for_every_shape_and_its_parts_fit_the_scratch_store() -> None:
    for n in (1, 2, 3, 4, 5, 8, 16, 17, 32, 64):
        for m in (1, 7, 64, 512, 1024, 4096, 6144, 14336, 18432, 65536, 128256, 256000):
            for k in (1, 32, 512, 2048, 4096, 5120, 14336, 16384, 28672):
                for itemsize, is_gated in ((2, False), (2, True), (4, False), (4, True)):
                    config = choose(n, m, k, itemsize, is_gated, CARDS[90])
                    if config.splits > 1:
                        counters, parts = parts_of(config, n, m)
                        assert counters <= COUNTERS and parts <= PARTS, (config, n, m, k)


def test_blocks_are_held_where_no_block_divides_the_length_of_a_sum() -> None:
    launched: list[Launched] = []
    with dry(launched):
        product(torch.empty(1, 3840), torch.empty(1024, 3840))
        gated_product(torch.empty(1, 3840), torch.empty(2048, 3840), "silu")
    assert [(one.options["HELD"], one.options["EVEN"]) for one in launched] == [(2, False), (4, False)]


def test_views_with_their_own_row_stride_are_read_in_place() -> None:
    weight = numbers(8, 60, dtype=torch.float32, seed=1)[:, :48]
    for config in CONFIGS.values():
        wide = numbers(vectors(config), 100, dtype=torch.float32)
        x, residual = wide[:, 4:52], wide[:, 60:68]
        got = product(x, weight, residual=residual, config=config)
        assert torch.allclose(got, linear(x, weight, residual=residual), atol=1e-5), config


def test_counters_are_zero_again_after_sums_in_parts() -> None:
    x, weight = numbers(1, 64, dtype=torch.float32), numbers(8, 64, dtype=torch.float32, seed=1)
    first = product(x, weight, config=CONFIGS["rows, in parts"])
    assert torch.equal(first, product(x, weight, config=CONFIGS["rows, in parts"]))
    assert not scratch(x.device)[1].any()


def test_what_does_not_fit_is_refused_by_name() -> None:
    weight = torch.zeros(4, 16)
    with pytest.raises(
        InputError, match=r"a product of 65 vectors; the kernels take 1 to 64, beyond that use F.linear"
    ):
        product(torch.zeros(65, 16), weight)
    with pytest.raises(InputError, match=r"rows of the same length and dtype"):
        product(torch.zeros(1, 15), weight)
    with pytest.raises(InputError, match=r"Rows\(.*\) takes one vector, not 2; use Tiles"):
        product(torch.zeros(2, 16), weight, config=Rows())
    for n, config in ((1, Tiles()), (2, None)):
        with pytest.raises(InputError, match=r"Tiles\(.*\): norms are deferred for one vector and Rows alone"):
            product(torch.zeros(n, 16), weight, squares=torch.ones(3), config=config)
    with pytest.raises(InputError, match=r"partial sums and .* counters, but the workspace has room for"):
        product(torch.zeros(64, 16), torch.zeros(1 << 15, 16), config=Tiles(splits=2))
