"""GGUF architectures of models with attention and one MLP in each layer."""

from __future__ import annotations

from torch import Tensor

from lamina.checkpoint.gguf.architecture import Architecture, Change, Fields, Joined
from lamina.checkpoint.gguf.changes import UNPAIRED, grouped_rows, transposed
from lamina.checkpoint.gguf.metadata import Metadata, key_heads, layer_types
from lamina.errors import CheckpointError

LAYER = "model.layers.{i}"


def block(theirs: str = LAYER, /, **modules: str) -> dict[str, str]:
    """Names of a layer's modules."""
    return {f"blk.{{i}}.{ours}": f"{theirs}.{name}" for ours, name in modules.items()}


ROPE = ("rope_parameters", "rope_theta")
LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **block(
        attn_norm="input_layernorm", attn_q="self_attn.q_proj", attn_k="self_attn.k_proj", attn_v="self_attn.v_proj",
        attn_output="self_attn.o_proj", attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm",
        ffn_norm="post_attention_layernorm", ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj",
    ),
}  # fmt: skip
"""Names of llama, and of most others."""

GPT = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    **block(
        "transformer.h.{i}",
        attn_norm="input_layernorm", attn_qkv="self_attention.query_key_value", attn_output="self_attention.dense",
        ffn_norm="post_attention_layernorm", ffn_up="mlp.dense_h_to_4h", ffn_down="mlp.dense_4h_to_h",
    ),
}  # fmt: skip
"""Names of bloom and falcon."""


def refuse_partial(m: Metadata, c: Fields) -> None:
    rotary = m.get("rope.dimension_count", c["head_dim"])
    if rotary != c["head_dim"]:
        kind = m.architecture
        raise CheckpointError(
            f"this {kind} GGUF rotates {rotary} of {c['head_dim']} head dimensions; {kind} rotates all"
        )


def llama(m: Metadata, c: Fields) -> Fields:
    """Mixtral has the same architecture, and Mistral, whose window the file does not have."""
    refuse_partial(m, c)
    found: Fields = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    if "num_experts" in c:
        found |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        found |= {"num_local_experts": c["num_experts"], "sliding_window": None}
    return found


def mistral3(m: Metadata, c: Fields) -> Fields:
    """Ministral 3 multiplies queries by a factor that grows with their position. `yarn_log_multiplier` is
    mscale_all_dim, which is mscale too."""
    rope = c["rope_parameters"]
    if (growth := m.get("attention.temperature_scale")) is None:
        return {"model_type": "mistral", "sliding_window": None}
    mscale = float(m.get("rope.scaling.yarn_log_multiplier", 1.0))
    rope |= {"llama_4_scaling_beta": float(growth), "mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_parameters": rope, "sliding_window": None}


def phi3(m: Metadata, c: Fields) -> Fields:
    length = m.get("rope.scaling.original_context_length")
    return {"sliding_window": m.get("attention.sliding_window", 0) or None, "original_max_position_embeddings": length}


def granite(m: Metadata, c: Fields) -> Fields:
    """The factors; one that a file lacks is 1."""
    found = {name: m.get(key) or 1.0 for name, key in GRANITE_FACTORS.items()}
    return found | {"attention_multiplier": m.get("attention.scale") or c["head_dim"] ** -0.5}


GRANITE_FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def cohere(m: Metadata, c: Fields) -> Fields:
    found = {"logit_scale": m.get("logit_scale", 0.0625), "use_qk_norm": bool(m.with_tensor("attn_q_norm.weight"))}
    return found | (layer_types(m, every=4) if m.architecture == "cohere2" else {})


def olmo2(m: Metadata, c: Fields) -> Fields:
    """OLMo 3 has the same architecture, and windows. Only its layers without a window scale RoPE."""
    if not m.get("attention.sliding_window", 0):
        return {}
    plain = {"rope_type": "default", "rope_theta": float(m.get("rope.freq_base_swa", c["rope_theta"]))}
    ropes = {"full_attention": c["rope_parameters"], "sliding_attention": plain}
    return layer_types(m, every=4) | {"model_type": "olmo3", "rope_parameters": ropes}


