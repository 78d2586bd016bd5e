"""Formats: the bytes mean what formats.py says they mean, read here by hand, and errors stay within the bound."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.cache.codec.bitpack import WIDTHS, high_bytes, low_bytes, pack, unpack
from lamina.cache.codec.formats import Field, FieldFormat, Float8, Grouped, float8_codes, float8_values, hadamard
from lamina.tracing import portable_operations

CPU = torch.device("cpu")
DIMS = [1, 3, 8, 31, 32, 33, 40, 64, 100, 128]


def formats(dim: int, dtype: torch.dtype = torch.float64, key_mean: Tensor | None = None) -> list[FieldFormat]:
    fields = [Field(dim, dtype, CPU, rotate, key_mean) for rotate in (False, True)]
    return [*(Grouped(field, bits) for bits in WIDTHS for field in fields), Float8(fields[0])]


def code_by_hand(low: list[int], high: list[int], at: int, size: int, bits: int) -> int:
    """Number `at` of a group of that size."""
    if bits == 8:
        return low[at]
    half = math.ceil(size / 2)
    code = low[at] & 15 if at < half else low[at - half] >> 4
    plane = math.ceil(size / 8)
    for i in range(bits - 4):
        code |= (high[i * plane + at // 8] >> at % 8 & 1) << 4 + i
    return code


def vector_by_hand(parts: dict[str, list], dim: int, bits: int, rotated: bool) -> list[float]:
    numbers: list[float] = []
    low, high, scales = parts["codes"], parts.get("high", []), parts["scales"]
    while len(numbers) < dim:
        size, group = min(32, dim - len(numbers)), len(numbers) // 32
        a, b = group * low_bytes(32, bits), group * high_bytes(32, bits)
        scale, offset = scales[2 * group : 2 * group + 2]
        found = [scale * code_by_hand(low[a:], high[b:], at, size, bits) + offset for at in range(size)]
        if rotated and size == 32:
            signs = [[(-1) ** (i & j).bit_count() for i in range(32)] for j in range(32)]
            found = [sum(s * x for s, x in zip(line, found, strict=True)) / math.sqrt(32) for line in signs]
        numbers += found
    return numbers


@pytest.mark.parametrize("dim", DIMS)
def test_bytes_read_by_hand_as_the_format_says_are_what_decode_gives(dim: int) -> None:
    x = torch.randn(2, dim, dtype=torch.float64)
    for chosen in formats(dim):
        if isinstance(chosen, Grouped):
            parts = chosen.encode(x)
            found = chosen.decode(parts)
            for row in range(2):
                kept = {name: part[row].tolist() for name, part in parts.items()}
                by_hand = vector_by_hand(kept, dim, chosen.bits, chosen.rotation is not None)
                assert found[row].tolist() == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("numbers", [1, 2, 7, 8, 9, 31, 32])
def test_packing_loses_nothing_and_takes_the_bytes_it_says(bits: int, numbers: int) -> None:
    codes = torch.randint(2**bits, (3, 2, numbers), dtype=torch.uint8)
    low, high = pack(codes, bits)
    assert (low.shape[-1], high.shape[-1]) == (low_bytes(numbers, bits), high_bytes(numbers, bits))
    assert torch.equal(unpack(low, high, numbers, bits), codes)


@given(
    dim=st.sampled_from(DIMS),
    size=st.sampled_from([1e-7, 1e-4, 0.01, 1.0, 300.0, 1500.0]),
    shift=st.sampled_from([0.0, 1.0, 30.0]),
    has_mean=st.booleans(),
    double=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_what_comes_back_is_within_the_bound(
    dim: int, size: float, shift: float, has_mean: bool, double: bool, seed: int
) -> None:
    draw, dtype = torch.Generator().manual_seed(seed), torch.float64 if double else torch.float32
    x = torch.randn(6, 2, 5, dim, generator=draw, dtype=dtype)
    x[0, 0] = 0
    x[1, :, :, 0] *= 20
    x[2] = x[2, :, :, :1]
    x = (x + shift) * size / (1 + shift)
    mean = torch.randn(2, 1, dim, generator=draw, dtype=dtype) * size if has_mean else None
    most = x.norm(dim=-1) + (0 if mean is None else mean.norm(dim=-1))
    for chosen in formats(dim, dtype, mean):
        parts = chosen.encode(x)
        assert {name: (part.shape[-1], part.dtype) for name, part in parts.items()} == chosen.parts
        error = (chosen.decode(parts) - x).norm(dim=-1)
        assert (error <= chosen.bound(x) + 8 * torch.finfo(dtype).eps * most).all()


@pytest.mark.parametrize("outlier", [0, 12])
def test_errors_are_as_small_as_the_bits_allow_even_beside_a_number_that_is_large(outlier: float) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 5] += outlier
    most = {8: 0.006, 6: 0.024, 5: 0.05, 4: 0.1, "fp8": 0.03}
    for chosen in formats(64):
        share = (chosen.decode(chosen.encode(x)) - x).norm(dim=-1) / x.norm(dim=-1)
        if outlier == 0 or not isinstance(chosen, Grouped) or chosen.rotation is not None:
            assert share.mean() < most[getattr(chosen, "bits", "fp8")]


def test_a_token_is_written_alone() -> None:
    x = torch.randn(3, 2, 7, 72)
    for chosen in formats(72, torch.float32):
        together = chosen.encode(x)
        for t in range(7):
            for name, part in chosen.encode(x[:, :, t : t + 1]).items():
                assert torch.equal(part, together[name][:, :, t : t + 1])


def test_zeros_come_back_as_zeros_and_what_is_no_number_as_none() -> None:
    for chosen in formats(40, torch.float32):
        assert torch.equal(chosen.decode(chosen.encode(torch.zeros(2, 40))), torch.zeros(2, 40))
        bad = torch.zeros(2, 40)
        bad[1, 3] = float("nan")
        found = chosen.decode(chosen.encode(bad))
        assert torch.equal(found[0], torch.zeros(40)) and found[1, 3].isnan()


def test_in_bfloat16_numbers_come_back_in_bfloat16() -> None:
    x = torch.randn(4, 64).bfloat16()
    for chosen in formats(64, torch.bfloat16):
        found = chosen.decode(chosen.encode(x))
        assert found.dtype == torch.bfloat16
        error = (found.float() - x.float()).norm(dim=-1)
        assert (error <= chosen.bound(x) + 2**-8 * x.float().norm(dim=-1)).all()


def test_the_hadamard_matrix_is_its_own_inverse() -> None:
    matrix = hadamard(torch.float64, CPU)
    torch.testing.assert_close(matrix @ matrix, torch.eye(32, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("dim", DIMS)
def test_in_arithmetic_alone_the_same_bytes_are_written_and_read(dim: int) -> None:
    x = torch.randn(50, dim) * torch.logspace(-6, 4, 50)[:, None]
    for chosen in formats(dim, torch.float32):
        parts = chosen.encode(x)
        with portable_operations():
            assert {name: part.tolist() for name, part in chosen.encode(x).items()} == {
                name: part.tolist() for name, part in parts.items()
            }
            found = chosen.decode(parts)
        assert torch.equal(found, chosen.decode(parts))


def test_every_float8_and_every_tie_between_two_is_rounded_as_pytorch_does() -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)  # without NaN
    values = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(float8_values(codes), values)
    ordered = values.sort().values
    ties = (ordered[1:] + ordered[:-1]) / 2
    x = torch.cat([values, ties, *(torch.nextafter(one, one + way) for one in (values, ties) for way in (1, -1))])
    x = x.clamp(-448, 448)
    assert torch.equal(float8_values(float8_codes(x)), x.to(torch.float8_e4m3fn).float())
