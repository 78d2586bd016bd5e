"""Norms, rotary and append against `RMSNorm`, `rotate`, `rotate_neighbours` and the slots that the layout names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lamina.attention import Full, Sliding, Window
from lamina.kernels.attention.rope_append import append, rotary_table, rotate_and_append
from lamina.nn import RMSNorm, Rotary
from lamina.nn.attention.rotary import rotate, rotate_neighbours
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


def norm_of(dim: int, plus_one: bool, weight: bool) -> RMSNorm:
    norm = RMSNorm(dim, 1e-5, plus_one=plus_one, weight=weight)
    if norm.weight is not None:
        norm.weight.data.normal_()
    return norm


@pytest.mark.parametrize(("dim", "pairs"), [(32, 16), (48, 8), (24, None)], ids=["all", "some", "nothing turned"])
@pytest.mark.parametrize(("plus_one", "weight"), [(False, True), (True, True), (False, False)])
@torch.no_grad()
def test_heads_are_normed_before_they_are_turned(dim: int, pairs: int | None, plus_one: bool, weight: bool) -> None:
    held = Held.random(Full(), [0, 3], 2, (dim, 16), slots=16)
    q, k, v = heads(2, 2, (dim, 16))
    rope = None if pairs is None else rope_of(held, 2, pairs)
    norms = norm_of(dim, plus_one, weight), norm_of(dim, plus_one, weight)
    want_q, want_k = (norm(x) if rope is None else rotate(norm(x), rope) for norm, x in zip(norms, (q, k), strict=True))
    stores = held.after([want_k, v])
    got_q, got_k, _ = rotate_and_append(q, k, v, rope, held.table(), norms=norms, write=True)
    torch.testing.assert_close(got_q, want_q)
    torch.testing.assert_close(got_k, want_k)
    same(held, stores)


@torch.no_grad()
def test_norms_come_after_turning_where_that_is_asked_for() -> None:
    held = Held.random(Full(), [0, 3], 2, (32, 32), slots=16)
    q, k, v = heads(2, 2, (32, 32))
    cos, sin = rope_of(held, 2, 16)
    rope = 1.5 * cos, 1.5 * sin  # a table with a factor: only then does the order tell
    norms = norm_of(32, False, True), norm_of(32, False, True)
    got_q, got_k, _ = rotate_and_append(
        q, k, v, rope, held.table(), neighbours=True, norms=norms, norms_last=True, write=False
    )
    torch.testing.assert_close(got_q, norms[0](rotate_neighbours(q, rope)))
    torch.testing.assert_close(got_k, norms[1](rotate_neighbours(k, rope)))


def test_a_factor_is_on_queries_alone() -> None:
    held = Held.random(Full(), [0, 3], 2, (32, 32), slots=16)
    q, k, v = heads(2, 2, (32, 32))
    factor, stores = torch.rand(2, 2), held.after([k, v])
    got_q, got_k, _ = rotate_and_append(q, k, v, None, held.table(), factor=factor, write=True)
    torch.testing.assert_close(got_q, q * factor[:, None, :, None])
    torch.testing.assert_close(got_k, k)
    same(held, stores)


def test_the_table_of_angles_is_that_of_the_models() -> None:
    rope = Rotary(24, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64})
    positions = torch.tensor([[0, 1, 2], [100, 4000, 100_000]])
    for got, want in zip(rotary_table(positions, rope.frequencies, rope.scale), rope(positions), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("window", [Full(), Sliding(3), Sliding(4, keep=2), Sliding(40, keep=1)], ids=str)
def test_accepted_tokens_go_into_any_store_and_no_slot_is_written_twice(window: Window) -> None:
    """Tokens that a later one of the same pass replaces are not written: the reference writes one after the other."""
    for T, slack in ((1, 0), (8, 0), (8, 3)):
        held = Held.random(window, [0, 1, 7, 12], 2, (16, 8), slots=32, counts=[T, 0, T - 1, T // 2], slack=slack)
        _, k, v = heads(4, T, (16, 8))
        expected = held.after([k, v])
        append(k, v, held.table())
        same(held, expected)
