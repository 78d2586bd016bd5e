"""The indexer of a native step against PyTorch: scores, the highest of them, and latent attention over these tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lamina
from lamina.attention import Chunked, Full, Sliding, View, Window, indexer, reference_attention
from lamina.attention.rotary import rotate, rotate_neighbours
from lamina.cache import IndexKeys, Latent, SharedIndex, Tokens
from lamina.cache.codec.codec import Coding
from lamina.errors import CaptureError
from lamina.native.operations import NativeRecorder
from lamina.native.program import Program
from lamina.nn import RMSNorm
from lamina.runtime.gpu.backend import TableEntry
from lamina.runtime.native.backend import why_unserved
from lamina.runtime.native.latent import attend_latent
from lamina.runtime.native.recall import recall
from lamina.runtime.native.select import select, selection_of
from lamina.runtime.native.step import NativeStep
from lamina.sampling.chooser import Chooser
from tests.kernels.stores import Held, InPages, Packed, error
from tests.laws.toys import toy

LENGTHS, COUNTS = [0, 6, 300, 8, 700], [1, 1, 1, 0, 1]
TOP = 9


def recording(dtype: torch.dtype = torch.float32, **more: Any) -> tuple[NativeRecorder, Any]:
    """A recorder of an empty program, and what memory calls ask of the pass."""
    return NativeRecorder(Program(), []), SimpleNamespace(model=SimpleNamespace(dtype=dtype), **more)


def held_keys(dim: int, dtype: torch.dtype, window: Window | None = None, slack: int = 0) -> Held:
    return Held.random(window or Full(), LENGTHS, 1, (dim,), slots=720, counts=COUNTS, dtype=dtype, slack=slack)


def table_of(stored: Packed, page: int, **more: int) -> tuple[Tensor, Any]:
    """The row of a table of these parts, in pages where `page` is not 0, and what must stay alive."""
    if not page:
        return stored.held.row(stored.parts, **more), stored
    paged = InPages(stored.held, stored.parts, page, 1)
    columns = {"pages": paged.pages.data_ptr(), "pages_per_row": paged.pages.shape[1]}
    return stored.held.row(paged.stores, slots=page, **columns, **more), paged


def selected(chosen: Tensor) -> list[list[int]]:
    """The positions in [B, 1, top] that are defined."""
    sees = [min(length + 1, chosen.shape[-1]) * count for length, count in zip(LENGTHS, COUNTS, strict=True)]
    return [row[0, :n].tolist() for row, n in zip(chosen, sees, strict=True)]


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    ("heads", "dim", "codec", "dtype"),
    [(3, 12, "plain", torch.float32), (6, 64, "plain", torch.float32), (5, 64, "plain", torch.float16),
     (4, 44, "int8", torch.float32), (9, 64, "int4", torch.float32), (2, 20, "fp8", torch.float32)],
)  # fmt: skip
def test_the_highest_scores_are_selected_and_keys_are_stored(
    heads: int, dim: int, codec: str, dtype: torch.dtype, page: int
) -> None:
    torch.manual_seed(heads)
    held = held_keys(dim, dtype)
    B, real = len(LENGTHS), held.real(1)
    q, k, weights = torch.randn(B, heads, 1, dim), torch.randn(B, 1, dim), torch.randn(B, 1, heads)
    k, weights = (x.masked_fill(~real[..., None], float("nan")) for x in (k, weights))
    angles, turn = torch.rand(B, 1, 4), (rotate, rotate_neighbours)[heads % 2]
    rope = angles.cos(), angles.sin()
    stored = Packed(held, codec, has_mean=False)
    new = stored.through("k", turn(k[:, None], rope).to(dtype))
    keys = stored.seen.after([new])[0][:, 0]  # [B, S, D]
    seen = (torch.arange(720) <= held.lengths[:, None, None]) & real[..., None]
    truth = indexer.select_tokens(turn(q, rope), keys.nan_to_num(0), weights.nan_to_num(0), seen, TOP)
    scores = torch.full((B, 1, 730), float("nan"))
    table, alive = table_of(stored, page, scores=scores.data_ptr(), score_room=730)
    coding = Coding(None, {"x": stored.formats["k"]} if stored.formats else {})
    recorder, one = recording(dtype)
    entry = TableEntry(IndexKeys(dim, top=TOP), table, coding=coding, page=page)
    chosen = select(recorder, one, entry, q, k, weights, rope, bool(heads % 2))
    recorder.program.run()
    assert selected(chosen) == [row[0].nonzero()[:, 0].tolist() for row in truth]
    if codec == "plain" and not page:
        limit = 2e-3 if dtype == torch.float16 else 1e-6
        torch.testing.assert_close(held.fields[0][:, 0], keys, rtol=limit, atol=limit, equal_nan=True)
    del alive


@pytest.mark.parametrize("dim", [16, 20])
def test_of_equal_scores_the_first_tokens_are_selected(dim: int) -> None:
    """Equal keys have equal scores wherever they are in a block or a page, and 0 has no sign."""
    torch.manual_seed(dim)
    held = held_keys(dim, torch.float32)
    few = torch.randn(3, dim)  # keys, each of which many tokens have; the third has no positive product
    which = torch.arange(720) % 5 % 3
    held.fields[0].copy_(few[which].expand(len(LENGTHS), 1, -1, -1))
    q = few[:1].expand(len(LENGTHS), 1, 1, dim).clone() - 2 * few[2] * (few[0] @ few[2] > 0)
    for weight in (1.0, -1.0, 0.0):
        recorder, one = recording()
        scores = torch.empty(len(LENGTHS), 1, 720)
        table = held.row({"k": held.fields[0]}, scores=scores.data_ptr(), score_room=720)
        for top in (1, 8, 200):
            k, weights = few[None, :1].expand(len(LENGTHS), -1, -1), torch.full((len(LENGTHS), 1, 1), weight)
            entry = TableEntry(IndexKeys(dim, top=top), table)
            chosen = select(recorder, one, entry, q, k, weights, None, False)
            recorder.program.run()
            seen = torch.arange(720) <= held.lengths[:, None, None]
            products = indexer.index_scores(q, few[None], weights)[:, :, which]
            products.scatter_(2, held.lengths[:, None, None], products[..., :1])  # the new token has the first key
            truth = indexer.best(products, seen & held.real(1)[..., None], top)
            assert selected(chosen) == [row[0].nonzero()[:, 0].tolist() for row in truth]


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    ("top", "codec", "rank"),
    [(1, "plain", 28), (9, "plain", 28), (150, "int8", 28), (640, "plain", 28), (9, "fp8", 28), (150, "int8", 900),
     (800, "int8", 900)],
)  # fmt: skip
def test_latent_attention_reads_the_selected_tokens_alone(top: int, codec: str, rank: int, page: int) -> None:
    torch.manual_seed(top)
    heads, nope, rope_dim = 5, 8, 4
    held = held_keys(rank + rope_dim, torch.float32)
    B, real = len(LENGTHS), held.real(1)
    q, kv, up = torch.randn(B, heads, 1, nope + rope_dim), torch.randn(B, 1, rank + rope_dim), torch.randn(5, 14, rank)
    angles, norm = torch.rand(B, 1, rope_dim // 2), RMSNorm(rank)
    rope = angles.cos(), angles.sin()
    stored = Packed(held, codec, rotated=False, has_mean=False)
    allowed = indexer.best(
        torch.randn(B, 1, 720), (torch.arange(720) <= held.lengths[:, None, None]) & real[..., None], top
    )
    chosen = torch.full((B, 1, top), 10**6, dtype=torch.int32)
    for row in range(B):
        some = allowed[row, 0].nonzero()[:, 0]
        chosen[row, 0, : len(some)] = some
    coding = Coding(None, {"latent": stored.formats["k"]} if stored.formats else {})
    table, alive = table_of(stored, page)
    recorder, one = recording()
    entry = TableEntry(Latent(rank, rope_dim), table, coding=coding, page=page)
    how: dict[str, Any] = dict(norm=norm, rope=rope, neighbours=False, up=up, scale=0.3)
    out = attend_latent(recorder, one, entry, q, kv, **how, chosen=chosen)
    recorder.program.run()

    new = torch.cat([norm(kv[..., :rank]), rotate(kv[:, None, :, rank:], rope)[:, 0]], dim=-1)[:, None]
    keys = stored.seen.after([stored.through("k", new)])[0].nan_to_num(0)
    view = View(held.lengths[:, None], torch.arange(720).expand(B, -1), Full()).restricted(allowed)
    wide = torch.cat([q[..., :nope] @ up[:, :nope], rotate(q[..., nope:], rope)], dim=-1)
    truth = reference_attention(wide, keys, keys[..., :rank], view, dtype=torch.float64, scale=0.3)
    assert error(out, truth @ up[:, nope:].double().mT, real) < 1e-5
    assert not out.transpose(1, 2)[~real].any()
    del alive


def test_a_latent_may_rotate_a_part_of_its_rotary_key_and_have_its_projection_in_any_order() -> None:
    torch.manual_seed(1)
    held = held_keys(12, torch.float32, Sliding(7, keep=2), slack=3)
    B, real = len(LENGTHS), held.real(1)
    q, kv = torch.randn(B, 2, 1, 4 + 4), torch.randn(B, 1, 12)
    up = torch.randn(8, 7, 2).permute(2, 1, 0)  # [H, N + V, rank]
    angles, norm = torch.rand(B, 1, 1), RMSNorm(8)
    rope = angles.cos(), angles.sin()
    recorder, one = recording()
    entry = TableEntry(Latent(8, 4, Sliding(7, keep=2)), held.table())
    new = torch.cat([norm(kv[..., :8]), rotate(kv[:, None, :, 8:], rope)[:, 0]], dim=-1)[:, None]
    wide = torch.cat([q[..., :4] @ up[:, :4], rotate(q[..., 4:], rope)], dim=-1)
    both = Held([held.fields[0], held.fields[0][..., :8]], held.layout, held.window, held.lengths, held.counts)
    truth = both.attend(wide, [new, new[..., :8]], scale=0.3) @ up[:, 4:].double().mT
    out = attend_latent(recorder, one, entry, q, kv, norm=norm, rope=rope, neighbours=False, up=up, scale=0.3)
    recorder.program.run()
    assert error(out, truth, real) < 1e-5


# -- token vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("codec", ["plain", "int8", "int5", "fp8"])
@pytest.mark.parametrize("window", [Full(), Sliding(5), Sliding(7, keep=2), Chunked(6)], ids=str)
def test_the_vectors_that_a_token_sees_are_read_back(window: Window, codec: str, page: int) -> None:
    torch.manual_seed(0)
    held = held_keys(40, torch.float32, window, slack=2)
    x = torch.randn(len(LENGTHS), 1, 40).masked_fill(~held.real(1)[..., None], float("nan"))
    stored = Packed(held, codec, has_mean=False)
    after = stored.seen.after([stored.through("k", x[:, None])])[0][:, 0]
    coding = Coding(None, {"x": stored.formats["k"]} if stored.formats else {})
    table, alive = table_of(stored, page)
    room = 720 if window.span is None else window.span + getattr(window, "keep", 0)
    recorder, one = recording(room_of=lambda asked: room if asked == window else 0)
    kept, seen = recall(recorder, one, TableEntry(Tokens(40, window), table, coding=coding, page=page), x)
    recorder.program.run()
    assert kept.shape == (5, room, 40) and seen.shape == (5, 1, room)
    for row, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        at = torch.arange(length + 1)
        at = at[window.sees(torch.tensor(length), at)] if count else at[:0]
        assert seen[row, 0].tolist() == [True] * len(at) + [False] * (room - len(at))
        expected = after[row, held.layout.slots(at)]
        torch.testing.assert_close(kept[row, : len(at)], expected, rtol=1e-5, atol=1e-5)
        assert not kept[row, len(at) :].any()
    del alive


@torch.no_grad()
def test_a_step_that_reads_vectors_back_is_recorded_again_for_longer_and_for_much_shorter_rows() -> None:
    model = toy("tokens", torch.float32)
    ids = torch.randint(0, model.vocab, (2, 700), generator=torch.Generator().manual_seed(0))
    step = NativeStep(model, 2, Chooser())
    used = []
    for length in (60, 700, 300, 8):
        native, plain = model.new_cache(2), model.new_cache(2)
        for cache in (native, plain):
            model(ids[:, :length], cache=cache, counts=[length, 3], logits="last")
        first = torch.tensor([4, 5])
        step.begin(native, first, [9, 9], ())
        step.run(2), step.run(7)
        used.append(step._recorded_room)
        for _ in range(9):
            first = model(first[:, None], cache=plain, logits="last").argmax(-1)
        assert native.tokens == plain.tokens
        torch.testing.assert_close(native.logits, plain.logits, rtol=1e-4, atol=1e-4)
    assert used == [128, 1024, 1024, 64]


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_vectors_that_are_too_wide_and_kinds_from_outside_are_named() -> None:
    class Own(lamina.Attention):
        """A kind from outside: its layer may store something else."""

    assert why_unserved(IndexKeys(1024), None, torch.float32) is None
    wide = "vectors of 1025 values; the native kernels take up to 1024"
    for spec in (IndexKeys(1025), Tokens(1025), Latent(1000, 25), lamina.Attention(1, 8, 1025)):
        assert why_unserved(spec, None, torch.float32) == wide
    assert why_unserved(Own(1, 8, 8), None, torch.float32) == "there is no native kernel for Own"


def test_a_selection_that_has_not_been_made_is_an_error() -> None:
    _, one = recording(entries=[{"index": TableEntry(IndexKeys(4), torch.zeros(16))}])
    with pytest.raises(CaptureError, match="layer 1 shares layer 0 entry 'index', which has not selected in this pass"):
        selection_of(one, (1, "index"), TableEntry(SharedIndex(0), torch.zeros(16)))


def test_selected_tokens_of_a_latent_with_a_window_are_refused() -> None:
    recorder, one = recording()
    entry = TableEntry(Latent(4, 2, Sliding(3)), torch.zeros(16))
    how: dict[str, Any] = dict(norm=RMSNorm(4), rope=(), neighbours=False, up=torch.zeros(1, 3, 4), scale=1.0)
    with pytest.raises(CaptureError, match="an indexer selects of all tokens"):
        attend_latent(recorder, one, entry, torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 6), **how, chosen=torch.zeros(1))
