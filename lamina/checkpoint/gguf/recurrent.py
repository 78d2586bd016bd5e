"""GGUF architectures of recurrent models, and of hybrids of recurrence and attention.

Of which kind a layer is shows in its tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.checkpoint.gguf.architecture import Architecture, Change, Fields, Joined
from lamina.checkpoint.gguf.changes import (
    MAMBA,
    MAMBA2,
    UNPAIRED,
    flat,
    gates_ups,
    grouped_rows,
    kernel,
    log_decay,
    minus_one,
    regrouped_values,
    row,
)  # fmt: skip
from lamina.checkpoint.gguf.dense import LAYER, LLAMA, ROPE, block, granite
from lamina.checkpoint.gguf.metadata import Metadata, deepseek_experts
from lamina.checkpoint.gguf.mixtures import (
    DEEPSEEK,
    EXPERTS,
    GRANITE,
    GRANITE_JOINED,
    LATENT,
    LATENT_JOINED,
    latent_fields,
)


def mamba_names(theirs: str) -> dict[str, str]:
    """Names of a mixer's tensors, for Mamba and Mamba-2."""
    return block(
        theirs,
        ssm_in="in_proj", ssm_conv1d="conv1d", ssm_x="x_proj", ssm_dt="dt_proj", ssm_a="A_log", ssm_d="D",
        ssm_norm="norm", ssm_out="out_proj", ssm_dt_norm="dt_layernorm", ssm_b_norm="b_layernorm",
        ssm_c_norm="c_layernorm",
    )  # fmt: skip


def mamba2_names(theirs: str) -> dict[str, str]:
    return mamba_names(theirs) | {"blk.{i}.ssm_dt.bias": f"{theirs}.dt_bias"}


BACKBONE = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.{i}.attn_norm": "backbone.layers.{i}.norm",
}
FEED_FORWARD = {"output_norm": "model.final_layernorm"} | block(
    ffn_norm="pre_ff_layernorm", ffn_gate="feed_forward.gate_proj", ffn_up="feed_forward.up_proj",
    ffn_down="feed_forward.down_proj",
)  # fmt: skip


def mamba(m: Metadata, c: Fields) -> Fields:
    """Falcon Mamba has norms of what the input selects."""
    return {
        "model_type": "falcon_mamba" if m.get("ssm.dt_b_c_rms", False) else "mamba",
        "intermediate_size": m["ssm.inner_size"],
        "state_size": m["ssm.state_size"],
        "conv_kernel": m["ssm.conv_kernel"],
        "time_step_rank": m["ssm.time_step_rank"],
        "layer_norm_epsilon": c["rms_norm_eps"],
        "use_bias": bool(m.with_tensor("ssm_in.bias")),
        "use_conv_bias": bool(m.with_tensor("ssm_conv1d.bias")),
    }


def mamba2(m: Metadata, c: Fields) -> Fields:
    heads, inner = m["ssm.time_step_rank"], m["ssm.inner_size"]
    return {
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // c["hidden_size"],
        "state_size": m["ssm.state_size"],
        "n_groups": m["ssm.group_count"],
        "conv_kernel": m["ssm.conv_kernel"],
        "layer_norm_epsilon": c["rms_norm_eps"],
        "use_bias": bool(m.with_tensor("ssm_in.bias")),
        "use_conv_bias": bool(m.with_tensor("ssm_conv1d.bias")),
    }


def mamba2_fields(m: Metadata) -> Fields:
    """Fields of Mamba-2 layers in hybrids."""
    heads, inner = m["ssm.time_step_rank"], m["ssm.inner_size"]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": m["ssm.state_size"],
        "mamba_n_groups": m["ssm.group_count"],
        "mamba_d_conv": m["ssm.conv_kernel"],
        "mamba_proj_bias": bool(m.with_tensor("ssm_in.bias")),
        "mamba_conv_bias": bool(m.with_tensor("ssm_conv1d.bias")),
    }


