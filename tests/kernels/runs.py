"""Runs of a captured step beside plain passes, for tests."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch

import lamina
from lamina import models
from lamina.cache.codec.codec import Codecs
from lamina.config import Config
from lamina.generation.prompt import from_rows
from lamina.generation.run import Run, StrategyOutput
from lamina.generation.settings.settings import settings_of
from lamina.generation.stopping import Stopping
from lamina.generation.strategies.captured import decode_captured
from lamina.generation.strategies.plain import decode_plain
from lamina.model import Model
from lamina.models.llama import Llama
from lamina.sampling.chain import Facts, chain_of
from lamina.sampling.chooser import Chooser
from tests.families.cases.llama import make
from tests.generation.text import tokenizer

PROMPTS = [[5, 9, 12, 3, 44, 8, 21, 2, 2, 6, 13], [7]]
NEW = 3


def start(
    model: Model, capacity: int | None = None, codec: Codecs | None = None, pool: lamina.Pool | None = None
) -> tuple[lamina.Cache, torch.Tensor]:
    """A cache that holds the prompts, and the logits after them."""
    cache, prompt = model.new_cache(rows=2, capacity=capacity, codec=codec, pool=pool), from_rows(PROMPTS)
    logits = model(prompt.ids, cache=cache, counts=prompt.counts, logits="last")
    assert logits is not None
    return cache.reserve(30), logits


def begin(model: Model, codec: Codecs | None = None, pool: lamina.Pool | None = None, **given: Any) -> Run:
    """A run after the prompts, as `generate` makes it of these settings."""
    settings = settings_of(model, dict(max_new_tokens=NEW, eos_token_id=(), seed=0) | given)
    cache, logits = start(model, codec=codec, pool=pool)
    assert settings.seed is not None
    chooser = Chooser(tuple(chain_of(settings, Facts(model.vocab))), settings.do_sample, settings.seed)
    counts = [len(prompt) for prompt in PROMPTS]
    stopping = Stopping.of(settings, counts, model.tokenizer)
    return Run(model, cache, logits, chooser, stopping, counts, [4, 2**32 - 11], settings)


def both(model: Model, **given: Any) -> tuple[StrategyOutput, StrategyOutput]:
    """What a captured step and plain passes make; the same."""
    captured, plain = decode_captured(begin(model, **given)), decode_plain(begin(model, **given))
    assert (captured.tokens, captured.reasons) == (plain.tokens, plain.reasons)
    assert captured.cache.tokens == plain.cache.tokens
    return captured, plain


SMALL: dict[str, dict[str, Any]] = {
    "llama": dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1),
    "gemma2": dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, sliding_window=3),
    "mamba": dict(num_hidden_layers=1),
    "mamba2": dict(num_hidden_layers=1, num_heads=4, head_dim=16),
    "falcon_h1": dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1),
    "qwen3_next": dict(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], mlp_only_layers=[0, 1],
        num_attention_heads=2, num_key_value_heads=1,
    ),
    "deepseek_v3": dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2),
    "glm_moe_dsa": dict(
        num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=2, indexer_types=["full", "shared"]
    ),
}  # fmt: skip


@functools.cache
def small(family: str) -> Model:
    """A random model of a family with one layer of each kind and no experts: the interpreter is slow."""
    file = {"glm_moe_dsa": "indexer"}.get(family, family)
    config = import_module(f"tests.families.cases.{file}").make(**SMALL[family]).to_dict()
    model = models.family(config["model_type"]).build(Config(config))
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not bool((parameter < 0).all()):  # norms and decays stay as they are
            parameter.normal_(std=0.4)
    return model


@functools.cache
def tiny() -> Model:
    """A random llama of one layer that knows the tokens of `tokenizer`."""
    torch.manual_seed(2)
    shape: dict[str, Any] = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    model = Llama.build(Config(make(vocab_size=tokenizer().vocab_size, intermediate_size=16, **shape).to_dict()))
    for parameter in model.parameters():
        parameter.normal_(std=0.5)
    model.tokenizer = tokenizer()
    return model
