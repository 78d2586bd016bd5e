"""Attention in the latent against PyTorch: into it, over one key head whose values are part of its keys, out of it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lamina.attention import Chunked, Full, Sliding, Window
from lamina.attention.rotary import rotate, rotate_neighbours
from lamina.cache import Latent
from lamina.errors import InputError
from lamina.kernels.attention.mla import decode_latent
from lamina.kernels.attention.mla_project import into_latent, out_of_latent, values_for
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.limits import CARDS
from lamina.nn import RMSNorm
from lamina.runtime.gpu.backend import KERNELS, TableEntry
from tests.kernels.stores import Held, error

SMALL = Tiling(block=16, warps=4, stages=2)


def seen(held: Held, q: Tensor, new: Tensor, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What the reference sees in the latent, [B, H, T, rank]."""
    both = Held([held.fields[0], held.fields[0][..., :rank]], held.layout, held.window, held.lengths, held.counts)
    return both.attend(q, [new[:, None], new[:, None, :, :rank]], dtype, scale=0.3)


def run(
    lengths: list[int],
    T: int,
    *,
    heads: int = 2,
    rank: int = 32,
    rope: int = 16,
    values: int = 12,
    counts: list[int] | None = None,
    splits: int = 3,
    window: Window | None = None,
    slack: int = 0,
    ring: bool = True,
    slots: int = 80,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, float]:
    """The error of attention and the way out, and that of the plain computation in the same number format."""
    torch.manual_seed(sum(lengths) + T)
    window = window or Full()
    held = Held.random(
        window, lengths, 1, (rank + rope,), slots=slots, counts=counts, slack=slack, dtype=dtype, ring=ring
    )
    real = held.real(T)
    new = torch.randn(len(lengths), T, rank + rope).masked_fill(~real[..., None], float("nan")).to(dtype)
    q = torch.randn(len(lengths), T, heads, rank + rope).masked_fill(~real[..., None, None], float("nan")).to(dtype)
    q = q.transpose(1, 2)
    up = torch.randn(heads, 5 + values, rank).to(dtype)[:, 5:]  # as a model has it: behind the way up to the keys
    stored = held  # in a line, new tokens are in their slots by then
    if held.layout.ring is None:
        stored = Held(held.after([new[:, None]]), held.layout, window, held.lengths, held.counts)
    table = stored.table()
    parts = decode_latent(q, new, table, rank=rank, scale=0.3, most_splits=splits, window=window, shape=SMALL, least=16)
    out = out_of_latent(parts, up, table)
    assert out.shape == (len(lengths), heads, T, values)
    assert out.isfinite().all(), "padding and unused slots never reach an output"
    assert not out.transpose(1, 2)[~real].any(), "padding gives zeros"
    truth = seen(held, q, new, rank) @ up.double().mT
    plain = seen(held, q, new, rank, dtype).to(dtype) @ up.mT
    return error(out, truth, real), error(plain, truth, real)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("T", [1, 3])
def test_ragged_rows_equal_the_reference(T: int, splits: int) -> None:
    ours, _ = run([0, 1, 70], T, splits=splits)
    assert ours < 1e-5


def test_padding_gives_zeros_and_changes_no_other_token() -> None:
    ours, _ = run([30, 30, 0, 5], 4, counts=[2, 0, 4, 0])
    assert ours < 1e-5


@pytest.mark.parametrize(("rank", "rope", "values"), [(512, 64, 32), (48, 8, 10)])
def test_any_rank_rotary_part_and_number_of_values(rank: int, rope: int, values: int) -> None:
    ours, _ = run([40], 1, rank=rank, rope=rope, values=values)
    assert ours < 1e-5


def test_more_queries_than_a_program_takes_are_spread_over_several() -> None:
    ours, _ = run([20], 2, heads=9, values=8, splits=2)
    assert ours < 1e-5


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("window", [Sliding(11, keep=2), Sliding(20), Chunked(16)], ids=str)
def test_windows_over_rings_before_at_and_after_the_wrap(window: Window, T: int) -> None:
    ours, _ = run([3, 12, 21, 40], T, window=window)
    assert ours < 1e-5


def test_more_parts_than_are_merged_at_a_time() -> None:
    ours, _ = run([330, 0, 40], 1, heads=1, splits=20, slots=340)
    assert ours < 1e-5


@pytest.mark.parametrize("splits", [1, 4])
def test_many_new_tokens_share_one_way_out(splits: int) -> None:
    ours, _ = run([0, 70, 20], 6, counts=[6, 4, 0], splits=splits)  # 18 of them, 16 to a program
    assert ours < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_windows_lengths_and_counts_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    window = rng.choice([Full(), Sliding(rng.randint(1, 30), keep=rng.randint(0, 5)), Chunked(rng.randint(1, 30))])
    T, rows = rng.randint(1, 5), rng.randint(1, 4)
    ours, _ = run(
        [rng.choice([0, rng.randint(1, 75)]) for _ in range(rows)],
        T,
        heads=rng.randint(1, 5),
        rank=rng.choice([16, 40]),
        rope=rng.choice([2, 4, 16]),
        values=rng.randint(1, 40),
        counts=rng.choice([None, [rng.randint(0, T) for _ in range(rows)]]),
        splits=rng.randint(1, 6),
        window=window,
        slack=rng.randint(0, 3),
        ring=rng.random() < 0.7,
    )
    assert ours < 1e-5


