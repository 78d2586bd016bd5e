"""Attention of many queries against the reference: every window, ragged rows, rings, spans, segments, biases, NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lamina.attention import Chunked, Full, Near, Sliding, View, Window, reference_attention
from lamina.attention.bias import kernel_form
from lamina.attention.blocks import blocks_of
from lamina.cache.packed_rows import PackedRows
from lamina.kernels.attention.merge import merge_into, merged
from lamina.kernels.attention.prefill.key_blocks import head_parts
from lamina.kernels.attention.prefill.many import Tile, attend_many, needed_bytes, tile_for
from lamina.kernels.limits import CARDS
from lamina.nn import AlibiBias, RelativeBias, alibi_slopes
from lamina.runtime.prefill import attention as prefill_attention

SMALL = Tile(queries=16, block=16, warps=4, stages=2)
WINDOWS = [Full(), Sliding(20), Sliding(20, keep=3), Chunked(24), Near(9)]


def line(lengths: list[int], T: int, S: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of T new tokens behind rows of these lengths, and of S slots, of which those past the end are empty."""
    before, slots = torch.tensor(lengths)[:, None], torch.arange(S)
    return before + torch.arange(T), torch.where(slots < before + T, slots, -1)


attend_in_small_tiles = partial(attend_many, tile=SMALL)


def error_of(
    view: View, heads: tuple[int, int] = (2, 1), dims: tuple[int, int] = (32, 32), dtype: torch.dtype = torch.float32,
    bias: Any = None, sinks: bool = False, softcap: float | None = None,
    run: Callable[..., torch.Tensor] = attend_in_small_tiles,
) -> tuple[float, float]:  # fmt: skip
    """The largest error of the kernel, and that of the plain computation in the same number format."""
    (B, T, S), (Hq, Hk), (D, Dv) = view.shape, heads, dims
    torch.manual_seed(T + S)
    q = torch.randn(B, T, Hq, D, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(B, Hk, S, D, dtype=dtype), torch.randn(B, Hk, S, Dv, dtype=dtype)
    for x in (k, v):
        x.masked_fill_((view.kv_positions < 0)[:, None, :, None], float("nan"))
    how: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sinks": torch.randn(Hq) if sinks else None}
    found = run(q, k, v, view, bias=kernel_form(bias), **how)
    truth = reference_attention(q, k, v, view, bias=bias, **how)
    plain = reference_attention(q, k, v, view, bias=bias, dtype=dtype, **how)
    assert found.shape == (B, Hq, T, Dv) and found.isfinite().all()
    return float((found - truth).abs().max()), float((plain - truth).abs().max())


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_ragged_rows_behind_a_line_equal_the_reference(window: Window) -> None:
    ours, _ = error_of(View(*line([0, 5, 40], 21, 70), window), heads=(4, 2))
    assert ours < 1e-5


@pytest.mark.parametrize("window", [Sliding(20), Sliding(20, keep=3), Chunked(24)], ids=str)
def test_a_ring_in_any_order_equals_the_reference(window: Window) -> None:
    q, kv = line([33, 50], 19, 70)
    turned = torch.stack([row.roll(7 * (i + 1)) for i, row in enumerate(kv)])
    ours, _ = error_of(View(q, turned, window))
    assert ours < 1e-5


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("stored", [False, True])
def test_rows_side_by_side_equal_each_row_alone(window: Window, stored: bool) -> None:
    counts, before, Hq, Hk, T = [21, 1, 0, 33], [5, 40, 3, 0] if stored else [0] * 4, 4, 2, 33
    rows = PackedRows(counts, torch.device("cpu"))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, rows.tokens, heads, 32).transpose(1, 2) for heads in (Hq, Hk, Hk))
    at, real = torch.tensor(before)[:, None] + torch.arange(T), torch.arange(T) < torch.tensor(counts)[:, None]
    if stored:
        k, v = torch.randn(4, Hk, 60, 32), torch.randn(4, Hk, 60, 32)
        held = torch.where(
            torch.arange(60) < torch.tensor(before)[:, None] + rows.counts[:, None], torch.arange(60), -1
        )
        for x in (k, v):
            x.masked_fill_((held < 0)[:, None, :, None], float("nan"))
    else:
        held = torch.where(real, at, -1)
    view = View(torch.where(real, at, 0), held, window)
    found = attend_many(q, k, v, view, scale=0.3, tile=SMALL, packed=rows, stored=stored)
    assert found.shape == (1, Hq, rows.tokens, 32)
    for row, part in enumerate(rows.slices()):
        if part.start == part.stop:
            continue
        own = (x[row : row + 1] if stored else x[:, :, part] for x in (k, v))
        here = held[row : row + 1] if stored else held[row : row + 1, : counts[row]]
        alone = View(at[row : row + 1, : counts[row]], here, window)
        expected = reference_attention(q[:, :, part], *own, alone, scale=0.3)
        torch.testing.assert_close(found[:, :, part], expected.to(found.dtype), rtol=1e-5, atol=1e-5)


