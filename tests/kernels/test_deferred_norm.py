"""The kernels of a deferred norm: the product in front prepares it, the products behind divide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lamina.kernels.gemm.deferred_norm import LANES, DeferredNorm, Unnormed
from lamina.kernels.gemm.experts import expert_down, expert_gated
from lamina.kernels.gemm.product import Rows, gated, gated_product, linear, product
from lamina.kernels.gemm.router import route
from lamina.nn import RMSNorm
from lamina.nn.moe.router import Choice
from tests.kernels.test_product import numbers


def deferred(norm: RMSNorm, width: int) -> DeferredNorm:
    return DeferredNorm(norm, torch.empty(1, width), torch.zeros(LANES.value * 4, dtype=torch.int64))


@pytest.mark.parametrize("config", [None, Rows(2, 16, 1, held=0), Rows(2, 16, 1, splits=2, held=1)])
@pytest.mark.parametrize("plus_one", [False, True])
def test_a_product_prepares_the_norm_behind_it(config: Rows | None, plus_one: bool) -> None:
    norm = RMSNorm(24, plus_one=plus_one)
    torch.nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    sizes = [(1, 64), (24, 64), (1, 24)]
    x, weight, rest = (numbers(*size, dtype=torch.float32, seed=i) for i, size in enumerate(sizes))
    behind = deferred(norm, 24)
    y = product(x, weight, residual=rest, next_norm=behind, config=config)
    assert torch.allclose(y, linear(x, weight, residual=rest), atol=1e-5)
    undivided = behind.of(behind.x)
    assert torch.allclose(undivided.divided(), norm(y), atol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e6])
def test_sums_of_squares_are_right_for_small_and_large_numbers(size: float) -> None:
    norm = RMSNorm(32)
    x, weight = numbers(1, 32, dtype=torch.float32) * size, numbers(32, 32, dtype=torch.float32, seed=1)
    behind = deferred(norm, 32)
    y = product(x, weight, next_norm=behind)
    assert torch.allclose(behind.of(behind.x).divided(), norm(y), atol=1e-5)


def undivided(norm: RMSNorm, y: Tensor) -> Unnormed:
    """What a product in front would leave of y."""
    behind = deferred(norm, y.shape[-1])
    product(y, torch.eye(y.shape[-1]), next_norm=behind)
    return behind.of(behind.x)


def test_products_behind_divide() -> None:
    norm, y = RMSNorm(48), 7 * numbers(1, 48, dtype=torch.float32)
    left, normed = undivided(norm, y), norm(y)
    weight = numbers(20, 48, dtype=torch.float32, seed=1)
    more = {"squares": left.squares, "eps": left.eps}
    assert torch.allclose(product(left.x, weight, **more), linear(normed, weight), atol=1e-5)
    assert torch.allclose(gated_product(left.x, weight, "silu", **more), gated(normed, weight, "silu"), atol=1e-5)
    chosen, weights, _ = route(left.x, weight, Choice(each=3), **more)
    for got, want in zip((chosen, weights), route(normed, weight, Choice(each=3)), strict=False):
        assert want is not None and torch.allclose(got, want, atol=1e-5)
    experts, shared = numbers(20, 12, 48, dtype=torch.float32, seed=2), numbers(8, 48, dtype=torch.float32, seed=3)
    given = experts, chosen, weights, "silu"
    got = expert_gated(left.x, *given, shared=shared, **more)
    assert torch.allclose(got, expert_gated(normed, *given, shared=shared), atol=1e-5)
    down, behind = numbers(20, 48, 6, dtype=torch.float32, seed=4), deferred(norm, 48)
    out = expert_down(got[:, :18], down, chosen, residual=y, next_norm=behind)
    assert torch.allclose(behind.of(behind.x).divided(), norm(out), atol=1e-5)


def test_to_anything_but_a_product_it_is_the_tensor_that_the_norm_gives() -> None:
    norm, y = RMSNorm(16), 3 * numbers(1, 1, 16, dtype=torch.float32)
    left, normed = undivided(norm, y.view(1, 16)), norm(y).view(1, 16)
    assert isinstance(left, Tensor) and left.shape == normed.shape and left.dtype == normed.dtype
    for use in (
        lambda t: t * 2,
        lambda t: t.reshape(4, 4).sum(0),
        lambda t: torch.cat([t, t]),
        lambda t: t[..., :3] + 1,
    ):
        found = use(left)
        assert not isinstance(found, Unnormed)
        assert torch.allclose(found, use(normed), atol=1e-5)
    assert "Unnormed" in repr(left)
