"""Norms against the blocks of `lamina.nn`, in float64."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from lamina.kernels.norm import gated_rms_norm, rms_norm, rms_norm_twice, sigmoid_gated
from lamina.nn import GatedRMSNorm, RMSNorm
from tests.kernels.test_product import close, numbers


def block(width: int, dtype: torch.dtype, plus_one: bool, weight: bool) -> tuple[RMSNorm, RMSNorm]:
    """The norm in `dtype`, and the same in float64."""
    plain = RMSNorm(width, 1e-5, plus_one=plus_one, weight=weight).to(dtype)
    exact = RMSNorm(width, 1e-5, plus_one=plus_one, weight=weight).double()
    if plain.weight is not None and exact.weight is not None:
        plain.weight.data.copy_(numbers(width, dtype=dtype, seed=5))
        exact.weight.data.copy_(plain.weight.data)
    return plain, exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("plus_one", "weight"), [(False, True), (True, True), (False, False)])
@torch.no_grad()
def test_rms_norm_is_that_of_the_models(dtype: torch.dtype, plus_one: bool, weight: bool) -> None:
    for shape in ((1, 64), (3, 40), (2, 5, 24)):
        plain, exact = block(shape[-1], dtype, plus_one, weight)
        x = 4 * numbers(*shape, dtype=dtype)
        assert close(rms_norm(x, plain.weight, 1e-5, plus_one=plus_one), plain(x), exact(x.double()))
        rest = numbers(*shape, dtype=dtype, seed=1)
        got = rms_norm(x, plain.weight, 1e-5, plus_one=plus_one, residual=rest)
        assert close(got, rest + plain(x), rest.double() + exact(x.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plus_one", [False, True])
@torch.no_grad()
def test_a_norm_onto_a_residual_and_the_norm_of_that_come_together(dtype: torch.dtype, plus_one: bool) -> None:
    for rows, width in ((1, 64), (3, 40)):
        (one, _), (two, exact) = (block(width, dtype, plus_one, True) for _ in range(2))
        two.weight.data.mul_(0.5), exact.weight.data.mul_(0.5)  # type: ignore[union-attr]
        x, rest = 4 * numbers(rows, width, dtype=dtype), numbers(rows, width, dtype=dtype, seed=1)
        weights = (one.weight, two.weight)
        added, normed = rms_norm_twice(x, rest, weights, (1e-5, 1e-5), plus_one=plus_one)  # type: ignore[arg-type]
        assert torch.equal(added, rms_norm(x, one.weight, 1e-5, plus_one=plus_one, residual=rest))
        assert close(normed, two(added), exact(added.double()))


def test_a_sigmoid_gate_opens_what_comes_out_of_heads() -> None:
    x = numbers(2, 3, 5, 16, dtype=torch.bfloat16).transpose(1, 2)  # [B, H, T, D], heads side by side
    qkv = numbers(2, 3, 12, 16, dtype=torch.bfloat16, seed=1).transpose(1, 2)
    gate = qkv[:, 4:9]
    got = sigmoid_gated(x, gate)
    assert got.shape == x.shape and got.transpose(1, 2).is_contiguous()
    assert close(got, x * gate.sigmoid(), x.double() * gate.double().sigmoid())


@torch.no_grad()
def test_heads_inside_a_wider_vector_are_normalised_in_place() -> None:
    qkv = numbers(3, 10 * 16, dtype=torch.float32)
    heads = qkv.view(3, 10, 16)[:, 2:6]  # [N, H, D]
    plain, _ = block(16, torch.float32, False, True)
    assert torch.allclose(rms_norm(heads, plain.weight, 1e-5), plain(heads), atol=1e-6)


@pytest.mark.parametrize(("gate_first", "sigmoid"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize(("width", "groups"), [(64, 1), (48, 3)])
@torch.no_grad()
def test_gated_rms_norm_is_that_of_the_models(gate_first: bool, sigmoid: bool, width: int, groups: int) -> None:
    how = {"groups": groups, "gate_first": gate_first, "sigmoid": sigmoid}
    for dtype in (torch.float32, torch.bfloat16):
        plain = GatedRMSNorm(width, 1e-5, **how).to(dtype)
        plain.weight.data.copy_(numbers(width, dtype=dtype, seed=5))
        x = 4 * numbers(3, width, dtype=torch.float32)  # a recurrence gives float32
        gate: Tensor = numbers(3, width + 9, dtype=dtype, seed=1)[:, 9:]
        exact = GatedRMSNorm(width, 1e-5, **how).double()
        exact.weight.data.copy_(plain.weight.data)
        got = gated_rms_norm(x, gate, plain.weight, 1e-5, **how)
        assert close(got, plain(x, gate), exact(x.double(), gate.double()))
        heads = numbers(3, 4 * width + 9, dtype=dtype, seed=2)[:, 9:].unflatten(1, (4, width))  # of each of 3 tokens
        flat, rows = heads.reshape(-1, width), x.repeat_interleave(4, 0)
        by_head = gated_rms_norm(rows, heads, plain.weight, 1e-5, **how)
        assert torch.equal(by_head, gated_rms_norm(rows, flat, plain.weight, 1e-5, **how))
        if groups == 1:  # many rows: several of them in a program
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("lamina.kernels.norm.MANY_ROWS", 1)
                patch.setattr("lamina.kernels.norm.TILE", 8 * triton.next_power_of_2(width))
                assert torch.allclose(gated_rms_norm(rows, heads, plain.weight, 1e-5, **how), by_head, atol=1e-6)
