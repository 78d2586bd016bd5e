"""Noise by hashing: the same bits everywhere, uniform, independent, and draws that follow the softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lamina.sampling.noise import BELOW_ONE, FIRST, LEFT, RIGHT, SECOND, draw, gumbel, noise
from tests.generation.statistics import chance

WORD = (1 << 32) - 1


def mixed(x: int) -> int:
    x ^= x >> 16
    x = x * FIRST & WORD
    x ^= x >> 15
    x = x * SECOND & WORD
    return x ^ x >> 15


def defined(seed: int, row: int, position: int, vocab: int, stream: int) -> list[float]:
    """The hash in plain integers."""
    left, right = LEFT, RIGHT
    for word in (seed, seed >> 32, row, position, stream):
        left, right = mixed(left + word & WORD), mixed(right + word & WORD)
    hashed = (mixed(mixed(id + left & WORD) + right & WORD) for id in range(vocab))
    return [float(min(np.float32(h) * np.float32(2**-32) + np.float32(2**-33), np.float32(BELOW_ONE))) for h in hashed]


@pytest.mark.parametrize("vocab", [1, 7, 64, 501])
def test_noise_is_the_hash_in_plain_integers_bit_for_bit(vocab: int) -> None:
    seeds = [0, 1, 2**31, 2**40 + 17, 2**63 - 1, -1]
    rows, positions = [0, 1, 2**32 - 1, 2**31 - 1, 2**31, 2], [0, 3, 2**20, 1, 131071, 8]
    for stream in (0, 1, 2**31):
        found = noise(torch.tensor(seeds), torch.tensor(rows), torch.tensor(positions), vocab, stream)
        expected = [defined(*given, vocab, stream) for given in zip(seeds, rows, positions, strict=True)]
        assert found.dtype == torch.float32 and found.tolist() == expected


def test_one_seed_for_all_rows_may_have_any_number_of_bits() -> None:
    rows = torch.arange(3)
    for seed in (7, 2**63 + 5, 2**64 - 1, -3):
        each = torch.tensor([seed - 2**64 if seed >= 2**63 else seed] * 3)
        assert torch.equal(noise(seed, rows, rows, 11), noise(each, rows, rows, 11))
    assert not torch.equal(noise(1, rows, rows, 11), noise(1 + 2**32, rows, rows, 11))


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    scores = torch.randn(6, 90, generator=torch.Generator().manual_seed(0))
    rows, positions = torch.tensor([4, 0, 2, 9, 1, 3]), torch.tensor([8, 100, 0, 5, 5, 7])
    together = draw(scores, 3, rows, positions)
    order = torch.tensor([5, 2, 0, 1])
    assert torch.equal(draw(scores[order], 3, rows[order], positions[order]), together[order])
    alone = [draw(scores[r : r + 1], 3, rows[r : r + 1], positions[r : r + 1]) for r in range(6)]
    assert torch.equal(torch.cat(alone), together)


def test_numbers_lie_between_zero_and_one_and_fill_it_evenly() -> None:
    u = noise(5, torch.arange(64), torch.arange(64), 4096)
    assert 0 < u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1
    assert chance((u.flatten() * 256).long().bincount(minlength=256)) > 1e-3
    assert torch.isfinite(gumbel(torch.tensor([2.0**-33, 0.5, BELOW_ONE]))).all()
    assert abs(gumbel(u).mean() - 0.5772) < 0.01 and abs(gumbel(u).var() - math.pi**2 / 6) < 0.02


@pytest.mark.parametrize("which", ["seed", "seed's upper half", "row", "position", "stream", "id"])
def test_neighbours_are_independent(which: str) -> None:
    n = 2000
    a, b = torch.arange(n), torch.arange(n) // 7
    first = noise(11, a, b, 33)
    second = {
        "seed": lambda: noise(12, a, b, 33),
        "seed's upper half": lambda: noise(11 + 2**32, a, b, 33),
        "row": lambda: noise(11, a + 1, b, 33),
        "position": lambda: noise(11, a, b + 1, 33),
        "stream": lambda: noise(11, a, b, 33, stream=1),
        "id": lambda: first.roll(1, dims=1),
    }[which]()
    pairs = (first * 16).long() * 16 + (second * 16).long()
    assert chance(pairs.flatten().bincount(minlength=256)) > 1e-3
    assert chance(torch.stack([first > second, first < second]).sum(dim=(1, 2))) > 1e-3


def test_swapping_row_and_position_changes_everything() -> None:
    a, b = torch.tensor([3]), torch.tensor([8])
    assert not (noise(0, a, b, 50) == noise(0, b, a, 50)).any()


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_draws_follow_the_softmax_over_positions_and_over_rows(spread: float) -> None:
    scores = spread * torch.randn(40, generator=torch.Generator().manual_seed(1))
    scores[[3, 17]] = -torch.inf
    n, zero = 40_000, torch.zeros(40_000, dtype=torch.int64)
    count = torch.arange(n)
    for rows, positions in ((zero, count), (count, zero), (count % 200, count // 200)):
        drawn = draw(scores.expand(n, 40), 123, rows, positions).bincount(minlength=40)
        assert drawn[3] == drawn[17] == 0
        assert chance(drawn, scores.softmax(-1)) > 1e-3


def test_rare_ids_are_drawn_as_often_as_they_should() -> None:
    """A token a million times less likely than another is not lost to the grain of the numbers."""
    n = 2_000_000
    scores = torch.tensor([0.0, math.log(4e-6)]).expand(n, 2)
    rare = int(draw(scores, 2, torch.zeros(n, dtype=torch.int64), torch.arange(n)).sum())
    assert 1 <= rare <= 22  # 8 expected


def test_the_largest_of_scores_and_noise_are_a_draw_without_replacement() -> None:
    scores = torch.tensor([1.0, 0.0, -1.0, 0.5])
    n = 30_000
    both = (scores + gumbel(noise(9, torch.zeros(n, dtype=torch.int64), torch.arange(n), 4))).topk(2).indices
    p = scores.softmax(-1)
    expected = torch.tensor([[0.0 if a == b else float(p[a] * p[b] / (1 - p[a])) for b in range(4)] for a in range(4)])
    assert chance((both[:, 0] * 4 + both[:, 1]).bincount(minlength=16), expected.flatten()) > 1e-3
