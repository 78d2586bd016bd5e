"""Gates, norms and rotations between products, against the modules and functions that they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lamina.activation import Gating
from lamina.attention.rotary import rotate, rotate_neighbours
from lamina.kernels.elementwise import expert_sum, gated, rotate_heads, scale_columns
from lamina.nn import GatedMLP, Linear, RMSNorm


@pytest.mark.parametrize("gating", [Gating("silu"), Gating("gelu_new"), Gating("silu", limit=0.5, plus=1, slope=1.7)])
@pytest.mark.parametrize("inner", [24, 1100])
def test_halves_are_gated_as_gating_says(gating: Gating, inner: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2 * inner + 6)[..., : 2 * inner]
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(gated(x, gating, 0.5), gating(gate * 0.5, up), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 1100])
def test_columns_of_a_product_are_scaled_in_place(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y, scale = torch.randn(2, 3, width).to(dtype), torch.randn(width)
    expected = (y * scale).to(dtype)
    assert scale_columns(y, scale).data_ptr() == y.data_ptr()
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


@torch.no_grad()
def test_factors_of_a_product_are_joined_and_added_with_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, onto, scale = torch.randn(2, 5, 24), torch.randn(2, 5, 40), torch.rand(40)
    for linear in (Linear(24, 40), Linear(24, 40, bias=False)):
        for how in ({}, {"before": 0.3}):
            plain = F.linear(x * how.get("before", 1.0), linear.weight, linear.bias)
            expected = {"none": plain, "one": onto + 0.7 * plain, "each": onto + scale * plain}
            for fused in (False, True):
                monkeypatch.setattr("lamina.kernels.fuses", lambda x, fused=fused: fused)
                found = {
                    "none": linear(x, **how), "one": linear(x, onto, scale=0.7, **how),
                    "each": linear(x, onto, scale=scale, **how),
                }  # fmt: skip
                for name, y in found.items():
                    torch.testing.assert_close(y, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residual", [None, torch.float32, torch.float64])
@torch.no_grad()
def test_many_tokens_of_a_gated_mlp_in_slices_are_the_same(
    residual: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    mlp, x = GatedMLP(24, 10, bias=True, factors=(0.8, 1.1)), torch.randn(2, 11, 24)
    onto = None if residual is None else torch.randn(2, 11, 24, dtype=residual)
    expected = mlp(x, onto)
    monkeypatch.setattr("lamina.kernels.fuses", lambda x: True)
    monkeypatch.setattr("lamina.nn.mlp.LEAST_TOKENS", 4)
    monkeypatch.setattr("lamina.nn.mlp.MOST_BYTES", 1)
    monkeypatch.setattr("lamina.nn.mlp.WHOLE_BYTES", 1)
    lengths: list[int] = []
    mlp.down.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[0]))
    torch.testing.assert_close(mlp(x, onto), expected, rtol=1e-5, atol=1e-5)
    assert lengths == [4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("heads", "dim", "pairs"), [(3, 16, 8), (2, 24, 8), (5, 80, 40)])
def test_heads_are_rotated_as_rope_says(neighbours: bool, heads: int, dim: int, pairs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, heads + 1, dim)[:, :, 1:].transpose(1, 2)
    angle = torch.randn(2, 7, pairs)
    rope = angle.cos(), angle.sin()
    expected = (rotate_neighbours if neighbours else rotate)(x, rope)
    torch.testing.assert_close(rotate_heads(x, rope, neighbours=neighbours), expected, rtol=1e-5, atol=1e-5)
    one = tuple(part[:1] for part in rope)
    same = rotate_heads(x[:1], one, neighbours=neighbours)
    torch.testing.assert_close(same, expected[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norms_last", [False, True])
@pytest.mark.parametrize("norm", [RMSNorm(16), RMSNorm(16, plus_one=True), RMSNorm(16, weight=False)])
@torch.no_grad()
def test_norms_and_factors_come_before_and_behind(norms_last: bool, norm: RMSNorm) -> None:
    torch.manual_seed(0)
    if norm.weight is not None:
        norm.weight.normal_()
    x, angle, factor = torch.randn(1, 4, 6, 16), torch.randn(1, 6, 8), torch.randn(1, 6)
    rope = angle.cos(), angle.sin()
    expected = norm(rotate(x, rope)) if norms_last else rotate(norm(x), rope)
    found = rotate_heads(x, rope, norm=norm, norms_last=norms_last, factor=factor)
    torch.testing.assert_close(found, expected * factor[:, None, :, None], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate_heads(x, None, norm=norm), norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighed", [False, True])
def test_experts_are_summed_where_they_are_and_identities_return_the_input(weighed: bool) -> None:
    torch.manual_seed(0)
    x, outputs, places = torch.randn(3, 40), torch.randn(5, 40), torch.tensor([[4, 0], [5, 1], [2, 5]])
    weights = torch.randn(3, 2) if weighed else torch.ones(3, 2)
    chosen = torch.stack([torch.cat([outputs, x[n : n + 1]])[places[n]] for n in range(3)])  # [3, 2, 40]
    found = expert_sum(x, outputs, places, weights if weighed else None)
    torch.testing.assert_close(found, (chosen * weights[..., None]).sum(1), rtol=1e-5, atol=1e-5)
