"""Captured programs belong to one generation at a time, are bounded in number, and give way to plain passes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from triton.runtime.interpreter import GridExecutor

import lamina
from lamina.cache.spec import Attention
from lamina.config import Config
from lamina.errors import CaptureError, LaminaError
from lamina.generation.run import Run, StrategyOutput
from lamina.generation.strategies.captured import decode_captured
from lamina.generation.strategies.plain import decode_plain
from lamina.notices import notice
from lamina.rehearsal.explain import explain_decoding
from lamina.runtime import Graphs
from lamina.sampling.chooser import Chooser
from tests.kernels.runs import PROMPTS, begin, small, tiny

pytestmark = pytest.mark.usefixtures("few_programs")

PLAIN = "plain passes, since "


def within(outer: Run, inner: Run) -> tuple[StrategyOutput, StrategyOutput]:
    """Runs `inner` as a whole while `outer` is between two of its tokens."""
    made: list[StrategyOutput] = []

    def told(*event: object) -> None:
        if len(run_outer) == 2 * outer.rows:
            made.append(decode_captured(inner))
        run_outer.append(event)

    run_outer: list[object] = []
    outer.on_token = told
    return decode_captured(outer), made[0]


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_generations_that_take_turns_give_the_tokens_of_each_alone(family: str) -> None:
    model = copy.deepcopy(small(family))
    settings: list[dict[str, Any]] = [dict(max_new_tokens=3), dict(max_new_tokens=2, eos_token_id=[5])]
    alone = [decode_plain(begin(model, **one)) for one in settings]
    runs = [begin(model, **one) for one in settings]
    runs[1].logits = runs[1].logits.flip(0)  # other tokens than the first run's
    alone[1] = decode_plain(run_like(runs[1]))
    outer, inner = within(runs[0], runs[1])
    assert "captured" in outer.how and "captured" in inner.how
    assert (outer.tokens, inner.tokens) == (alone[0].tokens, alone[1].tokens)
    assert model.graphs.captures == 2
    again = decode_captured(begin(model, **settings[0]))
    assert again.tokens == alone[0].tokens and model.graphs.captures == 2


def run_like(run: Run) -> Run:
    other = copy.copy(run)
    other.cache, other.stopping = run.cache.fork(), copy.deepcopy(run.stopping)
    return other


def test_two_programs_share_no_memory() -> None:
    model = tiny()
    with model.graphs.step(2, Chooser()) as one, model.graphs.step(2, Chooser()) as other:
        assert one is not other
        for name in ("scratch", "arrivals", "sums"):
            assert getattr(one.workspace, name) is not getattr(other.workspace, name)
        mine, theirs = (
            {value.data_ptr() for value in vars(step).values() if isinstance(value, torch.Tensor) and value.numel()}
            for step in (one, other)
        )
        assert not mine & theirs


def test_beyond_the_limit_a_generation_uses_plain_passes_and_says_why() -> None:
    model = copy.deepcopy(tiny())
    model.graphs.limit = 1
    expected = decode_plain(begin(model)).tokens
    outer, inner = within(begin(model), begin(model))
    assert outer.tokens == inner.tokens == expected
    assert "captured" in outer.how
    assert inner.how == PLAIN + "all 1 captured programs of this shape are in use; model.graphs.limit is 1"


def test_beyond_the_limit_a_caller_may_wait() -> None:
    graphs = Graphs(tiny())
    graphs.limit, graphs.wait = 1, True
    first = graphs.step(1, Chooser())
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(graphs.step(1, Chooser())))
    waiting.start()
    waiting.join(0.05)
    assert not got
    first.release()
    first.release()  # once is enough
    waiting.join(10)
    assert got == [first]


def test_a_program_that_is_dropped_is_no_longer_counted() -> None:
    graphs = Graphs(tiny())
    graphs.limit = 1
    step = graphs.step(1, Chooser())
    with pytest.raises(CaptureError, match=r"model\.graphs\.limit is 1"):
        graphs.step(1, Chooser())
    del step
    with graphs.step(1, Chooser()):
        assert graphs.captures == 2


def test_a_copy_of_a_model_has_programs_of_its_own() -> None:
    model = copy.deepcopy(tiny())
    with model.graphs.step(1, Chooser()):
        twin = copy.deepcopy(model)
    assert twin.graphs.model is twin and not twin.graphs.kept


# -- what kernels cannot do --------------------------------------------------------------------------------------------


class Slope(nn.Module):
    """Attention with a bias that falls with the distance, which no kernel adds."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.specs = {"attention": Attention(kv_heads=2, key_dim=8, value_dim=8)}

    def forward(self, x: torch.Tensor, memory: Any, shared: Any) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = memory.attend(q, k, v, scale=0.3, bias=lambda head, q_pos, kv_pos: (kv_pos - q_pos) * 0.1 * (head + 1))
        return x + self.out(y.transpose(1, 2).flatten(2))


