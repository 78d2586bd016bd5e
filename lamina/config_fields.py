"""The fields of a config.json that families read: the type and bounds of each.

Bounds are far beyond any real model. They turn a damaged file into an error that names the field, instead of a division
by zero, or minutes spent on ten million layers. Fields that are not in `FIELDS` are not checked.

`NOT_FOR_INFERENCE` lists the fields that change nothing a model computes: those of training, of initial weights, of
other heads than the language model's, and notes of the tools that wrote the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real  # NumPy's are among them
from typing import Any

from lamina.errors import InputError

Values = Mapping[str, Any]


class UnknownName(InputError):
    """A name, such as that of an activation, that is not known. `Config.naming_fields` says which field has it."""

    def __init__(self, what: str, name: object, known: Iterable[str], where: str = "") -> None:
        super().__init__(f"{what}={name!r}{where} is not supported; known: {', '.join(known)}")
        self.name, self.known = name, tuple(known)


@dataclass(frozen=True)
class IntField:
    """A whole number from `low` to `high`.

    also      other values that are allowed
    divides   name of a field that this one must divide
    among     names of fields that this one must not exceed (such as the number of experts, for experts per token)
    """

    low: int
    high: int
    also: tuple[Any, ...] = ()
    divides: str | None = None
    among: tuple[str, ...] = ()

    def checked(self, name: str, values: Values) -> Any:
        value = values[name]
        if any(value is one or (isinstance(one, str) and value == one) for one in self.also):
            return value
        # Some tools write integers as floats.
        whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not self.low <= value <= self.high:
            other = "".join(f", or {'null' if one is None else one!r}" for one in self.also)
            raise wrong(name, value, f"a whole number from {self.low:,} to {self.high:,}{other}")
        value = int(value)
        divided = values.get(self.divides) if self.divides is not None else None
        if isinstance(divided, int) and divided % value:
            raise InputError(f"{name}={value} in the configuration does not divide {self.divides}={divided}")
        for many in self.among:
            if isinstance(there := values.get(many), int) and 0 < there < value:
                raise InputError(f"{name}={value} in the configuration is more than {many}={there}")
        return value


@dataclass(frozen=True)
class FloatField:
    """A finite number from `low` to `high`; above=True excludes `low` itself."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def checked(self, name: str, values: Values) -> Any:
        value = values[name]
        number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not self.low <= value <= self.high or (self.above and value == self.low):
            low = f" above {self.low:g}" if self.above else f" of at least {self.low:g}" if self.low > -math.inf else ""
            raise wrong(name, value, f"a number{low}" + (f" and at most {self.high:g}" if self.high < math.inf else ""))
        return value


@dataclass(frozen=True)
class BoolField:
    """True or false; an integer is accepted too."""

    def checked(self, name: str, values: Values) -> Any:
        if not isinstance(values[name], int):
            raise wrong(name, values[name], "true or false")
        return values[name]


@dataclass(frozen=True)
class Text:
    def checked(self, name: str, values: Values) -> Any:
        if not isinstance(values[name], str):
            raise wrong(name, values[name], "a text")
        return values[name]


@dataclass(frozen=True)
class Part:
    """An object inside the configuration."""

    def checked(self, name: str, values: Values) -> Any:
        if not isinstance(values[name], Mapping):
            raise wrong(name, values[name], "an object")
        return values[name]


@dataclass(frozen=True)
class Row:
    """A list of texts (str), of whole numbers or flags (int), or of numbers (float); length: of a fixed number of
    entries."""

    of: type
    length: int | None = None

    def checked(self, name: str, values: Values) -> Any:
        value, kinds = values[name], (int, float) if self.of is float else self.of
        long_enough = isinstance(value, list | tuple) and self.length in (None, len(value))
        if not long_enough or not all(isinstance(one, kinds) for one in value):
            count = "" if self.length is None else f"{self.length} "
            what = {str: "texts", int: "whole numbers", float: "numbers"}[self.of]
            raise wrong(name, value, f"a list of {count}{what}")
        return value


