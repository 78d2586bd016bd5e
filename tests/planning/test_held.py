"""What a rehearsed pass holds is what a real one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lamina
from lamina import Cache, Model
from lamina.checkpoint.shapes import SHAPES
from lamina.nn import Experts
from lamina.planning.context import set_clock
from lamina.planning.use import Use, lay_out, scratch_of
from lamina.rehearsal.meter import AllocationMeter
from lamina.rehearsal.rehearsal import Fused, Rehearsal, as_on_gpu, shadow
from tests.laws.toys import MAKERS, Attend, Toy, toy
from tests.planning.models import FAMILIES, model, source

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def most_of_a_pass(model: Model, cache: Cache, start: int, tokens: int) -> int:
    """The most that a pass holds when everything in it is run."""
    set_clock(cache, start)
    cache.clock.sourced = [True] * cache.rows
    with torch.no_grad(), Fused(), AllocationMeter() as held:
        ids = torch.zeros(cache.rows, tokens, dtype=torch.int64, device=model.device)
        model(ids, cache=cache, logits="last")
    return held.most


@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_pass_holds_what_the_rehearsed_one_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU experts run one by one, on a GPU all at once: rehearsals are of the latter.
    monkeypatch.setattr(Experts, "_grouped_products", lambda self, x: True)
    subject, twin = model(family), shadow(model(family))
    given = source(family)
    rehearsal = Rehearsal(twin)
    for use in (
        Use(2, 40, source=given),
        Use(1, 45, prefill_chunk=20, slack=2, source=given),
        Use(3, 40, prompt=1, source=given),
    ):
        cache = subject.new_cache(use.rows, slack=use.slack).reserve(use.length)
        cache._kept_logits(subject.vocab, subject.dtype)
        most = []
        if given is not None:
            ids = torch.zeros(use.rows, given, dtype=torch.int64)
            cache.attach(subject.encode(ids))
            with torch.no_grad(), Fused(), AllocationMeter() as held:
                cache.attach(subject.encode(ids.clone()))
            most.append(held.most)
        most += [most_of_a_pass(subject, cache, *one) for one in use.passes()]
        assert scratch_of(twin, rehearsal, use, lay_out(twin, use)[0]) == max(most)


@pytest.mark.parametrize("kind", ["shared", "hybrid", "sliding and full", "latent", "from outside, among others"])
def test_counting_what_repeats_changes_nothing(kind: str) -> None:
    deep = toy(kind) if kind == "shared" else Toy(*(block for _ in range(3) for block in MAKERS[kind]().blocks))
    counted, run = shadow(deep), shadow(deep)
    use = Use(2, 150, prefill_chunk=70, slack=1)
    found = scratch_of(counted, Rehearsal(counted), use, lay_out(counted, use)[0])
    with torch.device("meta"):
        cache, _ = lay_out(run, use)
        assert found == max(most_of_a_pass(run, cache, *one) for one in use.passes())


@pytest.mark.parametrize("name", ["qwen3-next", "gemma-2-9b", "falcon-h1-7b"])
def test_counting_what_repeats_changes_nothing_in_real_shapes(name: str) -> None:
    from lamina.loading import on_meta
    from tests.bench.small import small

    shape = small(name) | {"num_hidden_layers": 8}
    counted, run = (on_meta(shape, torch.bfloat16) for _ in range(2))
    use = Use(1, 300, prompt=299)
    found = scratch_of(counted, Rehearsal(counted), use, lay_out(counted, use)[0])
    with torch.device("meta"):
        cache, _ = lay_out(run, use)
        assert found == max(most_of_a_pass(run, cache, *one) for one in use.passes())


@pytest.mark.parametrize("name", ["qwen3-next", "gemma-2-9b", "deepseek-v2-lite", "falcon-mamba-7b"])
def test_passes_of_a_gpu_are_rehearsed_with_its_kernels_and_need_no_masks(name: str) -> None:
    from lamina.loading import on_meta
    from tests.bench.small import small

    shape = small(name) | {"num_hidden_layers": 8}
    counted, run, plain = (on_meta(shape, torch.bfloat16) for _ in range(3))
    on_gpu, on_cpu = Rehearsal(counted, gpu=True), Rehearsal(plain)
    for use in (Use(1, 600), Use(2, 900, prefill_chunk=300)):
        found = scratch_of(counted, on_gpu, use, lay_out(counted, use)[0])
        with torch.device("meta"), as_on_gpu():
            cache, _ = lay_out(run, use)
            assert found == max(most_of_a_pass(run, cache, *one) for one in use.passes())
        assert found < scratch_of(plain, on_cpu, use, lay_out(plain, use)[0])


def test_the_scratch_of_a_gpu_grows_with_tokens_and_not_with_tokens_times_keys() -> None:
    shape = dict(SHAPES["gemma-2-9b"].config, num_hidden_layers=2)
    near, far = (lamina.plan(shape, length=n, prefill_chunk=1024, dtype="bfloat16").scratch for n in (8192, 65536))
    on_cpu = lamina.plan(shape, length=65536, prefill_chunk=1024, dtype="bfloat16", device="cpu")
    assert near is not None and far is not None and far < 1.2 * near
    assert (on_cpu.scratch or 0) > 5 * far and "without kernels" in str(on_cpu)


def test_few_latent_tokens_of_a_gpu_are_planned_without_a_mask_for_each_head() -> None:
    shape = dict(SHAPES["deepseek-v2-lite"].config) | {"num_hidden_layers": 2}
    short, long = (
        lamina.plan(shape, rows=2, length=length, prefill_chunk=64, dtype="bfloat16", device="cuda").scratch
        for length in (8192, 32768)
    )
    assert short is not None and long is not None
    assert long - short < 2 * 64 * (32768 - 8192) * 16 // 4  # a flag for each query, key and head is four times as much


def test_a_model_that_wants_numbers_in_a_pass_has_no_scratch_in_its_plan() -> None:
    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attend()
            self.specs = self.inner.specs

        def forward(self, x: torch.Tensor, memory: lamina.cache.Memory, shared: torch.Tensor) -> torch.Tensor:
            return self.inner(x, memory, shared) * float(x.sum() > 0)

    plan = lamina.plan(Toy(Curious()), length=50)
    assert plan.scratch is None and plan.total == plan.weights + plan.cache
    assert "scratch          not known: a pass of this model does not run on the meta device" in str(plan)


def test_memory_that_is_let_go_counts_no_more() -> None:
    with AllocationMeter() as held:
        x = torch.zeros(1000)
        y = x[10:20].clone()
        del x
        z = y.view(2, 5).add_(1).t()
    assert (held.now, held.most) == (40, 4040)
    del y, z
    assert held.now == 0


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*h200-llama-3.1-8b.json")), ids=lambda file: file.stem)
def test_the_peak_that_was_measured_on_a_gpu_was_foreseen(file: Path) -> None:
    for measured in json.loads(file.read_text())["prefill"]:
        if measured["subject"] == "lamina":
            plan = lamina.plan("llama-3.1-8b", length=measured["tokens"], device="cpu")  # before prompts had kernels
            kept = measured["tokens"] * SHAPES["llama-3.1-8b"].config["hidden_size"] * 2  # embeddings: freed since then
            assert plan.total + kept == pytest.approx(measured["peak_bytes"], rel=0.001)
