"""A kind of layer that is defined outside the package brings a kernel, and is then captured like the kinds inside.

The kind itself is tests/laws/outside.py, which goes through every law, through files and through plans as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

import lamina
from lamina.cache.layers.base import Layer
from lamina.cache.memory import Memory
from lamina.generation.strategies.plain import decode_plain
from lamina.generation.strategies.speculation import speculate
from lamina.kernels.entry import STORE, row_of
from lamina.kernels.launch import begin as begin_kernel
from lamina.kernels.launch import launch
from lamina.runtime import Graphs
from lamina.runtime.gpu import backend as gpu_backend
from lamina.runtime.gpu.backend import TableEntry, register_kernels, why_unserved
from lamina.runtime.prompts.eligibility import why_not_prompted
from tests.generation.drafted import Oracle, again, begin, same
from tests.kernels.passes import same as same_caches
from tests.kernels.runs import both
from tests.laws.outside import Peak

pytestmark = pytest.mark.usefixtures("few_programs", "passes_by_kernels")

SLOTS = tl.constexpr(2)  # of the ring of a layer without slack


@triton.jit
def _highest(
    x, out, table, T: tl.constexpr, C: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program `row`: x and out [B, T, C]; the entry's store is the peaks [B, SLOTS, C]."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    length, count = row_of(table, row, T)
    peaks = tl.load(table + STORE).to(tl.pointer_type(tl.float32)) + row * SLOTS * C
    begin_kernel(PDL)
    last = tl.maximum(length - 1, 0) % SLOTS
    peak = tl.load(peaks + last * C + c, mask=(c < C) & (length > 0), other=float("-inf"))
    for t in range(T):
        if t < count:
            new = tl.load(x + (row * T + t) * C + c, mask=c < C, other=float("-inf"))
            peak = tl.maximum(peak, new)
            if WRITE:
                tl.store(peaks + (length + t) % SLOTS * C + c, peak, mask=c < C)
        tl.store(out + (row * T + t) * C + c, peak, mask=c < C)


def highest(x: Tensor, table: Tensor, write: bool) -> Tensor:
    rows, T, C = x.shape
    out = torch.empty_like(x)
    launch(_highest, (rows,), x.contiguous(), out, table, T, C, write, triton.next_power_of_2(C), num_warps=1)
    return out


@pytest.fixture
def kernels_for_peaks() -> Iterator[None]:
    @register_kernels(Peak)
    class Kernels:
        @staticmethod
        def why_not(spec: Any, layer: Layer | None, dtype: torch.dtype) -> str | None:
            return f"its slack is {layer.slack}" if layer is not None and layer.slack else None

        @staticmethod
        def highest(entry: TableEntry, x: Tensor) -> Tensor:
            later = entry.later
            if later is not None:
                entry.at_commit = lambda: highest(x, later, write=True)
            return highest(x, entry.table, write=later is None)

    yield
    del gpu_backend._registered[Peak]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.specs = {"peak": Peak(width)}

    def forward(self, x: Tensor, memory: Memory, shared: None) -> Tensor:
        return x + self.up(memory.call("highest", x))


class Peaks(lamina.Model):
    def __init__(self, vocab: int = 80, width: int = 12) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def embed(self, ids: Tensor) -> Tensor:
        return self.token(ids)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(x)


@functools.cache
def peaks() -> Peaks:
    torch.manual_seed(0)
    return Peaks().requires_grad_(False).eval()


def test_without_kernels_plain_passes_run_and_say_why() -> None:
    assert why_unserved(Peak(3), None, torch.float32) == "there is no kernel for Peak"


@pytest.mark.usefixtures("kernels_for_peaks")
def test_captured_steps_and_plain_passes_make_the_same() -> None:
    captured, plain = both(peaks())
    torch.testing.assert_close(captured.cache.logits, plain.cache.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels_for_peaks")
def test_captured_speculation_commits_what_is_accepted() -> None:
    run = begin(peaks(), [[5, 9, 12, 3], [7]], 5)
    truth = decode_plain(again(run))
    found = speculate(again(run, num_assistant_tokens=3), Oracle(run, truth, 0.5, 0))
    same(found, truth, run)
    assert found.how == "captured passes of several tokens"


@pytest.mark.usefixtures("kernels_for_peaks")
def test_a_cache_that_the_kernels_do_not_serve_says_why() -> None:
    layer = peaks().new_cache(slack=2).layers[0]["peak"]
    assert why_unserved(layer.spec, layer, torch.float32) == "its slack is 2"


@torch.no_grad()
@pytest.mark.usefixtures("kernels_for_peaks")
def test_captured_prompts_run_kernels_that_say_they_read_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.runtime.prompts.captured_prompt.WIDTHS", (16,))
    model = peaks()
    captured, plain = model.new_cache(2), model.new_cache(2)
    refused = "layer 0 entry 'peak': captured prompts have no kernel for Peak"
    assert why_not_prompted(captured) == refused
    gpu_backend._registered[Peak].reads_prompts = True
    assert why_not_prompted(captured) is None
    assert why_not_prompted(model.new_cache(slack=2)) == "layer 0 entry 'peak': its slack is 2"
    one = Graphs(model).prompt_of(2)
    for counts in ([11, 4], [0, 7]):
        ids = torch.randint(0, 80, (2, max(counts)))
        one.feed(captured, ids, counts)
        model(ids, cache=plain, counts=counts, logits="last")
        same_caches(captured, plain)


def test_the_model_is_saved_planned_and_verified(tmp_path: Any) -> None:
    model = peaks()
    result = model.generate([[1, 2, 3]], 3, eos_token_id=())
    result.cache.save(tmp_path / "peaks.cache")
    again = lamina.load_cache(tmp_path / "peaks.cache", model)
    torch.testing.assert_close(model([[7]], cache=again), model([[7]], cache=result.cache), rtol=0, atol=0)
    assert lamina.plan(model, rows=2, length=9).moved is not None
    assert lamina.verify(model)
