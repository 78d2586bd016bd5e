"""Kernels read from every named column what the host wrote there."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from lamina.errors import InputError
from lamina.kernels.columns import ENTRY, HEADER, WIDTH, entry_row, header_row
from lamina.kernels.entry import (
    COUNTS,
    K_HIGH,
    K_SCALES,
    K_STORE,
    KEEP,
    LENGTHS,
    PAGES,
    PAGES_PER_ROW,
    RING,
    SCORE_ROOM,
    SCORES,
    SLOTS,
    STORE,
    V_HIGH,
    V_SCALES,
    V_STORE,
    row_of,
)
from lamina.kernels.step_ends import BASE, LOGITS, RECORD, RECORD_WIDTH, WRITTEN
from lamina.kernels.step_ends import LENGTHS as HEADER_LENGTHS


@triton.jit
def read_entry(table, out):
    """out [15]: the columns of an entry, in an order of the test's own."""
    tl.store(out, tl.load(table + K_STORE))
    tl.store(out + 1, tl.load(table + V_STORE))
    tl.store(out + 2, tl.load(table + K_SCALES))
    tl.store(out + 3, tl.load(table + V_SCALES))
    tl.store(out + 4, tl.load(table + K_HIGH))
    tl.store(out + 5, tl.load(table + V_HIGH))
    tl.store(out + 6, tl.load(table + SLOTS))
    tl.store(out + 7, tl.load(table + RING))
    tl.store(out + 8, tl.load(table + KEEP))
    tl.store(out + 9, tl.load(table + LENGTHS))
    tl.store(out + 10, tl.load(table + COUNTS))
    tl.store(out + 11, tl.load(table + PAGES))
    tl.store(out + 12, tl.load(table + PAGES_PER_ROW))
    tl.store(out + 13, tl.load(table + SCORES))
    tl.store(out + 14, tl.load(table + SCORE_ROOM))


@triton.jit
def read_header(header, out):
    """out [6]: the columns of a header, in an order of the test's own."""
    tl.store(out, tl.load(header + LOGITS))
    tl.store(out + 1, tl.load(header + RECORD_WIDTH))
    tl.store(out + 2, tl.load(header + RECORD))
    tl.store(out + 3, tl.load(header + BASE))
    tl.store(out + 4, tl.load(header + WRITTEN))
    tl.store(out + 5, tl.load(header + HEADER_LENGTHS))


@triton.jit
def read_rows(table, out, T: tl.constexpr):
    """out [B, 2]: the length and the count of each row."""
    length, count = row_of(table, tl.program_id(0), T)
    tl.store(out + 2 * tl.program_id(0), length)
    tl.store(out + 2 * tl.program_id(0) + 1, count)


def test_kernels_read_from_each_column_of_an_entry_what_the_host_wrote() -> None:
    order = [
        "k", "v", "k.scales", "v.scales", "k.high", "v.high", "slots", "ring", "keep", "lengths", "counts", "pages",
        "pages_per_row", "scores", "score_room",
    ]  # fmt: skip
    native = ["slack", "bases", "base", *(f"log.{i}" for i in range(5))]  # see tests/native/test_columns.py
    assert sorted(order + native) == sorted(ENTRY) and len(ENTRY) <= WIDTH and STORE is K_STORE
    values = {name: (1 << 40) + 17 * i for i, name in enumerate(order)}
    row, out = torch.tensor(entry_row(values)), torch.zeros(len(order), dtype=torch.int64)
    assert row.shape == (WIDTH,)
    read_entry[(1,)](row, out)
    assert out.tolist() == list(values.values())


def test_kernels_read_from_each_column_of_a_header_what_the_host_wrote() -> None:
    order = ["logits", "record_width", "record", "base", "written", "lengths"]
    assert sorted([*order, "slack"]) == sorted(HEADER)
    values = {name: (1 << 40) + 17 * i for i, name in enumerate([*order, "slack"])}
    out = torch.zeros(len(order), dtype=torch.int64)
    read_header[(1,)](torch.tensor(header_row(values)), out)
    assert out.tolist() == list(values.values())[:6]


@pytest.mark.parametrize("given", [None, [2, 0, 1]])
def test_a_row_has_its_length_and_count_and_all_new_tokens_without_counts(given: list[int] | None) -> None:
    counts = None if given is None else torch.tensor(given)
    lengths = torch.tensor([5, 0, 7])
    row = entry_row({"lengths": lengths.data_ptr(), "counts": 0 if counts is None else counts.data_ptr()})
    out = torch.zeros(3, 2, dtype=torch.int64)
    read_rows[(3,)](torch.tensor(row), out, T=4)
    assert out.T.tolist() == [[5, 0, 7], [4, 4, 4] if counts is None else counts.tolist()]


def test_a_name_that_is_no_column_is_refused() -> None:
    with pytest.raises(InputError, match="no column places; the columns are k, v, slots"):
        entry_row({"places": 1})
    with pytest.raises(InputError, match="a header without written, base"):
        header_row({"lengths": 1})
