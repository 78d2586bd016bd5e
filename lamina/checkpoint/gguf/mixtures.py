"""GGUF architectures of models with mixtures of experts. The matrices of all experts of a layer are one stack."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.checkpoint.gguf.architecture import Architecture, Fields, Joined
from lamina.checkpoint.gguf.changes import UNPAIRED, gates_ups, row, stacked_pair, up_of_latents
from lamina.checkpoint.gguf.dense import LAYER, LLAMA, block, granite
from lamina.checkpoint.gguf.metadata import Metadata, deepseek_experts, layer_types

EXPERTS = LLAMA | block(
    ffn_gate_inp="mlp.gate", ffn_gate_exps="mlp.experts.{e}.gate_proj", ffn_up_exps="mlp.experts.{e}.up_proj",
    ffn_down_exps="mlp.experts.{e}.down_proj", ffn_gate_inp_shexp="mlp.shared_expert_gate",
    ffn_gate_shexp="mlp.shared_expert.gate_proj", ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj",
)  # fmt: skip
"""Names of Qwen's mixtures."""

DEEPSEEK = EXPERTS | block(
    ffn_gate_shexp="mlp.shared_experts.gate_proj", ffn_up_shexp="mlp.shared_experts.up_proj",
    ffn_down_shexp="mlp.shared_experts.down_proj",
) | {"blk.{i}.exp_probs_b.bias": f"{LAYER}.mlp.gate.e_score_correction_bias"}  # fmt: skip
"""Names of DeepSeek's mixtures."""

LATENT = block(
    attn_q_a="self_attn.q_a_proj", attn_q_a_norm="self_attn.q_a_layernorm", attn_q_b="self_attn.q_b_proj",
    attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa", attn_kv_a_norm="self_attn.kv_a_layernorm",
    attn_kv_b="self_attn.kv_b_proj",
)  # fmt: skip
LATENT_JOINED = (
    Joined(
        f"{LAYER}.self_attn.kv_b_proj.weight", ("blk.{i}.attn_k_b.weight", "blk.{i}.attn_v_b.weight"), up_of_latents
    ),
)
"""Multi-head latent attention; files before April 2025 have attn_kv_b."""

GRANITE = LLAMA | block(
    ffn_gate_inp="block_sparse_moe.router.layer", ffn_down_exps="block_sparse_moe.output_linear",
    ffn_down_shexp="shared_mlp.output_linear",
)  # fmt: skip
GRANITE_JOINED = (
    gates_ups(f"{LAYER}.block_sparse_moe.input_linear.weight"),
    gates_ups(f"{LAYER}.shared_mlp.input_linear.weight", "_shexp.weight"),
)


def qwen_moe(m: Metadata, c: Fields) -> Fields:
    """Qwen 3 scales the weights of a token's experts to a sum of one, Qwen 2 does not."""
    sparse = m.with_tensor("ffn_gate_inp.weight")
    shared = m.with_tensor("ffn_up_shexp.weight")
    found = {"shared_expert_intermediate_size": m.rows(f"blk.{shared[0]}.ffn_up_shexp.weight")} if shared else {}
    return (
        found
        | {
            "norm_topk_prob": m.architecture != "qwen2moe",
            "mlp_only_layers": [i for i in range(m.layers) if i not in sparse],
            "decoder_sparse_step": 1,
            "moe_intermediate_size": m.tensors[f"blk.{sparse[0]}.ffn_up_exps.weight"].shape[1],
        }
        | ({"qkv_bias": c["attention_bias"]} if m.architecture == "qwen2moe" else {})
    )


def granite_moe(m: Metadata, c: Fields) -> Fields:
    shared = m.get("expert_shared_feed_forward_length", 0)
    kind = {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}
    return granite(m, c) | kind | {"num_local_experts": c.get("num_experts", 0)}


def gpt_oss(m: Metadata, c: Fields) -> Fields:
    """The frequencies between those that yarn scales and those it does not are not rounded."""
    rope = c["rope_parameters"] | ({"truncate": False} if c["rope_parameters"]["rope_type"] == "yarn" else {})
    experts = {"num_local_experts": c["num_experts"], "intermediate_size": c["moe_intermediate_size"]}
    return experts | layer_types(m, every=2) | {"rope_parameters": rope}


def alternating(gate: Tensor, up: Tensor, c: Fields) -> Tensor:
    """[E, inner] of gates and ups -> [E, 2 · inner], one of each in turn"""
    return torch.stack([gate, up], 2).flatten(1, 2)


def alternating_columns(gate: Tensor, up: Tensor, c: Fields) -> Tensor:
    """Matrices [E, inner, width] of gates and ups -> [E, width, 2 · inner]"""
    return alternating(gate, up, c).transpose(1, 2)


def swapped(t: Tensor, c: Fields) -> Tensor:
    """[E, a, b] -> [E, b, a]"""
    return t.transpose(1, 2)


def swapped_pair(gate: Tensor, up: Tensor, c: Fields) -> Tensor:
    return swapped(stacked_pair(gate, up, c), c)


