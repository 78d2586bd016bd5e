"""`verify` catches every planted fault and names the block that has it."""

from __future__ import annotations

import pytest
import torch

import lamina
from tests.checking.planted import FAULTS, RULE, Faulty, Sum, remembering
from tests.laws.toys import WIDTH, Attend, Highest, Recur, Toy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_blocks_without_a_fault_pass(dtype: torch.dtype) -> None:
    clean = [Faulty(lambda block, x, memory: x), Recur(RULE), remembering(Highest(), "peak", Sum(WIDTH))]
    report = lamina.verify(Toy(Attend(), *clean, Attend(), dtype=dtype), tries=1, length=20)
    assert report, str(report)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_and_its_block_is_named(name: str) -> None:
    planted = FAULTS[name]
    report = lamina.verify(planted.model(), tries=1, length=planted.length)
    assert not report.ok, str(report)
    assert report.first is not None
    assert report.first.where == "layer 1", str(report)
    assert {found.where for found in report.differences} == {"layer 1"}, str(report)
    broken = {found.law for found in report.differences}
    assert planted.laws <= broken, str(report)
    assert planted.said in str(report)
    assert "FAILED, first at layer 1" in str(report)


@pytest.mark.parametrize("name", ["rows are mixed", "looks ahead", "special case for one token", "dropout left on"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_planted_fault_is_caught_in_half_precision(name: str, dtype: torch.dtype) -> None:
    report = lamina.verify(FAULTS[name].model(dtype), tries=1, length=14)
    assert {found.where for found in report.differences} == {"layer 1"}, str(report)
    assert FAULTS[name].laws & {found.law for found in report.differences}, str(report)