def test_heads_in_two_tensors_equal_those_in_one() -> None:
    torch.manual_seed(0)
    view = View(*line([0, 9], 21, 40), Full())
    q, k, v = torch.randn(2, 4, 21, 32), torch.randn(2, 4, 40, 32), torch.randn(2, 4, 40, 16)
    q_rest, k_rest = torch.randn(2, 4, 21, 16), torch.randn(2, 40, 20)[..., 4:]
    for x in (k, v):
        x.masked_fill_((view.kv_positions < 0)[:, None, :, None], float("nan"))
    whole_q, whole_k = torch.cat([q, q_rest], -1), torch.cat([k, k_rest[:, None].expand(-1, 4, -1, -1)], -1)
    found = attend_many(q, k, v, view, scale=0.3, tile=SMALL, rest=(q_rest, k_rest))
    expected = reference_attention(whole_q, whole_k, v, view, scale=0.3)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5)


def test_packed_sequences_and_spans_equal_the_reference() -> None:
    segments = torch.tensor([0] * 13 + [1] * 20 + [2] * 7)[None]
    at = torch.cat([torch.arange(13), torch.arange(20), torch.arange(7)])[None]
    packed = View(at, at, Full(), q_segments=segments, kv_segments=segments)
    spans = torch.tensor([-1] * 3 + [0] * 25 + [-1] * 2 + [1] * 10)[None]
    along = torch.arange(40)[None]
    for window in (Full(), Sliding(5)):
        ours, _ = error_of(View(along, along, window, q_spans=spans, kv_spans=spans))
        assert ours < 1e-5
    assert error_of(packed)[0] < 1e-5


def test_an_encoder_sees_both_ways_and_rows_end_where_they_end() -> None:
    at = torch.arange(37).expand(2, -1)
    held = torch.where(at < torch.tensor([[37], [9]]), at, -1)
    ours, _ = error_of(View(at, held, Full(), causal=False))
    assert ours < 1e-5


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    q, kv = line([0, 0], 5, 9)
    kv[1] = -1
    found = attend_many(*(torch.randn(2, 1, n, 16) for n in (5, 9, 9)), View(q, kv, Full()), scale=1.0, tile=SMALL)
    assert not found[1].any() and found[0].any()


@pytest.mark.parametrize("dims", [(16, 24), (80, 48), (192, 128), (8, 8)], ids=str)
def test_heads_of_any_size_equal_the_reference(dims: tuple[int, int]) -> None:
    ours, _ = error_of(View(*line([3], 18, 30), Full()), dims=dims)
    assert ours < 1e-5


