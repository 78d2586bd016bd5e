"""Llama 4, the text model: most layers attend within chunks, with RoPE; some attend to the whole text, without it.

In layers without RoPE, queries are multiplied by a factor that grows slowly with their position (temperature tuning),
so that attention stays sharp over long texts. In some or all layers the MLP is a mixture of experts: one that all
tokens share, and those that a router chooses per token.

https://ai.meta.com/blog/llama-4-multimodal-intelligence
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lamina.attention.window import Chunked, Full, Window
from lamina.cache.memory import Memory
from lamina.cache.spec import Attention as KeysValues
from lamina.checkpoint.names import From
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import Decoder, mlp_names, qkv_names
from lamina.nn import Choice, GatedMLP, Linear, Mixture, RMSNorm, Rotary, rope_parameters
from lamina.nn.attention.rotary import RopeTable


class PassTensors(NamedTuple):
    rope: RopeTable
    temperature: Tensor | None  # [B, T]: a factor on queries of layers without RoPE


class TemperedAttention(nn.Module):
    """Attention with RoPE and then a norm of queries and keys, or with neither."""

    def __init__(self, c: Config, window: Window, rotary: bool) -> None:
        super().__init__()
        bias = c.get("attention_bias", False)
        heads, kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.parts, self.rotary = [heads, kv_heads, kv_heads], rotary
        self.spec = KeysValues(kv_heads, c.head_dim, c.head_dim, window)
        self.qkv = Linear(c.hidden_size, sum(self.parts) * c.head_dim, bias=bias)
        self.out = Linear(heads * c.head_dim, c.hidden_size, bias=bias)
        self.norm = RMSNorm(c.head_dim, c.rms_norm_eps, weight=False) if c.get("use_qk_norm", True) else None

    def forward(self, x: Tensor, memory: Memory, shared: PassTensors, onto: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads + 2 kv, T, D]
        q, k, v = qkv.split(self.parts, dim=1)
        how: dict[str, Any] = {"factor": shared.temperature}
        if self.rotary:
            norms = None if self.norm is None else (self.norm, self.norm)
            how = {"rope": shared.rope, "neighbours": True, "norms": norms, "norms_last": True}
        out = memory.attend(q, k, v, scale=self.head_dim**-0.5, **how)  # [B, H, T, D]
        return self.out(out.transpose(1, 2).flatten(2), onto)


def mixture(c: Config) -> Mixture:
    """The router's weight multiplies the experts' input."""
    width, inner, choice = c.hidden_size, c.intermediate_size, Choice(c.num_experts_per_tok, "sigmoid")
    return Mixture(width, c.num_local_experts, inner, c.hidden_act, choice, shared=inner, weigh_input=True)


class Block(nn.Module):
    def __init__(self, c: Config, window: Window, rotary: bool, dense: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = TemperedAttention(c, window, rotary)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size_mlp, c.hidden_act) if dense else mixture(c)
        self.specs = {"attention": self.attention.spec}

    def forward(self, x: Tensor, memory: Memory, shared: PassTensors) -> Tensor:
        x = self.attention(self.attention_norm(x), memory, shared, onto=x)
        return self.mlp(self.mlp_norm(x), onto=x)


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
    return [Block(c, windows[i], bool(rotary[i]), dense=i not in mixtures) for i in layers]


def swap(stack: Tensor) -> Tensor:
    """[E, in, out] <-> [E, out, in]"""
    return stack.transpose(1, 2)


class Llama4(Decoder):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        **qkv_names("blocks.{i}.attention", "model.layers.{i}.self_attn"),
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
        "blocks.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        **mlp_names("blocks.{i}.mlp", "model.layers.{i}.feed_forward"),
        "blocks.{i}.mlp.router": "model.layers.{i}.feed_forward.router",
        "blocks.{i}.mlp.experts.gate_up": From("model.layers.{i}.feed_forward.experts.gate_up_proj", swap),
        "blocks.{i}.mlp.experts.down": From("model.layers.{i}.feed_forward.experts.down_proj", swap),
        **mlp_names("blocks.{i}.mlp.shared", "model.layers.{i}.feed_forward.shared_expert"),
        "norm": "model.norm",
        "head": "lm_head",
    }

    def __init__(self, c: Config) -> None:
        super().__init__(
            c,
            blocks(c),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            rope=Rotary(c.head_dim, rope_parameters(c, 500_000.0), c.get("max_position_embeddings")),
            tied=c.get("tie_word_embeddings", False),
        )
        self.tuned = bool(c.get("attn_temperature_tuning", True))
        self.floor, self.growth = c.get("floor_scale", 8192), c.get("attn_scale", 0.1)

    def prepare(self, positions: Tensor) -> PassTensors:
        if not self.tuned:
            return PassTensors(super().prepare(positions), None)
        steps = torch.div(positions + 1, self.floor, rounding_mode="floor").float()
        return PassTensors(super().prepare(positions), 1 + self.growth * steps.log1p())
