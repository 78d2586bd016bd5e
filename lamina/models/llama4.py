"""Llama 4, the text model: most layers attend within chunks, with RoPE; some attend to the whole text, without it.

In layers without RoPE, queries are multiplied by a factor that grows slowly with their position (temperature tuning),
so that attention stays sharp over long texts. In some or all layers the MLP is a mixture of experts: one that all
tokens share, and those that a router chooses per token.

https://ai.meta.com/blog/llama-4-multimodal-intelligence
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.attention.window import Chunked, Full, Window
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import Decoder, mlp_names, qkv_names
from lamina.nn import Block, Choice, GatedMLP, Mixture, Positions, RMSNorm, Rotary, SelfAttention
from lamina.nn.moe.names import swapped_stack_names


def attention(c: Config, window: Window, rotary: bool) -> SelfAttention:
    """With RoPE and then a norm of queries and keys; or with neither, and queries times a factor."""
    normed, bias = rotary and c.get("use_qk_norm", True), c.get("attention_bias", False)
    q_norm, k_norm = (RMSNorm(c.head_dim, c.rms_norm_eps, weight=False) if normed else None for _ in range(2))
    return SelfAttention(
        c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, bias=bias, out_bias=bias,
        window=window, rope="default" if rotary else None, neighbours=True, q_norm=q_norm, k_norm=k_norm,
        norms_last=True, factored=not rotary,
    )  # fmt: skip


def mixture(c: Config) -> Mixture:
    """The router's weight multiplies the experts' input."""
    width, inner, choice = c.hidden_size, c.intermediate_size, Choice(c.num_experts_per_tok, "sigmoid")
    return Mixture(width, c.num_local_experts, inner, c.hidden_act, choice, shared=inner, weigh_input=True)


def blocks(c: Config) -> list[Block]:
    """The blocks: window, RoPE and kind of MLP of each layer, from the lists in the configuration or its intervals."""
    layers = range(c.num_hidden_layers)
    rotary = c.get("no_rope_layers") or [(i + 1) % c.get("no_rope_layer_interval", 4) != 0 for i in layers]
    kinds = c.get("layer_types") or ["chunked_attention" if one else "full_attention" for one in rotary]
    every = c.get("interleave_moe_layer_step", 1)
    mixtures = set(c.get("moe_layers", range(every - 1, len(layers), every)))
    known = ("chunked_attention", "full_attention")
    if min(len(kinds), len(rotary)) < len(layers) or not set(kinds) <= set(known):
        raise InputError(
            f"layer_types must name {len(layers)} layers, each one of {known}, and no_rope_layers as many: "
            f"not {kinds} and {rotary}"
        )
    windows = [Chunked(c.attention_chunk_size) if kind == known[0] else Full() for kind in kinds]
    return [
        Block(
            attention(c, windows[i], bool(rotary[i])),
            mixture(c) if i in mixtures else GatedMLP(c.hidden_size, c.intermediate_size_mlp, c.hidden_act),
            attention_norm=RMSNorm(c.hidden_size, c.rms_norm_eps),
            mlp_norm=RMSNorm(c.hidden_size, c.rms_norm_eps),
        )
        for i in layers
    ]


class Llama4(Decoder):
    no_effect = ("no_rope_layer_interval", "for_llm_compressor", "intermediate_size_mlp")  # the last: of dense layers
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        **qkv_names("blocks.{i}.attention", "model.layers.{i}.self_attn"),
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
        "blocks.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        **mlp_names("blocks.{i}.mlp", "model.layers.{i}.feed_forward"),
        "blocks.{i}.mlp.router": "model.layers.{i}.feed_forward.router",
        **swapped_stack_names("blocks.{i}.mlp.experts", "model.layers.{i}.feed_forward.experts"),
        **mlp_names("blocks.{i}.mlp.shared", "model.layers.{i}.feed_forward.shared_expert"),
        "norm": "model.norm",
        "head": "lm_head",
    }

    def __init__(self, c: Config) -> None:
        super().__init__(
            c,
            blocks(c),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            rope=Rotary.of(c, c.head_dim, 500_000.0),
            tied=c.get("tie_word_embeddings", False),
        )
        self.tuned = bool(c.get("attn_temperature_tuning", True))
        self.floor, self.growth = c.get("floor_scale", 8192), c.get("attn_scale", 0.1)

    def prepare(self, positions: Tensor) -> Positions:
        found = super().prepare(positions)
        if not self.tuned:
            return found
        steps = torch.div(positions + 1, self.floor, rounding_mode="floor").float()
        return found._replace(factor=1 + self.growth * steps.log1p())
