"""`generate` of many families over our cache gives the tokens that it gives over transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lamina import bridge
from tests.families.cases import cases
from tests.families.encoder_decoder_cases import FAMILIES as FAMILIES_WITH_ENCODER

FAMILIES = (
    "afmoe", "apertus", "arcee", "bamba", "bitnet", "bloom", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3",
    "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "falcon_mamba", "gemma",
    "gemma3n_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe",
    "granitemoehybrid", "helium", "jamba", "lfm2", "lfm2_moe", "llama4", "mamba", "mamba2", "ministral", "mixtral",
    "nemotron", "nemotron_h", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2", "zamba2",
)  # fmt: skip


WAYS: list[dict[str, Any]] = [{"num_beams": 2}, {"do_sample": True, "top_k": 9}, {"prefill_chunk_size": 5}]


def tokens(model: Any, ids: torch.Tensor, cache: Any, way: dict[str, Any]) -> list[list[int]]:
    name = "cache_params" if "mamba" in model.config.model_type else "past_key_values"
    settings = dict(do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0) | way
    torch.manual_seed(2)
    return model.generate(ids, **{name: cache}, **settings).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_its_own_cache(family: str) -> None:
    """Greedy, and in one of the other ways."""
    torch.manual_seed(0)
    config = next(iter(cases(family).values()))()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(3, 60, (1, 14), generator=torch.Generator().manual_seed(1))
    for way in ({}, WAYS[FAMILIES.index(family) % len(WAYS)]):
        theirs = tokens(model, ids, transformers.DynamicCache(config=model.config), way)
        assert theirs == tokens(model, ids, bridge.Cache(model), way), way


@pytest.mark.parametrize("family", ["bart", "marian", "mbart", "pegasus", "t5gemma", "umt5", "whisper"])
def test_tokens_of_an_encoder_decoder_model_are_those_of_its_own_cache(family: str) -> None:
    torch.manual_seed(0)
    if family == "whisper":
        given = torch.randn(1, 80, 60, generator=torch.Generator().manual_seed(1))
        model: Any = transformers.WhisperForConditionalGeneration(whisper()).eval()
    else:
        given = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))
        config = next(iter(FAMILIES_WITH_ENCODER[family].values()))()
        model = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    for way in ({}, {"num_beams": 2}):
        made = []
        for cache in (None, bridge.Cache(model)):
            settings = dict(do_sample=False, max_new_tokens=8, min_new_tokens=8) | way
            made.append(model.generate(given, past_key_values=cache, **settings).tolist())
        assert made[0] == made[1], way


def whisper() -> Any:
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
    return transformers.WhisperConfig(
        vocab_size=64, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=30, max_target_positions=40,
        **sizes, **tokens, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