def llama4(m: Metadata, c: Fields) -> Fields:
    """The chunk is not in files: it is 8192 in all releases, and every fourth layer has no RoPE, unless a window of 0
    says that there are neither chunks nor such layers. Queries and keys are normed in Scout, which has 16 experts, and
    not in Maverick, with 128."""
    experts = c.get("num_experts", 0)
    plain = m.get("attention.sliding_window") == 0
    return {
        "model_type": "llama4_text",
        "num_local_experts": experts,
        "intermediate_size": m.get("expert_feed_forward_length", c["intermediate_size"]),
        "intermediate_size_mlp": c["intermediate_size"],
        "hidden_act": "silu",
        "moe_layers": m.with_tensor("ffn_gate_inp.weight"),
        "interleave_moe_layer_step": m.get("interleave_moe_layer_step", 1),
        "attention_chunk_size": 8192,
        "use_qk_norm": experts != 128,
    } | ({"layer_types": ["full_attention"] * m.layers, "no_rope_layers": [1] * m.layers} if plain else {})


def latent_fields(m: Metadata, c: Fields) -> Fields:
    """Fields of multi-head latent attention."""
    rotary = m["rope.dimension_count"]
    return {
        "num_key_value_heads": c["num_attention_heads"],
        "q_lora_rank": m.get("attention.q_lora_rank"),
        "kv_lora_rank": m["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": m.get("attention.key_length_mla", m["attention.key_length"]) - rotary,
        "v_head_dim": m.get("attention.value_length_mla", m.get("attention.value_length")),
        "head_dim": rotary,
    }


def deepseek2(m: Metadata, c: Fields) -> Fields:
    """V3 scores experts by sigmoids (function 2), to which a bias is added. `yarn_log_multiplier` is a tenth of
    mscale_all_dim, which is mscale too in every release."""
    rope = {name: value for name, value in c["rope_parameters"].items() if name != "partial_rotary_factor"}
    if (log := m.get("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * float(log))
    found = latent_fields(m, c) | deepseek_experts(m) | {"rope_parameters": rope}
    if m.get("expert_gating_func") == SIGMOID or m.with_tensor("exp_probs_b.bias"):
        return found | {"model_type": "deepseek_v3"}
    grouped = found["n_group"] > 1
    return found | {
        "norm_topk_prob": False,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


SIGMOID = 2


def glm4_moe(m: Metadata, c: Fields) -> Fields:
    """A file has the layers for multi-token prediction, which are not read."""
    return deepseek_experts(m) | {
        "norm_topk_prob": m.get("expert_weights_norm", True),
        "use_qk_norm": bool(m.with_tensor("attn_q_norm.weight")),
    }


MIXTURES = {
    "qwen2moe": Architecture(
        EXPERTS, qwen_moe, ("qwen2_moe",), {"blk.{i}.ffn_gate_inp_shexp.weight": row}
    ),
    "qwen3moe": Architecture(EXPERTS, qwen_moe, ("qwen3_moe",)),
    "granitemoe": Architecture(
        GRANITE, granite_moe, ("granitemoe", "granitemoeshared"), UNPAIRED, GRANITE_JOINED,
        unread=("num_experts", "shared_expert_intermediate_size"),
    ),
    "gpt-oss": Architecture(
        LLAMA | block(ffn_gate_inp="mlp.router", post_attention_norm="post_attention_layernorm") | {
            "blk.{i}.attn_sinks.weight": f"{LAYER}.self_attn.sinks",
            "blk.{i}.ffn_down_exps.weight": f"{LAYER}.mlp.experts.down_proj",
            "blk.{i}.ffn_down_exps.bias": f"{LAYER}.mlp.experts.down_proj_bias",
        },
        gpt_oss, ("gpt_oss",), {"blk.{i}.ffn_down_exps.weight": swapped},
        (
            gates_ups(f"{LAYER}.mlp.experts.gate_up_proj", fn=alternating_columns),
            gates_ups(f"{LAYER}.mlp.experts.gate_up_proj_bias", "_exps.bias", alternating),
        ),
        unread=("num_experts", "moe_intermediate_size"),
    ),
    "llama4": Architecture(
        LLAMA | block(
            ffn_gate="feed_forward.gate_proj", ffn_up="feed_forward.up_proj", ffn_down="feed_forward.down_proj",
            ffn_gate_inp="feed_forward.router", ffn_gate_shexp="feed_forward.shared_expert.gate_proj",
            ffn_up_shexp="feed_forward.shared_expert.up_proj", ffn_down_shexp="feed_forward.shared_expert.down_proj",
        ) | {"blk.{i}.ffn_down_exps.weight": f"{LAYER}.feed_forward.experts.down_proj"},
        llama4, ("llama4_text", "llama4"), {"blk.{i}.ffn_down_exps.weight": swapped},
        (gates_ups(f"{LAYER}.feed_forward.experts.gate_up_proj", fn=swapped_pair),),
        unread=("num_experts", "moe_intermediate_size"),
    ),
    "deepseek2": Architecture(
        DEEPSEEK | LATENT, deepseek2, ("deepseek_v2", "deepseek_v3"), joined=LATENT_JOINED, unread=("num_experts",)
    ),
    "glm4moe": Architecture(
        DEEPSEEK | block(post_attention_norm="post_attention_layernorm"), glm4_moe, ("glm4_moe",),
        unread=("num_experts",),
    ),
}  # fmt: skip
