"""Kernels are built in threads while a model is loaded; who needs them waits, and nobody else notices."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamina import kernels
from lamina.runtime import rehearse
from lamina.runtime.rehearse import Builders, Rehearsal
from tests.families.cases import FIRST
from tests.families.harness import pair


def small() -> Any:
    return pair("llama", dict(FIRST)["llama"])[1]


def test_kernels_are_in_use_in_the_thread_that_says_so() -> None:
    seen: list[bool] = []
    with kernels.in_use():
        with kernels.in_use():
            assert kernels.on()
        assert kernels.on()
        other = Thread(target=lambda: seen.append(kernels.on()))
        other.start()
        other.join()
    assert seen == [False] and not kernels.on()


def test_a_model_answers_before_its_kernels_are_there_and_a_captured_step_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, built = small(), Event()
    monkeypatch.setattr(Rehearsal, "_build", lambda self, *given: built.wait(60))
    Rehearsal({}, torch.float32, torch.device("cpu")).serves(model)
    assert model.generate([[1, 2]], 2).tokens  # plain passes
    made: list[Any] = []
    asking = Thread(target=lambda: made.append(model.graphs.pass_of(1, 1)))
    asking.start()
    asking.join(0.2)
    assert asking.is_alive() and not made
    built.set()
    asking.join(60)
    assert made and model not in rehearse._under_way
    model.graphs.pass_of(1, 2)  # waits for nothing


def test_where_there_is_a_gpu_builders_make_kernels_ready_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        ready = False

        @property
        def run(self) -> None:
            self.ready = True

    with Builders() as pool:
        assert not pool.submit(Kernel).result().ready  # there is none
    gpu = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0, device=lambda which: nullcontext())
    monkeypatch.setattr(rehearse.torch, "cuda", gpu)
    with Builders() as pool:
        assert pool.submit(Kernel).result().ready