def spacing(layers: list[int], count: int) -> tuple[int, int]:
    """Period and offset of layers that repeat; of none, an offset that no layer has.

    >>> spacing([4, 12], 16)
    (8, 4)
    """
    if not layers:
        return count + 1, count
    return (layers[1] - layers[0] if len(layers) > 1 else count), layers[0]


def jamba(m: Metadata, c: Fields) -> Fields:
    period, offset = spacing(m.with_tensor("attn_q.weight"), m.layers)
    expert_period, expert_offset = spacing(m.with_tensor("ffn_gate_inp.weight"), m.layers)
    return {
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        "num_experts": c.get("num_experts", 1),
        "mamba_expand": m["ssm.inner_size"] // c["hidden_size"],
        "mamba_d_state": m["ssm.state_size"],
        "mamba_d_conv": m["ssm.conv_kernel"],
        "mamba_dt_rank": m["ssm.time_step_rank"],
        "mamba_proj_bias": bool(m.with_tensor("ssm_in.bias")),
        "mamba_conv_bias": bool(m.with_tensor("ssm_conv1d.bias")),
    }


def falcon_h1(m: Metadata, c: Fields) -> Fields:
    """The factors are not in files: the weights are stored multiplied by them."""
    normed = bool(m.with_tensor("ssm_norm.weight"))
    return mamba2_fields(m) | {
        "mamba_d_ssm": m["ssm.inner_size"],
        "mamba_rms_norm": normed,
        "mamba_norm_before_gate": False,
    }


def granite_hybrid(m: Metadata, c: Fields) -> Fields:
    """Without experts the shared expert is stored as an MLP. Bamba has the same architecture: RoPE on a part of each
    head, and no factors."""
    experts, rope = c.get("num_experts", 0), dict(c["rope_parameters"])
    part = rope.pop("partial_rotary_factor", 1)
    rotated = {} if part == 1 else {"attn_rotary_emb": round(part * c["head_dim"])}
    attending = m.with_tensor("attn_q.weight")
    return granite(m, c) | mamba2_fields(m) | rotated | {
        "mamba_expand": m["ssm.inner_size"] // c["hidden_size"],
        "num_local_experts": experts,
        "shared_intermediate_size": m.get("expert_shared_feed_forward_length", c["intermediate_size"]),
        "layer_types": ["attention" if i in attending else "mamba" for i in range(m.layers)],
        "position_embedding_type": "rope" if m.get("rope.scaling.finetuned", True) else "nope",
        "rope_parameters": rope,
    }  # fmt: skip


KINDS = {"attn_q.weight": "*", "ffn_gate_inp.weight": "E", "ssm_in.weight": "M", "ffn_up.weight": "-"}


def nemotron_h(m: Metadata, c: Fields) -> Fields:
    pattern = [""] * m.layers
    for name, kind in KINDS.items():
        for i in m.with_tensor(name):
            pattern[i] = kind
    dense = m.with_tensor("ffn_up.weight")
    eps = m.get("attention.layer_norm_rms_epsilon", m.get("attention.layer_norm_epsilon"))
    experts = {name: value for name, value in deepseek_experts(m).items() if name != "first_k_dense_replace"}
    return experts | {
        "hybrid_override_pattern": "".join(pattern),
        "layer_norm_epsilon": eps,
        "intermediate_size": m.rows(f"blk.{dense[0]}.ffn_up.weight") if dense else None,
        "mamba_num_heads": m["ssm.time_step_rank"],
        "mamba_head_dim": m["ssm.inner_size"] // m["ssm.time_step_rank"],
        "ssm_state_size": m["ssm.state_size"],
        "n_groups": m["ssm.group_count"],
        "conv_kernel": m["ssm.conv_kernel"],
        "use_bias": bool(m.with_tensor("ssm_in.bias")),
        "use_conv_bias": bool(m.with_tensor("ssm_conv1d.bias")),
        "mlp_bias": bool(m.with_tensor("ffn_up.bias") or m.with_tensor("ffn_up_shexp.bias")),
        "moe_intermediate_size": m.get("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length"),
        "moe_latent_size": m.get("moe_latent_size", 0),
    }


