"""Families with LayerNorm, learned positions or ALiBi, and more that are Llama with other options."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import (
    BioGptConfig,
    BloomConfig,
    CodeGenConfig,
    DogeConfig,
    Ernie4_5Config,
    FalconConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    Jais2Config,
    MiniCPM3Config,
    ModernBertDecoderConfig,
    MptConfig,
    NanoChatConfig,
    NemotronConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PreTrainedConfig,
    RoFormerConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    XGLMConfig,
    YoutuConfig,
)

SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=67,
    max_position_embeddings=256,
)  # fmt: skip
GPT: dict[str, Any] = dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, vocab_size=67)
NEO: dict[str, Any] = dict(hidden_size=32, num_heads=4, max_position_embeddings=256, vocab_size=67)
OPT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, max_position_embeddings=256, vocab_size=67,
    init_std=0.2,
)  # fmt: skip
XGLM: dict[str, Any] = dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, vocab_size=67, init_std=0.2)
FALCON: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256, vocab_size=67,
)  # fmt: skip
BLOOM: dict[str, Any] = dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=67)
MPT: dict[str, Any] = dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=256, vocab_size=67)
GROUPED: dict[str, Any] = SIZES | dict(num_key_value_heads=2, pad_token_id=None)
LATENT: dict[str, Any] = SIZES | dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10,
)  # fmt: skip
WIDE: dict[str, Any] = dict(initializer_range=0.2)  # large enough for attention to be heard in the logits


def small(config: type[PreTrainedConfig], sizes: dict[str, Any] = SIZES, **changes: Any) -> Any:
    return partial(config, **sizes | WIDE | changes)


FAMILIES = {
    "gpt2": {
        "plain": small(GPT2Config, GPT),
        "untied, own width, scaled by layer": small(
            GPT2Config, GPT, tie_word_embeddings=False, n_inner=40, scale_attn_by_inverse_layer_idx=True,
            activation_function="gelu", layer_norm_epsilon=1e-3,
        ),
        "scores as they are, relu, computed in float32": small(
            GPT2Config, GPT, scale_attn_weights=False, reorder_and_upcast_attn=True, activation_function="relu",
            n_layer=3, n_positions=40,
        ),
    },
    "gpt_bigcode": {
        "one key head": small(GPTBigCodeConfig, GPT),
        "a key head each, untied": small(
            GPTBigCodeConfig, GPT, multi_query=False, tie_word_embeddings=False, n_inner=40, layer_norm_epsilon=1e-3
        ),
        "scores as they are": small(
            GPTBigCodeConfig, GPT, scale_attn_weights=False, activation_function="relu", n_layer=3
        ),
    },
    "gpt_neo": {
        "global and local": small(
            GPTNeoConfig, NEO, num_layers=4, attention_types=[[["global", "local"], 2]], window_size=7
        ),
        "all local, untied": small(
            GPTNeoConfig, NEO, num_layers=2, attention_types=[[["local"], 2]], window_size=5,
            tie_word_embeddings=False, intermediate_size=None, activation_function="relu",
        ),
        "in another order": small(
            GPTNeoConfig, NEO, num_layers=3, attention_types=[[["local"], 1], [["global"], 2]], window_size=6,
            layer_norm_epsilon=1e-3, attention_layers=["global", "local", "local"],  # which win
        ),
    },
    "openai-gpt": {
        "plain": small(OpenAIGPTConfig, GPT),
        "untied, relu": small(OpenAIGPTConfig, GPT, tie_word_embeddings=False, afn="relu", n_layer=3),
        "silu, other epsilon": small(OpenAIGPTConfig, GPT, afn="silu", layer_norm_epsilon=1e-3, n_head=2),
    },
    "gptj": {
        "part of a head rotated": small(GPTJConfig, GPT, rotary_dim=4),
        "all of it, tied, own width": small(
            GPTJConfig, GPT, rotary_dim=8, tie_word_embeddings=True, n_inner=40, layer_norm_epsilon=1e-3
        ),
        "relu": small(GPTJConfig, GPT, rotary_dim=6, activation_function="relu", n_layer=3, n_head=2),
    },
    "codegen": {
        "a head a shard": small(CodeGenConfig, GPT, rotary_dim=4),
        "two heads a shard, own width": small(
            CodeGenConfig, GPT, rotary_dim=2, n_head=8, n_inner=40, layer_norm_epsilon=1e-3
        ),
        "relu, three layers": small(CodeGenConfig, GPT, rotary_dim=8, activation_function="relu", n_layer=3),
    },
    "gpt_neox": {
        "side by side": small(GPTNeoXConfig, rope_parameters=dict(partial_rotary_factor=0.5)),
        "one after the other, tied, no biases": small(
            GPTNeoXConfig, use_parallel_residual=False, tie_word_embeddings=True, attention_bias=False,
            layer_norm_eps=1e-3, rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=1.0),
        ),
        "linear rope, quarter rotated": small(
            GPTNeoXConfig, hidden_act="relu", num_hidden_layers=3,
            rope_parameters=dict(rope_type="linear", factor=3.0),
        ),
    },
    "opt": {
        "norms before": small(OPTConfig, OPT),
        "norms after, narrow embeddings, untied": small(
            OPTConfig, OPT, do_layer_norm_before=False, word_embed_proj_dim=16, tie_word_embeddings=False
        ),
        "no biases, plain norms, narrow embeddings": small(
            OPTConfig, OPT, enable_bias=False, layer_norm_elementwise_affine=False, word_embed_proj_dim=16,
            num_hidden_layers=3, activation_function="gelu",
        ),
        "no norm at the end": small(OPTConfig, OPT, _remove_final_layer_norm=True),
    },
    "xglm": {
        "scaled": small(XGLMConfig, XGLM),
        "not scaled, untied": small(
            XGLMConfig, XGLM, scale_embedding=False, tie_word_embeddings=False, activation_function="relu"
        ),
        "a position without a vector": small(XGLMConfig, XGLM, pad_token_id=9, num_layers=3, attention_heads=2),
    },
    "biogpt": {
        "scaled": small(BioGptConfig),
        "not scaled, untied": small(BioGptConfig, scale_embedding=False, tie_word_embeddings=False, hidden_act="relu"),
        "three layers": small(BioGptConfig, num_hidden_layers=3, num_attention_heads=2, layer_norm_eps=0.5),
    },
    "falcon": {
        "one key head, side by side": small(FalconConfig, FALCON),
        "new architecture, two norms": small(
            FalconConfig, FALCON, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=48, bias=True
        ),
        "new architecture, one norm": small(
            FalconConfig, FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
            tie_word_embeddings=False, rope_parameters=dict(rope_type="linear", rope_theta=1e3, factor=2.0),
        ),
        "ALiBi, a key head each, one after the other": small(
            FalconConfig, FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True,
            layer_norm_epsilon=1e-3,
        ),
        "ALiBi, three heads, one key head": small(
            FalconConfig, FALCON, alibi=True, hidden_size=24, num_attention_heads=3, activation="relu",
        ),
    },
    "bloom": {
        "four heads": small(BloomConfig, BLOOM),
        "six heads, untied": small(BloomConfig, BLOOM, hidden_size=48, n_head=6, tie_word_embeddings=False),
        "normed residual": small(
            BloomConfig, BLOOM, apply_residual_connection_post_layernorm=True, n_layer=3, layer_norm_epsilon=1e-3
        ),
    },
    "mpt": {
        "four heads": small(MptConfig, MPT),
        "six heads, clipped": small(
            MptConfig, MPT, d_model=48, n_heads=6, attn_config=dict(clip_qkv=0.4), layer_norm_epsilon=1e-3
        ),
        "own scale, untied": small(
            MptConfig, MPT, tie_word_embeddings=False, attn_config=dict(softmax_scale=0.7), n_layers=3
        ),
    },
    "starcoder2": {
        "full": small(Starcoder2Config, GROUPED),
        "sliding, untied": small(Starcoder2Config, GROUPED, sliding_window=7, tie_word_embeddings=False),
        "no biases, one key head, yarn": small(
            Starcoder2Config, GROUPED, use_bias=False, num_key_value_heads=1, norm_epsilon=1e-3, hidden_act="relu",
            rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16),
        ),
    },
    "stablelm": {
        "quarter rotated": small(StableLmConfig, GROUPED),
        "side by side, norms of heads, biases": small(
            StableLmConfig, GROUPED, use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True,
            rope_parameters=dict(partial_rotary_factor=0.5),
        ),
        "tied, norms of heads, gelu": small(
            StableLmConfig, GROUPED, tie_word_embeddings=True, qk_layernorm=True, layer_norm_eps=1e-3,
            hidden_act="gelu", num_key_value_heads=1,
        ),
    },
    "nemotron": {
        "half rotated": small(NemotronConfig, GROUPED),
        "biases, tied, own head dim": small(
            NemotronConfig, GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=16
        ),
        "all rotated, gelu": small(
            NemotronConfig, GROUPED, hidden_act="gelu", norm_eps=1e-3, num_key_value_heads=4,
            rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=1.0),
        ),
    },
    "jais2": {
        "biases": small(Jais2Config, GROUPED),
        "no biases, tied": small(
            Jais2Config, GROUPED, attention_bias=False, mlp_bias=False, tie_word_embeddings=True, layer_norm_eps=1e-3
        ),
        "own head dim": small(Jais2Config, GROUPED, head_dim=16, num_key_value_heads=1, hidden_act="gelu"),
    },
    "helium": {
        "grouped": small(HeliumConfig, GROUPED, head_dim=8),
        "biases, tied": small(
            HeliumConfig, GROUPED, head_dim=8, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        "one key head, short waves": small(
            HeliumConfig, GROUPED, head_dim=8, num_key_value_heads=1, rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="default", rope_theta=100.0),
        ),
    },
    "ernie4_5": {
        "tied": small(Ernie4_5Config, GROUPED, head_dim=8),
        "biases, untied, own head dim": small(
            Ernie4_5Config, GROUPED, head_dim=16, use_bias=True, tie_word_embeddings=False
        ),
        "head dim not given": small(
            Ernie4_5Config, GROUPED, head_dim=None, num_key_value_heads=1, rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="default", rope_theta=100.0),
        ),
    },
    "glm": {
        "half rotated": small(GlmConfig, GROUPED, head_dim=8),
        "no biases, tied": small(GlmConfig, GROUPED, head_dim=16, attention_bias=False, tie_word_embeddings=True),
        "all rotated": small(
            GlmConfig, GROUPED, head_dim=8, num_key_value_heads=4, hidden_act="gelu", rms_norm_eps=1e-3,
            rope_parameters=dict(rope_theta=100.0, partial_rotary_factor=1.0),
        ),
    },
    "glm4": {
        "half rotated": small(Glm4Config, GROUPED, head_dim=8),
        "no biases, tied": small(Glm4Config, GROUPED, head_dim=16, attention_bias=False, tie_word_embeddings=True),
        "all rotated": small(
            Glm4Config, GROUPED, head_dim=8, num_key_value_heads=4, hidden_act="gelu", rms_norm_eps=1e-3,
            rope_parameters=dict(rope_theta=100.0, partial_rotary_factor=1.0),
        ),
    },
    "hunyuan_v1_dense": {
        "plain rope": small(HunYuanDenseV1Config, GROUPED, head_dim=8),
        "scaled base, biases": small(
            HunYuanDenseV1Config, GROUPED, head_dim=16, attention_bias=True,
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=50.0),
        ),
        "tied, dynamic rope": small(
            HunYuanDenseV1Config, GROUPED, head_dim=8, tie_word_embeddings=True, rms_norm_eps=1e-3,
            num_key_value_heads=1, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
        ),
    },
    "nanochat": {
        "capped": small(NanoChatConfig, GROUPED, final_logit_softcapping=2.0),
        "biases, no cap, tied": small(
            NanoChatConfig, GROUPED, attention_bias=True, final_logit_softcapping=None, tie_word_embeddings=True
        ),
        "gelu, one key head": small(
            NanoChatConfig, GROUPED, hidden_act="gelu", num_key_value_heads=1, rms_norm_eps=1e-2,
            rope_parameters=dict(rope_type="linear", rope_theta=1e3, factor=2.0),
        ),
    },
    "seed_oss": {
        "biases": small(SeedOssConfig, GROUPED, head_dim=8),
        "biases out alone, tied": small(
            SeedOssConfig, GROUPED, head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True,
            tie_word_embeddings=True,
        ),
        "head dim not given": small(
            SeedOssConfig, GROUPED, head_dim=None, num_key_value_heads=1, hidden_act="gelu",
            rope_parameters=dict(rope_type="default", rope_theta=100.0),
        ),
    },
    "smollm3": {
        "every fourth layer without rope": small(SmolLM3Config, GROUPED, num_hidden_layers=4),
        "untied, windows without rope": small(
            SmolLM3Config, GROUPED, num_hidden_layers=3, tie_word_embeddings=False, use_sliding_window=True,
            sliding_window=6, no_rope_layer_interval=2, attention_bias=True,
        ),
        "listed layers": small(
            SmolLM3Config, GROUPED, num_hidden_layers=3, use_sliding_window=True, sliding_window=5, mlp_bias=True,
            no_rope_layers=[0, 1, 1], layer_types=["full_attention", "sliding_attention", "full_attention"],
            rope_parameters=dict(rope_type="default", rope_theta=100.0),
        ),
    },
    "youtu": {
        "low-rank queries": small(YoutuConfig, LATENT),
        "whole queries, biases, halves rotated, untied": small(
            YoutuConfig, LATENT, q_lora_rank=None, attention_bias=True, rope_interleave=False,
            tie_word_embeddings=False, rms_norm_eps=1e-3,
        ),
        "yarn, gelu": small(
            YoutuConfig, LATENT, hidden_act="gelu", num_hidden_layers=3,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16, mscale=0.8,
                mscale_all_dim=1.1,
            ),
        ),
    },
    "minicpm3": {
        "scaled": small(MiniCPM3Config, LATENT),
        "own factors, biases, untied": small(
            MiniCPM3Config, LATENT, scale_emb=3, scale_depth=0.7, dim_model_base=16, attention_bias=True,
            mlp_bias=True, tie_word_embeddings=False, v_head_dim=None,
        ),
        "no factors, whole queries": small(
            MiniCPM3Config, LATENT, scale_emb=1, scale_depth=None, dim_model_base=None, q_lora_rank=None,
            num_hidden_layers=3, rms_norm_eps=1e-3,
        ),
    },
    "modernbert-decoder": {
        "every third layer full": small(
            ModernBertDecoderConfig, SIZES, num_hidden_layers=4, local_attention=12, pad_token_id=0
        ),
        "all biases, listed layers, untied": small(
            ModernBertDecoderConfig, SIZES, num_hidden_layers=3, sliding_window=5, attention_bias=True,
            mlp_bias=True, norm_bias=True, classifier_bias=True, tie_word_embeddings=False, pad_token_id=0,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        "no bias of the head, own bases": small(
            ModernBertDecoderConfig, SIZES, local_attention=8, decoder_bias=False, hidden_activation="silu",
            classifier_activation="relu", norm_eps=1e-3, pad_token_id=0, global_attn_every_n_layers=2,
            rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=300.0),
                                 sliding_attention=dict(rope_type="linear", rope_theta=50.0, factor=2.0)),
        ),
    },
    "roformer": {
        "narrow embeddings": small(RoFormerConfig, SIZES, is_decoder=True, embedding_size=16),
        "untied": small(RoFormerConfig, SIZES, is_decoder=True, tie_word_embeddings=False, layer_norm_eps=1e-3),
        "three layers, relu": small(
            RoFormerConfig, SIZES, is_decoder=True, num_hidden_layers=3, hidden_act="relu", type_vocab_size=1,
            num_attention_heads=2,
        ),
    },
    "doge": {
        "grouped": small(DogeConfig, GROUPED),
        "sliding, biases, tied": small(
            DogeConfig, GROUPED, sliding_window=7, keep_window_size=9, attention_bias=True, mlp_bias=True,
            tie_word_embeddings=True,
        ),
        "rows of at most 24": small(
            DogeConfig, GROUPED, keep_window_size=24, num_key_value_heads=4, rms_norm_eps=1e-3, hidden_act="gelu"
        ),
    },
}  # fmt: skip
