"""GGUF architectures of Gemma. The first three store norms with one added."""

from __future__ import annotations

from lamina.checkpoint.gguf.architecture import Architecture, Fields
from lamina.checkpoint.gguf.changes import minus_one
from lamina.checkpoint.gguf.dense import LLAMA, block
from lamina.checkpoint.gguf.metadata import Metadata, layer_types

TWO_NORMS = LLAMA | block(
    post_attention_norm="post_attention_layernorm", ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)  # fmt: skip
SHIFTED = {"*norm.weight": minus_one}
NARROW = {"gemma2": 46, "gemma3": 62}
"""Layers of the releases of 27B, whose scores are scaled by hidden_size / num_attention_heads, not by head_dim."""


def gemma(m: Metadata, c: Fields) -> Fields:
    return {"hidden_act": "gelu_pytorch_tanh"}


def gemma2(m: Metadata, c: Fields) -> Fields:
    narrow = m.layers == NARROW.get(m.architecture)
    return layer_types(m, every=2) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": c["hidden_size"] // c["num_attention_heads"] if narrow else c["head_dim"],
        "attn_logit_softcapping": m.get("attn_logit_softcapping"),
        "final_logit_softcapping": m.get("final_logit_softcapping"),
    }


def ropes(m: Metadata, c: Fields) -> Fields:
    """Layers with a window have their own base, and do not scale."""
    local = {"rope_type": "default", "rope_theta": float(m.get("rope.freq_base_swa", 10_000.0))}
    full = c["rope_parameters"] | {"rope_theta": float(m.get("rope.freq_base", 1e6))}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def gemma3(m: Metadata, c: Fields) -> Fields:
    return gemma2(m, c) | layer_types(m, every=6) | ropes(m, c)


GEMMA = {
    "gemma": Architecture(LLAMA, gemma, changes=SHIFTED),
    "gemma2": Architecture(TWO_NORMS, gemma2, changes=SHIFTED),
    "gemma3": Architecture(TWO_NORMS, gemma3, ("gemma3_text", "gemma3"), SHIFTED),
}