NEMOTRON_UNREAD = (
    "layer_norm_eps", "rms_norm_eps", "num_experts", "shared_expert_intermediate_size", "attention_bias", *ROPE,
)  # fmt: skip
MIXER = "backbone.layers.{i}.mixer"
NEMOTRON = BACKBONE | mamba2_names(MIXER) | block(
    MIXER,
    attn_q="q_proj", attn_k="k_proj", attn_v="v_proj", attn_output="o_proj", ffn_up="up_proj", ffn_down="down_proj",
    ffn_gate_inp="gate", ffn_up_exps="experts.{e}.up_proj", ffn_down_exps="experts.{e}.down_proj",
    ffn_up_shexp="shared_experts.up_proj", ffn_down_shexp="shared_experts.down_proj",
    ffn_latent_down="fc1_latent_proj", ffn_latent_up="fc2_latent_proj",
) | {"blk.{i}.exp_probs_b.bias": f"{MIXER}.gate.e_score_correction_bias"}  # fmt: skip


def lfm2(m: Metadata, c: Fields) -> Fields:
    """The file has the width of the MLP that the original computes."""
    attending = m.with_tensor("attn_q.weight")
    found: Fields = {
        "layer_types": ["full_attention" if i in attending else "conv" for i in range(m.layers)],
        "norm_eps": c["rms_norm_eps"],
        "conv_L_cache": m["shortconv.l_cache"],
        "conv_bias": bool(m.with_tensor("shortconv.conv.bias") or m.with_tensor("shortconv.in_proj.bias")),
    }
    if "num_experts" not in c:
        return found | {"block_auto_adjust_ff_dim": False}
    return found | {
        "num_dense_layers": m.get("leading_dense_block_count", 0),
        "use_expert_bias": bool(m.with_tensor("exp_probs_b.bias")),
    }


LFM2 = LLAMA | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"} | block(
    attn_norm="operator_norm", ffn_norm="ffn_norm", attn_output="self_attn.out_proj",
    attn_q_norm="self_attn.q_layernorm", attn_k_norm="self_attn.k_layernorm", ffn_gate="feed_forward.w1",
    ffn_up="feed_forward.w3", ffn_down="feed_forward.w2", ffn_gate_inp="feed_forward.gate",
    ffn_gate_exps="feed_forward.experts.{e}.w1", ffn_up_exps="feed_forward.experts.{e}.w3",
    ffn_down_exps="feed_forward.experts.{e}.w2",
) | {
    "blk.{i}.exp_probs_b.bias": f"{LAYER}.feed_forward.expert_bias",
    "blk.{i}.shortconv.conv": f"{LAYER}.conv.conv",
    "blk.{i}.shortconv.in_proj": f"{LAYER}.conv.in_proj",
    "blk.{i}.shortconv.out_proj": f"{LAYER}.conv.out_proj",
}  # fmt: skip


