"""Decode attention against the reference: ragged rows, lines and rings, every window, poisoned slots."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lamina.attention import Chunked, Full, Sliding, View, Window, reference_attention
from lamina.attention.bias import kernel_form
from lamina.errors import InputError
from lamina.kernels.attention.decode import attend_source, decode_attention
from lamina.kernels.attention.decode_fused import attend_stored
from lamina.kernels.attention.split_kv import target_splits
from lamina.kernels.attention.tiling import Tiling
from lamina.nn import AlibiBias, RelativeBias, alibi_slopes
from tests.kernels.stores import Held, error

SMALL = Tiling(block=16, warps=4, stages=2)


def run(
    window: Window,
    lengths: list[int],
    T: int,
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (32, 32),
    counts: list[int] | None = None,
    slack: int = 0,
    ring: bool = True,
    slots: int = 96,
    splits: int = 3,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    sinks: bool = False,
    bias: Any = None,
) -> tuple[float, float]:
    """The error of the kernel, and that of the plain computation in the same number format."""
    torch.manual_seed(sum(lengths) + T)
    (Hq, Hk), (D, Dv), B = heads, dims, len(lengths)
    held = Held.random(window, lengths, Hk, dims, slots=slots, counts=counts, slack=slack, dtype=dtype, ring=ring)
    real = held.real(T)
    # As a model has them: cut out of one tensor, heads behind tokens. Padding holds NaN.
    both = torch.randn(B, T, Hq + Hk, D).masked_fill(~real[:, :, None, None], float("nan")).to(dtype).transpose(1, 2)
    q, k = both.split([Hq, Hk], dim=1)
    v = torch.randn(B, T, Hk, Dv).masked_fill(~real[:, :, None, None], float("nan")).to(dtype).transpose(1, 2)
    how = {"scale": 0.3, "softcap": softcap, "sinks": torch.randn(Hq) if sinks else None}
    out = decode_attention(
        q, k, v, held.table(), window, most_parts=splits, shape=SMALL, least=16, bias=kernel_form(bias), **how
    )
    assert out.shape == (B, Hq, T, Dv)
    assert out.isfinite().all(), "padding and unused slots never reach an output"
    truth = held.attend(q, [k, v], bias=bias, **how)
    plain = held.attend(q, [k, v], dtype=dtype, bias=bias, **how)
    return error(out, truth, real), error(plain, truth, real)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("splits", [1, 5])
def test_a_line_with_ragged_rows_equals_the_reference(T: int, splits: int) -> None:
    ours, _ = run(Full(), [0, 1, 77], T, heads=(4, 2), splits=splits)
    assert ours < 1e-5


@pytest.mark.parametrize(("T", "slack"), [(1, 0), (1, 3), (4, 0)])
@pytest.mark.parametrize("window", [Sliding(20), Sliding(20, keep=3), Sliding(2, keep=1), Chunked(16)], ids=str)
def test_a_ring_equals_the_reference_before_at_and_after_the_wrap(window: Window, slack: int, T: int) -> None:
    ours, _ = run(window, [0, 2, 20, 23, 75], T, slack=slack, splits=2)
    assert ours < 1e-5


@pytest.mark.parametrize("window", [Sliding(20), Sliding(20, keep=3), Chunked(16)], ids=str)
def test_a_window_over_a_line_reads_only_what_it_shows(window: Window) -> None:
    ours, _ = run(window, [2, 20, 75], 5, ring=False)
    assert ours < 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_windows_lengths_and_counts_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    window = rng.choice([Full(), Sliding(rng.randint(1, 30), keep=rng.randint(0, 5)), Chunked(rng.randint(1, 30))])
    T, rows, key_heads = rng.randint(1, 9), rng.randint(1, 3), rng.randint(1, 2)
    ours, _ = run(
        window,
        [rng.choice([0, rng.randint(1, 90)]) for _ in range(rows)],
        T,
        heads=(key_heads * rng.randint(1, 5), key_heads),
        dims=(rng.choice([32, 40, 80]), rng.choice([32, 48, 96])),
        counts=rng.choice([None, [rng.randint(0, T) for _ in range(rows)]]),
        slack=rng.randint(0, 3),
        splits=rng.randint(1, 6),
        softcap=rng.choice([None, 3.0]),
        sinks=rng.random() < 0.5,
        ring=rng.random() < 0.7,
    )
    assert ours < 1e-5


def test_padding_gives_zeros_and_changes_no_other_token() -> None:
    ours, _ = run(Full(), [30, 30, 0, 0], 4, counts=[2, 0, 4, 0])
    assert ours < 1e-5
    ours, _ = run(Sliding(6, keep=2), [30, 31, 0, 1], 4, counts=[4, 1, 0, 3], slack=2)
    assert ours < 1e-5


@pytest.mark.parametrize("dims", [(80, 80), (96, 64), (64, 128), (256, 256)], ids=str)
def test_head_dims_need_not_be_powers_of_two_nor_equal(dims: tuple[int, int]) -> None:
    ours, _ = run(Full(), [5, 40], 2, dims=dims)
    assert ours < 1e-5


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("T", [1, 16])
def test_any_grouping_of_heads_and_up_to_16_tokens(heads: tuple[int, int], T: int) -> None:
    ours, _ = run(Sliding(19), [40], T, heads=heads, splits=2)
    assert ours < 1e-5


def test_more_queries_than_a_program_takes_are_spread_over_several() -> None:
    ours, _ = run(Full(), [3, 20], 16, heads=(3, 1), splits=2)  # 48 queries of one key head
    assert ours < 1e-5


@pytest.mark.parametrize("splits", [1, 4])
def test_softcap_and_sinks_take_part_in_every_part(splits: int) -> None:
    ours, _ = run(Full(), [0, 7, 70], 2, softcap=2.0, sinks=True, splits=splits)
    assert ours < 1e-5


def relative(heads: int) -> RelativeBias:
    """T5's bias with random weights: distances from 20 on share a bucket."""
    bias = RelativeBias(heads, 8, 20, both_ways=False).requires_grad_(False)
    bias.weight.normal_()
    return bias


