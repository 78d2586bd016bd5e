"""Norms against the blocks of `lamina.nn`, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lamina.kernels.norm import gated_rms_norm, rms_norm
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


@torch.no_grad()
def test_heads_inside_a_wider_vector_are_normalised_in_place() -> None:
    qkv = numbers(3, 10 * 16, dtype=torch.float32)
    heads = qkv.view(3, 10, 16)[:, 2:6]  # [N, H, D]
    plain, _ = block(16, torch.float32, False, True)
    assert torch.allclose(rms_norm(heads, plain.weight, 1e-5), plain(heads), atol=1e-6)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(("width", "groups"), [(64, 1), (48, 3)])
@torch.no_grad()
def test_gated_rms_norm_is_that_of_the_models(gate_first: bool, width: int, groups: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain = GatedRMSNorm(width, 1e-5, groups=groups, gate_first=gate_first).to(dtype)
        plain.weight.data.copy_(numbers(width, dtype=dtype, seed=5))
        x = 4 * numbers(3, width, dtype=torch.float32)  # a recurrence gives float32
        gate: Tensor = numbers(3, width + 9, dtype=dtype, seed=1)[:, 9:]
        exact = GatedRMSNorm(width, 1e-5, groups=groups, gate_first=gate_first).double()
        exact.weight.data.copy_(plain.weight.data)
        got = gated_rms_norm(x, gate, plain.weight, 1e-5, groups=groups, gate_first=gate_first)
        assert close(got, plain(x, gate), exact(x.double(), gate.double()))