def delta_fields(m: Metadata, c: Fields) -> Fields:
    """Fields of Qwen3-Next and Qwen3.5."""
    heads = m["ssm.time_step_rank"]
    attending = m.with_tensor("attn_q.weight")
    found = {
        "layer_types": ["full_attention" if i in attending else "linear_attention" for i in range(m.layers)],
        "linear_num_key_heads": m["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_key_head_dim": m["ssm.state_size"],
        "linear_value_head_dim": m["ssm.inner_size"] // heads,
        "linear_conv_kernel_dim": m["ssm.conv_kernel"],
    }
    if m.architecture != "qwen3next":
        return found
    dense = sorted(set(range(m.layers)) - set(m.with_tensor("ffn_gate_inp.weight")))
    return found | {"norm_topk_prob": True, "mlp_only_layers": dense, "decoder_sparse_step": 1}


DELTA = EXPERTS | block(
    post_attention_norm="post_attention_layernorm", ssm_conv1d="linear_attn.conv1d", ssm_a="linear_attn.A_log",
    ssm_ba="linear_attn.in_proj_ba", ssm_in="linear_attn.in_proj_qkvz", ssm_norm="linear_attn.norm",
    ssm_out="linear_attn.out_proj", attn_qkv="linear_attn.in_proj_qkv", attn_gate="linear_attn.in_proj_z",
    ssm_alpha="linear_attn.in_proj_a", ssm_beta="linear_attn.in_proj_b",
) | {"blk.{i}.ssm_dt.bias": f"{LAYER}.linear_attn.dt_bias"}  # fmt: skip
DELTA_CHANGES: dict[str, Change] = {
    "blk.{i}.ssm_a": log_decay,
    "blk.{i}.ssm_conv1d.weight": kernel,
    "blk.{i}.ffn_gate_inp_shexp.weight": row,
    "blk.{i}.ssm_norm.weight": lambda t, c: t,  # this norm has no one added
    "*norm.weight": minus_one,
}


def by_key_head(qkv: Tensor, z: Tensor, c: Fields) -> Tensor:
    """Queries, keys and values of all heads, and gates -> those of one key head after another"""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    key, value = c["linear_key_head_dim"], values // keys * c["linear_value_head_dim"]
    return grouped_rows(torch.cat([qkv, z]), keys, key, key, value, value)


QWEN35_CHANGES: dict[str, Change] = {
    **DELTA_CHANGES,
    "blk.{i}.ssm_a": lambda t, c: log_decay(regrouped_values(t, c, 1), c),
    "blk.{i}.ssm_dt.bias": lambda t, c: regrouped_values(t, c, 1),
    "blk.{i}.ssm_alpha.weight": lambda t, c: regrouped_values(t, c, 1),
    "blk.{i}.ssm_beta.weight": lambda t, c: regrouped_values(t, c, 1),
    "blk.{i}.attn_gate.weight": lambda t, c: regrouped_values(t, c),
    "blk.{i}.attn_qkv.weight": lambda t, c: regrouped_values(t, c),
    "blk.{i}.ssm_conv1d.weight": lambda t, c: kernel(regrouped_values(t, c), c),
    "blk.{i}.ssm_out.weight": lambda t, c: regrouped_values(t.transpose(0, 1), c).transpose(0, 1),
}
"""Value heads are stored in another order."""


def kimi_linear(m: Metadata, c: Fields) -> Fields:
    """`kda.head_dim` is the width of heads of delta attention; a layer's heads are counted by their decays."""
    attending = m.with_tensor("attn_kv_a_mqa.weight")
    delta = m.with_tensor("ssm_beta.weight")
    experts = {name: value for name, value in deepseek_experts(m).items() if name != "n_routed_experts"}
    return latent_fields(m, c) | experts | {
        "layer_types": ["full_attention" if i in attending else "linear_attention" for i in range(m.layers)],
        "linear_head_dim": m["kda.head_dim"],
        "linear_num_heads": m.rows(f"blk.{delta[0]}.ssm_beta.weight") if delta else c["num_attention_heads"],
        "linear_conv_kernel_dim": m["ssm.conv_kernel"],
        "num_experts": c.get("num_experts", 0),
        "num_experts_per_token": c.get("num_experts_per_tok"),
        "num_shared_experts": experts["n_shared_experts"],
        "num_expert_group": experts["n_group"],
        "moe_renormalize": m.get("expert_weights_norm", True),
        "norm_topk_prob": None,
        "model_max_length": c.get("max_position_embeddings"),
    }  # fmt: skip


KIMI = DEEPSEEK | LATENT | block(
    ssm_conv1d_q="self_attn.q_conv1d", ssm_conv1d_k="self_attn.k_conv1d", ssm_conv1d_v="self_attn.v_conv1d",
    ssm_f_a="self_attn.f_a_proj", ssm_f_b="self_attn.f_b_proj", ssm_beta="self_attn.b_proj", ssm_a="self_attn.A_log",
    ssm_g_a="self_attn.g_a_proj", ssm_g_b="self_attn.g_b_proj", ssm_norm="self_attn.o_norm",
    ffn_gate_exps="mlp.experts.{e}.w1", ffn_up_exps="mlp.experts.{e}.w3", ffn_down_exps="mlp.experts.{e}.w2",
) | {"blk.{i}.ssm_dt.bias": f"{LAYER}.self_attn.dt_bias"}  # fmt: skip
KIMI_CHANGES: dict[str, Change] = {
    "blk.{i}.ssm_a": lambda t, c: log_decay(flat(t, c), c),
    "blk.{i}.ssm_conv1d_*.weight": kernel,
}

ATTENTION = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    "attention_bias", *ROPE,
)  # fmt: skip
"""Fields that models without attention do not have."""

