"""Shapes of real models, as the config.json of each says them. Weights are random: they do not change the speed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lamina.checkpoint.ctranslate2 import is_ctranslate2
from lamina.checkpoint.demo_weights import NAMED
from lamina.checkpoint.folder import read_config, read_json
from lamina.checkpoint.hub import is_hub_id, locate
from lamina.checkpoint.source import names_dtype, open_source
from lamina.errors import CheckpointError, InputError


@dataclass(frozen=True)
class ModelShape:
    """A configuration with a name; `note` says where it differs from the model it is named after.

    source   positions of the encoder's output that a decoder is benchmarked with, if it reads one
    """

    name: str
    config: Mapping[str, Any]
    note: str = ""
    source: int | None = None


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

MISTRAL_7B = ModelShape(
    "mistral-7b",
    dict(
        model_type="mistral", vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, sliding_window=None, rms_norm_eps=1e-5,
        max_position_embeddings=32768, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
)  # fmt: skip

QWEN3_8B = ModelShape(
    "qwen3-8b",
    dict(
        model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, attention_bias=False, use_sliding_window=False,
        rms_norm_eps=1e-6, max_position_embeddings=40960, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
)  # fmt: skip

GEMMA_3_12B = ModelShape(
    "gemma-3-12b",
    dict(
        model_type="gemma3_text", vocab_size=262208, hidden_size=3840, intermediate_size=15360, num_hidden_layers=48,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 8, rms_norm_eps=1e-6,
        max_position_embeddings=131072, tie_word_embeddings=True,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    "the text model alone",
)  # fmt: skip

QWEN3_30B_A3B = ModelShape(
    "qwen3-30b-a3b",
    dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        attention_bias=False, rms_norm_eps=1e-6, max_position_embeddings=40960, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
)  # fmt: skip

GPT_OSS_20B = ModelShape(
    "gpt-oss-20b",
    dict(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12, swiglu_limit=7.0,
        attention_bias=True, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096,
        ),
    ),
    "experts in the dtype of the run; the released ones are in MXFP4",
)  # fmt: skip

NEMOTRON_H_8B = ModelShape(
    "nemotron-h-8b",
    dict(
        model_type="nemotron_h", vocab_size=131072, hidden_size=4096, intermediate_size=21504, num_hidden_layers=52,
        hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-", num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8,
        conv_kernel=4, expand=2, mlp_hidden_act="relu2", use_bias=False, use_conv_bias=True, mlp_bias=False,
        attention_bias=False, mamba_proj_bias=False, layer_norm_epsilon=1e-5, max_position_embeddings=8192,
        tie_word_embeddings=False,
    ),
)  # fmt: skip

GRANITE_4_H_SMALL = ModelShape(
    "granite-4.0-h-small",
    dict(
        model_type="granitemoehybrid", vocab_size=100352, hidden_size=4096, intermediate_size=768,
        shared_intermediate_size=1536, num_hidden_layers=40,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)], num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=72, num_experts_per_tok=10, mamba_n_heads=128, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True,
        mamba_proj_bias=False, embedding_multiplier=12, attention_multiplier=0.0078125, residual_multiplier=0.22,
        logits_scaling=16, position_embedding_type="nope", attention_bias=False, rms_norm_eps=1e-5,
        max_position_embeddings=131072, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
)  # fmt: skip

RECURRENTGEMMA_9B = ModelShape(
    "recurrentgemma-9b",
    dict(
        model_type="recurrent_gemma", vocab_size=256000, hidden_size=4096, intermediate_size=24576,
        num_hidden_layers=38, num_attention_heads=16, num_key_value_heads=1, lru_width=4096, conv1d_width=4,
        attention_window_size=2048, block_types=["recurrent", "recurrent", "attention"], logits_soft_cap=30.0,
        hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    ),
)  # fmt: skip

FALCON_MAMBA_7B = ModelShape(
    "falcon-mamba-7b",
    dict(
        model_type="falcon_mamba", vocab_size=65024, hidden_size=4096, intermediate_size=8192, expand=16,
        num_hidden_layers=64, state_size=16, conv_kernel=4, time_step_rank=256, use_bias=False, use_conv_bias=True,
        layer_norm_epsilon=1e-5, mixer_rms_eps=1e-6, residual_in_fp32=True, tie_word_embeddings=False,
    ),
)  # fmt: skip

MAMBA_2_8B = ModelShape(
    "mamba-2.8b",
    dict(
        model_type="mamba", vocab_size=50280, hidden_size=2560, intermediate_size=5120, expand=2, num_hidden_layers=64,
        state_size=16, conv_kernel=4, time_step_rank=160, use_bias=False, use_conv_bias=True, layer_norm_epsilon=1e-5,
        residual_in_fp32=True, tie_word_embeddings=True,
    ),
)  # fmt: skip

WHISPER_LARGE_V3 = ModelShape(
    "whisper-large-v3",
    dict(
        model_type="whisper", vocab_size=51866, num_mel_bins=128, d_model=1280, encoder_layers=32, decoder_layers=32,
        encoder_attention_heads=20, decoder_attention_heads=20, encoder_ffn_dim=5120, decoder_ffn_dim=5120,
        max_source_positions=1500, max_target_positions=448, activation_function="gelu", scale_embedding=False,
        decoder_start_token_id=50258, pad_token_id=50256, tie_word_embeddings=True,
    ),
    source=1500,
)  # fmt: skip

SHAPES = {
    shape.name: shape
    for shape in (
        LLAMA_3_1_8B, GEMMA_2_9B, MAMBA2_2_7B, FALCON_H1_7B, QWEN3_NEXT, DEEPSEEK_V2_LITE, SMOLLM2_135M, MISTRAL_7B,
        QWEN3_8B, GEMMA_3_12B, QWEN3_30B_A3B, GPT_OSS_20B, NEMOTRON_H_8B, GRANITE_4_H_SMALL, RECURRENTGEMMA_9B,
        FALCON_MAMBA_7B, MAMBA_2_8B, WHISPER_LARGE_V3,
    )
}  # fmt: skip


def find_shape(name: str | os.PathLike[str], revision: str | None = None) -> ModelShape:
    """A known shape, or that of a checkpoint: a folder with config.json, a config.json, a .gguf file, a name, a Hub id.

    revision  a branch, tag or commit, of a Hub id

    >>> find_shape("llama-3.1-8b").config["hidden_size"]
    4096
    """
    if isinstance(name, str) and name in SHAPES:
        return SHAPES[name]
    path = locate(name, revision, weights=False)
    if path.suffix == ".json" and path.is_file():
        return ModelShape(path.stem, read_json(path))
    if not path.exists():
        raise InputError(
            f"{name} is neither a folder with config.json, nor a config.json, nor a .gguf file, nor one of "
            f"{', '.join((*NAMED, *SHAPES))}, nor a Hub id (owner/name)"
        )
    known = str(name) if name in NAMED or is_hub_id(name) else path.resolve().name
    if not path.is_dir() or is_ctranslate2(path):
        return ModelShape(known if path.is_dir() else path.name, open_source(path).config)
    config = read_config(path)
    if names_dtype(config) is None:  # then it is that of the tensors, if there are some
        with suppress(CheckpointError):
            config = open_source(path).config
    return ModelShape(known, config)
