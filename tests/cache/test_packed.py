"""Packed passes: ragged rows side by side are the same rows with padding, for every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lamina
from lamina.cache import packed
from lamina.cache.packed import PackedStep
from lamina.runtime.feed import why_not_packed
from tests.families.cases import CASES
from tests.families.harness import pair, relative
from tests.laws.toys import toy
from tests.planning.models import model as planned

FAMILIES = [
    "llama", "gemma2", "qwen3_next", "mamba", "mamba2", "lfm2", "falcon_h1", "deepseek_v3", "gpt_oss",
    "recurrent_gemma", "gemma3n_text", "gpt2", "bloom", "rwkv", "llama4", "deepseek_v32", "glm_moe_dsa",
]  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Passes are packed however little padding they have; -> how many tokens each packed pass had."""
    monkeypatch.setattr(packed, "LEAST_PADDING", 1)
    monkeypatch.setattr(packed, "LEAST_SHARE", 0.0)
    return note_packed(monkeypatch)


def note_packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made, init = list[int](), PackedStep.__init__

    def note(self: Any, *args: Any) -> None:
        init(self, *args)
        made.append(self.T)

    monkeypatch.setattr(PackedStep, "__init__", note)
    return made


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_ragged_rows_in_chunks_give_the_logits_of_each_row_alone(family: str, seen: list[int]) -> None:
    _, model = pair(family, next(iter(CASES[family])))
    ids = torch.randint(3, model.vocab, (3, 30), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(3, slack=2)
    for start, counts in ((0, [11, 4, 0]), (11, [2, 9, 7]), (20, [3, 1, 10])):
        logits = model(ids[:, start : start + 11][:, : max(counts)], cache=cache, counts=counts, logits="last")
        cache.poison()
    assert seen == [15, 18, 14]
    assert logits is not None
    for row, tokens in enumerate(cache.tokens):
        alone = model(torch.tensor([tokens]), logits="last")
        assert alone is not None and relative(logits[row], alone[0]) < 2e-4
    cache.rewind(2)
    after = model(ids[:, :3], cache=cache, counts=[3, 1, 2], logits="last")
    assert after is not None
    for row, tokens in enumerate(cache.tokens):
        alone = model(torch.tensor([tokens]), logits="last")
        assert alone is not None and relative(after[row], alone[0]) < 2e-4


@pytest.mark.parametrize("settings", [{"codec": "int8"}, {"residence": "host"}, {"pool": 4}], ids=str)
@torch.no_grad()
def test_packing_changes_nothing_in_codes_on_the_host_and_in_pages(settings: dict[str, Any], seen: list[int]) -> None:
    _, model = pair("gemma2", next(iter(CASES["gemma2"])))
    ids = torch.randint(3, model.vocab, (2, 20), generator=torch.Generator().manual_seed(0))
    found = []
    for pack in (True, False):
        packed.LEAST_PADDING = 1 if pack else 1 << 30
        how = {"pool": lamina.Pool(model, page=settings["pool"])} if "pool" in settings else settings
        cache = model.new_cache(2, **how)
        for counts in ([9, 3], [2, 8]):
            logits = model(ids[:, : max(counts)], cache=cache, counts=counts, logits="last")
        assert logits is not None
        found.append(logits)
    assert seen == [12, 10]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_generate_packs_prompts_of_different_lengths(seen: list[int]) -> None:
    _, model = pair("llama", next(iter(CASES["llama"])))
    prompts = [[5, 6, 7, 8, 9, 10], [4], [11, 12, 13]]
    together = model.generate(prompts, 6, eos_token_id=None)
    assert seen == [10]
    for prompt, tokens in zip(prompts, together.tokens, strict=True):
        assert model.generate([prompt], 6, eos_token_id=None).tokens == [tokens]


def test_little_padding_or_unknown_counts_are_not_packed() -> None:
    _, model = pair("llama", next(iter(CASES["llama"])))
    cache = model.new_cache(2)
    step = cache.step(200, [200, 190])
    assert packed.packed(step, None) is None
    step = cache.step(200, [200, 20])
    one = packed.packed(step, None)
    assert one is not None and one.T == 220
    step.abort()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each packed pass had, with the thresholds that users have."""
    return note_packed(monkeypatch)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "deepseek_v32", "gemma3n_text"])
@torch.no_grad()
def test_rows_of_one_token_beside_a_long_one_run_packed_with_any_logits(family: str, noted: list[int]) -> None:
    _, model = pair(family, next(iter(CASES[family])))
    ids = torch.randint(3, model.vocab, (4, 40), generator=torch.Generator().manual_seed(0))
    counts, cache = [1, 40, 1, 2], model.new_cache(4)
    model(ids[:, :5], cache=cache)
    last = model(ids, cache=cache, counts=counts, logits="last")
    held = cache.tokens
    every = model(ids, cache=cache, counts=counts)
    whole = model(cache.record[:, : int(cache.lengths.max())], counts=cache.lengths.tolist())  # without a cache
    assert noted == [44, 44, sum(cache.lengths.tolist())]
    assert last is not None and every is not None and whole is not None
    for row, tokens in enumerate(cache.tokens):
        alone = model(torch.tensor([tokens]))
        assert alone is not None
        n = len(tokens)
        assert relative(last[row], alone[0, len(held[row]) - 1]) < 2e-4
        assert relative(every[row, : counts[row]], alone[0, len(held[row]) :]) < 2e-4
        assert relative(whole[row, :n], alone[0]) < 2e-4


@torch.no_grad()
def test_decoder_rows_of_a_source_run_packed(noted: list[int]) -> None:
    model = planned("t5", torch.float32)
    source = model.random_source(4, 7, torch.Generator().manual_seed(0))
    ids = torch.randint(3, model.vocab, (4, 40), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(4, source=source)
    model(ids[:, :5], cache=cache)
    last = model(ids, cache=cache, counts=[1, 40, 1, 2], logits="last")
    assert noted == [44] and last is not None
    for row, tokens in enumerate(cache.tokens):
        alone = model(torch.tensor([tokens]), source=source.select([row]), logits="last")
        assert alone is not None and relative(last[row], alone[0]) < 2e-4


def test_layers_whose_calls_work_on_rows_are_not_packed_and_the_reason_is_told() -> None:
    model = toy("tokens")
    reason = why_not_packed(model)
    assert reason is not None and "is Tokens, whose calls work on rows" in reason
    cache = model.new_cache(2)
    model(torch.zeros(2, 200, dtype=torch.int64), cache=cache, counts=[1, 200], logits="last")
    assert cache.lengths.tolist() == [1, 200]
