"""Huge pages: memory is asked for and moved, and nothing a tensor holds is changed."""

from __future__ import annotations

import torch

from lamina.checkpoint.huge_pages import HUGE, ask_for_huge_pages, collapse, joined


def test_tensors_keep_their_place_and_their_numbers() -> None:
    tensors = [torch.empty(n) for n in (5, 3 * HUGE // 4, HUGE)]
    for tensor in tensors:
        ask_for_huge_pages(tensor)
        tensor.copy_(torch.arange(len(tensor)))
    places = [tensor.data_ptr() for tensor in tensors]
    inside = collapse(tensors)
    assert 0 <= inside <= sum(tensor.nbytes for tensor in tensors)
    assert places == [tensor.data_ptr() for tensor in tensors]
    assert all(torch.equal(tensor, torch.arange(len(tensor)).float()) for tensor in tensors)


def test_moving_ends_when_its_time_is_over() -> None:
    tensor = torch.ones(32 * HUGE // 4)
    ask_for_huge_pages(tensor)
    assert collapse([tensor], seconds=0.0) == 0


def test_tensors_elsewhere_are_left_alone() -> None:
    with torch.device("meta"):
        tensor = torch.empty(HUGE)
    ask_for_huge_pages(tensor)
    assert collapse([tensor]) == 0


def test_neighbours_are_one_range() -> None:
    assert joined([(10_000, 20_000), (0, 9_000), (50_000, 60_000), (55_000, 58_000)]) == [(0, 20_000), (50_000, 60_000)]