RECURRENT = {
    "mamba": Architecture(
        BACKBONE | mamba_names(MIXER), mamba, ("mamba", "falcon_mamba"), MAMBA, unread=ATTENTION
    ),
    "mamba2": Architecture(
        BACKBONE | mamba2_names(MIXER), mamba2, changes=MAMBA2, unread=(*ATTENTION, "intermediate_size")
    ),
    "jamba": Architecture(
        LLAMA | mamba_names(f"{LAYER}.mamba") | FEED_FORWARD | block(
            ffn_gate_inp="feed_forward.router", ffn_gate_exps="feed_forward.experts.{e}.gate_proj",
            ffn_up_exps="feed_forward.experts.{e}.up_proj", ffn_down_exps="feed_forward.experts.{e}.down_proj",
        ),
        jamba, changes=MAMBA, unread=("attention_bias", *ROPE),
    ),
    "falcon-h1": Architecture(
        LLAMA | mamba2_names(f"{LAYER}.mamba") | FEED_FORWARD | {  # files lack the ".weight" of this norm
            "blk.{i}.ffn_norm": f"{LAYER}.pre_ff_layernorm.weight",
            "blk.{i}.ffn_norm.weight": f"{LAYER}.pre_ff_layernorm.weight",
        },
        falcon_h1, ("falcon_h1",), MAMBA2,
    ),
    "granitehybrid": Architecture(
        GRANITE | mamba2_names(f"{LAYER}.mamba") | block(ffn_down="shared_mlp.output_linear"),
        granite_hybrid, ("granitemoehybrid", "bamba"), MAMBA2 | UNPAIRED,
        (*GRANITE_JOINED, gates_ups(f"{LAYER}.shared_mlp.input_linear.weight", ".weight")),
        unread=("num_experts", "shared_expert_intermediate_size", "rope_theta"),
    ),
    "nemotron_h": Architecture(NEMOTRON, nemotron_h, ("nemotron_h",), MAMBA2, unread=NEMOTRON_UNREAD),
    "nemotron_h_moe": Architecture(NEMOTRON, nemotron_h, ("nemotron_h",), MAMBA2, unread=NEMOTRON_UNREAD),
    "lfm2": Architecture(
        LFM2, lfm2, changes={"blk.{i}.shortconv.conv.weight": kernel}, unread=("rms_norm_eps", "attention_bias")
    ),
    "lfm2moe": Architecture(
        LFM2, lfm2, ("lfm2_moe",), {"blk.{i}.shortconv.conv.weight": kernel},
        unread=("rms_norm_eps", "attention_bias"),
    ),
    "qwen3next": Architecture(
        DELTA, delta_fields, ("qwen3_next",), DELTA_CHANGES,
        (
            Joined(
                f"{LAYER}.linear_attn.in_proj_qkvz.weight", ("blk.{i}.attn_qkv.weight", "blk.{i}.attn_gate.weight"),
                by_key_head,
            ),
        ),
    ),
    "qwen35": Architecture(DELTA, delta_fields, ("qwen3_5_text", "qwen3_5"), QWEN35_CHANGES),
    "qwen35moe": Architecture(DELTA, delta_fields, ("qwen3_5_moe_text", "qwen3_5_moe"), QWEN35_CHANGES),
    "kimi-linear": Architecture(KIMI, kimi_linear, ("kimi_linear",), KIMI_CHANGES, LATENT_JOINED, unread=ROPE),
}  # fmt: skip
