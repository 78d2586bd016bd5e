"""The guard of interpreted kernels finds what it is there for."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels import guard


@pytest.fixture(autouse=True)
def every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kernels.guard.EVERY", 1)


@triton.jit
def copying(x, y, N, SIZE: tl.constexpr, WRITES: tl.constexpr):
    i = tl.arange(0, SIZE)
    numbers = tl.load(x + i, mask=i < N, other=0.0)
    tl.store(y + i, numbers, mask=i < (N if WRITES else 0))


def test_addresses_in_tensors_pass_and_masked_ones_are_nobodys_business() -> None:
    x, y = torch.rand(12), torch.zeros(12)
    copying[(1,)](x, y, 12, SIZE=1 << 20, WRITES=True)
    assert torch.equal(x, y)


@pytest.mark.parametrize("WRITES", [False, True])
def test_an_address_that_is_in_no_tensor_is_an_error(WRITES: bool) -> None:
    many = 1 << 19  # of float32: a tensor of so many has memory of its own, with nobody behind it
    x, y = torch.rand(many if WRITES else many // 2), torch.zeros(many // 2)
    with pytest.raises(InterpreterError, match="writing" if WRITES else "reading"):
        copying[(1,)](x, y, many, SIZE=many, WRITES=WRITES)


def test_tensors_without_memory_are_passed_over() -> None:
    kept: list[torch.Tensor] = []
    torch.func.vmap(lambda x: kept.append(x) or x)(torch.zeros(2))
    with pytest.raises(NotImplementedError):
        guard.memory_of(kept[0])
    guard.Guard()._look()