@pytest.mark.parametrize("make", [lambda heads: AlibiBias(alibi_slopes(heads)), relative], ids=["alibi", "relative"])
def test_a_bias_by_distance_is_added_after_the_softcap(make: Any) -> None:
    ours, _ = run(Full(), [0, 7, 70], 3, heads=(6, 2), softcap=2.0, sinks=True, bias=make(6))
    assert ours < 1e-5
    ours, _ = run(Sliding(20, keep=3), [2, 75], 2, heads=(3, 1), bias=make(3))
    assert ours < 1e-5


@pytest.mark.parametrize("T", [1, 3])
def test_cross_attention_sees_the_whole_source_and_no_new_token(T: int) -> None:
    torch.manual_seed(T)
    (Hq, Hk), (D, Dv), counts = (4, 2), (16, 24), [T, 0, T, T - 1]
    held = Held.random(Full(), [21, 40, 0, 3], Hk, (D, Dv), slots=48, counts=counts)
    q, sinks = torch.randn(4, T, Hq, D).transpose(1, 2), torch.randn(Hq)
    source = held.layout.positions(held.slots, held.lengths)
    view = View(torch.zeros(4, T, dtype=torch.int64), source, Full(), causal=False)
    k, v = (field.nan_to_num(0) for field in held.fields)
    truth = reference_attention(q, k, v, view, scale=0.3, sinks=sinks)
    tuning = dict(most_parts=3, shape=SMALL, least=16)
    out = attend_source(q, held.table(), Hk, Dv, scale=0.3, sinks=sinks, **tuning)
    assert error(out, truth, held.real(T)) < 1e-5 and out.isfinite().all()
    if T == 1:
        out = attend_stored(q, held.table(), Hk, Dv, Full(), new=False, scale=0.3, sinks=sinks, **tuning)
        assert error(out, truth, held.real(T)) < 1e-5 and out.isfinite().all()


@pytest.mark.parametrize("splits", [2, 6])
def test_many_bytes_are_merged_in_two_levels(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    monkeypatch.setattr("lamina.kernels.attention.split_kv.MERGE_BYTES", 0)
    ours, _ = run(Full(), [0, 90, 20], 3, dims=(32, 80), sinks=True, counts=[3, 2, 0], splits=splits)
    assert ours < 1e-5


def test_more_groups_than_counters_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.kernels.attention.split_kv.COUNTERS", 1)
    ours, _ = run(Full(), [0, 40], 1, splits=3)
    assert ours < 1e-5


def test_low_precision_is_within_twice_the_error_of_the_plain_computation() -> None:
    ours, plain = run(Full(), [1, 77], 2, dtype=torch.float16)  # the interpreter's products know no bfloat16
    assert ours <= 2 * plain


def test_the_counters_are_zero_again_after_a_merge() -> None:
    from lamina.kernels.workspace import arrivals

    ours, _ = run(Full(), [77, 0, 40], 1, splits=5)
    assert ours < 1e-5
    assert not arrivals(torch.device("cpu")).any()


def test_parts_fill_the_device_without_being_useless() -> None:
    assert target_splits(1, 8, 128, 256, 132) == 1  # 128 tokens are one part
    assert target_splits(1, 8, 16_384, 256, 132) == 16  # a program on each of 132 multiprocessors
    assert target_splits(32, 8, None, 256, 132) == 16  # for the rows that are longer than others
    assert target_splits(1, 8, None, 256, 132, waves=2) == 33


def test_more_than_16_tokens_are_refused() -> None:
    q = torch.zeros(1, 1, 17, 32)
    with pytest.raises(InputError, match="17 new tokens"):
        decode_attention(q, q, q, torch.zeros(8, dtype=torch.int64), Full(), scale=1.0, most_parts=1)
