"""Small random models of transformers' families: the cases of the tests, and for other families their default
configuration with every size shrunk.

A default configuration becomes a dictionary, sizes are replaced by name (SIZES), lists with a value per layer
are cut, and ids of special tokens are moved into the small vocabulary. A family whose model cannot be built or run so
is skipped, with the error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from lamina.errors import InputError
from tests.families.cases import CASES
from tests.families.encoder_decoder_cases import FAMILIES as ENCODER_DECODERS

VOCAB, LAYERS = 99, 4
LARGEST = 20_000_000  # parameters: larger models are not small, whatever their configuration says
SIZES: list[tuple[int, tuple[str, ...]]] = [
    (VOCAB, ("vocab_size", "decoder_vocab_size", "text_vocab_size", "vocab_size_per_layer_input")),
    (LAYERS, (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "decoder_layers",
        "num_encoder_layers", "encoder_layers", "num_blocks", "depth",
    )),
    (128, ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "max_sequence_length")),
    (48, (
        "intermediate_size", "ffn_dim", "d_ff", "n_inner", "dff", "ffn_hidden_size", "decoder_ffn_dim",
        "encoder_ffn_dim", "dim_ff", "feed_forward_size", "shared_expert_intermediate_size",
    )),
    (32, (
        "hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "attention_hidden_size",
        "input_embedding_size", "output_embedding_size", "cross_attention_hidden_size", "d_embed",
    )),
    (24, ("q_lora_rank",)),
    (16, ("kv_lora_rank", "moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "o_lora_rank")),
    (8, (
        "head_dim", "dim_head", "d_kv", "d_head", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
        "qk_head_dim", "sliding_window", "attention_chunk_size", "linear_key_head_dim", "linear_value_head_dim",
        "index_head_dim", "mamba_d_state", "ssm_state_size", "hidden_size_per_layer_input", "global_head_dim",
        "mamba_head_dim", "qk_dim_factor", "swa_head_dim", "swa_v_head_dim",
    )),
    (4, (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "mamba_num_heads", "n_mamba_heads",
        "index_topk", "linear_num_value_heads", "index_n_heads", "mamba_d_conv", "mamba_dt_rank", "chunk_size",
        "swa_num_attention_heads",
    )),
    (2, (
        "num_key_value_heads", "n_kv_heads", "num_kv_heads", "linear_num_key_heads", "num_experts_per_tok", "top_k",
        "moe_topk", "moe_top_k", "num_key_value_groups", "moe_num_active_experts", "swa_num_key_value_heads",
        "num_global_key_value_heads",
    )),
    (1, (
        "n_group", "num_group", "topk_group", "n_shared_experts", "num_shared_experts", "mamba_n_groups", "n_groups",
        "first_k_dense_replace",
    )),
]  # fmt: skip
SIZE = {name: size for size, names in SIZES for name in names}
OWN: dict[str, dict[str, Any]] = {
    "axk1": dict(num_key_value_heads=4),
    "axk2": dict(num_key_value_heads=4),
    "hrm_text": dict(num_hidden_layers=1, num_layers_per_stack=None),
    "laguna": dict(num_attention_heads_per_layer=[4] * LAYERS),
    "reformer": dict(axial_pos_embds_dim=[8, 24], axial_pos_shape=[8, 16], is_decoder=True),
    "t5": dict(decoder_start_token_id=0),
    "xmod": dict(default_language="en_XX"),
    "zaya": dict(num_experts_per_tok=1),
}
"""What single families require besides."""
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers", "attn_layers", "block_types")


def families() -> dict[str, Callable[[], Any]]:
    """Name -> function that makes a configuration: those of the tests' cases, then every other language model."""
    found: dict[str, Callable[[], Any]] = {}
    known = set()
    for family, cases in (CASES | ENCODER_DECODERS).items():
        found[family] = next(iter(cases.values()))
        known.add(found[family]().model_type)
    for kind in [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES]:
        if kind not in known and kind in CONFIG_MAPPING and kind not in found:
            found[kind] = lambda kind=kind: shrunk(kind)
    return found


def shrunk(model_type: str) -> Any:
    """The default configuration of a family with small sizes."""
    cls = CONFIG_MAPPING[model_type]
    found = small(cls().to_dict()) | OWN.get(model_type, {})
    if "is_decoder" in found and not found.get("is_encoder_decoder"):
        found["is_decoder"] = True  # encoders of the BERT kind are causal only then
    return cls.from_dict(found)


def small(config: dict[str, Any]) -> dict[str, Any]:
    """Every size in it replaced, in the parts of a composite configuration too."""
    found = copy.deepcopy(config)
    for name, value in found.items():
        if isinstance(value, dict) and name.endswith("_config"):
            found[name] = small(value)
        elif name in SIZE and isinstance(value, int) and not isinstance(value, bool):
            found[name] = SIZE[name]
        elif name in PER_LAYER and isinstance(value, list):
            found[name] = cut(value, LAYERS)
        elif name.endswith("token_id") and (isinstance(value, list) or (isinstance(value, int) and value >= VOCAB)):
            found[name] = VOCAB - 1
    return found


def cut(values: list[Any], layers: int) -> list[Any]:
    """A list with one value per layer, cut so that every kind of layer is still there."""
    kept = values[:layers]
    missing = [value for value in dict.fromkeys(map(str, values)) if value not in map(str, kept)]
    for at, value in enumerate(missing[: layers - 1]):
        kept[-1 - at] = next(one for one in values if str(one) == value)
    return kept


def build(config: Any) -> Any:
    """A random model in float32, whose norms and biases are random too."""
    torch.manual_seed(0)
    order = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
    if getattr(config, "is_encoder_decoder", False):
        order = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForCausalLM)
    cls = next(one for one in order if type(config) in one._model_mapping)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls.from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise InputError(f"with every known size shrunk it has {size / 1e6:.0f} M parameters")
    model = cls.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # others are computed: tables of sinusoids
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
