"""GPT-2: learned positions, LayerNorm, a plain MLP, biases.

GPT-BigCode (SantaCoder, StarCoder) has one head of keys and values, GPT-Neo a sliding window in every other layer.

https://openai.com/index/better-language-models  https://arxiv.org/abs/2301.03988  https://doi.org/10.5281/zenodo.5297715
"""

from __future__ import annotations

from typing import Any

from lamina.attention.window import Full, Sliding, Window
from lamina.checkpoint.names import From, Value
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.gpt import Gpt, split_groups, transposed
from lamina.nn import SelfAttention

BODY = {
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "blocks.{i}.attention_norm": "transformer.h.{i}.ln_1",
    "blocks.{i}.attention.qkv": "transformer.h.{i}.attn.c_attn",
    "blocks.{i}.attention.out": "transformer.h.{i}.attn.c_proj",
    "blocks.{i}.mlp_norm": "transformer.h.{i}.ln_2",
    "blocks.{i}.mlp.up": "transformer.h.{i}.mlp.c_fc",
    "blocks.{i}.mlp.down": "transformer.h.{i}.mlp.c_proj",
    "norm": "transformer.ln_f",
}
MASKS = ("*h.{i}.attn.bias", "*h.{i}.attn.masked_bias")


class GPT2(Gpt):
    names: dict[str, Value] = {
        **{path: name if "norm" in path or "{i}" not in path else transposed(name) for path, name in BODY.items()},
        "head": "lm_head",
    }
    ignored: tuple[str, ...] = MASKS
    aliases = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    }
    defaults = {"max_position_embeddings": 1024}
    learned_positions = True

    def __init__(self, c: Config) -> None:
        c.require("add_cross_attention", (False,), False)
        c.ignore("n_ctx", "reorder_and_upcast_attn", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
        super().__init__(c)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        scale = c.head_width**-0.5 if c.get("scale_attn_weights", True) else 1.0
        if c.get("scale_attn_by_inverse_layer_idx", False):
            scale /= layer + 1
        return super().make_attention(c, layer, **dict(scale=scale) | options)


class GPTBigCode(GPT2):
    names = {**BODY, "head": "lm_head"}
    act = ("activation_function", "gelu_pytorch_tanh")

    def __init__(self, c: Config) -> None:
        c.ignore("inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input")
        heads = c.num_attention_heads
        kv_heads = 1 if c.get("multi_query", True) else heads
        super().__init__(c.with_values(num_key_value_heads=kv_heads, scale_attn_by_inverse_layer_idx=False))
        grouped = From("transformer.h.{i}.attn.c_attn", split_groups(kv_heads, c.head_width))
        self.names = {**self.names, "blocks.{i}.attention.qkv": grouped}


class GPTNeo(Gpt):
    """Layers attend to the whole row or to the last `window_size` tokens, and scores are not scaled."""

    names = {
        **BODY,
        "blocks.{i}.attention.qkv": tuple(f"transformer.h.{{i}}.attn.attention.{part}_proj" for part in "qkv"),
        "blocks.{i}.attention.out": "transformer.h.{i}.attn.attention.out_proj",
        "head": "lm_head",
    }
    ignored = ("*h.{i}.attn.attention.bias", "*h.{i}.attn.attention.masked_bias")
    aliases = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    learned_positions = True

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(bias=False, scale=1.0) | options)

    def make_window(self, c: Config, layer: int) -> Window:
        """`attention_layers` has the kind of each layer; `attention_types` has patterns that are repeated."""
        repeats = c.get("attention_types", [[["global", "local"], 12]])
        kinds = c.get("attention_layers") or [kind for kinds, times in repeats for _ in range(times) for kind in kinds]
        if len(kinds) != c.num_hidden_layers or not set(kinds) <= {"global", "local"}:
            name, found = ("attention_layers", kinds) if c.get("attention_layers") else ("attention_types", repeats)
            raise InputError(f"{name}={found} must say global or local for {c.num_hidden_layers} layers")
        return Full() if kinds[layer] == "global" else Sliding(c.get("window_size", 256))
