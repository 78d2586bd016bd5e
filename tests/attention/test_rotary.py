"""Turning by positions: the short form gives what the plain one gives."""

from __future__ import annotations

import pytest
import torch

from lamina.attention.rotary import rotate, rotate_widened, widened


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_widened_table_turns_as_the_table_does(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    angles = torch.rand(2, tokens, 8) * 6
    x = torch.randn(2, 3, tokens, 16, dtype=dtype)
    table = angles.cos(), angles.sin()
    turned = rotate_widened(x, widened(table))
    assert turned.dtype == dtype
    torch.testing.assert_close(turned, rotate(x, table))


def test_numbers_past_the_table_are_left_alone() -> None:
    angles = torch.rand(1, 4, 2) * 6
    x = torch.randn(1, 2, 4, 7)
    turned = rotate(x, (angles.cos(), angles.sin()))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned[..., :4].norm(dim=-1), x[..., :4].norm(dim=-1))
