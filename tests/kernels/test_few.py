"""A few queries over many keys, which are split over programs, against the reference: windows, rings, spans, NaN."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lamina.attention import Full, View, Window
from lamina.kernels.attention.prefill import few
from lamina.kernels.attention.prefill.few import attend_few, few_tile
from lamina.kernels.attention.prefill.many import needed_bytes
from lamina.kernels.limits import CARDS, INTERPRETER
from lamina.nn import AlibiBias, RelativeBias, alibi_slopes
from tests.kernels import test_prefill
from tests.kernels.test_prefill import WINDOWS, line


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "LEAST_KEYS", 40)


def error_of(view: View, heads: tuple[int, int] = (4, 2), bits: bool = False, **how: Any) -> tuple[float, float]:
    """As that of attention of many queries."""
    tile = few_tile(heads[0] // heads[1] * view.shape[1], 32, 32, 4, INTERPRETER)
    mask = view.mask_bits(tile.queries, tile.block) if bits else None
    return test_prefill.error_of(view, heads, run=partial(attend_few, mask=mask), **how)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_ragged_rows_and_rings_equal_the_reference(window: Window) -> None:
    q, kv = line([0, 5, 90], 5, 110)
    assert error_of(View(q, kv, window))[0] < 1e-5
    assert error_of(View(q, torch.stack([row.roll(7 * i) for i, row in enumerate(kv)]), window))[0] < 1e-5


def test_more_queries_than_a_program_has_are_in_blocks() -> None:
    assert error_of(View(*line([70], 11, 90), Full()), heads=(8, 1))[0] < 1e-5


@pytest.mark.parametrize("dims", [(80, 48), (192, 128), (8, 8)], ids=str)
def test_heads_of_any_size_equal_the_reference(dims: tuple[int, int]) -> None:
    assert error_of(View(*line([50], 3, 60), Full()), dims=dims)[0] < 1e-5


@pytest.mark.parametrize("bias", [AlibiBias(alibi_slopes(4)), RelativeBias(4, 8, 20, both_ways=False)], ids=str)
def test_biases_sinks_and_softcaps_equal_the_reference(bias: Any) -> None:
    with torch.no_grad():
        if isinstance(bias, RelativeBias):
            bias.weight.normal_()
        view = View(*line([0, 70], 6, 80), Full())
        assert error_of(view, bias=bias)[0] < 1e-5
        assert error_of(view, softcap=2.0, sinks=True)[0] < 1e-5


def test_spans_segments_and_rules_equal_the_reference() -> None:
    q, kv = line([60, 3], 6, 70)
    spans = torch.tensor([[-1, 0, 0, 0, -1, 1]] * 2)
    of_keys = torch.where(kv >= q[:, :1], spans.gather(1, (kv - q[:, :1]).clamp(0, 5)), -1)
    assert error_of(View(q, kv, Full(), q_spans=spans, kv_spans=of_keys))[0] < 1e-5
    segments, theirs = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2), (torch.arange(70) % 2).expand(2, -1)
    assert error_of(View(q, kv, Full(), q_segments=segments, kv_segments=theirs.contiguous()))[0] < 1e-5
    ruled = View(q, kv, Full(), also=lambda row, q, kv: (q + kv + row) % 3 > 0)
    assert error_of(ruled, bits=True)[0] < 1e-5


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    q, kv = line([60, 60], 3, 63)
    kv[1] = -1
    found = attend_few(*(torch.randn(2, 1, n, 16) for n in (3, 63, 63)), View(q, kv, Full()), scale=1.0)
    assert not found[1].any() and found[0].any()


def test_half_precision_is_as_exact_as_the_plain_computation() -> None:
    ours, plain = error_of(View(*line([0, 60], 7, 70), Full()), dtype=torch.bfloat16, softcap=5.0)
    assert ours <= 2 * plain


def test_every_card_has_a_tile_for_every_head() -> None:
    for card in CARDS.values():
        for itemsize in (2, 4):
            for dim in (16, 64, 96, 128, 192, 256):
                for queries in (2, 16, 512):
                    for bias in ("", "buckets"):
                        tile = few_tile(queries, dim, dim, itemsize, card, bias)
                        assert needed_bytes(tile, dim, dim, itemsize, bias) <= card.shared