class Sloped(lamina.Model):
    def __init__(self) -> None:
        super().__init__()
        self.vocab, self.embedding = 67, nn.Embedding(67, 16)
        self.blocks, self.head = nn.ModuleList([Slope(), Slope()]), nn.Linear(16, 67)
        self.config = Config({"model_type": "sloped"})

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids)

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def test_what_cannot_be_captured_is_decoded_by_plain_passes_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    notice.cache_clear()  # another test of this process may have been told the same
    model = Sloped().requires_grad_(False).eval()
    expected = decode_plain(begin(model)).tokens
    told: list[tuple[int, int]] = []
    for watched in (False, True):
        run = begin(model)
        if watched:
            run.on_token = lambda row, token, reason: told.append((row, token))
        made = decode_captured(run)
        assert made.tokens == expected
        assert made.how == PLAIN + (
            "its capture failed: InputError: attend(bias=…): no kernel adds a bias to the scores that has no "
            "kernel_form, as <lambda>; AlibiBias and RelativeBias have one"
        )
        assert made.cache.tokens == [p + t for p, t in zip(PROMPTS, expected, strict=True)]
    assert [[token for at, token in told if at == row] for row in range(2)] == expected  # each once
    assert model.graphs.captures == 1  # it is not tried again
    assert "no kernel adds a bias" in (model.graphs.why_not(rows=2) or "") and model.graphs.why_not(rows=1) is None
    assert sum("no kernel adds a bias" in record.message for record in caplog.records) == 1


def test_a_bias_that_no_kernel_adds_is_told_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.rehearsal.explain.why_not_captured", lambda *_: None)  # as on a GPU
    assert "no kernel adds a bias to the scores that has no kernel_form" in explain_decoding(Sloped())
    assert explain_decoding(tiny()) == "decoding: one captured graph a step"


@pytest.mark.usefixtures("passes_by_kernels")
def test_speculation_on_what_cannot_be_captured_reads_by_plain_passes() -> None:
    torch.manual_seed(0)
    model = Sloped().requires_grad_(False).eval()
    expected = model.generate(PROMPTS, 4, eos_token_id=None)
    found = model.generate(PROMPTS, 4, eos_token_id=None, prompt_lookup_num_tokens=2)
    assert found.tokens == expected.tokens
    assert found.how.startswith("plain passes of several tokens, since its capture failed: InputError: attend(bias=…)")


# -- streams and devices -----------------------------------------------------------------------------------------------


def test_a_program_runs_on_the_stream_that_it_was_borrowed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_event(self, event: object) -> None:
            waited.append((self, event))

        def record_event(self) -> object:
            return self, "done"

    waited: list[tuple[object, object]] = []
    here, there = Stream(), Stream()
    current = [here]
    monkeypatch.setattr("lamina.runtime.captured.current_stream", lambda device: current[0])
    model = copy.deepcopy(tiny())
    run = begin(model)
    with model.graphs.step(2, Chooser()) as step:
        step.begin(run.cache, torch.tensor([1, 2]), [2, 2], ())
        step.run(1)
        current[0] = there
        with pytest.raises(LaminaError, match=r"was borrowed on CUDA stream .* and nothing orders the two"):
            step.run(1)
    with model.graphs.step(2, Chooser()) as again:
        assert again is step and waited == [(there, (here, "done"))]


def test_everything_is_launched_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[torch.device] = []

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    for module in ("runtime.step", "runtime.multi_token", "generation.strategies.captured"):
        monkeypatch.setattr(f"lamina.{module}.current", guard)
    launch, launched = GridExecutor.__call__, []

    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(list(inside))
        launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", checked)
    model = copy.deepcopy(tiny())
    decode_captured(begin(model))
    cache = model.new_cache()
    with model.graphs.pass_of(1, 1, cache) as one:
        one.read(cache, torch.tensor([[1]]))
        one.commit()
    assert len(launched) > 20 and all(devices and devices[-1] == model.device for devices in launched)


# -- room --------------------------------------------------------------------------------------------------------------


def test_room_is_made_for_tokens_as_they_come() -> None:
    model = copy.deepcopy(tiny())
    free = decode_plain(begin(model, max_new_tokens=40)).tokens
    ends: dict[str, Any] = dict(eos_token_id=[row[39] for row in free], min_new_tokens=36)
    expected = decode_plain(begin(model, max_new_tokens=41, **ends))
    run = begin(model, max_new_tokens=1_000_000, **ends)
    run.cache = run.cache.select([0, 1])  # without room for more
    stores = {layer.data["k"].data_ptr() for layer in run.cache.layers[0].values()}
    made = decode_captured(run)
    assert made.tokens == expected.tokens
    assert {layer.data["k"].data_ptr() for layer in run.cache.layers[0].values()} != stores  # it has grown
    assert run.cache.record.shape[1] < 200 and run.cache.nbytes < 4 * expected.cache.nbytes
