"""Positions and slots: each layout is the inverse of itself, and keeps what it says it keeps."""

from __future__ import annotations

import random

import pytest
import torch

from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.cache.layers.layout import Layout
from lamina.cache.layers.token_store import layout_for

LAYOUTS = [Layout(), Layout(ring=1), Layout(ring=5), Layout(ring=4, keep=1), Layout(ring=3, keep=6)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_slot_holds_the_last_position_that_was_put_there(layout: Layout) -> None:
    for length in range(30):
        slots = 30 if layout.most is None else layout.most
        held = [-1] * slots
        for position in range(length):
            held[int(layout.slots(torch.tensor(position)))] = position
        assert layout.positions(slots, torch.tensor([length]))[0].tolist() == held


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fewer_slots_than_a_full_layout_are_its_first_ones(layout: Layout) -> None:
    slots = 30 if layout.most is None else layout.most
    lengths = torch.arange(slots + 1)
    for fewer in range(slots + 1):
        fits = lengths[: fewer + 1]
        assert layout.positions(fewer, fits).tolist() == layout.positions(slots, fits)[:, :fewer].tolist()


def test_rows_of_different_lengths_are_laid_out_by_themselves() -> None:
    layout, lengths = Layout(ring=4, keep=2), torch.tensor([0, 1, 3, 7, 50])
    together = layout.positions(6, lengths)
    for row, length in enumerate(lengths):
        assert together[row].tolist() == layout.positions(6, length[None])[0].tolist()


def test_the_picture_of_the_module_is_right() -> None:
    assert Layout(ring=4, keep=1).positions(5, torch.tensor([7])).tolist() == [[0, 5, 6, 3, 4]]


@pytest.mark.parametrize("window", [Full(), Sliding(1), Sliding(5), Sliding(3, keep=2), Chunked(4)], ids=str)
def test_all_that_a_window_can_see_is_kept_after_going_back_by_the_slack(window: Window) -> None:
    rng = random.Random(0)
    for slack in range(5):
        layout = layout_for(window, slack)
        for _ in range(20):
            length = rng.randint(1, 40)
            slots = 50 if layout.most is None else layout.most
            kept = set(layout.positions(slots, torch.tensor([length]))[0].tolist())
            for query in range(max(0, length - slack), length):
                seen = [p for p in range(query) if window.sees(torch.tensor(query), torch.tensor(p))]
                assert kept.issuperset(seen)


def test_a_window_that_sees_all_is_a_line_and_any_other_a_ring() -> None:
    assert layout_for(Full(), slack=3) == Layout()
    assert layout_for(Sliding(8), slack=3) == Layout(ring=11)
    assert layout_for(Sliding(8, keep=4), slack=0) == Layout(ring=8, keep=4)
    assert layout_for(Chunked(16), slack=2) == Layout(ring=18)
