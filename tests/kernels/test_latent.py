"""Attention in the latent against the reference with one key head whose values are a part of its keys."""

from __future__ import annotations

import pytest
import torch

from lamina.attention import Full, Sliding, Window
from lamina.kernels.attend import Shape
from lamina.kernels.latent import decode_latent
from lamina.kernels.rope import append
from tests.kernels.stores import Held, error

SMALL = Shape(block=16, warps=4, stages=2)


def run(
    lengths: list[int],
    T: int,
    *,
    heads: int = 2,
    rank: int = 32,
    rope: int = 16,
    counts: list[int] | None = None,
    splits: int = 3,
    window: Window | None = None,
) -> float:
    torch.manual_seed(sum(lengths) + T)
    window = window or Full()
    held = Held.random(window, lengths, 1, (rank + rope,), slots=80, counts=counts)
    real = held.real(T)
    new = torch.randn(len(lengths), T, rank + rope).masked_fill(~real[..., None], float("nan"))
    q = torch.randn(len(lengths), T, heads, rank + rope).transpose(1, 2)
    out = decode_latent(
        q, new, held.table(), rank=rank, scale=0.3, most_splits=splits, window=window, shape=SMALL, least=16
    )
    assert out.shape == (len(lengths), heads, T, rank)
    assert out.isfinite().all()
    keys = new[:, None]
    held.fields = [held.fields[0], held.fields[0][..., :rank]]
    return error(out, held.attend(q, [keys, keys[..., :rank]], scale=0.3), real)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("T", [1, 3])
def test_ragged_rows_equal_the_reference(T: int, splits: int) -> None:
    assert run([0, 1, 70], T, splits=splits) < 1e-5


def test_padding_gives_zeros_and_changes_no_other_token() -> None:
    assert run([30, 30, 0], 4, counts=[2, 0, 4]) < 1e-5


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (48, 8)])
def test_any_rank_and_rotary_part(rank: int, rope: int) -> None:
    assert run([40], 1, rank=rank, rope=rope) < 1e-5


def test_more_queries_than_a_program_takes_are_spread_over_several() -> None:
    assert run([20], 2, heads=20, splits=2) < 1e-5


@pytest.mark.parametrize("T", [1, 3])
def test_a_sliding_window_over_a_wrapped_ring(T: int) -> None:
    assert run([3, 12, 40], T, window=Sliding(11, keep=2)) < 1e-5


@pytest.mark.parametrize(("window", "T"), [(Full(), 3), (Sliding(4, keep=1), 1)])
def test_new_tokens_go_to_their_slots_and_padding_nowhere(window: Window, T: int) -> None:
    held = Held.random(window, [0, 3, 9], 1, (24,), slots=16, counts=[T, 0, 1])
    x = torch.randn(3, T, 24)
    stores = held.after([x[:, None]])
    append(x, held.table())
    torch.testing.assert_close(held.fields[0], stores[0], equal_nan=True)
