"""The indexer's kernels against PyTorch: scores, the highest of them, and latent attention over these tokens alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.attention import Full, View, indexer, reference_attention
from lamina.attention.rotary import rotate
from lamina.cache import IndexKeys
from lamina.cache.codec.codec import Coding
from lamina.generation.strategies.plain import decode_plain
from lamina.kernels.attention.indexer import select_in_turns, select_tokens
from lamina.kernels.attention.mla import decode_latent
from lamina.kernels.attention.mla_project import out_of_latent
from lamina.kernels.attention.prompt.selected import attend_selected
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.eligibility import why_no_index
from lamina.kernels.quant.field import Coded, Side
from lamina.runtime import Graphs
from lamina.runtime.gpu.backend import TableEntry
from lamina.runtime.gpu.select import select
from lamina.sampling.chooser import Chooser
from tests.kernels.runs import begin, small, start
from tests.kernels.stores import Held, InPages, Packed, error

pytestmark = pytest.mark.usefixtures("few_programs")


def lists(chosen: Tensor) -> list[list[list[int]]]:
    """The indices that are True in the last axis of [B, T, S]."""
    return [[one.nonzero()[:, 0].tolist() for one in row] for row in chosen]


def listed(chosen: Tensor, held: Held) -> list[list[list[int]]]:
    """The positions in [B, T, top] that are defined, of real tokens."""
    T, top = chosen.shape[1:]
    sees = torch.where(held.real(T), held.lengths[:, None] + torch.arange(T) + 1, 0).clamp(max=top)
    return [
        [one[:n].tolist() for one, n in zip(*pair, strict=True)] for pair in zip(chosen, sees.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("T", "heads", "codec"), [(1, 3, "plain"), (3, 18, "plain"), (2, 4, "int8")])
def test_the_highest_scores_are_selected_and_keys_are_stored(T: int, heads: int, codec: str) -> None:
    torch.manual_seed(T)
    D = 12 if codec == "plain" else 44  # 32 of which are rotated by a Hadamard matrix
    held = Held.random(Full(), [0, 6, 70], 1, (D,), slots=80, counts=None if T == 1 else [2, 0, T])
    real, B = held.real(T), 3
    q, k, weights = torch.randn(B, heads, T, D), torch.randn(B, T, D), torch.randn(B, T, heads)
    angles = torch.rand(B, T, 4)
    rope = angles.cos(), angles.sin()
    k, weights = (x.masked_fill(~real[..., None], float("nan")) for x in (k, weights))
    stored = Packed(held, codec, has_mean=False)
    new = stored.through("k", rotate(k[:, None], rope))
    keys = stored.seen.after([new])[0][:, 0]  # [B, S, D]
    at = held.lengths[:, None] + torch.arange(T)
    seen = (torch.arange(80) <= at[..., None]) & real[..., None]
    truth = indexer.select_tokens(rotate(q, rope), keys.nan_to_num(0), weights.nan_to_num(0), seen, 9)
    scores = torch.full((B, T, 90), float("nan"))
    table = held.row(stored.parts, scores=scores.data_ptr(), score_room=90)
    coding = Coding(None, {"x": stored.formats["k"]} if stored.formats else {})
    entry = TableEntry(IndexKeys(D, top=9), table, coding=coding)
    assert listed(select(entry, q, k, weights, rope, False), held) == lists(truth)
    if codec == "plain":
        torch.testing.assert_close(held.fields[0][:, 0], keys, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("block", [16, 128])
def test_of_equal_scores_the_first_are_selected(block: int) -> None:
    torch.manual_seed(0)
    held = Held.random(Full(), [99, 40, 7, 0], 1, (1,), slots=100)
    scores = torch.randint(-2, 3, (4, 1, 100)) * torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None, None]
    scores[0, 0, ::7] = -0.0
    table = held.row({"k": held.fields[0]}, scores=scores.data_ptr(), score_room=100)
    seen = torch.arange(100) <= held.lengths[:, None, None]
    for top in (1, 8, 45, 100):
        found = listed(select_tokens(4, 1, top, table, block=block), held)
        assert found == lists(indexer.best(scores, seen, top))


@pytest.mark.parametrize("T", [1, 3, 6])
def test_attention_reads_the_selected_tokens_alone(T: int) -> None:
    torch.manual_seed(T)
    counts = None if T == 1 else [T, T - 1, 0]
    held = Held.random(Full(), [0, 30, 60], 1, (24,), slots=70, counts=counts)
    real = held.real(T)
    q, new = torch.randn(3, T, 5, 24).transpose(1, 2), torch.randn(3, T, 24)
    up = torch.randn(5, 8, 16)
    stored = Held(held.after([new[:, None]]), held.layout, Full(), held.lengths, held.counts)
    at = held.lengths[:, None] + torch.arange(T)
    seen = (torch.arange(70) <= at[..., None]) & real[..., None]
    allowed = indexer.best(torch.randn(3, T, 70), seen, 20)
    chosen = torch.full((3, T, 20), 10**6, dtype=torch.int32)
    for row, t in real.nonzero().tolist():
        some = allowed[row, t].nonzero()[:, 0]
        chosen[row, t, : len(some)] = some
    table = stored.table()
    how = dict(most_splits=2, shape=Tiling(block=16, warps=4, stages=2), least=16)
    parts = decode_latent(q, new, table, rank=16, scale=0.3, chosen=chosen, **how)  # type: ignore[arg-type]
    out = out_of_latent(parts, up, table)
    keys = stored.fields[0].nan_to_num(0)
    view = View(at, torch.arange(70).expand(3, -1), Full()).restricted(allowed)
    truth = reference_attention(q, keys, keys[..., :16], view, dtype=torch.float64, scale=0.3) @ up.double().mT
    assert error(out, truth, real) < 1e-5
    assert not out.transpose(1, 2)[~real].any()


@pytest.mark.parametrize("most", [64, 20, 3])
def test_the_queries_of_a_prompt_are_scored_in_turns(most: int) -> None:
    torch.manual_seed(most)
    B, T, heads, D = 3, 37, 5, 12
    held = Held.random(Full(), [0, 6, 30], 1, (D,), slots=80, counts=[37, 0, 20])
    real, at = held.real(T), held.lengths[:, None] + torch.arange(T)
    q, k = torch.randn(B, T, heads, D).transpose(1, 2), torch.randn(B, T, D)
    weights = torch.randn(B, T, heads).masked_fill(~real[..., None], float("nan"))
    stored = Held(held.after([k[:, None]]), held.layout, Full(), held.lengths, held.counts)
    scores = torch.full((B, min(most, T), 80), float("nan"))
    table = stored.row({"k": stored.fields[0]}, scores=scores.data_ptr(), score_room=80)
    keys, seen = stored.fields[0][:, 0].nan_to_num(0), (torch.arange(80) <= at[..., None]) & real[..., None]
    truth = indexer.select_tokens(q, keys, weights.nan_to_num(0), seen, 9)
    assert listed(select_in_turns(q, weights, k, table, 9, most), held) == lists(truth)


@pytest.mark.parametrize("codec", ["plain", "int8"])
@pytest.mark.parametrize("paged", [False, True])
def test_queries_of_a_prompt_read_the_selected_tokens_alone(codec: str, paged: bool) -> None:
    torch.manual_seed(0)
    B, T, heads, rank, D, top = 3, 21, 18, 16, 24, 12
    held = Held.random(Full(), [0, 30, 60], 1, (D,), slots=96, counts=[21, 20, 0])
    new = torch.randn(B, T, D)
    after = Held(held.after([new[:, None]]), held.layout, Full(), held.lengths, held.counts)
    stored = Packed(after, codec, rotated=False, has_mean=False)
    real, at = held.real(T), held.lengths[:, None] + torch.arange(T)
    seen = (torch.arange(96) <= at[..., None]) & real[..., None]
    allowed = indexer.best(torch.randn(B, T, 96), seen, top)
    chosen = torch.full((B, T, top), 10**6, dtype=torch.int32)
    for row, t in real.nonzero().tolist():
        some = allowed[row, t].nonzero()[:, 0]
        chosen[row, t, : len(some)] = some
    table, page = stored.table(), 0
    if paged:
        pages = InPages(after, stored.parts, 4, T)
        table, page = pages.table(), 4
    kind: Any = new
    if codec != "plain":
        side = Side.of(stored.formats["k"], D)
        part = side.empty(new, 1, 1)
        kind = Coded(new, part.codes, part, part, side, side, stored=True)
    q = torch.randn(B, T, heads, D).transpose(1, 2)
    view = View(at, torch.arange(96).expand(B, -1), Full()).restricted(allowed)
    keys = stored.seen.fields[0].nan_to_num(0)
    truth = reference_attention(q, keys, keys[..., :rank], view, dtype=torch.float64, scale=0.3)
    for first, end in ((0, T), (0, 8), (8, T)):
        out = attend_selected(q[:, :, first:end], kind, table, chosen, rank=rank, scale=0.3, page=page, first=first)
        assert error(out, truth[:, :, first:end], real[:, first:end]) < 1e-5
        assert not out.transpose(1, 2)[~real[:, first:end]].any()


@pytest.mark.parametrize("native", [False, True])
def test_a_captured_step_goes_on_after_its_cache_grew(native: bool) -> None:
    model = small("glm_moe_dsa")
    cache, logits = start(model)
    expected = decode_plain(begin(model, max_new_tokens=3)).tokens
    with Graphs(model).step(2, Chooser(), native=native) as step:
        step.begin(cache, logits.argmax(-1), [9, 9], ())
        step.run(1)
        cache.reserve(100)  # more than the buffer of scores has room for
        step.run(1)
        assert step._scores is not None and step._scores.shape[-1] >= 100
    assert [row[-2:] for row in cache.tokens] == [tokens[:2] for tokens in expected]


def test_keys_that_are_too_wide_are_named() -> None:
    assert why_no_index(IndexKeys(128)) is None
    assert why_no_index(IndexKeys(320)) == ("indexer keys of 320 values; the kernels that select tokens take up to 256")