@pytest.mark.parametrize(
    "bias", [AlibiBias(alibi_slopes(4)), RelativeBias(4, 8, 20, both_ways=False)], ids=["slopes", "buckets"]
)
def test_biases_sinks_and_softcaps_equal_the_reference(bias: Any) -> None:
    with torch.no_grad():
        if isinstance(bias, RelativeBias):
            bias.weight.normal_()
        view = View(*line([0, 30], 20, 60), Sliding(25))
        assert error_of(view, heads=(4, 2), bias=bias)[0] < 1e-5
        assert error_of(view, heads=(4, 2), softcap=2.0, sinks=True)[0] < 1e-5


@pytest.mark.parametrize("window", [Full(), Near(7)], ids=str)
def test_an_encoder_s_buckets_and_windows_reach_both_ways(window: Window) -> None:
    with torch.no_grad():
        bias = RelativeBias(4, 8, 20, both_ways=True)
        bias.weight.normal_()
        at = torch.arange(37).expand(2, -1)
        held = torch.where(at < torch.tensor([[37], [11]]), at, -1)
        view = View(at, held, window, causal=False)
        assert error_of(view, heads=(4, 2), bias=bias)[0] < 1e-5
        assert error_of(view, heads=(4, 2), softcap=2.0)[0] < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_plain_computation(dtype: torch.dtype) -> None:
    ours, plain = error_of(View(*line([0, 40], 20, 64), Sliding(25)), dtype=dtype, softcap=5.0)
    assert ours <= 2 * plain


def test_blocks_are_seen_whole_only_where_every_query_sees_every_key() -> None:
    q, kv = line([0, 11, 40], 21, 70)
    turned = kv.roll(5, 1)
    spans = torch.full_like(q, -1)
    spans[:, 3:9] = 0
    for window in WINDOWS:
        for view in (View(q, turned, window), View(q, kv, window, causal=False)):
            mask = view.mask()[:, 0]
            found = blocks_of(view, 8, 4)
            for b, i in torch.cartesian_prod(torch.arange(3), torch.arange(3)).tolist():
                order, whole, seen = found.order[b, i].tolist(), int(found.whole[b, i]), int(found.seen[b, i])
                assert sorted(order) == list(range(18))
                for place, block in enumerate(order):
                    part = mask[b, 8 * i : 8 * i + 8, 4 * block : 4 * block + 4]
                    full = bool(part.all()) and part.shape[1] == 4
                    assert (place < whole) <= full
                    assert bool(part.any()) <= (place < seen)


def test_every_card_has_a_tile_for_every_head() -> None:
    for card in CARDS.values():
        for itemsize in (2, 4):
            for dim in (16, 64, 96, 128, 192, 256):
                for queries, bias in ((64, ""), (4096, ""), (4096, "both ways")):
                    tile = tile_for(queries, dim, dim, itemsize, card, bias)
                    assert needed_bytes(tile, dim, dim, itemsize, bias) <= card.shared
    assert head_parts(192) == (128, 64)


def test_parts_merge_to_attention_over_all_keys() -> None:
    torch.manual_seed(0)
    total, more, lse, more_lse = torch.randn(9, 24), torch.randn(9, 24), torch.randn(9), 30 * torch.randn(9)
    expected, sums = merged(total, lse, more, more_lse)
    rounded = merge_into(total, lse, more, more_lse, torch.empty(9, 24, dtype=torch.bfloat16))
    torch.testing.assert_close(rounded, expected.bfloat16())
    torch.testing.assert_close(merge_into(total, lse, more, more_lse), expected)
    torch.testing.assert_close(lse, sums)


def test_a_chunk_behind_a_row_is_merged_from_pieces_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * scale
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        return scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.logsumexp(-1, keepdim=True)

    monkeypatch.setattr(prefill_attention, "planned", planned)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 24, 16), torch.randn(2, 2, 24, 16)
    at = torch.arange(24).expand(2, -1)
    for S in (6, 24):
        view = View(at[:, S - 6 : S], at[:, :S], Full(), exact=True)
        found = prefill_attention.cudnn(q, k[:, :, :S], v[:, :, :S], view, scale=0.3)
        expected = reference_attention(q, k[:, :, :S], v[:, :, :S], view, scale=0.3)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
