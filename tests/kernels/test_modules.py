"""Modules of `lamina.nn` give the same with kernels and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lamina import kernels
from lamina.nn import MLP, Embedding, GatedMLP, LayerNorm, Linear, RMSNorm, Rotary


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    plain = run()
    with kernels.in_use():
        return run(), plain


def drawn(module: torch.nn.Module) -> Any:
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3)
    return module.requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("each", [False, True], ids=["one factor", "a factor for each output"])
def test_linear_with_all_that_stands_around_it(rows: int, each: bool) -> None:
    torch.manual_seed(0)
    linear, x, onto = drawn(Linear(24, 10)), torch.randn(rows, 1, 24), torch.randn(rows, 1, 10)
    scale = torch.rand(10) if each else 0.7
    torch.testing.assert_close(*both(lambda: linear(x, onto, before=1.3, scale=scale, softcap=2.0)))
    expected = onto + 2 * torch.tanh(((1.3 * x) @ linear.weight.T + linear.bias) * scale / 2)
    torch.testing.assert_close(linear(x, onto, before=1.3, scale=scale, softcap=2.0), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_gated_mlp_with_factors(rows: int) -> None:
    torch.manual_seed(0)
    mlp, x = drawn(GatedMLP(24, 10, bias=True, factors=(0.8, 1.1))), torch.randn(rows, 1, 24)
    torch.testing.assert_close(*both(lambda: mlp(x, onto=x)))
    gate, up = mlp.gate_up(x).chunk(2, dim=-1)
    torch.testing.assert_close(mlp(x), 1.1 * mlp.down(torch.nn.functional.silu(0.8 * gate) * up))


@pytest.mark.parametrize("rows", [1, 3])
def test_an_mlp_activates_in_the_launch_of_its_first_product(rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 1, 24)
    for act in ("relu2", "gelu_new"):
        mlp = drawn(MLP(24, 10, act, bias=True, factor=0.6))
        torch.testing.assert_close(*both(lambda one=mlp: one(x, onto=x)))
        torch.testing.assert_close(mlp(x, onto=x), x + 0.6 * mlp.down(mlp.act(mlp.up(x))))
    for one in (mlp, drawn(GatedMLP(24, 10))):
        one.act = torch.nn.functional.mish  # no kernel computes it
        torch.testing.assert_close(*both(lambda one=one: one(x, onto=x)))


@pytest.mark.parametrize("others", [{}, {"bias": False}, {"weight": False, "bias": False}], ids=str)
def test_layer_norms_onto_a_residual(others: dict[str, bool]) -> None:
    torch.manual_seed(0)
    norm, wide = drawn(LayerNorm(24, **others)), torch.randn(3, 1, 40) * 3 + 5
    x, y = wide[..., 4:28], torch.randn(3, 1, 24)  # rows with a stride of their own
    torch.testing.assert_close(*both(lambda: norm(x)))
    torch.testing.assert_close(*both(lambda: norm(x, onto=y)))
    low = x.bfloat16()
    got, plain = both(lambda: norm(low, torch.float32))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, plain)


@pytest.mark.parametrize("others", [{}, {"plus_one": True}, {"weight": False}], ids=str)
def test_norms_onto_a_residual(others: dict[str, bool]) -> None:
    torch.manual_seed(0)
    after, before = (drawn(RMSNorm(24, **others)) for _ in range(2))
    x, y = torch.randn(3, 1, 24), torch.randn(3, 1, 24)
    torch.testing.assert_close(*both(lambda: after(y, onto=x)))
    torch.testing.assert_close(after(y, onto=x), x + after(y))
    torch.testing.assert_close(*both(lambda: before(after(y, onto=x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("others", [{}, {"scale": 5.66}, {"scale": 59.87, "rounded": True}], ids=str)
def test_embeddings_times_a_factor(dtype: torch.dtype, others: dict[str, Any]) -> None:
    embedding = Embedding(9, 1100, dtype=dtype).requires_grad_(False)
    got, plain = both(lambda: embedding(torch.tensor([[3], [8], [0]]), **others))
    assert torch.equal(got, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_added_to_others(dtype: torch.dtype) -> None:
    embedding, x = Embedding(9, 24, dtype=dtype).requires_grad_(False), torch.randn(3, 1, 24).to(dtype)
    got, plain = both(lambda: embedding(torch.tensor([[3], [8], [0]]), onto=x))
    assert torch.equal(got, plain)


def test_the_rotary_table() -> None:
    rope = Rotary(16, {"rope_type": "default", "rope_theta": 1e4})
    torch.testing.assert_close(*both(lambda: rope(torch.tensor([[5], [70]]))))


def test_inputs_and_residuals_may_be_parts_of_wider_vectors() -> None:
    torch.manual_seed(0)
    x, onto = torch.randn(3, 1, 3, 24)[:, :, 1], torch.randn(3, 1, 2, 24)[:, :, 1]
    for module in (RMSNorm(24), LayerNorm(24), Linear(24, 24), GatedMLP(24, 10)):
        one = drawn(module)
        torch.testing.assert_close(*both(lambda one=one: one(x, onto=onto)))