def glm4(m: Metadata, c: Fields) -> Fields:
    if "rope.dimension_sections" in m:
        raise CheckpointError(
            "this glm4 GGUF is of a model for images (GLM-4V), which orders the rows of heads otherwise"
        )
    return {}


def stablelm(m: Metadata, c: Fields) -> Fields:
    """Layers with one norm have attention and MLP side by side, whatever the metadata says."""
    return {
        "use_parallel_residual": not m.with_tensor("ffn_norm.weight"),
        "qk_layernorm": bool(m.with_tensor("attn_q_norm.weight")),
        "use_qkv_bias": c["attention_bias"],
    }


def starcoder2(m: Metadata, c: Fields) -> Fields:
    return {"norm_epsilon": c["layer_norm_eps"], "use_bias": c["attention_bias"]}


def gpt2(m: Metadata, c: Fields) -> Fields:
    return {
        "n_embd": c["hidden_size"],
        "n_layer": c["num_hidden_layers"],
        "n_head": c["num_attention_heads"],
        "n_positions": m.rows("position_embd.weight"),
        "n_inner": m.rows("blk.0.ffn_up.weight"),
        "layer_norm_epsilon": c["layer_norm_eps"],
    }


def bloom(m: Metadata, c: Fields) -> Fields:
    return {"layer_norm_epsilon": c["layer_norm_eps"]}


