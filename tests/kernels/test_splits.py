"""Merging of parts by the programs that made them: the same numbers whatever the order they arrive in."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.kernels.attention.online_softmax import TAIL, merge_splits
from lamina.kernels.attention.split_kv import COUNTERS, Division, assigned_split, bunch_for
from lamina.kernels.columns import entry_row

ROWS, VALUES = 3, 20


@triton.jit
def arriving(
    out, whole, parts, counters, made, order, used,
    ROWS: tl.constexpr, DV: tl.constexpr, TAIL: tl.constexpr, BUNCH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Group 0's programs, in `order`; made [programs, ROWS, DV + TAIL] is what each of them found."""
    split = tl.load(order + tl.program_id(1))
    n, d = tl.arange(0, 4), tl.arange(0, 32)
    at = made + (split * ROWS + n) * (DV + TAIL)
    inside = (n < ROWS)[:, None] & (d < DV)[None, :]
    mix = tl.load(at[:, None] + d[None, :], mask=inside, other=0.0)
    top, total = tl.load(at + DV, mask=n < ROWS, other=0.0), tl.load(at + DV + 1, mask=n < ROWS, other=0.0)
    if split < used:
        last, top, total, mix = merge_splits(
            parts, counters, top, total, mix, tl.program_id(0), 0, split, used, n, n, d,
            ROWS, DV, 4, 32, BUNCH, True, CHUNK,
        )  # fmt: skip
        if last:
            tl.atomic_add(whole, 1)
            tl.store(out + n[:, None] * DV + d[None, :], mix / total[:, None], mask=inside)


def merged(made: Tensor, order: Tensor, used: int, bunch: int, chunk: int) -> Tensor:
    most = len(made)
    out, whole = torch.zeros(ROWS, VALUES), torch.zeros(1, dtype=torch.int32)
    parts = torch.full((2 * most, ROWS, VALUES + TAIL.value), float("nan"))
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    arriving[(1, most)](
        out, whole, parts, counters, made, order, used, ROWS=ROWS, DV=VALUES, TAIL=TAIL.value, BUNCH=bunch, CHUNK=chunk
    )
    assert whole.item() == 1, "one program ends with the whole"
    assert not counters.any(), "every counter is zero again"
    return out


@pytest.mark.parametrize(("most", "used", "bunch", "chunk"), [(7, 7, 2, 2), (7, 5, 4, 1), (6, 2, 4, 4), (5, 1, 2, 1)])
def test_parts_merge_to_the_same_numbers_in_whatever_order_they_arrive(
    most: int, used: int, bunch: int, chunk: int
) -> None:
    torch.manual_seed(most)
    made = torch.randn(most, ROWS, VALUES + TAIL.value)
    made[..., VALUES] *= 20  # tops
    made[..., VALUES + 1] = made[..., VALUES + 1].abs() + 0.1  # totals
    shares = torch.exp2(made[:used, :, VALUES] - made[:used, :, VALUES].amax(0))[..., None].double()
    sums = (made[:used, :, VALUES + 1 : VALUES + 2] * shares).sum(0)
    expected = (made[:used, :, :VALUES] * shares).sum(0) / sums
    first = merged(made, torch.arange(most), used, bunch, chunk)
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-5)
    for _ in range(2):
        assert torch.equal(merged(made, torch.randperm(most), used, bunch, chunk), first)


def test_few_bytes_are_one_bunch_and_many_are_bunches_of_bunches() -> None:
    assert bunch_for(16, 4, 128) == 16  # llama: 34 KB
    assert bunch_for(66, 6, 128) == 8  # falcon-h1: 9 bunches
    assert bunch_for(66, 8, 256) == 8  # qwen3-next
    assert bunch_for(1, 64, 256) == 1


@triton.jit
def parting(found, table, rows, wanted, least, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """found [programs, 5]: row, split, used, base and each of every program that has a part."""
    row, split, used, base, each, _length, _count, _kept, _first, _many, _ring = assigned_split(
        table, rows, wanted, 1, 0, least, 1, ROWS, "full", BLOCK
    )
    if split < used:
        at = found + tl.program_id(1) * 5
        tl.store(at, row)
        tl.store(at + 1, split)
        tl.store(at + 2, used)
        tl.store(at + 3, base)
        tl.store(at + 4, each)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(1, 300), st.integers(1, 100_000)), min_size=1, max_size=9),
    absent=st.sets(st.integers(0, 8)),
    wanted=st.integers(1, 40),
    least=st.sampled_from([16, 64, 256]),
)
def test_every_token_is_in_one_part_and_no_part_is_without_a_program(
    lengths: list[int], absent: set[int], wanted: int, least: int
) -> None:
    rows, block = len(lengths), 16
    counts = torch.tensor([int(row not in absent) for row in range(rows)])
    kept = torch.tensor(lengths)
    table = torch.tensor(entry_row({"lengths": kept.data_ptr(), "counts": counts.data_ptr()}))
    items = Division.of(rows, 1, 4, 32, wanted, torch.empty(0)).items
    found = torch.full((items, 5), -1, dtype=torch.int32)
    parting[(1, items)](found, table, rows, wanted, least, ROWS=triton.next_power_of_2(rows), BLOCK=block)
    taken = [tuple(one) for one in found.tolist() if one[0] >= 0]
    assert sorted((row, split) for row, split, *_ in taken) == sorted(
        (row, split) for row in range(rows) for split in range(next(one[2] for one in taken if one[0] == row))
    )
    assert len({base + split for _, split, _, base, _ in taken}) == len(taken), "every part has an item of its own"
    for row, _, used, _, each in taken:
        seen = lengths[row] if counts[row] else 0
        assert (used - 1) * each < max(seen, 1) <= used * each
        assert used == 1 or each >= least // 2