def test_low_precision_is_within_twice_the_error_of_the_plain_computation() -> None:
    ours, plain = run([1, 77], 2, dtype=torch.float16)
    assert ours <= 2 * plain


# -- the way in ------------------------------------------------------------------------------------------------------


def made(B: int, T: int, heads: int, nope: int, rank: int, pairs: int) -> tuple[Tensor, ...]:
    """q and kv as views of one product, the way up to the keys as part of a weight, a norm's weight, cos and sin."""
    torch.manual_seed(B + T + rank)
    both = torch.randn(B, T, heads * (nope + 2 * pairs) + rank + 2 * pairs)
    q, kv = both.tensor_split([-rank - 2 * pairs], dim=-1)
    angles = 10 * torch.rand(B, T, pairs)
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    return q, kv, torch.randn(heads, nope + 3, rank)[:, :nope], torch.randn(rank), angles.cos(), angles.sin()


def ready(
    q: Tensor, kv: Tensor, up: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor], neighbours: bool
) -> tuple[Tensor, Tensor]:
    """The queries in the latent, and the new tokens, as `into_latent` makes them."""
    turn, (_, nope, rank) = rotate_neighbours if neighbours else rotate, up.shape
    new = torch.cat([rms(kv[..., :rank]) * weight, turn(kv[:, None, :, rank:], rope)[:, 0]], dim=-1)
    return torch.cat([q[..., :nope] @ up, turn(q[..., nope:], rope)], dim=-1), new


def rms(x: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("seed", range(5))
def test_queries_and_new_tokens_are_made_ready_and_stored(seed: int) -> None:
    rng = random.Random(seed)
    T = rng.choice([1, 1, 3, 7])
    window = rng.choice([Full(), Sliding(4, keep=1)]) if T == 1 else Full()
    lengths = [rng.randint(0, 9) for _ in range(rng.choice([1, 2, 3]))]
    heads, nope, rank, pairs = rng.randint(1, 5), rng.choice([8, 12]), rng.choice([16, 40, 144]), rng.choice([1, 3, 4])
    counts = rng.choice([None, [rng.randint(0, T) for _ in lengths]])
    held = Held.random(window, lengths, 1, (rank + 2 * pairs,), slots=16, counts=counts)
    neighbours, real = rng.random() < 0.5, held.real(T)
    q, kv, up, weight, *rope = made(len(lengths), T, heads, nope, rank, pairs)
    expected_q, expected_new = ready(q, kv, up, weight, (rope[0], rope[1]), neighbours)
    stores = held.after([expected_new[:, None]])
    got_q, new = into_latent(q, kv, up, weight, 1e-6, (rope[0], rope[1]), held.table(), neighbours=neighbours)
    assert error(got_q, expected_q, real) < 1e-5
    assert error(new[:, None], expected_new[:, None], real) < 1e-5
    torch.testing.assert_close(held.fields[0], stores[0], equal_nan=True, rtol=1e-5, atol=1e-5)


def test_numbers_that_do_not_fit_are_refused() -> None:
    q, kv, up, weight, cos, sin = made(1, 1, 2, 8, 16, 2)
    with pytest.raises(InputError, match="the up projection has 8 x 16"):
        into_latent(q[..., 1:], kv, up, weight, 1e-6, (cos, sin), torch.zeros(8, dtype=torch.int64))


# -- all of it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", [False, True])
def test_a_layer_of_a_captured_step_equals_the_plain_one(neighbours: bool) -> None:
    heads, nope, rank, pairs, values = 3, 8, 24, 4, 10
    held = Held.random(Full(), [0, 50, 7], 1, (rank + 2 * pairs,), slots=64, counts=[1, 1, 0])
    q, kv, _, _, *rope = made(3, 1, heads, nope, rank, pairs)
    up, norm = torch.randn(heads, nope + values, rank), RMSNorm(rank).requires_grad_(False)
    norm.weight.copy_(torch.randn(rank))  # type: ignore[union-attr]
    table = (rope[0], rope[1])
    in_latent, new = ready(q, kv, up[:, :nope], norm.weight, table, neighbours)  # type: ignore[arg-type]
    expected = seen(held, in_latent, new, rank) @ up[:, nope:].double().mT
    entry = TableEntry(Latent(rank, 2 * pairs), held.table())
    out = KERNELS.attend_latent(
        None, (0, ""), entry, q, kv, norm=norm, rope=table, neighbours=neighbours, up=up, scale=0.3  # type: ignore[arg-type]
    )  # fmt: skip
    assert error(out, expected, held.real(1)) < 1e-5
    assert not out[2].any()


def test_programs_of_the_way_out_fill_the_device_and_read_parts_no_more_often_than_that() -> None:
    assert values_for(16, 128, 1024, CARDS[90]) == 16  # 16 heads: 8 programs each
    assert values_for(128, 128, 1024, CARDS[90]) == 64  # 128 heads: 2 each
    assert values_for(128, 128, 2048, CARDS[90]) == 32  # as many as registers hold


def test_more_than_16_tokens_are_refused() -> None:
    q = torch.zeros(1, 1, 17, 32)
    with pytest.raises(InputError, match="17 new tokens"):
        decode_latent(q, q[:, 0], torch.zeros(8, dtype=torch.int64), rank=16, scale=1.0)
