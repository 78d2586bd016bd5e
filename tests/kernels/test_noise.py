"""The hash inside kernels against the one in PyTorch, bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from lamina.kernels import noise as kernel
from lamina.sampling.noise import BELOW_ONE, gumbel, noise


@triton.jit
def fill(seeds, rows, positions, stream, out, VOCAB, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    u = kernel.uniform(tl.load(seeds + row), tl.load(rows + row), tl.load(positions + row), stream, at)
    tl.store(out + row * VOCAB + at, u, mask=at < VOCAB)


@triton.jit
def fill_at_once(seed, rows, positions, stream, out, VOCAB, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    u = kernel.uniform(seed, tl.load(rows + row), tl.load(positions + row), stream, at)
    tl.store(out + row * VOCAB + at, u, mask=at < VOCAB)


@triton.jit
def turn(u, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, kernel.gumbel(tl.load(u + at, mask=at < N, other=0.5)), mask=at < N)


@pytest.mark.parametrize("vocab", [1, 50, 300])
@pytest.mark.parametrize("stream", [0, 1, 3])
def test_a_program_for_each_row_gives_the_same_bits(vocab: int, stream: int) -> None:
    seeds = torch.tensor([0, 1, -1, 2**40 + 17])
    rows, positions = torch.tensor([0, 5, 2**32 - 1, 2**31]), torch.tensor([9, 0, 131071, 2**31 - 1])
    out = torch.zeros(4, vocab)
    fill[(4, triton.cdiv(vocab, 64))](seeds, rows, positions, stream, out, vocab, 64)
    assert torch.equal(out, noise(seeds, rows, positions, vocab, stream))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", [0, 1, 2**33 + 1])
def test_one_program_for_several_rows_gives_the_same_bits(dtype: torch.dtype, seed: int) -> None:
    rows, positions = torch.arange(8, dtype=dtype), torch.arange(100, 108, dtype=dtype)
    out = torch.zeros(8, 30)
    fill_at_once[(1,)](seed, rows, positions, 2, out, 30, 8, 32)
    assert torch.equal(out, noise(seed, rows, positions, 30, 2))


def test_gumbel_noise_is_that_of_pytorch_to_the_last_bits() -> None:
    u = torch.cat([noise(3, torch.tensor([0]), torch.tensor([0]), 4000)[0], 2.0 ** -torch.arange(1.0, 34)])
    u = torch.cat([u, torch.tensor([BELOW_ONE])])
    out = torch.zeros_like(u)
    turn[(triton.cdiv(len(u), 512),)](u, out, len(u), 512)
    torch.testing.assert_close(out, gumbel(u), rtol=2e-6, atol=2e-6)
