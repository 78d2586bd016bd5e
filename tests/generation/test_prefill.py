"""Prompts in chunks: progress between them, interrupts that leave a cache to go on from, and sizes that fit memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import Pool
from lamina.attention.core import Way
from lamina.generation.prefill import chunks
from lamina.model import Model
from lamina.notices import notice
from lamina.rehearsal import explain
from lamina.rehearsal.cost import pass_cost
from lamina.rehearsal.explain import attention_line
from lamina.rehearsal.free_memory import available_memory, free_memory
from lamina.rehearsal.meter import AllocationMeter
from tests.families.harness import relative
from tests.generation.rows import PROMPTS, model_of
from tests.laws.toys import toy
from tests.planning.models import model as planned

LONG = [[(7 * i + r) % 60 + 3 for i in range(n)] for r, n in enumerate((23, 5, 14))]


class Stop(Exception):
    pass


def goes_on(model: Model, cache: Any, fed: int) -> None:
    """The cache holds the chunks so far; fed with the rest it gives the logits of whole rows."""
    assert cache.tokens == [row[:fed] for row in LONG]
    rest = [row[fed:] for row in LONG]
    widest = max(map(len, rest))
    ids = torch.tensor([row + [0] * (widest - len(row)) for row in rest])
    model(ids, cache=cache, counts=[len(row) for row in rest], logits="last")
    for row, logits in zip(LONG, cache.logits, strict=True):
        alone = model([row], logits="last")
        assert alone is not None and relative(logits, alone[0]) < 2e-4


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "mamba"])
@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
@torch.no_grad()
def test_an_interrupt_between_chunks_leaves_the_chunks_so_far(family: str, kind: type[BaseException]) -> None:
    model, said = model_of(family), list[tuple[int, int]]()

    def progress(done: int, total: int) -> None:
        said.append((done, total))
        if len(said) == 2:
            raise kind

    cache = model.new_cache(3)
    with pytest.raises(kind):
        model.generate(LONG, 2, cache=cache, prefill_chunk=6, progress=progress)
    assert said == [(17, 42), (29, 42)]
    goes_on(model, cache, 12)


@torch.no_grad()
def test_a_stream_that_is_cancelled_in_its_prompt_leaves_the_chunks_so_far() -> None:
    model, said = model_of("llama"), list[int]()
    cache = model.new_cache(3)

    def progress(done: int, total: int) -> None:
        said.append(done)
        if len(said) == 2:
            stream.cancel()

    stream = model.stream(LONG, 2, cache=cache, prefill_chunk=6, progress=progress)
    assert list(stream) == [] and said == [17, 29]
    goes_on(model, cache, 12)


def test_an_interrupted_prompt_is_continued_by_giving_it_again() -> None:
    model, cache = model_of("llama"), None

    def stop(done: int, total: int) -> None:
        if done < total:
            raise KeyboardInterrupt

    cache = model.new_cache()
    with pytest.raises(KeyboardInterrupt):
        model.generate([PROMPTS[0]], 4, cache=cache, prefill_chunk=6, progress=stop)
    found = model.generate([PROMPTS[0]], 4, cache=cache, eos_token_id=())
    assert found.reused == [6] and found.timing.prompt_passes == 1 and found.timing.prompt_chunk == 5
    assert found.tokens == model.generate([PROMPTS[0]], 4, eos_token_id=()).tokens


def test_a_result_says_how_its_prompt_was_fed() -> None:
    model = model_of("llama")
    found = model.generate(PROMPTS, 1, prefill_chunk=4)
    assert found.prompt_how == "3 passes of up to 4 tokens a row; attention: sdpa"
    assert (found.timing.prompt_passes, found.timing.prompt_chunk) == (3, 4)
    again = model.generate(cache=found.cache, max_new_tokens=1)
    assert again.prompt_how == "nothing was fed: the cache held every token"


# -- sizes that fit memory ---------------------------------------------------------------------------------------------


def long_prompts(*lengths: int) -> list[list[int]]:
    return [[(5 * i + r) % 60 + 3 for i in range(n)] for r, n in enumerate(lengths)]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_prompt_that_does_not_fit_is_fed_in_the_largest_chunks_that_do(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = model_of(family), long_prompts(1500, 1100)
    cost = pass_cost(model, model.new_cache())
    assert cost is not None
    seen = dict[str, Any]()
    for fits in (512, 256):
        room = cost.nbytes(2, fits, 1500, even=False)
        monkeypatch.setattr(chunks, "free_memory", lambda device, room=room: round(room / chunks.SHARE) + 1)
        seen[f"{fits}"] = model.score(prompts, beyond_context=True)
        assert seen[f"{fits}"].timing.prompt_chunk == fits
    monkeypatch.setattr(chunks, "free_memory", lambda device: 1 << 50)
    monkeypatch.setattr(chunks, "pass_cost", lambda *given: pytest.fail("nothing is measured for what surely fits"))
    whole = model.score(prompts, beyond_context=True)
    assert whole.timing.prompt_chunk == 1500 and whole.timing.prompt_passes == 1
    for found in seen.values():
        torch.testing.assert_close(found.logprobs[1], whole.logprobs[1], rtol=1e-3, atol=1e-3)
    assert model.score(prompts, prefill_chunk=700, beyond_context=True).timing.prompt_chunk == 700
    monkeypatch.setattr(chunks, "free_memory", lambda device: pytest.fail("few tokens need no memory to be measured"))
    assert model.score(long_prompts(256, 256), beyond_context=True).timing.prompt_passes == 1


def test_the_measured_cost_of_a_pass_is_that_of_larger_passes() -> None:
    for family in ("llama", "mamba2", "deepseek_v3"):
        for how in ({}, {"codec": "int8"}, {"residence": "host"}, {"pool": 16}):
            model = planned(family)
            if "codec" in how and family != "llama":
                continue
            given = {"pool": Pool(model, page=16)} if "pool" in how else how
            cache = model.new_cache(1, **given).reserve(600)  # type: ignore[arg-type]
            cost = pass_cost(model, cache)
            assert cost is not None
            for tokens, keys in ((200, 200), (300, 500)):
                with torch.no_grad(), AllocationMeter() as held:
                    model(torch.zeros(1, tokens, dtype=torch.int64), cache=cache, logits="last")
                assert 1.0 <= cost.nbytes(1, tokens, keys) / held.most < 2.1, (family, how, tokens)


class Full(RuntimeError):
    """What PyTorch raises on a CPU."""

    def __init__(self) -> None:
        super().__init__("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


@pytest.mark.parametrize("error", [Full, torch.OutOfMemoryError])
def test_a_pass_that_runs_out_of_memory_is_tried_again_with_half_the_tokens(
    error: type[RuntimeError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, (prompt,) = model_of("gemma2"), long_prompts(1300)
    expected = model.generate([prompt], 3, eos_token_id=(), beyond_context=True).tokens
    block, sizes = model.blocks[1], list[int]()
    forward = block.forward

    def failing(x: torch.Tensor, *given: Any) -> Any:
        sizes.append(x.shape[1])
        if x.shape[1] > 512:
            raise error()
        return forward(x, *given)

    monkeypatch.setattr(block, "forward", failing)
    notice.cache_clear()
    found = model.generate([prompt], 3, eos_token_id=(), beyond_context=True)
    assert found.tokens == expected and sizes[:5] == [1300, 1024, 512, 512, 276]
    assert found.timing.prompt_chunk == 512 and found.timing.prompt_passes == 3
    assert "a prompt pass of 1,024 tokens a row did not fit into memory: going on with 512" in caplog.text
    with pytest.raises(error):  # the caller's own choice is not changed
        model.generate([prompt], 3, prefill_chunk=1024, beyond_context=True)


def test_free_memory_is_that_of_the_container_if_there_is_less(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    assert available_memory(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    5000 kB\n")
    assert available_memory(tmp_path) == 5000 * 1024
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text("1000000\n")
    (folder / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert available_memory(tmp_path) == 5000 * 1024
    (folder / "memory.max").write_text("2000000\n")
    assert available_memory(tmp_path) == 1_300_000
    found = free_memory(torch.device("cpu"))
    assert found is None or found > 0


# -- in words ----------------------------------------------------------------------------------------------------------


def test_explain_says_how_prompts_run_for_every_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = model_of("gemma2").explain().splitlines()
    assert found[1] == "prompts: PyTorch operations, since the model is on cpu"
    why = "eager, since softcap changes scores and the model is on cpu"
    assert f"  attention, sliding 8, heads of 8 (2 layers): {why}" in found
    assert f"  attention, full, heads of 8 (2 layers): {why}" in found
    assert "  ragged rows: packed, from 64 tokens and 12.5% of padding on" in found
    assert "fits in one pass" in found[-1]
    hybrid = model_of("qwen3_next").explain()
    assert "GatedDelta (2 layers): PyTorch, since the model is on cpu" in hybrid and ": sdpa" in hybrid
    assert "padded, since layer 0 entry 'index' is Tokens" in toy("tokens").explain()
    monkeypatch.setattr(explain, "why_no_kernels", lambda model: None)  # as on a GPU
    hybrid = model_of("qwen3_next").explain()
    assert "GatedDelta (2 layers): chunked kernel" in hybrid and "prompts: kernels between products" in hybrid
    assert "cuDNN for chunks of 512 tokens or more" in attention_line(Way("kernel", "full", (), 128), 32, None)
    assert "applies softcap itself" in attention_line(Way("kernel", "sliding 8", ("softcap",), 128), 2, None)
