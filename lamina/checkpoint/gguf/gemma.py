"""GGUF architectures of Gemma. The first three store norms with one added."""

from __future__ import annotations

import math
from statistics import NormalDist

from lamina.checkpoint.gguf.architecture import Architecture, Fields
from lamina.checkpoint.gguf.changes import gates_ups, minus_one
from lamina.checkpoint.gguf.dense import LAYER, LLAMA, block
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
    return layer_types(m, every=2, window=4096) | {
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
    found = {name: value for name, value in gemma2(m, c).items() if name != "sliding_window"}
    return found | layer_types(m, every=6) | ropes(m, c)


def with_layer_inputs(m: Metadata, c: Fields) -> Fields:
    """Fields that Gemma 3n and 4 share."""
    width = m.get("embedding_length_per_layer_input", 0)
    rows = {"vocab_size_per_layer_input": m.rows("per_layer_token_embd.weight")} if width else {}
    return rows | ropes(m, c) | layer_types(m, every=5 if m.architecture == "gemma3n" else 6) | {
        "hidden_size_per_layer_input": width,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": m.get("final_logit_softcapping"),
        "num_kv_shared_layers": m.get("attention.shared_kv_layers", 0),
    }  # fmt: skip


def gemma3n(m: Metadata, c: Fields) -> Fields:
    """The share of gates that become zero is stored as a number of standard deviations."""
    deviations = m.get("activation_sparsity_scale", [-math.inf] * m.layers)
    return with_layer_inputs(m, c) | {
        "activation_sparsity_pattern": [NormalDist().cdf(number) for number in deviations],
        "altup_active_idx": m["altup.active_idx"],
        "altup_num_inputs": m["altup.num_inputs"],
        "laurel_rank": m.rows("blk.0.laurel_l.weight"),
    }


def gemma4(m: Metadata, c: Fields) -> Fields:
    """Layers without a window have other heads, and rotate those dimensions whose divisor is one."""
    found = with_layer_inputs(m, c)
    full = [i for i, kind in enumerate(found["layer_types"]) if kind == "full_attention"]
    heads = m.get("attention.head_count_kv", c["num_attention_heads"])
    counts = heads if isinstance(heads, list) else [heads] * m.layers
    dim, sizes = m["attention.key_length"], m["feed_forward_length"]
    sizes = sizes if isinstance(sizes, list) else [sizes]
    divisors = m.tensors["rope_freqs.weight"].data
    rotated = {"rope_type": "proportional", "partial_rotary_factor": float((divisors == 1).mean())}
    rope = found["rope_parameters"]
    rope["full_attention"] = {"rope_theta": rope["full_attention"]["rope_theta"]} | rotated
    own = m.with_tensor("attn_k.weight")
    return found | {
        "head_dim": m.get("attention.key_length_swa", dim),
        "num_key_value_heads": next((counts[i] for i in range(m.layers) if i not in full), counts[0]),
        "per_layer_config": {str(i): {"head_dim": dim, "num_key_value_heads": counts[i]} for i in full},
        "attention_k_eq_v": len(own) > len(m.with_tensor("attn_v.weight")),
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": max(sizes) > min(sizes),
        "enable_moe_block": "num_experts" in c,
        "top_k_experts": c.get("num_experts_per_tok"),
    }


LAYER_INPUTS = TWO_NORMS | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    **block(inp_gate="per_layer_input_gate", proj="per_layer_projection", post_norm="post_per_layer_input_norm"),
}
GEMMA = {
    "gemma": Architecture(LLAMA, gemma, changes=SHIFTED),
    "gemma2": Architecture(TWO_NORMS, gemma2, changes=SHIFTED),
    "gemma3": Architecture(TWO_NORMS, gemma3, ("gemma3_text", "gemma3"), SHIFTED),
    "gemma3n": Architecture(
        LAYER_INPUTS | block(
            altup_correct_coef="altup.correction_coefs", altup_predict_coef="altup.prediction_coefs",
            altup_router="altup.modality_router", altup_router_norm="altup.router_norm", laurel_l="laurel.linear_left",
            laurel_r="laurel.linear_right", laurel_post_norm="laurel.post_laurel_norm",
        ) | {
            "blk.{i}.altup_correct_scale.weight": f"{LAYER}.altup.correct_output_scale",
            "altup_proj": "model.altup_projections.{e}",
            "altup_unembd_proj": "model.altup_unembed_projections.{e}",
        },
        gemma3n, ("gemma3n_text", "gemma3n"),
    ),
    "gemma4": Architecture(
        LAYER_INPUTS | block(
            pre_ffw_norm_2="pre_feedforward_layernorm_2", post_ffw_norm_1="post_feedforward_layernorm_1",
            post_ffw_norm_2="post_feedforward_layernorm_2",
        ) | {
            "blk.{i}.layer_output_scale.weight": f"{LAYER}.layer_scalar",
            "blk.{i}.ffn_gate_inp.weight": f"{LAYER}.router.proj.weight",
            "blk.{i}.ffn_gate_inp.scale": f"{LAYER}.router.scale",
            "blk.{i}.ffn_down_exps.scale": f"{LAYER}.router.per_expert_scale",
            "blk.{i}.ffn_down_exps.weight": f"{LAYER}.experts.down_proj",
            "blk.{i}.ffn_gate_up_exps.weight": f"{LAYER}.experts.gate_up_proj",
        },
        gemma4, ("gemma4_text", "gemma4"), joined=(gates_ups(f"{LAYER}.experts.gate_up_proj"),),
        unread=("num_experts_per_tok",),
    ),
}  # fmt: skip
