"""Captured steps, passes and prompts that read token vectors back give what plain passes give."""

from __future__ import annotations

import pytest
import torch

import lamina
from lamina.attention.window import Chunked, Full, Near, Sliding
from lamina.cache.spec import Tokens
from lamina.kernels.eligibility import why_no_vectors
from lamina.model import Model
from lamina.runtime import Graphs
from lamina.runtime.captured import Captured
from lamina.runtime.eligibility import why_no_kernels
from lamina.runtime.prompts.eligibility import why_unserved
from lamina.sampling.chooser import Chooser
from tests.kernels.captured_twins import Twins
from tests.laws.toys import Index, Toy

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of few tokens, and programs for rows of four tokens, then eight …"""
    monkeypatch.setattr("lamina.runtime.prompts.captured_prompt.WIDTHS", (8,))
    monkeypatch.setattr("lamina.runtime.captured.LEAST_ROOM", 4)
    monkeypatch.setattr("lamina.runtime.captured.MOST_ROOM", 4)
    monkeypatch.setattr("lamina.runtime.step.LEAST_ROOM", 4)
    monkeypatch.setattr(Captured, "room", 4)


def model_of(*windows: object) -> Model:
    return Toy(*(Index(window) for window in windows), dtype=torch.float32)  # type: ignore[arg-type]


WINDOWS = [(Full(), Sliding(4)), (Sliding(4, keep=2), Chunked(3)), (Sliding(1), Full())]


@torch.no_grad()
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("how", ["plain", "slack", "int8", "k5v4", "fp8", "pages", "int4 in pages"])
def test_steps_passes_and_prompts_read_back_what_plain_passes_do(windows: tuple[object, ...], how: str) -> None:
    model, codec = model_of(*windows), how.split()[0] if how.split()[0] in ("int8", "int4", "k5v4", "fp8") else None
    captured, plain = (model.new_cache(2, slack=2 if how == "slack" else 0, codec=codec) for _ in range(2))
    if "pages" in how:
        captured = model.new_cache(2, pool=lamina.Pool(model, tokens=128, page=4, codec=codec))
    twins = Twins(model, captured, plain)
    twins.prompt([6, 2])
    twins.step(3, [3, 1])
    twins.read(4)
    if how == "slack":
        twins.rewind_and_go_on()
    twins.prompt([0, 7])
    twins.read(1)
    twins.step(2, [1, 2])
    twins.go_on()


@torch.no_grad()
def test_programs_are_made_again_for_longer_and_for_much_shorter_rows() -> None:
    model, ids = model_of(Full()), torch.randint(1, 12, (2, 40), generator=torch.Generator().manual_seed(0))
    graphs = Graphs(model)
    with graphs.step(2, Chooser()) as step, graphs.pass_of(2, 2) as one, graphs.prompt_of(2) as prompt:
        rooms = []
        for length in (6, 30, 9, 2):
            captured, plain = model.new_cache(2), model.new_cache(2)
            for cache in (captured, plain):
                model(ids[:, :length], cache=cache, counts=[length, 1], logits="last")
            prompt.feed(captured, ids[:, :3])
            one.read(captured, ids[:, :2])
            one.commit()
            step.begin(captured, ids[:, 0], [7, 7], ())
            step.run(2), step.run(5)
            rooms.append((prompt.room, one.room, step.room))
            fed = torch.tensor(captured.tokens[0][length:]), torch.tensor(captured.tokens[1][1:])
            model(torch.stack(fed), cache=plain, logits="last")
            torch.testing.assert_close(captured.logits, plain.logits, rtol=1e-4, atol=1e-4)
    assert rooms == [(8, 16, 32), (32, 64, 64), (32, 64, 64), (4, 8, 64)]


@torch.no_grad()
def test_graphs_of_another_room_are_dropped() -> None:
    with Graphs(model_of(Full())).pass_of(1, 2) as one:
        one.replays[0] = one.replays[1] = lambda: None
        one.fit_room(32)
        assert one.room == 32 and not one.replays
        one.replays[0] = lambda: None
        one.fit_room(5)  # not much more than is needed
        assert one.room == 32 and one.replays
    with Graphs(model_of(Sliding(3))).pass_of(1, 2) as one:
        one.replays[0] = lambda: None
        one.fit_room(3000)  # a window is all that is read back
        assert one.room == 4 and one.replays


def test_a_model_that_recalls_is_served_and_traced() -> None:
    model = model_of(Full(), Sliding(4))
    assert why_no_kernels(model.specs, dtype=model.dtype) is None
    assert Graphs(model).fusion_plan().reason is None


def test_what_is_not_served_says_why() -> None:
    reason = "no kernel for the window Near(size=2); there are kernels for Full, Sliding and Chunked"
    spec = Tokens(4, Near(2))
    assert why_no_vectors(spec) == why_unserved(spec, None, torch.float32) == reason
    assert why_unserved(Tokens(4, Full()), None, torch.float32) is None
