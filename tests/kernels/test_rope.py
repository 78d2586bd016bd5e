"""Rotary and append against `rotate`, `rotate_neighbours` and the slots that the layout names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lamina.attention import Full, Sliding, Window
from lamina.kernels.rope import rotate_and_append
from lamina.nn.rotary import rotate, rotate_neighbours
from tests.kernels.stores import Held

Rope = tuple[Tensor, Tensor]


def rope_of(held: Held, T: int, pairs: int) -> Rope:
    angles = (held.lengths[:, None] + torch.arange(T))[..., None] * torch.rand(pairs)
    return angles.cos(), angles.sin()


def heads(B: int, T: int, dims: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q with three heads, k and v with two, as a model has them: heads behind tokens in one tensor."""
    keys = torch.randn(B, T, 5, dims[0], dtype=dtype).transpose(1, 2)
    return [*keys.split([3, 2], dim=1), torch.randn(B, T, 2, dims[1], dtype=dtype).transpose(1, 2)]


def same(held: Held, fields: list[Tensor]) -> None:
    for ours, theirs in zip(held.fields, fields, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(("dim", "pairs"), [(32, 16), (80, 40), (64, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_heads_are_turned_as_by_rotate_and_stored(dim: int, pairs: int, dtype: torch.dtype) -> None:
    T = 2
    held = Held.random(Full(), [0, 3, 9], 2, (dim, 48), slots=16, dtype=dtype)
    q, k, v = heads(3, T, (dim, 48), dtype)
    rope = rope_of(held, T, pairs)
    stores = held.after([rotate(k, rope), v])
    turned_q, turned_k, same_v = rotate_and_append(q, k, v, rope, held.table(), write=True)
    torch.testing.assert_close(turned_q, rotate(q, rope))
    torch.testing.assert_close(turned_k, rotate(k, rope))
    assert same_v is v
    same(held, stores)


def test_neighbours_are_turned_as_by_rotate_neighbours() -> None:
    held = Held.random(Full(), [0, 3], 2, (32, 32), slots=16)
    q, k, v = heads(2, 2, (32, 32))
    rope = rope_of(held, 2, 16)
    before = [field.clone() for field in held.fields]
    turned_q, turned_k, _ = rotate_and_append(q, k, v, rope, held.table(), neighbours=True, write=False)
    torch.testing.assert_close(turned_q, rotate_neighbours(q, rope))
    torch.testing.assert_close(turned_k, rotate_neighbours(k, rope))
    same(held, before)


def test_padding_is_not_stored() -> None:
    held = Held.random(Full(), [0, 3, 9], 2, (32, 32), slots=12, counts=[3, 0, 2])
    q, k, v = heads(3, 4, (32, 32))
    stores = held.after([k, v])
    same_q, same_k, _ = rotate_and_append(q, k, v, None, held.table(), write=True)
    assert same_q is q and same_k is k
    same(held, stores)


@pytest.mark.parametrize("window", [Sliding(4), Sliding(4, keep=2)], ids=str)
def test_one_token_goes_round_the_ring(window: Window) -> None:
    held = Held.random(window, [0, 1, 4, 5, 6, 30], 2, (32, 32), slots=0, slack=1)
    q, k, v = heads(6, 1, (32, 32))
    rope = rope_of(held, 1, 16)
    stores = held.after([rotate(k, rope), v])
    rotate_and_append(q, k, v, rope, held.table(), write=True)
    same(held, stores)
