"""Kernels are built in threads while a model is loaded; who needs them waits, and nobody else notices."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamina import kernels
from lamina.runtime import builders, prebuild
from lamina.runtime.builders import Builders, build_together, builds
from lamina.runtime.prebuild import KernelBuild
from tests.families.cases import FIRST, cases
from tests.kernels.runs import NEW, begin, decode_captured, decode_plain, tiny

pytestmark = pytest.mark.usefixtures("few_programs")

ARITHMETIC = ("llama4",)  # whose steps take it


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


def build(model: Any, monkeypatch: pytest.MonkeyPatch) -> Event:
    """Kernels are being built for this model until the event is set."""
    built = Event()
    monkeypatch.setattr(KernelBuild, "_build", lambda self, *given: built.wait(60))
    KernelBuild(lambda: model, torch.device("cpu")).register(model)
    return built


def test_the_first_token_is_told_before_kernels_are_there_and_a_captured_step_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = begin(tiny())
    run.model.__dict__.pop("_graphs", None)  # nothing is captured yet
    built, told = build(run.model, monkeypatch), []

    def tell(row: int, token: int, reason: object) -> None:
        told.append(built.is_set())
        if len(told) == run.rows:  # the first of every row: whatever runs next would wait for a minute
            assert run.model in builds
            built.set()

    run.on_token = tell
    assert decode_captured(run).tokens == decode_plain(begin(run.model)).tokens
    assert told == [False] * run.rows + [True] * (NEW - 1) * run.rows
    assert run.model not in builds


def test_a_captured_pass_waits_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    cache = model.new_cache(rows=1)
    built, read = build(model, monkeypatch), []
    assert model.generate([[1, 2]], 2).tokens  # plain passes do not
    one = model.graphs.pass_of(1, 1, cache)
    asking = Thread(target=lambda: read.append(one.read(cache, torch.tensor([[1]]))))
    asking.start()
    asking.join(0.2)
    assert asking.is_alive() and not read
    built.set()
    asking.join(60)
    assert read and model not in builds


LIGHTLY = """
import json, sys
import torch
from triton.runtime.jit import JITFunction
from lamina import models
from lamina.config import Config
from lamina.kernels.limits import CARDS, assumed
from lamina.loading import on_meta
from lamina.runtime.prebuild import build_kernels

JITFunction.run = lambda *given, **named: None
with assumed(CARDS[90]):
    for config in json.load(sys.stdin):
        build_kernels(on_meta(config, torch.bfloat16))
        assert models.family(config["model_type"]).build(Config(config)).fusion_plan.fusions
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""


def test_neither_building_kernels_nor_tracing_a_step_loads_the_compiler_of_pytorch() -> None:
    """Which takes seconds, and any arithmetic without numbers would load it: so first tokens come late."""
    families = [(family, cases(family)[name]) for family, name in FIRST if family not in ARITHMETIC]
    configs = json.dumps([make().to_dict() for _, make in families], default=str)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LIGHTLY]
    done = subprocess.run(command, env=environment, input=configs, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-3000:]


def test_nothing_is_collected_while_kernels_are_parsed_in_several_threads() -> None:
    seen: list[bool] = []
    with builders._uncollected:  # as if another thread were building too
        build_together(lambda: seen.append(gc.isenabled()))
        assert seen == [False] and not gc.isenabled()
    assert gc.isenabled()


def test_where_there_is_a_gpu_builders_make_kernels_ready_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        ready = False

        @property
        def run(self) -> None:
            self.ready = True

    with Builders() as pool:
        assert not pool.submit(Kernel).result().ready  # there is none
    now, loaded = [0], []

    def device(which: int) -> Any:
        loaded.append(which)
        return nullcontext()

    gpu = SimpleNamespace(is_available=lambda: True, current_device=lambda: now[0], device=device)
    monkeypatch.setattr(prebuild.torch, "cuda", gpu)
    with Builders() as pool:
        assert pool.submit(Kernel).result().ready
        now[0] = 1  # as it is while a kernel for tensors of that device is launched
        assert pool.submit(Kernel).result().ready
    assert loaded == [0, 1]


def test_kernels_are_built_for_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has a current device of its own: without a number "cuda" would be another one there."""
    second, built = SimpleNamespace(device=torch.device("cuda", 1)), []

    def device(which: torch.device) -> Any:
        built.append(which.index)
        return nullcontext()

    monkeypatch.setattr(prebuild.torch, "cuda", SimpleNamespace(device=device))
    monkeypatch.setattr(prebuild.torch, "empty", lambda *shape, **how: second)
    monkeypatch.setattr(prebuild.kernels, "why_not", lambda x: None)
    monkeypatch.setattr(prebuild, "build_kernels", lambda model: None)
    build = prebuild.start_build(lambda: None, torch.float32, torch.device("cuda"))
    assert build is not None
    build.thread.join(60)
    assert build.failed is None and built == [1]
