"""How each family is stored in GGUF files: what is changed, and the metadata beside those that all have."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.checkpoint.gguf_converter import (
    Fields,
    Format,
    bloom_rows,
    by_layer,
    changed,
    columns,
    constant,
    decays,
    delta_keys,
    deviations,
    dt_bias,
    factors,
    falcon_groups,
    falcon_rows,
    head_norms,
    hybrid_keys,
    kernels,
    latent,
    latent_keys,
    local_base,
    mamba_keys,
    paired,
    paired_weights,
    plus_one,
    qkvz,
    renamed,
    rotates_all,
    split,
    stacked,
    tiled,
    transposed,
    window,
    windows,
)  # fmt: skip

FULL = "full_attention"
BIAS = {r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias": r"blk.\1.exp_probs_b.bias"}
MERGED = renamed(r"(block_sparse_moe|feed_forward)\.experts\.(?=\D)", "mlp.experts.")
W = {"w1": "gate", "w2": "down", "w3": "up"}
STACK_NAMES = {
    rf"model\.layers\.(\d+)\.mlp\.experts\.{w}\.weight": rf"blk.\1.ffn_{n}_exps.weight" for w, n in W.items()
}
GRANITE_NAMES = {
    rf"model\.layers\.(\d+)\.{theirs}\.weight": rf"blk.\1.ffn_{ours}.weight"
    for theirs, ours in {
        "block_sparse_moe.gate": "gate_exps", "block_sparse_moe.up": "up_exps",
        "block_sparse_moe.output_linear": "down_exps", "shared_mlp.gate": "gate_shexp", "shared_mlp.up": "up_shexp",
        "shared_mlp.output_linear": "down_shexp",
    }.items()
}  # fmt: skip
GRANITE_STEPS = tuple(
    split(rf"{part}\.input_linear", (f"{part}.gate", f"{part}.up"), lambda t, c: t.chunk(2, -2))
    for part in ("block_sparse_moe", "shared_mlp")
)
MAMBA2 = (decays, kernels, columns, dt_bias)


def llama3_divisors(c: Fields) -> list[float]:
    """Divisors of the frequencies, from the wave lengths."""
    rope, dim = c["rope_parameters"], c["head_dim"]
    if rope["rope_type"] != "llama3":
        return []
    old, found = rope["original_max_position_embeddings"], []
    for pair in range(dim // 2):
        wave = 2 * torch.pi * rope["rope_theta"] ** (2 * pair / dim)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = float(old / wave > low) if low == high else min(max((old / wave - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - share) / rope["factor"] + share))
    return found


def with_divisors(tensors: Any, c: Fields) -> Any:
    found = llama3_divisors(c)
    return tensors | ({"rope_freqs.weight": torch.tensor(found)} if found else {})


def longrope(tensors: Any, c: Fields) -> Any:
    rope = c["rope_parameters"]
    if rope["rope_type"] != "longrope":
        return tensors
    return tensors | {f"rope_factors_{one}.weight": torch.tensor(rope[f"{one}_factor"]) for one in ("long", "short")}


def attention_factor(c: Fields) -> float | None:
    rope = c["rope_parameters"]
    if rope["rope_type"] != "longrope":
        return None
    original = rope["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(c["max_position_embeddings"] / original) / math.log(original))


def phi3(c: Fields) -> Fields:
    rope, heads = c["rope_parameters"], c["num_attention_heads"]
    return {
        "attention.sliding_window": c["sliding_window"] or 0,
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings", 4096),
        "rope.scaling.attn_factor": attention_factor(c),
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1) * c["hidden_size"]) // heads,
        "attention.key_length": None,
        "attention.value_length": None,
    }  # fmt: skip


def only_dense(c: Fields) -> Fields:
    """Of heads with their own keys and an MLP four times as wide, whatever is true."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    return {"attention.head_count_kv": heads, "feed_forward_length": 4 * width, "rope.freq_base": None}


def stablelm(c: Fields) -> Fields:
    return {"use_parallel_residual": c["use_parallel_residual"], "rope.freq_base": None}


