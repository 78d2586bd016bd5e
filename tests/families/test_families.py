"""Every decoder-only family gives transformers' logits: in one pass, in pieces, ragged, padded, rewound, packed."""

from __future__ import annotations

import random

import pytest
import torch

from lamina.generation.prompt import from_padded
from tests.families.cases import ALL, FIRST
from tests.families.harness import (
    TOLERANCE,
    pair,
    random_cuts,
    random_ids,
    relative,
    run_in_pieces,
    run_ragged,
    truth,
)  # fmt: skip

LENGTH = 40  # windows and chunks of the cases are at most 8 to 13: three times that and more

HISTORIES = {case: 20 if case in FIRST else 8 for case in ALL}  # what other cases change is not how a sequence is cut

every_case = pytest.mark.parametrize(("family", "name"), ALL, ids=[f"{f}-{n}" for f, n in ALL])


@every_case
def test_one_pass_without_a_cache_gives_the_same_logits(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    ids = random_ids(2, LENGTH, ours.vocab)
    assert relative(ours(ids), truth(theirs, ids)) < TOLERANCE


@every_case
def test_random_cuts_give_the_same_logits(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    ids = random_ids(2, LENGTH, ours.vocab, seed=1)
    expected = truth(theirs, ids)
    for seed in range(HISTORIES[family, name]):
        rng = random.Random(seed)
        cache = ours.new_cache(rows=2, capacity=rng.choice([None, LENGTH, 2 * LENGTH]), slack=rng.choice([0, 2, 5]))
        found = run_in_pieces(ours, ids, cache, random_cuts(LENGTH, rng))
        assert relative(found, expected) < TOLERANCE, seed


@every_case
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_ragged_rows_equal_themselves_alone(family: str, name: str, rows: int) -> None:
    theirs, ours = pair(family, name)
    rng = random.Random(rows)
    sequences = [random_ids(1, rng.randint(1, LENGTH), ours.vocab, seed=r)[0] for r in range(rows)]
    cache = ours.new_cache(rows=rows, capacity=rng.choice([None, LENGTH]), slack=rng.choice([0, 3]))
    found = run_ragged(ours, sequences, cache, rng)
    for row, logits in zip(sequences, found, strict=True):
        assert relative(logits[None], truth(theirs, row[None])) < TOLERANCE


@every_case
def test_a_left_padded_batch_with_its_mask_equals_each_row_alone(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    ids = random_ids(3, 21, ours.vocab)
    mask = torch.ones_like(ids)
    for row, padding in enumerate([0, 4, 17]):
        mask[row, :padding] = 0
    prompt = from_padded(ids, mask)
    cache = ours.new_cache(rows=3)
    last = ours(prompt.ids, cache=cache, counts=prompt.counts, logits="last")
    for row in range(3):
        expected = truth(theirs, ids[row : row + 1, mask[row].bool()])[:, -1]
        assert relative(last[row : row + 1], expected) < TOLERANCE


@every_case
def test_rewinding_in_the_middle_leaves_no_trace(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    ids, other = random_ids(2, LENGTH, ours.vocab), random_ids(2, LENGTH, ours.vocab, seed=9)
    expected = truth(theirs, ids)
    for seed in range(HISTORIES[family, name] // 3):
        rng = random.Random(seed)
        cache = ours.new_cache(rows=2, capacity=rng.choice([None, 2 * LENGTH]), slack=4)
        outs = []
        for piece in ids.split(random_cuts(LENGTH, rng), dim=1):
            for stray in [rng.randint(1, 4)] * rng.randint(0, 2):
                width = [1] * stray if rng.random() < 0.5 else [stray]
                run_in_pieces(ours, other[:, :stray], cache, width)
                cache.rewind(stray).poison()
            outs.append(ours(piece, cache=cache))
        assert relative(torch.cat(outs, dim=1), expected) < TOLERANCE, seed


@every_case
def test_packed_sequences_equal_each_of_them_alone(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    ids = random_ids(1, LENGTH, ours.vocab, seed=3)
    segments = torch.tensor([[0] * 5 + [1] * 1 + [2] * 20 + [0] * (LENGTH - 26)])
    found = ours(ids, segments=segments)
    expected = torch.cat([truth(theirs, part) for part in ids.split([5, 1, 20, LENGTH - 26], dim=1)], dim=1)
    assert relative(found, expected) < TOLERANCE
