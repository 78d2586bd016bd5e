"""Granite 4 hybrids: Mamba-2 layers and a few of attention, with a shared expert and, in the larger ones, others.

https://www.ibm.com/granite
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lamina.config import Config
from lamina.models.bamba import hybrid_names, mamba2_mixer
from lamina.models.decoder import layer_types
from lamina.models.granite import Granite
from lamina.models.granite_moe import ROUTER
from lamina.nn import Choice, GatedMLP, Mixer, Mixture, Rotary, SelfAttention
from lamina.nn.moe.names import linear_stack_names

LAYER = "model.layers.{i}"
KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # names in older files


class GraniteMoeHybrid(Granite):
    names = Granite.names | {
        **hybrid_names(LAYER),
        "blocks.{i}.mlp.gate_up": f"{LAYER}.shared_mlp.input_linear",
        "blocks.{i}.mlp.down": f"{LAYER}.shared_mlp.output_linear",
        "blocks.{i}.mlp.shared.gate_up": f"{LAYER}.shared_mlp.input_linear",
        "blocks.{i}.mlp.shared.down": f"{LAYER}.shared_mlp.output_linear",
        "blocks.{i}.mlp.router": ROUTER,
        **linear_stack_names("blocks.{i}.mlp.experts", f"{LAYER}.block_sparse_moe"),
    }

    no_effect = ("max_position_embeddings",)  # of RoPE, which most do not have

    def __init__(self, c: Config) -> None:
        c.require("normalization_function", ("rmsnorm",), "rmsnorm")  # in published files
        super().__init__(c)

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        given = c.first("layer_types", "layers_block_type", default=None)
        kinds = None if given is None else [KINDS.get(kind, kind) for kind in given]
        known = ["linear_attention", "full_attention"]
        if layer_types(c.with_values(layer_types=kinds), known, lambda i: known[0])[layer] == "full_attention":
            return self.make_attention(c, layer)
        return mamba2_mixer(c, c.get(*self.eps), factors=(1.0, c.residual_multiplier))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        positions = c.require("position_embedding_type", ("rope", "nope", None))
        return super().make_attention(c, layer, **dict(rope="default" if positions == "rope" else None) | options)

    def make_rope(self, c: Config) -> Rotary | None:
        if c.get("position_embedding_type") == "rope":
            rotated = c.get("attn_rotary_emb")  # of Bamba, which GGUF files have as this family
            partial = None if rotated is None else rotated / c.head_width
            return Rotary.of(c, c.head_width, self.rope_base, partial=partial)
        c.ignore("rope_parameters", "rope_parameters.*", "rope_theta", "rope_scaling")
        return None

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        width, act, factor = c.hidden_size, c.get(*self.act), c.residual_multiplier
        shared, experts = c.get("shared_intermediate_size", 1024), c.get("num_local_experts", 8)
        if not experts:
            return GatedMLP(width, shared, act, factors=(1.0, factor))
        choice = Choice(c.get("num_experts_per_tok", 2), normed=True)
        return Mixture(width, experts, c.intermediate_size, act, choice, shared=shared, factor=factor)
