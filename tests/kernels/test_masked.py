"""Rules, selections and windows from outside, as a GPU runs them, against the reference: by mask bits, in turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.attention import Full, Sliding, View, Window, attention, mask_bits, reference_attention
from lamina.attention.core import Calls, noted
from lamina.attention.mask_bits import mask_bits_of
from lamina.kernels.attention.prefill.many import Tile, attend_many
from lamina.nn import RelativeBias
from lamina.runtime.prefill import masked
from tests.kernels.test_prefill import line
from tests.largest import Largest


@dataclass(frozen=True)
class Even(Window):
    """A kind of window from outside: tokens at an even distance."""

    def sees(self, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv) % 2 == 0

    @property
    def span(self) -> None:
        return None


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.kernels.fuses", lambda x: not torch.is_grad_enabled())


def thirds(row: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q + kv + row) % 3 > 0


def views(T: int = 40, S: int = 70) -> dict[str, View]:
    """Ragged rows behind a line."""
    q, kv = line([0, 17, 30], T, S)
    rolled = torch.stack([row.roll(5 * i) for i, row in enumerate(kv)])
    spans, of_keys = torch.arange(T).expand(3, -1) // 8 - 1, torch.where(kv < 0, -1, kv // 8 - 1)
    chosen = torch.rand(3, T, S, generator=torch.Generator().manual_seed(0)) < 0.4
    return {
        "also": View(q, rolled, Full(), also=thirds),
        "or_else": View(q, kv, Sliding(9), or_else=lambda row, q, kv: kv % 11 == row),
        "spans and also": View(q, kv, Full(), q_spans=spans, kv_spans=of_keys, also=thirds),
        "segments and also": View(q, kv, Full(), q_segments=spans, kv_segments=of_keys, also=thirds),
        "chosen": View(q, rolled, Full()).restricted(chosen),
        "window from outside": View(q, kv, Even()),
    }


def tensors(view: View, Hq: int = 4, Hk: int = 2, D: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v, with NaN in slots without a token."""
    B, T, S = view.shape
    torch.manual_seed(0)
    q, k, v = torch.randn(B, Hq, T, D), torch.randn(B, Hk, S, D), torch.randn(B, Hk, S, D)
    return q, *(x.masked_fill((view.kv_positions < 0)[:, None, :, None], float("nan")) for x in (k, v))


def check(view: View, backend: str, **how: Any) -> None:
    q, k, v = tensors(view)
    calls: Calls = {}
    with torch.no_grad(), noted(calls):
        found = attention(q, k, v, view, scale=0.3, **how)
    assert [way.backend for way in calls] == [backend]
    expected = reference_attention(q, k, v, view, scale=0.3, **how)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pairs", [1, 1 << 13, 1 << 20])
@pytest.mark.parametrize("name", views())
def test_bits_and_blocks_are_those_of_the_mask(name: str, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_bits, "PIECE", pairs)
    view = views()[name]
    found = mask_bits_of(view, queries=16, keys=32)
    seen = (found.bits[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2).bool()
    expected = torch.nn.functional.pad(view.mask()[:, 0], (0, 96 - 70, 0, 48 - 40))
    assert torch.equal(seen, expected)
    tiles = expected.unflatten(2, (-1, 32)).unflatten(1, (-1, 16)).transpose(2, 3)
    for b, i in torch.cartesian_prod(torch.arange(3), torch.arange(3)).tolist():
        order, whole, some = found.blocks.order[b, i], int(found.blocks.whole[b, i]), int(found.blocks.seen[b, i])
        for place, block in enumerate(order.tolist()):
            assert bool(tiles[b, i, block].all()) == (place < whole)
            assert bool(tiles[b, i, block].any()) == (place < some)


@pytest.mark.parametrize("name", views())
def test_rules_selections_and_windows_from_outside_equal_the_reference(name: str, on_a_gpu: None) -> None:
    check(views()[name], "kernel over mask bits")


@pytest.mark.parametrize("name", ["also", "chosen"])
def test_queries_whose_bits_do_not_fit_are_taken_in_turns(
    name: str, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_bits, "MOST_BYTES", 1)
    turns: list[int] = []
    run = attend_many

    def note(q: Tensor, *args: Any, **how: Any) -> Tensor:
        turns.append(q.shape[2])
        return run(q, *args, **how)

    monkeypatch.setattr("lamina.kernels.attention.prefill.many.attend_many", note)
    monkeypatch.setattr("lamina.kernels.attention.prefill.many.tile_for", lambda *_, **__: Tile(16, 16, 4, 2))
    check(views()[name], "kernel over mask bits", softcap=2.0)
    assert turns == [16, 16, 8]


def test_softcaps_sinks_and_biases_go_with_a_rule(on_a_gpu: None) -> None:
    bias = RelativeBias(4, 8, 20, both_ways=False)
    with torch.no_grad():
        bias.weight.normal_()
        check(views()["also"], "kernel over mask bits", softcap=2.0, sinks=torch.randn(4))
        check(views()["also"], "kernel over mask bits", bias=bias)


def test_a_few_queries_over_many_keys_split_the_keys(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.runtime.prefill.attention.MANY", 300)
    q, kv = line([0, 300], 3, 303)
    check(View(q, kv, Full()), "split-KV kernel")
    check(View(q, kv, Full()), "split-KV kernel", softcap=2.0)
    check(View(q, kv, Full(), also=thirds), "kernel over mask bits")
    with torch.no_grad():
        view = View(q, kv, Full())
        given = tensors(view)
        with Largest() as made:
            attention(*given, view, scale=0.3)
        assert made.most_of(torch.bool) == 0


@pytest.mark.parametrize("room", [1 << 26, 1 << 16])
def test_calls_that_no_kernel_takes_run_in_turns_where_masks_and_scores_are_large(
    room: int, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.runtime.prefill.attention.WIDEST", 16)
    monkeypatch.setattr(masked, "ROOM", room)
    ending = " in turns" if room == 1 << 16 else ""
    for name, view in views().items():
        check(view, "sdpa" + ending)
        if name in ("also", "chosen"):
            check(view, "eager" + ending, bias=lambda head, q, kv: -0.1 * (head + 1) * (q - kv).abs())


@pytest.mark.parametrize("selected", [False, True])
def test_nothing_as_large_as_a_flag_for_each_pair_is_made(
    selected: bool, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_bits, "PIECE", 1 << 14)
    at = torch.arange(1024)[None]
    view = View(at, at, Full(), also=thirds)
    if selected:
        view = view.restricted((at[..., None] + at[:, None]) % 5 > 1)
    q, k, v = tensors(view, 1, 1, 16)
    with torch.no_grad(), Largest() as made:
        found = attention(q, k, v, view, scale=0.3)
    assert made.most <= 1024 * 1024 // 8
    torch.testing.assert_close(found, reference_attention(q, k, v, view, scale=0.3).float(), rtol=1e-5, atol=1e-5)
