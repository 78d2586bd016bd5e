"""The visibility rule against its definition, how it is lowered, and how it is drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.attention import Chunked, Full, Sliding, View, both, either


def at(*positions: int) -> torch.Tensor:
    return torch.tensor([positions])


def run(T: int, S: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.arange(start, start + S)[None]
    return keys[:, S - T :], keys


windows = st.one_of(
    st.just(Full()),
    st.builds(Sliding, st.integers(1, 5), keep=st.integers(0, 3)),
    st.builds(Chunked, st.integers(1, 5)),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_mask_is_the_rule_pair_by_pair(data: st.DataObject) -> None:
    B, T, S = data.draw(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 6)))

    def table(width: int, low: int, high: int) -> list[list[int]]:
        line = st.lists(st.integers(low, high), min_size=width, max_size=width)
        return [data.draw(line) for _ in range(B)]

    def tensor(rows: list[list[int]], width: int) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.long).view(B, width)

    q, kv = table(T, 0, 9), table(S, -1, 9)
    q_seg, kv_seg = table(T, 0, 1), table(S, 0, 1)
    q_span, kv_span = table(T, -1, 1), table(S, -1, 1)
    window, causal = data.draw(windows), data.draw(st.booleans())
    segments, spans, also, or_else = (data.draw(st.booleans()) for _ in range(4))
    view = View(
        tensor(q, T),
        tensor(kv, S),
        window,
        causal,
        q_segments=tensor(q_seg, T) if segments else None,
        kv_segments=tensor(kv_seg, S) if segments else None,
        q_spans=tensor(q_span, T) if spans else None,
        kv_spans=tensor(kv_span, S) if spans else None,
        also=(lambda row, q, kv: (row + q + kv) % 3 != 0) if also else None,
        or_else=(lambda row, q, kv: kv == 7) if or_else else None,
    )
    mask = view.mask()
    assert mask.shape == (B, 1, T, S)
    assert mask.dtype == torch.bool
    for b in range(B):
        for t in range(T):
            for s in range(S):
                reach = bool(window.sees(torch.tensor(q[b][t]), torch.tensor(kv[b][s]))) and (
                    not causal or kv[b][s] <= q[b][t]
                )
                reach = reach or (spans and q_span[b][t] >= 0 and q_span[b][t] == kv_span[b][s])
                reach = reach or (or_else and kv[b][s] == 7)
                seen = kv[b][s] >= 0 and reach and (not segments or q_seg[b][t] == kv_seg[b][s])
                seen = seen and (not also or (b + q[b][t] + kv[b][s]) % 3 != 0)
                assert bool(mask[b, 0, t, s]) == seen
    assert torch.equal(view.blind()[..., 0], ~mask.any(-1))


def test_what_a_view_computes_is_remembered() -> None:
    view = View(*run(3, 3), Sliding(2))
    assert view.mask() is view.mask() is view.lower()
    assert view.blind() is view.blind()
    assert view.opened() is view.opened()
    assert view.block_mask() is view.block_mask()


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("window", [Full(), Sliding(4), Sliding(3, keep=1), Chunked(4)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_lowered_view_says_what_its_mask_says(start: int, window, causal: bool) -> None:
    for S in range(1, 7):
        for T in range(1, S + 1):
            view = View(*run(T, S, start), window, causal, exact=True)
            lowered = view.lower()
            if lowered is None:
                assert view.mask().all()
            elif isinstance(lowered, str):
                assert lowered == "causal"
                assert torch.equal(view.mask()[0, 0], torch.ones(T, S, dtype=torch.bool).tril())
            else:
                assert lowered is view.mask()


@pytest.mark.parametrize(
    ("T", "S", "window", "lowered"),
    [
        (1, 9, Full(), None),
        (9, 9, Full(), "causal"),
        (2, 9, Full(), "mask"),
        (1, 4, Sliding(4), None),
        (4, 4, Sliding(4), "causal"),
        (1, 5, Sliding(4), "mask"),
        (5, 5, Sliding(4), "mask"),
        (1, 1, Chunked(4), None),
        (1, 4, Chunked(4), "mask"),
        (4, 4, Chunked(4), "mask"),
    ],
)
def test_an_exact_view_is_lowered_as_far_as_the_window_allows(T: int, S: int, window, lowered) -> None:
    found = View(*run(T, S), window, exact=True).lower()
    assert ("mask" if isinstance(found, torch.Tensor) else found) == lowered


def test_without_a_promise_a_view_is_always_a_mask() -> None:
    assert isinstance(View(*run(4, 4), Full()).lower(), torch.Tensor)
    assert isinstance(View(*run(1, 4), Full()).lower(), torch.Tensor)


def test_a_rule_from_outside_keeps_an_exact_view_from_being_lowered() -> None:
    for overlay in ("also", "or_else"):
        view = View(*run(4, 4), Full(), exact=True, **{overlay: lambda row, q, kv: kv > q})
        assert isinstance(view.lower(), torch.Tensor)


def test_a_full_view_needs_no_mask() -> None:
    view = View(*run(3, 5), Full(), causal=False, full=True)
    assert view.lower() is None
    assert view.mask().all()


def test_rules_compose_with_and_and_or() -> None:
    even, far = (lambda row, q, kv: kv % 2 == 0), (lambda row, q, kv: kv < q - 1)
    q, kv = run(6, 6)
    mask = View(q, kv, Full(), also=both(even, far)).mask()[0, 0]
    assert torch.equal(mask, torch.tensor([[j <= i and j % 2 == 0 and j < i - 1 for j in range(6)] for i in range(6)]))
    mask = View(q, kv, Full(), also=either(even, far)).mask()[0, 0]
    assert torch.equal(mask, torch.tensor([[j <= i and (j % 2 == 0 or j < i - 1) for j in range(6)] for i in range(6)]))


def test_a_rule_never_shows_a_slot_that_holds_no_token() -> None:
    view = View(at(5), at(0, -1, 5), Full(), or_else=lambda row, q, kv: kv == kv)
    assert view.mask()[0, 0].tolist() == [[True, False, True]]


def test_the_block_mask_shows_what_the_mask_shows() -> None:
    q, kv = torch.randint(0, 300, (2, 150)), torch.randint(-1, 300, (2, 260))
    spans, kv_spans = torch.randint(-1, 2, (2, 150)), torch.randint(-1, 2, (2, 260))
    view = View(q, kv, Sliding(9, keep=2), q_spans=spans, kv_spans=kv_spans, also=lambda row, q, kv: kv != row)
    block = view.block_mask()
    assert block.shape == (2, 1, 150, 260)
    row, t, s = torch.meshgrid(torch.arange(2), torch.arange(150), torch.arange(260), indexing="ij")
    assert torch.equal(block.mask_mod(row, torch.zeros_like(row), t, s), view.mask()[:, 0])


def test_the_grid_draws_causal_sliding_chunked_spans_and_segments() -> None:
    q, kv = run(4, 4)
    assert View(q, kv, Full()).grid() == "  0 1 2 3\n0 █ · · ·\n1 █ █ · ·\n2 █ █ █ ·\n3 █ █ █ █"
    assert View(q, kv, Sliding(1, keep=1)).grid() == "  0 1 2 3\n0 █ · · ·\n1 █ █ · ·\n2 █ · █ ·\n3 █ · · █"
    assert View(q, kv, Chunked(2)).grid() == "  0 1 2 3\n0 █ · · ·\n1 █ █ · ·\n2 · · █ ·\n3 · · █ █"
    spans, parts = at(-1, 0, 0, -1), at(0, 0, 1, 1)
    spanned = View(q, kv, Full(), q_spans=spans, kv_spans=spans).grid()
    assert spanned == "  0 1 2 3\n0 █ · · ·\n1 █ █ █ ·\n2 █ █ █ ·\n3 █ █ █ █"
    packed = View(q, kv, Full(), q_segments=parts, kv_segments=parts).grid()
    assert packed == "  0 1 2 3\n0 █ · · ·\n1 █ █ · ·\n2 · · █ ·\n3 · · █ █"


def test_the_grid_aligns_wide_positions_and_marks_empty_slots() -> None:
    assert View(at(9, 10), at(9, -1, 10), Full()).grid() == "    9  - 10\n 9  █  ·  ·\n10  █  ·  █"


def test_a_large_grid_is_cut_in_the_middle() -> None:
    grid = View(*run(9, 9), Full()).grid(limit=4)
    assert grid == "  0 1 … 8\n0 █ · … ·\n1 █ █ … ·\n… … … … …\n8 █ █ … █"


def test_an_empty_grid_can_be_drawn() -> None:
    assert View(at(0)[:, :0], at(0)[:, :0], Full()).grid() == ""
    assert View(at(3), at(3)[:, :0], Full()).grid() == " \n3"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: View(torch.arange(3), at(1), Full()), r"positions are \[3\] and \[1, 1\]"),
        (lambda: View(at(1), torch.zeros(2, 3), Full()), r"positions are \[1, 1\] and \[2, 3\].* same B"),
        (lambda: View(at(1), at(1), Full(), q_segments=at(0)), "segments belong to queries and keys"),
        (lambda: View(at(1), at(1), Full(), kv_spans=at(0)), "give q_spans and kv_spans, or neither"),
        (
            lambda: View(at(1), at(1), Full(), q_spans=at(0), kv_spans=at(0, 1)),
            r"spans are \[1, 1\] and \[1, 2\]: the positions are \[1, 1\] and \[1, 1\]",
        ),
        (
            lambda: View(at(1), at(1), Full(), q_segments=at(0), kv_segments=at(0), exact=True),
            "exact=True promises no segments and no spans",
        ),
        (lambda: View(at(1, 2), at(1), Full(), exact=True), "the 2 queries are the last of the 1 keys"),
        (lambda: View(at(1), at(1), Full(), full=True, also=lambda row, q, kv: kv == q), "all is seen"),
    ],
)
def test_contradictions_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_grid_of_a_missing_row_is_refused() -> None:
    with pytest.raises(IndexError, match=r"grid\(row=1\): this View has 1 rows"):
        View(at(0), at(0), Full()).grid(row=1)
