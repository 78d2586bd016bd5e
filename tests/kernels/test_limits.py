"""Configurations follow the limits of the device that tensors are on, and launches go there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import next_power_of_2

from lamina.errors import InputError
from lamina.kernels import device_guard as current
from lamina.kernels import eligibility as eligible
from lamina.kernels import launch, limits, workspace
from lamina.kernels.attention import decode as attend
from lamina.kernels.attention import decode_fused as token
from lamina.kernels.attention import mla_project as absorb
from lamina.kernels.attention.mla import plan_for, shape_for
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.gemm.product import Tiles, choose
from lamina.kernels.limits import CARDS, INTERPRETER, KIB, assumed, fitted, limits_of, smaller

BF16, F32 = torch.bfloat16, torch.float32


class Gpus:
    """Two GPUs, as far as they are asked: an H200, which is the current one, and an RTX 3090."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.now = 0

    def get_device_properties(self, index: int) -> Any:
        self.asked.append(index)
        card = CARDS[(90, 86)[index]]
        return SimpleNamespace(
            major=card.capability[0], minor=card.capability[1], multi_processor_count=card.multiprocessors,
            shared_memory_per_block_optin=card.shared,
        )  # fmt: skip

    def current_device(self) -> int:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        return self.now == 1

    @contextmanager
    def device(self, which: torch.device) -> Iterator[None]:
        before, self.now = self.now, which.index
        try:
            yield
        finally:
            self.now = before


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    two = Gpus()
    for name in ("get_device_properties", "current_device", "device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(two, name))
    monkeypatch.setattr(limits, "INTERPRETED", False)
    limits._queried.cache_clear()
    yield two
    limits._queried.cache_clear()


class Launched:
    """A kernel that notes how it is run."""

    def __init__(self, gpus: Gpus | None = None) -> None:
        self.gpus = gpus
        self.runs: list[dict[str, Any]] = []

    def run(self, *args: Any, **named: Any) -> None:
        self.runs.append(named | {"device": None if self.gpus is None else self.gpus.now})


def on(index: int) -> Any:
    return SimpleNamespace(device=torch.device("cuda", index))


# -- devices ---------------------------------------------------------------------------------------------------------


def test_limits_are_those_of_the_tensors_device_asked_once(gpus: Gpus) -> None:
    for _ in range(2):
        assert limits_of(torch.device("cuda", 1)) == CARDS[86]
        assert limits_of(torch.device("cuda", 0)) == CARDS[90]
    assert gpus.asked == [1, 0]
    gpus.now = 1
    assert limits_of(torch.device("meta")) == CARDS[86]  # kernels without tensors are for the current one


def test_a_launch_goes_to_the_device_of_its_tensors_in_the_way_that_one_can(gpus: Gpus) -> None:
    kernel = Launched(gpus)
    for index in (0, 1, 0):
        launch.launch(kernel, (1,), on(index), num_warps=4)
        assert gpus.now == 0
    assert [run["device"] for run in kernel.runs] == [0, 1, 0]
    assert [run["PDL"] for run in kernel.runs] == [True, False, True]
    assert [run.get("launch_pdl", False) for run in kernel.runs] == [True, False, True]


def test_the_device_is_the_old_one_again_where_a_launch_fails(gpus: Gpus) -> None:
    def fail(*args: Any, **named: Any) -> None:
        raise RuntimeError(f"on {gpus.now}")

    with pytest.raises(RuntimeError, match="on 1"):
        launch.launch(SimpleNamespace(run=fail), (1,), on(1))
    assert gpus.now == 0


def test_whether_a_graph_is_captured_is_asked_of_the_device_that_memory_is_for(gpus: Gpus) -> None:
    assert current.is_capturing(torch.device("cuda", 1)) and not current.is_capturing(torch.device("cuda", 0))
    assert not current.is_capturing(torch.device("cpu"))
    with pytest.raises(Exception, match="cannot be made while a graph is captured"):
        _ = workspace.Workspace(torch.device("cuda", 1)).scratch


def test_the_forms_of_products_are_chosen_for_the_device_of_the_vectors(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lamina.kernels.gemm import product

    chosen: list[Any] = []
    monkeypatch.setattr(product, "choose", lambda *given: chosen.append(given[-1]) or Tiles())
    monkeypatch.setattr(product, "launch", lambda *given, **named: None)
    monkeypatch.setattr(product, "limits_of", lambda device: CARDS[86] if device.type == "meta" else CARDS[90])
    x, weight = (torch.empty(n, 64, dtype=BF16, device="meta") for n in (4, 128))
    product.product(x, weight)
    assert chosen == [CARDS[86]]


# -- building --------------------------------------------------------------------------------------------------------


def test_while_building_a_launch_only_builds_in_this_thread_and_also_inside_another() -> None:
    kernel, started, done = Launched(), Barrier(2), Barrier(2)

    def beside() -> None:
        started.wait(60)
        launch.launch(kernel, (1,), torch.empty(0), who="beside")
        done.wait(60)

    thread = Thread(target=beside)
    thread.start()
    with launch.build_only():
        with launch.build_only():
            launch.launch(kernel, (1,), torch.empty(0), who="inner")
        launch.launch(kernel, (1,), torch.empty(0), who="outer")
        started.wait(60)
        done.wait(60)
    thread.join()
    launch.launch(kernel, (1,), torch.empty(0), who="after")
    assert {run["who"]: run["warmup"] for run in kernel.runs} == {
        "inner": True, "outer": True, "beside": False, "after": False,
    }  # fmt: skip


def test_tritons_own_way_to_run_a_kernel_is_never_replaced() -> None:
    from triton.runtime.jit import JITFunction

    from lamina.runtime.builders import build_together

    before, during = JITFunction.run, []
    threads = [Thread(target=build_together, args=(lambda: during.append(JITFunction.run),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert JITFunction.run is before and during == [before] * 4


# -- shapes ----------------------------------------------------------------------------------------------------------


def test_fewer_stages_come_before_smaller_blocks_and_three_stages_before_two() -> None:
    found = [(one.block, one.stages) for one in smaller(Tiling(64, 4, 4), least=32)]
    assert found == [(64, 4), (64, 3), (32, 4), (32, 3), (64, 2), (32, 2)]
    assert [(one.block, one.stages) for one in smaller(Tiling(32, 8, 2))] == [(32, 2), (16, 2)]
    assert [one.block for one in smaller(Tiling(8, 4, 2))] == [8]  # smaller than the least: as it is


def test_where_nothing_fits_the_error_names_the_need_and_the_room() -> None:
    with pytest.raises(InputError, match=r"needs 2048 bytes of shared memory or more, as .*, and the device has 1000"):
        fitted(smaller(Tiling(16, 4, 2)), lambda one: 64 * one.block * one.stages, 1000)


def test_a_head_of_llama_takes_less_at_a_time_on_a_card_with_less_shared_memory() -> None:
    for card, expected in ((90, Tiling(128, 8, 3)), (80, Tiling(128, 8, 3)), (86, Tiling(64, 8, 3))):
        assert token.plan_for(128, 128, BF16, 4, 8, CARDS[card]) == (expected, 1, 256)
    for card, expected in ((90, Tiling(64, 4, 4)), (80, Tiling(64, 4, 3)), (120, Tiling(32, 4, 3))):
        assert token.plan_for(128, 128, BF16, 4, 256, CARDS[card]) == (expected, 2, 256)  # two share an SM


def test_nothing_is_smaller_on_an_h200_than_its_table_says() -> None:
    card = CARDS[90]
    for dtype in (BF16, F32):
        for dim in (16, 64, 80, 96, 128, 192, 256, 512):
            if eligible.why_no_heads(dim, dim, dtype) is None:
                for queries in (1, 4, 16, 32, 33, 64, 256):
                    most = min(max(16, next_power_of_2(queries)), attend.MOST_QUERIES[dtype.itemsize])
                    expected = most, attend.shape_for(dim, dim, dtype, most)
                    assert attend.plan_for(dim, dim, dtype, queries, card) == expected
                for groups in (8, 256):
                    for queries in (1, 4, 16, attend.MOST_QUERIES[dtype.itemsize]):
                        shape, programs, _ = token.plan_for(dim, dim, dtype, queries, groups, card)
                        assert shape == token._shape(dim, dim, dtype, programs == 2)
        for rank in (32, 128, 256, 512):
            for queries in (1, 16, 32, 64, 2048):
                for coded in (False, True):
                    plan = plan_for(dtype.itemsize, queries, rank, 64, coded, card)
                    assert plan.shape == shape_for(dtype.itemsize, plan.queries, coded, card)
                    assert plan.stretch == min(128, rank)
                    assert plan.queries == min(max(16, next_power_of_2(queries)), attend.MOST_QUERIES[dtype.itemsize])


@pytest.mark.parametrize("card", CARDS)
def test_every_head_number_of_queries_and_dtype_that_kernels_take_has_a_shape_on_every_card(card: int) -> None:
    for dtype, most in ((BF16, 512), (F32, 256)):
        for dim in (16, 64, 96, 128, 192, 256, 512):
            for queries in (1, 16, 64):
                if dim <= most:
                    assert attend.plan_for(dim, dim, dtype, queries, CARDS[card])[1].stages >= 2
        for queries in (1, 16, 32, 64, 256):
            for coded in (False, True):
                plan = plan_for(dtype.itemsize, queries, 512, 64, coded, CARDS[card])
                assert plan.shape.block >= (16 if dtype == F32 else 32)


def test_products_have_fewer_stages_where_shared_memory_is_short_and_parts_by_the_number_of_sms() -> None:
    stages = {card: choose(32, 14336, 4096, 2, True, CARDS[card]).stages for card in CARDS}  # type: ignore[union-attr]
    assert stages == {80: 4, 86: 3, 89: 3, 90: 4, 100: 4, 120: 3}
    few = replace(CARDS[90], multiprocessors=20)
    assert (choose(8, 4096, 4096, 2, False, CARDS[90]).splits, choose(8, 4096, 4096, 2, False, few).splits) == (2, 1)


def test_ways_out_of_a_latent_have_as_many_stages_as_there_is_room_for() -> None:
    assert [absorb.stages_for(4, 16, 32, 512, 4, CARDS[card].shared) for card in (90, 80, 86)] == [4, 4, 2]
    assert absorb.stages_for(4, 16, 64, 512, 2, CARDS[86].shared) == 4


def test_limits_are_assumed_in_one_thread_and_inside_alone() -> None:
    seen: list[Any] = []
    with assumed(CARDS[86]), assumed(CARDS[120]) as inner:
        assert limits_of(torch.device("cpu")) is inner
        thread = Thread(target=lambda: seen.append(limits_of(torch.device("cpu"))))
        thread.start()
        thread.join()
    assert seen == [INTERPRETER] and limits_of(torch.device("cpu")) is INTERPRETER
    assert CARDS[86].room(1) == 99 * KIB and CARDS[86].room(2) == 49 * KIB
