"""Shapes of real models, as the config.json of each says them. Weights are random: they do not change the speed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamina.checkpoint.demo_weights import NAMED
from lamina.checkpoint.folder import read_json
from lamina.checkpoint.hub import is_hub_id, locate
from lamina.checkpoint.source import open_source
from lamina.errors import InputError


@dataclass(frozen=True)
class ModelShape:
    """A configuration with a name; `note` says where it differs from the model it is named after."""

    name: str
    config: Mapping[str, Any]
    note: str = ""


LLAMA_3_1_8B = ModelShape(
    "llama-3.1-8b",
    dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072,
        tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
)  # fmt: skip

GEMMA_2_9B = ModelShape(
    "gemma-2-9b",
    dict(
        model_type="gemma2", vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rms_norm_eps=1e-6, max_position_embeddings=8192,
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
    "also run past the 8192 positions that it was trained for",
)  # fmt: skip

MAMBA2_2_7B = ModelShape(
    "mamba2-2.7b",
    dict(
        model_type="mamba2", vocab_size=50288, hidden_size=2560, num_hidden_layers=64, state_size=128, num_heads=80,
        head_dim=64, n_groups=1, expand=2, conv_kernel=4, layer_norm_epsilon=1e-5, residual_in_fp32=True,
        tie_word_embeddings=True,
    ),
)  # fmt: skip

FALCON_H1_7B = ModelShape(
    "falcon-h1-7b",
    dict(
        model_type="falcon_h1", vocab_size=130048, hidden_size=3072, intermediate_size=12288, num_hidden_layers=44,
        num_attention_heads=12, num_key_value_heads=2, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24,
        mamba_d_head=128, mamba_d_state=256, mamba_n_groups=1, mamba_d_conv=4, mamba_rms_norm=False,
        rms_norm_eps=1e-5, max_position_embeddings=262144, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=100000000000.0),
        embedding_multiplier=5.66, lm_head_multiplier=0.02, key_multiplier=0.4, attention_in_multiplier=1.0,
        attention_out_multiplier=0.9, ssm_in_multiplier=1.25, ssm_out_multiplier=0.25, mlp_multipliers=[0.88, 0.2],
        ssm_multipliers=[0.35, 0.25, 0.18, 0.5, 0.35],
    ),
    "its fixed factors are stand-ins: that they are not one is what costs time",
)  # fmt: skip

QWEN3_NEXT = ModelShape(
    "qwen3-next",
    dict(
        model_type="qwen3_next", vocab_size=151936, hidden_size=2048, intermediate_size=5120, num_hidden_layers=48,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, partial_rotary_factor=0.25, rms_norm_eps=1e-6,
        full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=128, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, decoder_sparse_step=1, norm_topk_prob=True,
        max_position_embeddings=262144, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25),
    ),
    "128 experts a layer where Qwen3-Next-80B-A3B has 512, so that it fits (43 GB in bfloat16); a token visits 10 in "
    "all 48 layers as in the original, so one row moves the same bytes, while many rows meet in fewer experts",
)  # fmt: skip

DEEPSEEK_V2_LITE = ModelShape(
    "deepseek-v2-lite",
    dict(
        model_type="deepseek_v3", vocab_size=102400, hidden_size=2048, intermediate_size=10944,
        moe_intermediate_size=1408, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, n_group=1,
        topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=163840,
        tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=40.0, original_max_position_embeddings=4096, beta_fast=32,
            beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
        ),
    ),
    "built as deepseek_v3, whose router differs: sigmoid scores and a bias in the choice, in float32, where V2-Lite "
    "has a softmax; every matrix and the latents are V2-Lite's",
)  # fmt: skip

SMOLLM2_135M = ModelShape(
    "smollm2-135m",
    dict(
        model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, rms_norm_eps=1e-5, max_position_embeddings=8192,
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=100000.0),
    ),
)  # fmt: skip

SHAPES = {
    shape.name: shape
    for shape in (
        LLAMA_3_1_8B, GEMMA_2_9B, MAMBA2_2_7B, FALCON_H1_7B, QWEN3_NEXT, DEEPSEEK_V2_LITE, SMOLLM2_135M,
    )
}  # fmt: skip


def find_shape(name: str | os.PathLike[str]) -> ModelShape:
    """A known shape, or that of a checkpoint: a folder with config.json, a config.json, a .gguf file, a name, a Hub id.

    >>> find_shape("llama-3.1-8b").config["hidden_size"]
    4096
    """
    if isinstance(name, str) and name in SHAPES:
        return SHAPES[name]
    path = locate(name, weights=False)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return ModelShape(path.name, open_source(path).config)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".json":
        raise InputError(
            f"{name} is neither a folder with config.json, nor a config.json, nor a .gguf file, nor one of "
            f"{', '.join((*NAMED, *SHAPES))}, nor a Hub id (owner/name)"
        )
    if is_hub_id(name):
        return ModelShape(str(name), read_json(file))
    return ModelShape(path.resolve().name if path.is_dir() else path.stem, read_json(file))
