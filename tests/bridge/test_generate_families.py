"""Greedy `generate` of many families over our cache gives the tokens that it gives over transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lamina import bridge
from tests.families.cases import cases

FAMILIES = (
    "afmoe", "apertus", "arcee", "bamba", "bitnet", "bloom", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3",
    "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "falcon_mamba", "gemma",
    "gemma3n_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe",
    "granitemoehybrid", "helium", "jamba", "lfm2", "lfm2_moe", "llama4", "mamba", "mamba2", "ministral", "mixtral",
    "nemotron", "nemotron_h", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2", "zamba2",
)  # fmt: skip


def greedy(model: Any, ids: torch.Tensor, cache: Any) -> list[int]:
    name = "cache_params" if "mamba" in model.config.model_type else "past_key_values"
    made = model.generate(ids, **{name: cache}, do_sample=False, max_new_tokens=10, min_new_tokens=10, pad_token_id=0)
    return made[0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_its_own_cache(family: str) -> None:
    torch.manual_seed(0)
    config = next(iter(cases(family).values()))()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(3, 60, (1, 14), generator=torch.Generator().manual_seed(1))
    own = transformers.DynamicCache(config=model.config)
    assert greedy(model, ids, own) == greedy(model, ids, bridge.Cache(model))
