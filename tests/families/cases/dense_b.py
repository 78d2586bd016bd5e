"""Families with LayerNorm, learned positions or ALiBi, and more that are Llama with other options."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import (
    BioGptConfig,
    CodeGenConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PreTrainedConfig,
    XGLMConfig,
)

SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=67,
    max_position_embeddings=64,
)  # fmt: skip
GPT: dict[str, Any] = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=67)
NEO: dict[str, Any] = dict(hidden_size=32, num_heads=4, max_position_embeddings=64, vocab_size=67)
OPT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, max_position_embeddings=64, vocab_size=67,
    init_std=0.2,
)  # fmt: skip
XGLM: dict[str, Any] = dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, vocab_size=67, init_std=0.2)
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
            layer_norm_epsilon=1e-3,
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
}  # fmt: skip