Field = IntField | FloatField | BoolField | Text | Part | Row


def wrong(name: str, value: Any, expected: str) -> InputError:
    shown = "null" if value is None else repr(value)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}…"
    return InputError(f"{name}={shown} in the configuration must be {expected}")


def each(field: Field, names: str) -> dict[str, Field]:
    return dict.fromkeys(names.split(), field)


WIDTH, POSITIONS = IntField(1, 1_000_000), IntField(1, 10**12)
LAYERS, SOME_LAYERS, HEADS = IntField(1, 10_000), IntField(0, 10_000), IntField(1, 100_000)

FIELDS: Mapping[str, Field] = {
    # sizes
    **each(
        IntField(1, 100_000_000),
        "vocab_size vocab_size_per_layer_input decoder_vocab_size src_vocab_size tgt_vocab_size",
    ),
    **each(
        POSITIONS,
        "max_position_embeddings original_max_position_embeddings sliding_window attention_chunk_size floor_scale "
        "n_positions n_ctx max_seq_len context_length attention_window_size window_size local_attention context "
        "max_source_positions max_target_positions model_max_length index_topk",
    ),
    **each(
        LAYERS,
        "num_hidden_layers num_layers n_layer n_layers num_decoder_layers num_encoder_layers encoder_layers "
        "decoder_layers no_rope_layer_interval interleave_moe_layer_step full_attention_interval decoder_sparse_step "
        "encoder_num_hidden_layers decoder_num_hidden_layers attn_layer_period expert_layer_period moe_layer_interval "
        "global_attn_every_n_layers altup_num_inputs hc_mult num_mem_blocks",
    ),
    **each(
        SOME_LAYERS,
        "first_k_dense_replace num_nextn_predict_layers num_dense_layers attn_layer_offset expert_layer_offset "
        "num_mtp_layers max_window_layers num_kv_shared_layers num_sparse_decoder_layers num_sparse_encoder_layers "
        "encoder_sparse_step altup_active_idx",
    ),
    **each(
        WIDTH,
        "hidden_size d_model n_embd mamba_d_ssm kv_lora_rank head_dim global_head_dim d_kv qk_rope_head_dim v_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim block_multiple_of state_size ssm_state_size "
        "mamba_d_state relative_attention_max_distance relative_attention_num_buckets embedding_size "
        "word_embed_proj_dim attention_hidden_size attention_head_dim lru_width block_width mamba_head_dim "
        "mamba_headdim kv_channels index_head_dim laurel_rank adapter_rank o_lora_rank num_mel_bins qk_head_dim",
    ),
    "shared_expert_intermediate_size": IntField(1, 10_000_000),
    "qk_nope_head_dim": IntField(0, 1_000_000),
    "rotary_dim": IntField(0, 1_000_000, also=(None,)),
    "hidden_size_per_layer_input": IntField(0, 1_000_000),
    "type_vocab_size": IntField(0, 1_000_000),
    "q_lora_rank": IntField(1, 1_000_000, also=(None,)),
    **each(IntField(1, 1_000_000, also=("auto",)), "time_step_rank mamba_d_head mamba_dt_rank"),
    **each(IntField(1, 10_000), "conv_kernel mamba_d_conv linear_conv_kernel_dim conv_L_cache conv1d_width"),
    # 0 in checkpoints without such an MLP
    **each(
        IntField(0, 10_000_000),
        "intermediate_size intermediate_size_mlp moe_intermediate_size d_ff "
        "block_ff_dim n_inner ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim shared_intermediate_size "
        "expert_ffn_hidden_size moe_shared_expert_intermediate_size",
    ),
    # heads, groups, experts
    **each(
        HEADS,
        "num_attention_heads num_heads n_head n_heads attention_heads mamba_n_heads mamba_num_heads n_mamba_heads "
        "linear_num_value_heads linear_num_heads n_groups n_group o_groups mamba_ngroups "
        "num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads "
        "decoder_num_attention_heads encoder_num_key_value_heads decoder_num_key_value_heads index_n_heads "
        "num_expert_group num_global_key_value_heads",
    ),
    **each(IntField(1, 100_000, divides="d_model"), "encoder_attention_heads decoder_attention_heads"),
    "num_key_value_heads": IntField(1, 100_000, divides="num_attention_heads"),
    "num_kv_heads": IntField(1, 100_000, also=(None,)),
    "linear_num_key_heads": IntField(1, 100_000, divides="linear_num_value_heads"),
    "mamba_n_groups": IntField(1, 100_000, divides="mamba_n_heads"),
    "topk_group": IntField(1, 100_000, among=("n_group",)),
    **each(
        IntField(0, 1_000_000),
        "num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts moe_num_experts "
        "moe_num_shared_experts zero_expert_num expert_capacity",
    ),
    **each(
        IntField(1, 1_000_000, among=("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
        "num_experts_per_tok num_experts_per_token moe_k top_k_experts",
    ),
    # numbers
    **each(
        FloatField(0, 1),
        "rms_norm_eps layer_norm_epsilon norm_eps layer_norm_eps norm_epsilon mixer_rms_eps hc_eps moe_norm_min",
    ),
    **each(FloatField(0, 1000, above=True), "expand mamba_expand block_ffn_dim_multiplier expansion_ratio"),
    **each(
        FloatField(0, above=True),
        "rope_theta rope_local_base_freq compress_rope_theta factor low_freq_factor high_freq_factor "
        "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping logits_soft_cap rotary_emb_base "
        "swiglu_limit swiglu_alpha dim_model_base logits_scaling attention_multiplier short_mscale long_mscale "
        "clip_qkv key_multiplier",
    ),
    **each(FloatField(0, 1, above=True), "partial_rotary_factor rotary_pct"),
    **each(
        FloatField(),
        "routed_scaling_factor attn_scale embedding_multiplier lm_head_multiplier "
        "attention_in_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier beta_fast beta_slow "
        "mscale mscale_all_dim attention_factor residual_multiplier router_scaling_factor "
        "logit_scale llama_4_scaling_beta alibi_bias_max scale_depth scale_emb route_scale lambda_std_dev "
        "altup_coef_clip "
        "attention_value_scale time_step_scale full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor "
        "linear_attn_beta_factor mlp_alpha_factor mlp_beta_factor final_w_init_variance_scale embedding_fraction",
    ),
    # lists
    "mlp_multipliers": Row(float, 2),
    "ssm_multipliers": Row(float, 5),
    "time_step_limit": Row(float, 2),
    **each(Row(float), "activation_sparsity_pattern short_factor long_factor"),
    **each(Row(str), "layer_types layers_block_type mlp_layer_types indexer_types block_types"),
    **each(
        Row(int),
        "attn_type_list no_rope_layers moe_layers full_attn_idxs mlp_only_layers attn_layer_indices hybrid_layer_ids",
    ),
    # the rest
    **each(
        BoolField(),
        "attention_bias mlp_bias use_bias use_conv_bias conv_bias mamba_proj_bias mamba_conv_bias projectors_bias "
        "mamba_rms_norm mamba_norm_before_gate tie_word_embeddings tie_embedding residual_in_fp32 rope_interleave "
        "norm_topk_prob use_qk_norm block_auto_adjust_ff_dim scale_decoder_outputs truncate use_sliding_window "
        "qk_layernorm qkv_bias use_qkv_bias lm_head_bias bias alibi multi_query new_decoder_architecture parallel_attn "
        "use_parallel_residual scale_embedding add_cross_attention is_decoder do_layer_norm_before enable_bias "
        "layer_norm_elementwise_affine _remove_final_layer_norm apply_residual_connection_post_layernorm "
        "attention_out_bias moe_renormalize add_bias_linear no_bias learned_pos_emb scale_attn_weights "
        "scale_attn_by_inverse_layer_idx reorder_and_upcast_attn use_expert_bias use_mem_rope use_long_context "
        "use_shared_attention_adapter mup_enabled attention_k_eq_v enable_moe_block use_double_wide_mlp "
        "altup_correct_scale router_bias is_gated_act share_encoder_decoder_embeddings linear_allow_neg_eigval "
        "attn_temperature_tuning norm_bias decoder_bias classifier_bias rotary_value slow_but_exact",
    ),
    **each(
        Text(),
        "model_type hidden_act hidden_activation feed_forward_proj rope_type type activation activation_function "
        "dense_act_fn hidden_mamba_act mamba_hidden_act mlp_hidden_act afn attention_type topk_method scoring_func "
        "norm_type encoder_hidden_act decoder_hidden_act encoder_attention_type",
    ),
    **each(Part(), "rope_parameters rope_scaling text_config quantization_config attn_config per_layer_config"),
}

NOT_FOR_INFERENCE = (
    # who wrote the file, and what it is called
    "architectures", "auto_map", "_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "model_name",
    "dtype", "torch_dtype", "attn_implementation", "_attn_implementation*", "use_cache", "return_dict", "torchscript",
    "use_return_dict", "tokenizer_class", "cache_implementation", "task_specific_params", "prefix", "problem_type",
    "finetuning_task", "transformers.js_config", "tokenizer_name", "verbose", "max_batch_size", "xla_dtype", "ep_size",
    "base_model_tp_plan", "base_model_pp_plan", "pretraining_tp",
    # training
    "*dropout*", "*_pdrop", "*layerdrop", "layer_drop*", "*_loss_coef", "*_loss_coefficient", "*aux_loss*",
    "lambda_std_dev", "*w_init_variance_scale", "time_step_init_scheme", "time_step_floor", "time_step_scale",
    "initializer_*", "*_initializer_range", "*init_std", "init_device", "init_method*", "*router_jitter_noise",
    "input_jitter_noise", "rescale_prenorm_residual", "gradient_checkpointing", "deepspeed*", "apply_spec_augment",
    "mask_time_*", "mask_feature_*", "label_smoothing", "z_loss_*", "*_init_variance_scale", "linear_a_log_*",
    "linear_dt_*", "*_init_scale", "*_xavier_init", "seq_aux", "altup_lr_multiplier", "fused_add_norm",
    "pad_vocab_size_multiple",
    "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_scale",
    # other outputs and heads
    "output_*", "id2label", "label2id", "num_labels", "_num_labels", "classifier_*", "summary_*", "pruned_heads",
    "prune_heads",
    "is_encoder_decoder", "is_decoder", "cross_attention_hidden_size", "chunk_size_feed_forward", "num_logits_to_keep",
    "calc_logits_for_entire_prompt", "mtp_*", "use_mtp", "num_mtp_modules",
    # tokens and generation: read from generation_config.json and the tokenizer
    "*_token_id", "im_*_id", "text_*_id", "mask_init_id", "pad_id", "*_token_index", "*_token_ids",
    "begin_suppress_tokens", "suppress_tokens",
    "max_length", "min_length", "num_beams", "num_beam_groups", "diversity_penalty", "do_sample", "early_stopping",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "num_return_sequences",
    "bad_words_ids", "forced_decoder_ids", "remove_invalid_values", "exponential_decay_length_penalty",
    "force_bos_token_to_be_generated",
    # how transformers computes, not what
    "use_mamba_kernels", "use_mambapy", "use_associative_scan", "use_mem_eff_path", "chunk_size", "mamba_chunk_size",
    "mamba_ssm_cache_dtype", "mamba_ssm_dtype",
)  # fmt: skip
"""Patterns of fields that no family has to read."""