def bloom_rows(t: Tensor, c: Fields) -> Tensor:
    heads = c["num_attention_heads"]
    return grouped_rows(t, heads, *[t.shape[0] // heads // 3] * 3)


def falcon(m: Metadata, c: Fields) -> Fields:
    """Falcon 40B has two norms in a layer, 11B several key heads, and 7B neither."""
    two, kv_heads = bool(m.with_tensor("attn_norm_2.weight")), c["num_key_value_heads"]
    new = two or kv_heads > 1
    return {
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (2 if two else 1) if new else None,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "parallel_attn": True,
        "alibi": False,
        "bias": bool(m.with_tensor("attn_qkv.bias")),
        "ffn_hidden_size": m.rows("blk.0.ffn_up.weight"),
        "intermediate_size": None,
        "layer_norm_epsilon": c["layer_norm_eps"],
    }


def falcon_rows(t: Tensor, c: Fields) -> Tensor:
    heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
    dim = t.shape[0] // (heads + 2 * groups)
    return grouped_rows(t, groups, heads // groups * dim, dim, dim)


def phi(m: Metadata, c: Fields) -> Fields:
    """The metadata say that every head has its own keys, and four times the width, whatever the tensors are."""
    found = {
        "qk_layernorm": bool(m.with_tensor("attn_q_norm.weight")),
        "intermediate_size": m.rows("blk.0.ffn_up.weight"),
    }
    return found | {"num_key_value_heads": key_heads(m, c["head_dim"]) or c["num_attention_heads"]}


TRANSPOSED: dict[str, Change] = {
    f"blk.{{i}}.{name}.weight": transposed for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
}

FALCON_NORMS = tuple(
    Joined(
        f"transformer.h.{{i}}.{name}.{leaf}",
        (f"blk.{{i}}.attn_norm.{leaf}", f"blk.{{i}}.attn_norm_2.{leaf}"),
        lambda *args, n=n: args[n],
    )
    for n, name in enumerate(("ln_mlp", "ln_attn"))
    for leaf in ("weight", "bias")
)
"""Names of two norms. The first is that of the MLP."""

SPLIT_QKV = tuple(
    Joined(f"{LAYER}.self_attn.{name}_proj.{leaf}", (f"blk.{{i}}.attn_qkv.{leaf}",), lambda t, c, n=n: t.chunk(3)[n])
    for n, name in enumerate("qkv")
    for leaf in ("weight", "bias")
)
"""Early files have queries, keys and values in one tensor."""

DENSE = {
    "llama": Architecture(
        LLAMA | block(
            ffn_gate_inp="block_sparse_moe.gate",
            ffn_gate_exps="block_sparse_moe.experts.{e}.w1",
            ffn_up_exps="block_sparse_moe.experts.{e}.w3",
            ffn_down_exps="block_sparse_moe.experts.{e}.w2",
        ) | {  # files of early 2024 have a tensor for each expert
            "blk.{i}.ffn_gate.{e}": f"{LAYER}.block_sparse_moe.experts.{{e}}.w1",
            "blk.{i}.ffn_up.{e}": f"{LAYER}.block_sparse_moe.experts.{{e}}.w3",
            "blk.{i}.ffn_down.{e}": f"{LAYER}.block_sparse_moe.experts.{{e}}.w2",
        },
        llama, ("llama", "mistral", "mixtral"), UNPAIRED,
    ),
    "mistral3": Architecture(LLAMA, mistral3, ("ministral3", "mistral", "mistral3"), UNPAIRED),
    "qwen2": Architecture(LLAMA),
    "qwen3": Architecture(LLAMA),
    "smollm3": Architecture(LLAMA, changes=UNPAIRED),
    "granite": Architecture(LLAMA, granite, changes=UNPAIRED),
    "olmo": Architecture(
        LLAMA, lambda m, c: {"clip_qkv": m.get("attention.clamp_kqv")},
        changes={pattern.replace("*", "weight"): fn for pattern, fn in UNPAIRED.items()}, unread=("layer_norm_eps",),
    ),
    "olmo2": Architecture(
        LLAMA | block(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm"),
        olmo2, ("olmo2", "olmo3"),
    ),
    "phi3": Architecture(LLAMA | block(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj"), phi3),
    "phi2": Architecture(
        LLAMA | {"output_norm": "model.final_layernorm"} | block(
            attn_output="self_attn.dense", attn_q_norm="self_attn.q_layernorm", attn_k_norm="self_attn.k_layernorm",
            ffn_up="mlp.fc1", ffn_down="mlp.fc2",
        ),
        phi, ("phi",), joined=SPLIT_QKV, unread=("mlp_bias",),
    ),
    "command-r": Architecture(LLAMA, cohere, ("cohere",)),
    "cohere2": Architecture(LLAMA, cohere),
    "glm4": Architecture(
        LLAMA | block(
            ffn_up="mlp.gate_up_proj", post_attention_norm="post_self_attn_layernorm",
            post_ffw_norm="post_mlp_layernorm",
        ),
        glm4,
    ),
    "stablelm": Architecture(
        LLAMA | block(attn_q_norm="self_attn.q_layernorm.norms.{e}", attn_k_norm="self_attn.k_layernorm.norms.{e}"),
        stablelm,
    ),
    "starcoder2": Architecture(
        LLAMA | block(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"), starcoder2, unread=("layer_norm_eps",)
    ),
    "gpt2": Architecture(
        {
            "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
            "output": "lm_head",
            **block(
                "transformer.h.{i}",
                attn_norm="ln_1", attn_qkv="attn.c_attn", attn_output="attn.c_proj", ffn_norm="ln_2", ffn_up="mlp.c_fc",
                ffn_down="mlp.c_proj",
            ),
        },
        gpt2, changes=TRANSPOSED, unread=("layer_norm_eps", *ROPE),
    ),
    "bloom": Architecture(
        GPT, bloom, changes={"blk.{i}.attn_qkv.*": bloom_rows}, unread=("layer_norm_eps", *ROPE)
    ),
    "falcon": Architecture(
        GPT, falcon, changes={"blk.{i}.attn_qkv.*": falcon_rows}, joined=FALCON_NORMS, unread=("layer_norm_eps",)
    ),
}  # fmt: skip
