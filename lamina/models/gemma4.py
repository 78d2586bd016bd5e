"""Gemma 4, the text model: layers with a window and layers without differ in the number and width of heads and in RoPE.

Full layers rotate a part of each head, and their values may be their keys. The last layers may read earlier layers'
keys and values. Some releases have an input for each layer, others a mixture of experts beside the MLP.

https://huggingface.co/blog/gemma4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.attention.window import Full, Sliding, Window
from lamina.cache.memory import Memory
from lamina.checkpoint.names import From
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import layer_types
from lamina.models.gemma3 import Gemma3
from lamina.models.gemma_parts import (
    LAYER_INPUT_NAMES,
    REUSE_NAMES,
    LayerInput,
    LayerInputs,
    ReusingAttention,
    WithLayerInputs,
    source_of,
    unused,
)  # fmt: skip
from lamina.nn import Choice, Experts, GatedMLP, Positions, RMSNorm, Rotary, Router

FULL, SLIDING = "full_attention", "sliding_attention"


class Gemma4MLP(nn.Module):
    """post_norm(norm₁(mlp(norm(x))) + norm₂(experts(norm(x)))); the router has a norm of x of its own."""

    def __init__(self, c: Config, inner: int, eps: float) -> None:
        super().__init__()
        width = c.hidden_size
        self.norm, self.post_norm = (RMSNorm(width, eps) for _ in range(2))
        self.mlp = GatedMLP(width, inner, c.hidden_activation)
        self.mixed = bool(c.get("enable_moe_block", False))
        if self.mixed:
            self.router_norm, self.experts_norm, self.first_norm, self.second_norm = (
                RMSNorm(width, eps) for _ in range(4)
            )
            self.router = Router(width, c.num_experts, Choice(c.top_k_experts, normed=True), scaled=True)
            self.experts = Experts(c.num_experts, width, c.moe_intermediate_size, c.hidden_activation)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        if self.mixed:
            chosen, weights, _ = self.router(self.router_norm(x))
            more = self.experts(self.experts_norm(x), chosen, weights)
            y = self.second_norm(more, onto=self.first_norm(y))
        return self.post_norm(y, onto=x)


class Gemma4Block(nn.Module):
    """factor · (x + attention, then + MLP, then + the input of this layer)"""

    def __init__(self, c: Config, layer: int, attention: ReusingAttention, mlp: Gemma4MLP, eps: float) -> None:
        super().__init__()
        width, dim, self.layer = c.hidden_size, c.hidden_size_per_layer_input, layer
        self.attention_norm, self.attention_post_norm = (RMSNorm(width, eps) for _ in range(2))
        self.attention, self.mlp, self.specs = attention, mlp, attention.specs
        self.layer_input = LayerInput(width, dim, c.hidden_activation, eps) if dim else None
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, memory: Memory, shared: Positions | WithLayerInputs) -> Tensor:
        positions = shared.positions if isinstance(shared, WithLayerInputs) else shared
        x = self.attention_post_norm(self.attention(self.attention_norm(x), memory, positions), onto=x)
        x = self.mlp(x)
        if self.layer_input is not None and isinstance(shared, WithLayerInputs):
            x = self.layer_input(x, shared.inputs[:, :, self.layer], onto=x)
        return x * self.factor


class Gemma4(Gemma3):
    names = Gemma3.names | REUSE_NAMES | LAYER_INPUT_NAMES | {
        "blocks.{i}.mlp.norm": "model.layers.{i}.pre_feedforward_layernorm",
        "blocks.{i}.mlp.post_norm": "model.layers.{i}.post_feedforward_layernorm",
        "blocks.{i}.mlp.mlp.gate_up": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
        "blocks.{i}.mlp.mlp.down": "model.layers.{i}.mlp.down_proj",
        "blocks.{i}.mlp.router_norm.weight": From("model.layers.{i}.router.scale", lambda w: w * w.shape[0] ** -0.5),
        "blocks.{i}.mlp.router.weight": "model.layers.{i}.router.proj.weight",
        "blocks.{i}.mlp.router.scales": "model.layers.{i}.router.per_expert_scale",
        "blocks.{i}.mlp.experts.gate_up": "model.layers.{i}.experts.gate_up_proj",
        "blocks.{i}.mlp.experts.down": "model.layers.{i}.experts.down_proj",
        "blocks.{i}.mlp.experts_norm": "model.layers.{i}.pre_feedforward_layernorm_2",
        "blocks.{i}.mlp.first_norm": "model.layers.{i}.post_feedforward_layernorm_1",
        "blocks.{i}.mlp.second_norm": "model.layers.{i}.post_feedforward_layernorm_2",
        "blocks.{i}.factor": "model.layers.{i}.layer_scalar",
    }  # fmt: skip
    defaults = dict(
        vocab_size=262_144, num_attention_heads=8, num_key_value_heads=4, head_dim=256, global_head_dim=512,
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=131_072, sliding_window=512,
        vocab_size_per_layer_input=262_144, hidden_size_per_layer_input=256, num_kv_shared_layers=0,
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    )  # fmt: skip

    def __init__(self, c: Config) -> None:
        c.require("expert_intermediate_size", (None,))  # in published files
        if c.get("use_bidirectional_attention") == "vision":  # of images, which are not read here
            c = c.with_values(use_bidirectional_attention=False)
        if not c.get("enable_moe_block", False):
            c.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        super().__init__(c)
        layers, dim = c.num_hidden_layers, c.hidden_size_per_layer_input
        self.layer_inputs = None
        c.ignore("vocab_size_per_layer_input", "sliding_window")  # not used in every model
        if dim:
            self.layer_inputs = LayerInputs(c.vocab_size_per_layer_input, c.hidden_size, layers, dim, c.get(*self.eps))
        self.ignored = (*self.ignored, *unused([i for i in range(layers) if self.source(c, i) is not None]))

    def make_norm(self, c: Config) -> RMSNorm:
        return RMSNorm(c.hidden_size, c.get(*self.eps))

    def make_window(self, c: Config, layer: int) -> Window:
        return Full() if self.kinds(c)[layer] == FULL else Sliding(c.sliding_window)

    def make_block(self, c: Config, layer: int) -> Gemma4Block:
        return Gemma4Block(c, layer, self.make_attention(c, layer), self.make_mlp(c, layer), c.get(*self.eps))

    def make_attention(self, c: Config, layer: int, **options: Any) -> Any:
        kind = self.kinds(c)[layer]
        return ReusingAttention(
            c.hidden_size, c.num_attention_heads, *heads_of(c, layer, kind), window=self.make_window(c, layer),
            rope=kind, eps=c.get(*self.eps), bias=c.get("attention_bias", False), source=self.source(c, layer),
            k_is_v=kind == FULL and bool(c.get("attention_k_eq_v", False)),
        )  # fmt: skip

    def make_mlp(self, c: Config, layer: int) -> Gemma4MLP:
        wide = c.get("use_double_wide_mlp", False) and self.source(c, layer) is not None
        return Gemma4MLP(c, c.intermediate_size * (2 if wide else 1), c.get(*self.eps))

    def make_rope(self, c: Config) -> dict[str, Rotary]:
        kinds = self.kinds(c)
        c.ignore(*(f"rope_parameters.{kind}{more}" for kind in {FULL, SLIDING} - {*kinds} for more in ("", ".*")))
        return {kind: Rotary.of(c, heads_of(c, kinds.index(kind), kind)[1], kind=kind) for kind in sorted(set(kinds))}

    def kinds(self, c: Config) -> Sequence[str]:
        """The last layer is always a full one."""
        return [*layer_types(c, [FULL, SLIDING], lambda i: SLIDING if (i + 1) % 6 else FULL)[:-1], FULL]

    def source(self, c: Config, layer: int) -> int | None:
        return source_of(self.kinds(c), layer, c.num_kv_shared_layers)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T, width + L · P]: the embedding, and then that of each layer, if there is one"""
        x = super().embed(ids)
        return x if self.layer_inputs is None else torch.cat([x, self.layer_inputs.embed(ids)], dim=-1)

    def enter(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Positions | WithLayerInputs]:
        x, more = embeds.tensor_split([self.embedding.embedding_dim], dim=-1)
        x, prepared = super().enter(x, positions)
        return x, prepared if self.layer_inputs is None else WithLayerInputs(prepared, self.layer_inputs(x, more))


def heads_of(c: Config, layer: int, kind: str) -> tuple[int, int]:
    """Number of key heads and width of heads: `per_layer_config`, or in files of releases fields for full layers."""
    if c.get("per_layer_config") is not None:
        layers = c.part("per_layer_config")
        key = next((key for key in layers.values if key.isdigit() and int(key) == layer), None)  # "5" or "05"
        own = Config({}) if key is None else layers.part(key)
        for name in own.values.keys() - {"head_dim", "num_key_value_heads"}:
            raise InputError(f"{name}={own.get(name)!r} in per_layer_config of layer {layer} is not supported")
        return own.get("num_key_value_heads", c.num_key_value_heads), own.get("head_dim", c.head_dim)
    if kind == SLIDING:
        return c.num_key_value_heads, c.head_dim
    fewer = c.get("num_global_key_value_heads") if c.get("attention_k_eq_v", False) else None
    return fewer or c.num_key_value_heads, c.global_head_dim
