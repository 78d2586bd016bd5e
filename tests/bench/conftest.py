"""The benchmark is tested on the plain CPU path: interpreted kernels, which other tests turn on, have their own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.kernels.INTERPRETED", False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # for the processes that tests start