def falcon(c: Fields) -> Fields:
    return {
        "tensor_data_layout": "jploski", "context_length": 2048, "feed_forward_length": 4 * c["hidden_size"],
        "attention.head_count_kv": falcon_groups(c), "rope.freq_base": None, "rope.scaling.type": None,
    }  # fmt: skip


def glm4_moe(c: Fields) -> Fields:
    """One more layer, for multi-token prediction."""
    found = {"expert_weights_norm": c["norm_topk_prob"], "expert_gating_func": 2, "nextn_predict_layers": 1}
    return found | {"block_count": c["num_hidden_layers"] + 1}


def prediction_layer(tensors: Any, c: Fields) -> Any:
    name = f"model.layers.{c['num_hidden_layers']}"
    return tensors | {f"{name}.{part}.weight": torch.ones(32, 32) for part in ("eh_proj", "self_attn.q_proj")}


def gemma4(c: Fields) -> Fields:
    own = {int(i): one for i, one in c["per_layer_config"].items()}
    dim = next(iter(own.values()))["head_dim"]
    layers, inner, shared = c["num_hidden_layers"], c["intermediate_size"], c["num_kv_shared_layers"]
    heads = [own.get(i, {}).get("num_key_value_heads", c["num_key_value_heads"]) for i in range(layers)]
    wide = [inner * (2 if i >= layers - shared else 1) for i in range(layers)]
    return windows(c) | local_base(c) | {
        "feed_forward_length": wide if c["use_double_wide_mlp"] else inner,
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
        "attention.key_length": dim, "attention.value_length": dim,
        "attention.key_length_swa": c["head_dim"], "attention.value_length_swa": c["head_dim"],
        "rope.dimension_count": dim, "rope.dimension_count_swa": c["head_dim"],
    }  # fmt: skip


