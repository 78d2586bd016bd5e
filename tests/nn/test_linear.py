"""Products of few rows: the same numbers as `F.linear`, from the same weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lamina.nn import Linear
from lamina.nn.linear import few_rows


@pytest.mark.parametrize("out", [1, 7, 24, 160])
@pytest.mark.parametrize("lead", [(1,), (1, 1), (3, 1), (2, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_few_rows_is_that_of_the_whole(out: int, lead: tuple[int, ...], bias: bool) -> None:
    draw = torch.Generator().manual_seed(out)
    x, weight = torch.randn(*lead, 33, generator=draw), torch.randn(out, 33, generator=draw)
    added = torch.randn(out, generator=draw) if bias else None
    torch.testing.assert_close(few_rows(x, weight, added), F.linear(x, weight, added))


@pytest.mark.parametrize("rows", [0, 1, 4, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_linear_gives_what_torch_gives_and_adds_the_residual(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = Linear(48, 32, dtype=dtype).requires_grad_(False)
    x, onto = torch.randn(rows, 1, 48, dtype=dtype), torch.randn(rows, 1, 32, dtype=dtype)
    torch.testing.assert_close(ours(x), F.linear(x, ours.weight, ours.bias))
    torch.testing.assert_close(ours(x, onto), onto + F.linear(x, ours.weight, ours.bias))


def test_the_weight_stays_as_it_is_and_gradients_flow() -> None:
    ours = Linear(16, 32)
    x = torch.randn(1, 16, requires_grad=True)
    before = ours.weight.data_ptr(), ours.weight.stride()
    ours(x).sum().backward()
    assert (ours.weight.data_ptr(), ours.weight.stride()) == before
    torch.testing.assert_close(x.grad, ours.weight.sum(0, keepdim=True).detach())
