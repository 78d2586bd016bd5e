"""The fields of a config.json that families read: the type and bounds of each.

Bounds are far beyond any real model. They turn a damaged file into an error that names the field, instead of a division
by zero, or minutes spent on ten million layers. Fields that are not in `FIELDS` are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real  # NumPy's are among them
from typing import Any

from lamina.errors import InputError

Values = Mapping[str, Any]


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

FIELDS: Mapping[str, Field] = {
    # sizes
    "vocab_size": IntField(1, 100_000_000),
    **each(
        POSITIONS,
        "max_position_embeddings original_max_position_embeddings sliding_window attention_chunk_size floor_scale",
    ),
    **each(
        IntField(1, 10_000),
        "num_hidden_layers num_layers num_decoder_layers no_rope_layer_interval interleave_moe_layer_step "
        "full_attention_interval decoder_sparse_step",
    ),
    **each(IntField(0, 10_000), "first_k_dense_replace num_nextn_predict_layers"),
    **each(
        WIDTH,
        "hidden_size d_model mamba_d_ssm kv_lora_rank head_dim d_kv qk_rope_head_dim v_head_dim linear_key_head_dim "
        "linear_value_head_dim block_multiple_of state_size mamba_d_state relative_attention_max_distance "
        "relative_attention_num_buckets",
    ),
    "qk_nope_head_dim": IntField(0, 1_000_000),
    "q_lora_rank": IntField(1, 1_000_000, also=(None,)),
    **each(IntField(1, 1_000_000, also=("auto",)), "time_step_rank mamba_d_head"),
    **each(IntField(1, 10_000), "conv_kernel mamba_d_conv linear_conv_kernel_dim conv_L_cache"),
    # 0 in checkpoints without such an MLP
    **each(
        IntField(0, 10_000_000),
        "intermediate_size intermediate_size_mlp moe_intermediate_size shared_expert_intermediate_size d_ff "
        "block_ff_dim",
    ),
    # heads, groups, experts
    **each(IntField(1, 100_000), "num_attention_heads num_heads mamba_n_heads linear_num_value_heads n_groups n_group"),
    "num_key_value_heads": IntField(1, 100_000, divides="num_attention_heads"),
    "linear_num_key_heads": IntField(1, 100_000, divides="linear_num_value_heads"),
    "mamba_n_groups": IntField(1, 100_000, divides="mamba_n_heads"),
    "topk_group": IntField(1, 100_000, among=("n_group",)),
    **each(IntField(0, 1_000_000), "num_experts num_local_experts n_routed_experts n_shared_experts"),
    "num_experts_per_tok": IntField(0, 1_000_000, among=("num_experts", "num_local_experts", "n_routed_experts")),
    # encoder–decoder models whose sides have sizes of their own
    **each(IntField(1, 10_000), "encoder_layers decoder_layers"),
    **each(IntField(1, 100_000, divides="d_model"), "encoder_attention_heads decoder_attention_heads"),
    **each(IntField(1, 10_000_000), "encoder_ffn_dim decoder_ffn_dim max_source_positions max_target_positions"),
    "num_mel_bins": WIDTH,
    "activation_function": Text(),
    "scale_embedding": BoolField(),
    # numbers
    **each(FloatField(0, 1), "rms_norm_eps layer_norm_epsilon norm_eps"),
    **each(FloatField(0, 1000, above=True), "expand mamba_expand block_ffn_dim_multiplier"),
    **each(
        FloatField(0, above=True),
        "rope_theta factor low_freq_factor high_freq_factor query_pre_attn_scalar attn_logit_softcapping "
        "final_logit_softcapping",
    ),
    "partial_rotary_factor": FloatField(0, 1, above=True),
    **each(
        FloatField(),
        "routed_scaling_factor attn_scale embedding_multiplier lm_head_multiplier key_multiplier "
        "attention_in_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier beta_fast beta_slow "
        "mscale mscale_all_dim attention_factor",
    ),
    # lists
    "mlp_multipliers": Row(float, 2),
    "ssm_multipliers": Row(float, 5),
    "time_step_limit": Row(float, 2),
    "layer_types": Row(str),
    **each(Row(int), "no_rope_layers moe_layers full_attn_idxs mlp_only_layers"),
    # the rest
    **each(
        BoolField(),
        "attention_bias mlp_bias use_bias use_conv_bias conv_bias mamba_proj_bias mamba_conv_bias projectors_bias "
        "mamba_rms_norm mamba_norm_before_gate tie_word_embeddings tie_embedding residual_in_fp32 rope_interleave "
        "norm_topk_prob use_qk_norm block_auto_adjust_ff_dim scale_decoder_outputs truncate",
    ),
    **each(Text(), "model_type hidden_act hidden_activation feed_forward_proj rope_type type"),
    **each(Part(), "rope_parameters rope_scaling text_config quantization_config"),
}
