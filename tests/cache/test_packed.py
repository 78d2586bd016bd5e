"""Packed passes: ragged rows side by side are the same rows with padding, for every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lamina
from lamina.cache import packed
from lamina.cache.packed import PackedStep
from tests.families.cases import CASES
from tests.families.harness import pair, relative

FAMILIES = [
    "llama", "gemma2", "qwen3_next", "mamba", "mamba2", "lfm2", "falcon_h1", "deepseek_v3", "gpt_oss",
    "recurrent_gemma", "gemma3n_text", "gpt2", "bloom", "rwkv", "llama4",
]  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Passes are packed however little padding they have; -> how many tokens each packed pass had."""
    monkeypatch.setattr(packed, "LEAST_PADDING", 1)
    monkeypatch.setattr(packed, "LEAST_SHARE", 0.0)
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
