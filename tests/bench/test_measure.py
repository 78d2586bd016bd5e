from __future__ import annotations

import pytest
import torch

from lamina.bench.measure import DeviceRates, Peak, free_memory, limits, peak_of_process, seconds
from lamina.bench.read_kernel import read

CPU = torch.device("cpu")


def test_limits_are_measured() -> None:
    found = limits(CPU, torch.float32, nbytes=2**20)
    assert found.read > 0 and found.copy > 0 and found.matrix > 0
    assert found.read_by in ("sum", "dot", "amax")


def test_the_better_of_two_measurements_is_the_higher_of_each() -> None:
    assert DeviceRates(1, "sum", 1, 5, 2).better(DeviceRates(3, "dot", 2, 4, 1)) == DeviceRates(3, "dot", 2, 5, 2)


def test_seconds_times_the_work_and_memory_is_known_where_it_can_be() -> None:
    done = []
    assert seconds(lambda: done.append(1), CPU) >= 0 and done == [1]
    with Peak(CPU) as peak:
        pass
    assert peak.nbytes is None
    assert free_memory(CPU) > 0
    assert (peak_of_process(CPU) or 1) > 0


def test_the_read_kernel_reads_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as where Triton was imported: see conftest.py
    x = torch.rand(100_001)
    torch.testing.assert_close(read(x).sum(), x.sum())
