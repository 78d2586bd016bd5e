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


EVERY_WAY = (
    "deepseek_v3",
    "falcon_h1",
    "gpt_oss",
    "jamba",
    "lfm2",
    "mamba",
    "mamba2",
    "mixtral",
    "qwen3_next",
    "zamba2",
)
ALL_DIFFERENT = dict(do_sample=False, max_new_tokens=8, min_new_tokens=8, no_repeat_ngram_size=1)
"""Settings for small encoder–decoder models, which otherwise repeat one token."""
WAYS: list[dict[str, Any]] = [{"num_beams": 2}, {"do_sample": True, "top_k": 9}, {"prefill_chunk_size": 5}]


def tokens(model: Any, ids: torch.Tensor, cache: Any, way: dict[str, Any]) -> list[list[int]]:
    name = "cache_params" if "mamba" in model.config.model_type else "past_key_values"
    settings = dict(do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0) | way
    torch.manual_seed(2)
    return model.generate(ids, **{name: cache}, **settings).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_its_own_cache(family: str) -> None:
    """Greedy, and in one of the other ways; families in `EVERY_WAY` in all of them."""
    torch.manual_seed(0)
    config = next(iter(cases(family).values()))()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(3, 60, (1, 14), generator=torch.Generator().manual_seed(1))
    ways = WAYS if family in EVERY_WAY else [WAYS[FAMILIES.index(family) % len(WAYS)]]
    if family in ("mamba", "mamba2"):  # transformers prefills in chunks only where the cache is `past_key_values`
        ways = [way for way in ways if "prefill_chunk_size" not in way]
    for way in ({}, *ways):
        theirs = tokens(model, ids, transformers.DynamicCache(config=model.config), way)
        assert theirs == tokens(model, ids, bridge.Cache(model), way), way


@pytest.mark.parametrize("family", ["bart", "marian", "mbart", "pegasus", "t5", "t5gemma", "umt5", "whisper"])
def test_tokens_of_an_encoder_decoder_model_are_those_of_its_own_cache(family: str) -> None:
    torch.manual_seed(0)
    if family == "whisper":
        given = torch.randn(1, 80, 60, generator=torch.Generator().manual_seed(1))
        model: Any = transformers.WhisperForConditionalGeneration(whisper()).eval()
    else:
        given = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))
        config = t5() if family == "t5" else next(iter(FAMILIES_WITH_ENCODER[family].values()))()
        model = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    for way in ({}, {"num_beams": 2}):
        made = []
        for cache in (None, bridge.Cache(model)):
            settings = ALL_DIFFERENT | way
            made.append(model.generate(given, past_key_values=cache, **settings).tolist())
        assert made[0] == made[1], way


def whisper() -> Any:
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
    return transformers.WhisperConfig(
        vocab_size=64, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=30, max_target_positions=40,
        **sizes, **tokens, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip


def t5(encoder_layers: int = 3) -> Any:
    return transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=encoder_layers, num_decoder_layers=3, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip


def test_a_decoder_with_more_layers_than_its_encoder_gives_the_tokens_of_an_uncached_run() -> None:
    """transformers makes a cache of as many layers as the encoder has, and fails."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(t5(encoder_layers=1)).eval()
    settings = ALL_DIFFERENT
    ours = model.generate(torch.tensor([[5, 6, 7, 8]]), past_key_values=bridge.Cache(model), **settings)
    assert torch.equal(ours, model.generate(torch.tensor([[5, 6, 7, 8]]), use_cache=False, **settings))


def test_memory_that_is_made_early_for_an_encoder_decoder_model_changes_no_token() -> None:
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(t5()).eval()
    given, made = torch.tensor([[5, 6, 7, 8]]), []
    early = bridge.Cache(model, capacity=20)
    early.early_initialization(1, 4, 8, torch.float32, torch.device("cpu"))
    for cache in (None, early):
        made.append(model.generate(given, past_key_values=cache, **ALL_DIFFERENT))
    assert torch.equal(*made) and early.inner.lengths.tolist() == [8]


def test_tokens_of_a_model_with_images_are_those_of_its_own_cache() -> None:
    torch.manual_seed(0)
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8)
    text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, patch_size=4, projection_dim=16),
        text_config=transformers.LlamaConfig(**text, num_key_value_heads=2), image_token_id=60,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    given = torch.tensor([[3, 4, 60, 60, 60, 60, 5, 6]])  # four patches
    image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    settings = dict(pixel_values=image, do_sample=False, max_new_tokens=8, pad_token_id=0)
    for way in ({}, {"num_beams": 2}):
        theirs = model.generate(given, past_key_values=transformers.DynamicCache(config=config), **settings, **way)
        assert torch.equal(theirs, model.generate(given, past_key_values=bridge.Cache(model), **settings, **way)), way
    blind = model.generate(given, **(settings | {"pixel_values": torch.zeros_like(image)}))
    assert not torch.equal(theirs, blind)  # the image matters
