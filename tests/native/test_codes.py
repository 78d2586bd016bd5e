"""Codes put into order by the native kernel are those of the PyTorch reference, for every layout."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.checkpoint.quantized.code_order import StoredCodes, empty_codes, in_order, in_order_by_torch, use_kernel
from lamina.native import codes as native
from lamina.native import library
from lamina.native.codes import native_codes
from lamina.notices import notice

KINDS = [
    *(
        f"{place}, {bits} bits{order}"
        for place in ("along", "across")
        for bits in (4, 8)
        for order in ("", ", ordered")
    ),
    "awq",
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    library.library()


@pytest.fixture
def registered() -> Iterator[None]:
    before = use_kernel(native_codes)
    yield
    use_kernel(before)


def words(rows: int, columns: int, cut: bool, noise: torch.Generator) -> Tensor:
    """Random words [rows, columns]; cut: out of the middle of a larger matrix."""
    found = torch.randint(-(2**31), 2**31, (rows + 2 * cut, columns + 5 * cut), dtype=torch.int32, generator=noise)
    return found[1:-1, 2:-3] if cut else found


def stored(kind: str, out: int, width: int, cut: bool, signed: bool, seed: int) -> StoredCodes:
    noise = torch.Generator().manual_seed(seed)
    if kind == "awq":
        return StoredCodes(words(width, out // 8, cut, noise), 4, width, awq=True)
    bits = 8 if "8 bits" in kind else 4
    order = torch.randperm(width, generator=noise).int() if "ordered" in kind else None
    each = width * bits // 32
    found = words(out, each, cut, noise) if "along" in kind else words(each, out, cut, noise).T
    return StoredCodes(found, bits, width, order, signed=signed and bits == 8)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(
    eighths=st.integers(1, 40), groups=st.integers(1, 20), cut=st.booleans(), signed=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_the_kernel_equals_the_reference(kind, eighths, groups, cut, signed, seed):
    out = 8 * eighths if kind == "awq" else 8 * eighths - seed % 8
    codes = stored(kind, out, 32 * groups, cut, signed, seed)
    found = native_codes(codes, empty_codes)
    assert found is not None and found.shape == codes.shape == (out, 32 * groups * codes.bits // 8)
    assert torch.equal(found, in_order_by_torch(codes))


@pytest.mark.parametrize("kind", KINDS)
def test_large_matrices_are_shared_by_threads(kind):
    codes = stored(kind, 1096, 1184, False, True, 0)
    assert codes.words.numel() * 4 > native.LEAST_BYTES
    assert torch.equal(native_codes(codes, empty_codes), in_order_by_torch(codes))


def test_rows_of_bytes_need_not_be_whole_words():
    codes = StoredCodes(words(7, 9, True, torch.Generator().manual_seed(0)), 8, 33, signed=True)
    assert torch.equal(native_codes(codes, empty_codes), in_order_by_torch(codes))


def test_words_with_gaps_in_both_directions_are_copied_first():
    whole = words(30, 48, False, torch.Generator().manual_seed(0))
    for codes in (StoredCodes(whole[::2, ::3], 4, 128), StoredCodes(whole[:, ::3].T[:, :28], 4, 224)):
        assert torch.equal(native_codes(codes, empty_codes), in_order_by_torch(codes))


def test_codes_are_written_to_the_memory_that_is_given(registered):
    codes, memory = stored("awq", 16, 64, False, False, 0), torch.zeros(20, 32, dtype=torch.uint8)
    found = in_order(codes, lambda rows, width: memory[3 : 3 + rows])
    assert found.data_ptr() == memory[3].data_ptr() and torch.equal(found, in_order_by_torch(codes))
    assert not memory[:3].any() and not memory[19:].any()


@pytest.mark.parametrize(
    "codes",
    [
        StoredCodes(torch.zeros(8, 4, dtype=torch.int32, device="meta"), 4, 32),
        StoredCodes(torch.zeros(8, 4, dtype=torch.int64), 4, 32),
        StoredCodes(torch.zeros(8, 3, dtype=torch.int32), 4, 32),  # fewer words than values
        StoredCodes(torch.zeros(33, 1, dtype=torch.int32), 4, 32, awq=True),
        StoredCodes(torch.zeros(8, 4, dtype=torch.int32), 4, 32, torch.full((32,), 32)),  # there is no column 32
        StoredCodes(torch.zeros(8, 4, dtype=torch.int32), 4, 32, torch.arange(31)),
    ],
)
def test_what_the_kernel_does_not_read_is_left_to_pytorch(codes):
    assert native_codes(codes, empty_codes) is None


def test_the_reason_for_pytorch_is_logged(monkeypatch, caplog, registered):
    monkeypatch.setattr(native, "why_not_at_once", lambda: "there is no compiler here")
    codes = stored("awq", 16, 64, False, False, 0)
    notice.cache_clear()
    with caplog.at_level(logging.INFO, "lamina"):
        assert torch.equal(in_order(codes), in_order_by_torch(codes))
    assert "codes of quantized weights are put into order by PyTorch, since there is no compiler here" in caplog.text


def test_loading_does_not_wait_for_the_compiler(monkeypatch):
    library._was_built.cache_clear()
    monkeypatch.setattr(library, "is_built", lambda: False)
    monkeypatch.setattr(library, "load", lambda: pytest.fail("compiles"))
    assert library.why_not_at_once() is None  # it is loaded
    loaded = library._library
    monkeypatch.setattr(
        library, "_library", type("Unloaded", (), {"cache_info": lambda: loaded.cache_info()._replace(currsize=0)})
    )
    assert "not compiled yet" in library.why_not_at_once()
    library._was_built.cache_clear()
