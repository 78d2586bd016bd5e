"""Kernels of captured prompts against their references: attention of many tokens over tables, stores, states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.attention import Chunked, Full, Sliding, View, Window, reference_attention
from lamina.attention.bias import kernel_form
from lamina.kernels.attention.prefill.many import Tile
from lamina.kernels.attention.prompt.attend import attend_prompt, tile_for
from lamina.kernels.attention.prompt.store import store_tokens
from lamina.kernels.columns import entry_row
from lamina.kernels.limits import CARDS
from lamina.kernels.recurrent.prompt.carried import load_inputs, load_state, store_state
from lamina.nn import AlibiBias, RelativeBias, alibi_slopes
from tests.kernels.stores import Held, InPages, Ring, error

pytestmark = pytest.mark.usefixtures("few_programs")
SMALL = Tile(queries=32, block=16, warps=4, stages=2)


def run(
    window: Window, lengths: list[int], T: int, counts: list[int] | None = None, *, heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16), page: int = 0, ring: bool = True, dtype: torch.dtype = torch.float32,
    softcap: float | None = None, sinks: bool = False, bias: Any = None, slots: int = 400,
) -> tuple[float, float]:  # fmt: skip
    """The error of the kernel, and that of the plain computation in the same number format."""
    torch.manual_seed(sum(lengths) + T)
    (Hq, Hk), (D, Dv), B = heads, dims, len(lengths)
    held = Held.random(window, lengths, Hk, dims, slots=slots, counts=counts, dtype=dtype, ring=ring)
    real = held.real(T)[:, :, None, None]
    q, k, v = (
        torch.randn(B, T, H, dim).masked_fill(~real, float("nan")).to(dtype).transpose(1, 2)
        for H, dim in ((Hq, D), (Hk, D), (Hk, Dv))
    )
    table = held.table()
    if page:
        pages = InPages(held, dict(zip("kv", held.fields, strict=True)), page, T)
        table = pages.table()
    how: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sinks": torch.randn(Hq) if sinks else None}
    out = attend_prompt(q, (k, v), table, Hk, Dv, window, bias=kernel_form(bias), page=page, tile=SMALL, **how)
    assert out.shape == (B, Hq, T, Dv) and out.isfinite().all()
    assert (out.masked_fill(real.transpose(1, 2), 0) == 0).all(), "padding gives zeros"
    truth = held.attend(q, [k, v], bias=bias, **how)
    plain = held.attend(q, [k, v], dtype=dtype, bias=bias, **how)
    return error(out, truth, held.real(T)), error(plain, truth, held.real(T))


@pytest.mark.parametrize("page", [0, 8])
@pytest.mark.parametrize("window", [Full(), Sliding(20), Sliding(20, keep=3), Chunked(24)], ids=str)
def test_ragged_rows_over_lines_rings_and_pages_equal_the_reference(window: Window, page: int) -> None:
    ours, _ = run(window, [0, 5, 61], 40, [40, 17, 33], heads=(4, 2), page=page)
    assert ours < 1e-5


def test_a_few_tokens_behind_a_long_row_are_divided_over_programs() -> None:
    ours, _ = run(Full(), [380, 3, 90], 9, [9, 0, 4])
    assert ours < 1e-5


def test_a_window_over_a_line_and_a_pass_that_is_longer_than_the_window() -> None:
    for window in (Sliding(6), Sliding(6, keep=2), Chunked(7)):
        assert run(window, [2, 75], 50, [50, 41], ring=False)[0] < 1e-5


@pytest.mark.parametrize(
    "bias", [AlibiBias(alibi_slopes(4)), RelativeBias(4, 8, 20, both_ways=False)], ids=["slopes", "buckets"]
)
def test_biases_softcaps_and_sinks_are_those_of_the_reference(bias: Any) -> None:
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        ours, _ = run(Sliding(30), [44, 7], 20, [20, 11], heads=(4, 2), bias=bias, softcap=3.0, sinks=True)
    assert ours < 1e-5


def test_bfloat16_is_at_most_twice_as_far_off_as_the_plain_computation() -> None:
    ours, plain = run(Full(), [70], 24, heads=(4, 1), dims=(40, 24), dtype=torch.bfloat16)
    assert ours < 2 * plain


def test_every_query_sees_a_whole_source() -> None:
    held = Held.random(Full(), [30, 9, 0], 1, (16, 16), slots=40, counts=[20, 20, 3])
    q = torch.randn(3, 2, 20, 16)
    out = attend_prompt(q, None, held.table(), 1, 16, scale=0.3, tile=SMALL)
    seen = held.layout.positions(40, held.lengths)
    at = torch.full((3, 20), 100)  # behind all of the source
    k, v = (field.nan_to_num(0) for field in held.fields)
    truth = reference_attention(q, k, v, View(at, seen, Full()), scale=0.3, dtype=torch.float64)
    assert error(out[:2], truth[:2], held.real(20)[:2]) < 1e-5 and (out[2] == 0).all()


@pytest.mark.parametrize("card", [86, 90])
def test_tiles_fit_the_shared_memory_of_a_card(card: int) -> None:
    for dim in (64, 128, 256, 512):
        for itemsize in (2, 4):
            tile = tile_for(2048, dim, dim, itemsize, CARDS[card])
            assert tile.queries >= 16 and (tile.queries + tile.block) * dim * itemsize < CARDS[card].shared


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("window", [Full(), Sliding(6), Sliding(6, keep=2)], ids=str)
def test_tokens_are_stored_where_one_by_one_would_put_them(window: Window, page: int) -> None:
    held = Held.random(window, [0, 3, 20], 2, (20, 12), slots=44, counts=[17, 5, 0], slack=2)
    k, v = (torch.randn(3, 17, 2, dim).transpose(1, 2) for dim in (20, 12))
    expected, parts = held.after([k, v]), dict(zip("kv", held.fields, strict=True))
    if page:
        pages = InPages(held, parts, page, 17)
        store_tokens(k, v, pages.table(), page)
        pages.same(dict(zip("kv", expected, strict=True)))
    else:
        store_tokens(k, v, held.table())
        for found, right in zip(held.fields, expected, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def test_the_inputs_of_a_convolution_come_from_its_ring_and_go_there() -> None:
    history = [torch.randn(n, 6) for n in (0, 2, 11)]
    ring, counts, x = Ring(history, 4), torch.tensor([7, 1, 0]), torch.randn(3, 7, 6)
    table = ring.table(counts)
    past = load_inputs(table, x, 4)
    for row, inputs in enumerate(history):
        torch.testing.assert_close(past[row], torch.cat([torch.zeros(3, 6), inputs])[-3:], rtol=0, atol=0)
    store_tokens(x[:, None], None, table)
    for row, count in enumerate(counts.tolist()):
        whole = torch.cat([history[row], x[row, :count]])
        for position in range(max(0, len(whole) - 4), len(whole)):
            assert torch.equal(ring.store[row, position % 4], whole[position])


def test_states_are_copied_out_and_those_of_rows_with_tokens_are_stored() -> None:
    state, counts = torch.randn(3, 5, 1000), torch.tensor([2, 0, 1])
    table = torch.tensor(entry_row({"k": state.data_ptr(), "counts": counts.data_ptr()}))
    found, before = load_state(table, 3, (5, 1000)), state.clone()
    assert torch.equal(found, state)
    store_state(found + 1, table)
    assert torch.equal(state, before + (counts > 0)[:, None, None])