def gemma4_divisors(c: Fields) -> list[float]:
    dim = next(iter(c["per_layer_config"].values()))["head_dim"]
    rotated = int(dim * c["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return [1.0] * rotated + [1e30] * (dim // 2 - rotated)


def gemma3n(c: Fields) -> Fields:
    return windows(c) | local_base(c) | {
        "altup.active_idx": c["altup_active_idx"], "altup.num_inputs": c["altup_num_inputs"],
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": c["num_kv_shared_layers"], "activation_sparsity_scale": deviations(c),
    }  # fmt: skip


def altup(tensors: Any, c: Fields) -> Any:
    """Matrices of single versions become one stack."""
    found = {n: t for n, t in tensors.items() if "altup_projections" not in n and "altup_unembed" not in n}
    for name in ("altup_projections", "altup_unembed_projections"):
        found[f"model.{name}.weight"] = torch.stack([tensors[f"model.{name}.{i}.weight"] for i in range(3)])
    return found


def mamba(c: Fields) -> Fields:
    found = {"ssm.inner_size": c["intermediate_size"], "ssm.time_step_rank": c["time_step_rank"]}
    return mamba_keys(c) | found | {"ssm.dt_b_c_rms": c["model_type"] == "falcon_mamba"}


def jamba(c: Fields) -> Fields:
    layers = range(c["num_hidden_layers"])
    attends = [i % c["attn_layer_period"] == c["attn_layer_offset"] for i in layers]
    return hybrid_keys(c) | {
        "attention.head_count_kv": [c["num_key_value_heads"] if one else 0 for one in attends],
        "ssm.time_step_rank": c["mamba_dt_rank"], "attention.key_length": None, "attention.value_length": None,
    }  # fmt: skip


def granite_hybrid(c: Fields) -> Fields:
    kinds = c["layer_types"]
    return hybrid_keys(c) | {
        "attention.head_count_kv": by_layer(c["num_key_value_heads"], kinds, FULL),
        "rope.scaling.finetuned": False, "context_length": 2**20, **rotates_all(c),
    }  # fmt: skip


def bamba(c: Fields) -> Fields:
    heads = [c["num_key_value_heads"] if i in c["attn_layer_indices"] else 0 for i in range(c["num_hidden_layers"])]
    return hybrid_keys(c) | {"attention.head_count_kv": heads, "rope.scaling.finetuned": True}


def ministral3(c: Fields) -> Fields:
    rope = c["rope_parameters"]
    found = {"rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"]}
    return rotates_all(c) | found | {"attention.temperature_scale": rope["llama_4_scaling_beta"]}


def without_experts(tensors: Any, c: Fields) -> Any:
    """The shared expert is called an MLP if there are no others."""
    if c["num_local_experts"]:
        return tensors
    names = {
        "shared_mlp.gate.": "mlp.gate_proj.",
        "shared_mlp.up.": "mlp.up_proj.",
        "shared_mlp.output_linear.": "mlp.down_proj.",
    }
    found = dict(tensors)
    for old in tensors:
        for theirs, ours in names.items():
            if theirs in old:
                found[old.replace(theirs, ours)] = found.pop(old)
    return found


def nemotron_h(c: Fields) -> Fields:
    kinds = c["layers_block_type"] if "layers_block_type" in c else c["layer_types"]
    return {
        "block_count": len(kinds),
        "attention.head_count_kv": by_layer(c["num_key_value_heads"], kinds, FULL),
        "feed_forward_length": by_layer(c["moe_intermediate_size"], kinds, "moe"),
        "ssm.conv_kernel": c["conv_kernel"], "ssm.state_size": c["ssm_state_size"], "ssm.group_count": c["n_groups"],
        "ssm.inner_size": c["mamba_num_heads"] * c["mamba_head_dim"], "ssm.time_step_rank": c["mamba_num_heads"],
        "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": c["norm_topk_prob"], "moe_latent_size": c["moe_latent_size"],
    }  # fmt: skip


def lfm2(c: Fields) -> Fields:
    inner = c["intermediate_size"]
    if c.get("block_auto_adjust_ff_dim"):
        multiple = c["block_multiple_of"]
        inner = -(-int(c["block_ffn_dim_multiplier"] * int(2 * inner / 3)) // multiple) * multiple
    heads = by_layer(c["num_key_value_heads"], c["layer_types"], FULL)
    return {
        "attention.head_count_kv": heads, "feed_forward_length": inner, "shortconv.l_cache": c["conv_L_cache"],
        "expert_weights_scale": None, "expert_gating_func": 2 if "num_experts" in c else None,
    }  # fmt: skip


def kimi_linear(c: Fields) -> Fields:
    return latent_keys(c) | {
        "context_length": c["model_max_length"],
        "attention.head_count_kv": by_layer(1, c["layer_types"], FULL),
        "attention.value_length": None,
        "ssm.conv_kernel": c["linear_conv_kernel_dim"], "kda.head_dim": c["linear_head_dim"],
        "leading_dense_block_count": c["mlp_layer_types"].count("dense"),
    }  # fmt: skip


QKVZ = split(r"in_proj_qkvz\.", ("in_proj_qkv.", "in_proj_z."), qkvz)
NEXT_NORMS = changed(r"(?<!linear_attn\.)norm\.weight$", lambda t, c: t + 1)
NEXT = (decays, kernels, dt_bias, NEXT_NORMS, stacked)
QWEN35 = (
    changed(r"linear_attn\.(in_proj_qkv|in_proj_z|conv1d)\.weight", tiled()),
    changed(r"linear_attn\.(in_proj_a|in_proj_b|A_log|dt_bias)", tiled(1)),
    changed(r"linear_attn\.out_proj", lambda t, c: tiled()(t.T, c).T),
    *NEXT,
)
NEXT_NAMES = {r"model\.layers\.(\d+)\.linear_attn\.in_proj_qkv\.weight": r"blk.\1.attn_qkv.weight"}

FORMATS: dict[str, Format] = {
    "llama": Format("llama", (*paired, with_divisors), rotates_all),
    "mistral": Format("llama", paired, rotates_all),
    "ministral3": Format("mistral3", paired, ministral3),
    "mixtral": Format("llama", (*paired, stacked, MERGED), rotates_all, STACK_NAMES),
    "qwen2": Format("qwen2"),
    "qwen2_moe": Format("qwen2moe", (stacked,)),
    "qwen3": Format("qwen3"),
    "qwen3_moe": Format("qwen3moe", (stacked,)),
    "gemma": Format("gemma", (plus_one,), lambda c: {"rope.freq_base": None}),
    "gemma2": Format("gemma2", (plus_one,), lambda c: window(c) | {"rope.freq_base": None}),
    "gemma3_text": Format("gemma3", (plus_one,), lambda c: window(c) | local_base(c)),
    "gemma3n_text": Format("gemma3n", (altup, renamed(r"_scale$", "_scale.weight")), gemma3n),
    "gemma4_text": Format(
        "gemma4", (renamed(r"(layer_scalar|_proj)$", r"\1.weight"), constant("rope_freqs.weight", gemma4_divisors)),
        gemma4,
        {
            r"model\.layers\.(\d+)\.router\.scale": r"blk.\1.ffn_gate_inp.scale",
            r"model\.layers\.(\d+)\.router\.per_expert_scale": r"blk.\1.ffn_down_exps.scale",
        },
    ),
    "phi": Format("phi2", keys=only_dense),
    "phi3": Format("phi3", (longrope,), phi3),
    "granite": Format("granite", paired, rotates_all),
    "granitemoe": Format("granitemoe", (*paired, *GRANITE_STEPS), rotates_all, GRANITE_NAMES),
    "granitemoeshared": Format("granitemoe", (*paired, *GRANITE_STEPS), rotates_all, GRANITE_NAMES),
    "cohere": Format("command-r", keys=lambda c: {"rope.scaling.type": "none"}),
    "cohere2": Format("cohere2", keys=lambda c: window(c) | rotates_all(c) | {"rope.scaling.type": "none"}),
    "olmo": Format(
        "olmo", paired_weights,
        lambda c: {"attention.clamp_kqv": c.get("clip_qkv"), "attention.layer_norm_epsilon": 1e-5},
    ),
    "olmo2": Format("olmo2"),
    "olmo3": Format("olmo2", keys=lambda c: windows(c) | local_base(c)),
    "glm4": Format("glm4"),
    "gpt2": Format("gpt2", (transposed,), lambda c: {"feed_forward_length": 4 * c["n_embd"]}),
    "gpt_oss": Format(
        "gpt-oss",
        (
            renamed(r"sinks$", "sinks.weight"),
            changed(r"experts\.\w+_proj$", lambda t, c: t.transpose(1, 2)),
            split(r"gate_up_proj_bias$", ("gate_proj.bias", "up_proj.bias"), lambda t, c: (t[:, ::2], t[:, 1::2])),
            split(r"gate_up_proj$", ("gate_proj.weight", "up_proj.weight"), lambda t, c: (t[:, ::2], t[:, 1::2])),
            renamed(r"experts\.down_proj$", "experts.down_proj.weight"),
            renamed(r"down_proj_bias$", "down_proj.bias"),
        ),
        lambda c: window(c) | {"expert_feed_forward_length": c["intermediate_size"]},
    ),
    "smollm3": Format("smollm3", paired, rotates_all),
    "stablelm": Format("stablelm", (head_norms,), stablelm),
    "starcoder2": Format("starcoder2"),
    "falcon": Format("falcon", (changed(r"query_key_value", falcon_rows),), falcon),
    "bloom": Format(
        "bloom", (renamed(r"transformer\.", ""), changed(r"query_key_value", bloom_rows)),
        lambda c: {"attention.head_count_kv": c["n_head"], "feed_forward_length": 4 * c["hidden_size"],
                   "context_length": c.get("seq_length", c["hidden_size"])},
    ),
    "deepseek_v2": Format("deepseek2", (stacked, latent), latent_keys),
    "deepseek_v3": Format("deepseek2", (stacked, latent), latent_keys, BIAS),
    "glm4_moe": Format("glm4moe", (stacked, prediction_layer), glm4_moe, BIAS),
    "llama4": Format(
        "llama4",
        (
            changed(r"experts\.\w+_proj$", lambda t, c: t.transpose(1, 2)),
            split(r"gate_up_proj$", ("gate_proj.weight", "up_proj.weight"), lambda t, c: t.chunk(2, 1)),
            renamed(r"experts\.down_proj$", "experts.down_proj.weight"),
            with_divisors,
        ),
        lambda c: {
            "feed_forward_length": c["intermediate_size_mlp"], "expert_feed_forward_length": c["intermediate_size"],
            "interleave_moe_layer_step": c["interleave_moe_layer_step"], "rope.dimension_count": c["head_dim"],
        },
    ),
    "mamba": Format("mamba", (decays, kernels), mamba),
    "falcon_mamba": Format("mamba", (decays, kernels), mamba),
    "mamba2": Format(
        "mamba2", (*MAMBA2, changed(r"mixer\.norm", lambda t, c: t.view(c["n_groups"], -1))),
        lambda c: mamba_keys(c) | {"ssm.inner_size": c["num_heads"] * c["head_dim"], "ssm.group_count": c["n_groups"],
                                   "ssm.time_step_rank": c["num_heads"]},
    ),
    "jamba": Format("jamba", (decays, kernels, stacked, MERGED), jamba),
    "falcon_h1": Format(
        "falcon-h1", (factors, *MAMBA2, changed(r"mamba\.norm", lambda t, c: t.view(c["mamba_n_groups"], -1))),
        lambda c: hybrid_keys(c) | {"embedding_scale": None},
        {r"model\.layers\.(\d+)\.pre_ff_layernorm\.weight": r"blk.\1.ffn_norm"},
    ),
    "granitemoehybrid": Format(
        "granitehybrid",
        (*paired, *MAMBA2, changed(r"mamba\.norm", lambda t, c: t.view(c["mamba_n_groups"], -1)), *GRANITE_STEPS,
         without_experts),
        granite_hybrid, GRANITE_NAMES,
    ),
    "bamba": Format(
        "granitehybrid",
        (*paired, *MAMBA2, changed(r"mamba\.norm", lambda t, c: t.view(c["mamba_n_groups"], -1))), bamba,
    ),
    "nemotron_h": Format(
        "nemotron_h_moe",
        (*MAMBA2, changed(r"mixer\.norm", lambda t, c: t.view(c["n_groups"], -1)), stacked,
         renamed(r"backbone\.layers\.(\d+)\.mixer\.experts", r"model.layers.\1.mlp.experts")),
        nemotron_h, {r"backbone\.layers\.(\d+)\.mixer\.gate\.e_score_correction_bias": r"blk.\1.exp_probs_b.bias"},
    ),
    "lfm2": Format("lfm2", (kernels,), lfm2),
    "lfm2_moe": Format(
        "lfm2moe", (kernels, stacked, MERGED), lfm2,
        STACK_NAMES | {r"model\.layers\.(\d+)\.feed_forward\.expert_bias": r"blk.\1.exp_probs_b.bias"},
    ),
    "qwen3_next": Format("qwen3next", (QKVZ, *NEXT), delta_keys, NEXT_NAMES),
    "qwen3_5_text": Format("qwen35", QWEN35, delta_keys, NEXT_NAMES),
    "qwen3_5_moe_text": Format("qwen35moe", QWEN35, delta_keys, NEXT_NAMES),
    "kimi_linear": Format(
        "kimi-linear",
        (
            decays, dt_bias, stacked, latent, MERGED,
            renamed(r"block_sparse_moe\.(gate_proj|up_proj|down_proj)", r"mlp.\1"),
            changed(r"_conv1d\.weight$", lambda t, c: t.reshape(1, t.shape[0], 1, t.shape[-1])),
        ),
        kimi_linear,
        STACK_NAMES
        | {r"model\.layers\.(\d+)\.block_sparse_moe\.gate\.e_score_correction_bias": r"blk.\1.exp_probs_b.bias"},
    ),
}  # fmt: skip
