"""Releases with recurrent layers, alone or beside attention."""

from __future__ import annotations

from typing import Any

from tests.families.releases import COMMON, Release
from tests.families.releases.header import header
from tests.families.releases.mixtures import ends, experts, mlp

MAMBA: dict[str, Any] = dict(
    conv_kernel=4, expand=2, fused_add_norm=True, hidden_act="silu", initializer_range=0.1, pad_vocab_size_multiple=8,
    rescale_prenorm_residual=False, residual_in_fp32=True, rms_norm=True, ssm_cfg={}, state_size=16,
    time_step_floor=0.0001, time_step_init_scheme="random", time_step_max=0.1, time_step_min=0.001,
    time_step_scale=1.0, use_bias=False, use_conv_bias=True,
)  # fmt: skip


def delta_layers(prefix: str, n: str, width: int, key: int, value: int, heads: int) -> str:
    """Lines of gated delta nets with separate projections; `key` and `value` are the widths of all heads."""
    layer = f"{prefix}.layers.<{n}>.linear_attn"
    return f"""
        {layer}.{{A_log,dt_bias}} {heads}
        {layer}.conv1d.weight {2 * key + value} 1 4
        {layer}.in_proj_qkv.weight {2 * key + value} {width}
        {layer}.in_proj_z.weight {value} {width}
        {layer}.in_proj_{{a,b}}.weight {heads} {width}
        {layer}.norm.weight 128
        {layer}.out_proj.weight {width} {value}
    """


def every_fourth(count: int) -> tuple[str, str]:
    """Numbers of linear layers, and of every fourth layer, which attends."""
    linear = ",".join(str(i) for i in range(count) if i % 4 != 3)
    return linear, ",".join(str(i) for i in range(3, count, 4))


QWEN3_5: dict[str, Any] = dict(
    attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16", eos_token_id=248044,
    full_attention_interval=4, head_dim=256, hidden_act="silu", initializer_range=0.02,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_value_head_dim=128,
    max_position_embeddings=262144, mlp_only_layers=[], mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
    num_key_value_heads=2, rms_norm_eps=1e-06, use_cache=True, vocab_size=248320, mamba_ssm_dtype="float32",
    rope_parameters=dict(
        mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type="default", rope_theta=10000000,
        partial_rotary_factor=0.25,
    ),
)  # fmt: skip
QWEN3_5_FILE: dict[str, Any] = dict(
    image_token_id=248056, video_token_id=248057, vision_start_token_id=248053, vision_end_token_id=248054,
    transformers_version="4.57.0.dev0", vision_config=dict(depth=12, hidden_size=768, model_type="qwen3_5"),
)  # fmt: skip
LINEAR, FULL = every_fourth(24)
LINEAR40, FULL40 = every_fourth(40)
LINEAR48, FULL48 = every_fourth(48)
KDA = "0-2,4-6,8-10,12-14,16-18,20-22,24-25"
MLA = "3,7,11,15,19,23,26"
ZAMBA_HYBRID = [5, 11, 17, 23, 29, 35]
JAMBA_ATTENTION = "4,12,20,28"
JAMBA_MAMBA = ",".join(str(i) for i in range(32) if i % 8 != 4)
NEMOTRON_PATTERN = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"


NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def numbers(pattern: str) -> dict[str, list[int]]:
    """Numbers of the layers of each kind."""
    names = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}
    return {name: [i for i, one in enumerate(pattern) if one == kind] for kind, name in names.items()}


GRANITE_H = ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]
LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)

RELEASES: dict[str, Release] = {
    "state-spaces/mamba-130m-hf": Release(
        129_135_360,
        header("""
            backbone.embeddings.weight 50280 768
            backbone.layers.<0-23>.norm.weight 768
            backbone.layers.<0-23>.mixer.A_log 1536 16
            backbone.layers.<0-23>.mixer.D 1536
            backbone.layers.<0-23>.mixer.conv1d.weight 1536 1 4
            backbone.layers.<0-23>.mixer.conv1d.bias 1536
            backbone.layers.<0-23>.mixer.in_proj.weight 3072 768
            backbone.layers.<0-23>.mixer.x_proj.weight 80 1536
            backbone.layers.<0-23>.mixer.dt_proj.weight 1536 48
            backbone.layers.<0-23>.mixer.dt_proj.bias 1536
            backbone.layers.<0-23>.mixer.out_proj.weight 768 1536
            backbone.norm_f.weight 768
        """),
        COMMON | MAMBA | dict(
            model_type="mamba", d_inner=1536, d_model=768, hidden_size=768, intermediate_size=1536,
            layer_norm_epsilon=1e-05, n_layer=24, num_hidden_layers=24, time_step_rank=48, torch_dtype="float32",
            vocab_size=50280,
        ),
    ),
    "tiiuae/falcon-mamba-7b": Release(
        7_272_665_088,
        header("""
            backbone.embeddings.weight 65024 4096
            backbone.layers.<0-63>.norm.weight 4096
            backbone.layers.<0-63>.mixer.A_log 8192 16
            backbone.layers.<0-63>.mixer.D 8192
            backbone.layers.<0-63>.mixer.conv1d.weight 8192 1 4
            backbone.layers.<0-63>.mixer.conv1d.bias 8192
            backbone.layers.<0-63>.mixer.in_proj.weight 16384 4096
            backbone.layers.<0-63>.mixer.x_proj.weight 288 8192
            backbone.layers.<0-63>.mixer.dt_proj.weight 8192 256
            backbone.layers.<0-63>.mixer.dt_proj.bias 8192
            backbone.layers.<0-63>.mixer.out_proj.weight 4096 8192
            backbone.norm_f.weight 4096
            lm_head.weight 65024 4096
        """),
        COMMON | dict(
            model_type="falcon_mamba", conv_kernel=4, expand=16, hidden_act="silu", hidden_size=4096,
            initializer_range=0.1, intermediate_size=8192, layer_norm_epsilon=1e-05, mixer_rms_eps=1e-06,
            num_hidden_layers=64, pad_token_id=11, rescale_prenorm_residual=False, residual_in_fp32=True,
            state_size=16, tie_word_embeddings=False, time_step_floor=0.0001, time_step_init_scheme="random",
            time_step_max=0.1, time_step_min=0.001, time_step_rank=256, time_step_scale=1.0, use_bias=False,
            use_conv_bias=True, use_mambapy=False, vocab_size=65024,
        ),
    ),
    "mistralai/Mamba-Codestral-7B-v0.1": Release(
        7_285_403_648,
        header("""
            backbone.embeddings.weight 32768 4096
            backbone.layers.<0-63>.norm.weight 4096
            backbone.layers.<0-63>.mixer.{A_log,D,dt_bias} 128
            backbone.layers.<0-63>.mixer.conv1d.weight 10240 1 4
            backbone.layers.<0-63>.mixer.conv1d.bias 10240
            backbone.layers.<0-63>.mixer.in_proj.weight 18560 4096
            backbone.layers.<0-63>.mixer.norm.weight 8192
            backbone.layers.<0-63>.mixer.out_proj.weight 4096 8192
            backbone.norm_f.weight 4096
            lm_head.weight 32768 4096
        """),
        COMMON | dict(
            model_type="mamba2", chunk_size=256, conv_kernel=4, expand=2, head_dim=64, hidden_act="silu",
            hidden_size=4096, initializer_range=0.1, intermediate_size=8192, layer_norm_epsilon=1e-05, n_groups=8,
            norm_before_gate=True, num_heads=128, num_hidden_layers=64, pad_token_id=0,
            rescale_prenorm_residual=False, residual_in_fp32=True, rms_norm=True, state_size=128,
            tie_word_embeddings=False, time_step_floor=0.0001, time_step_init_scheme="random",
            time_step_limit=[0.0, float("inf")], time_step_max=0.1, time_step_min=0.001, time_step_rank=256,
            time_step_scale=1.0, use_bias=False, use_conv_bias=True, vocab_size=32768,
        ),
    ),
    "ai21labs/Jamba-v0.1": Release(
        51_570_323_328,
        header(
            "model.embed_tokens.weight 65536 4096\nmodel.final_layernorm.weight 4096\nlm_head.weight 65536 4096\n"
            f"""
            model.layers.<0-31>.{{input,pre_ff}}_layernorm.weight 4096
            model.layers.<{JAMBA_ATTENTION}>.self_attn.{{q,o}}_proj.weight 4096 4096
            model.layers.<{JAMBA_ATTENTION}>.self_attn.{{k,v}}_proj.weight 1024 4096
            model.layers.<{JAMBA_MAMBA}>.mamba.A_log 8192 16
            model.layers.<{JAMBA_MAMBA}>.mamba.D 8192
            model.layers.<{JAMBA_MAMBA}>.mamba.conv1d.weight 8192 1 4
            model.layers.<{JAMBA_MAMBA}>.mamba.conv1d.bias 8192
            model.layers.<{JAMBA_MAMBA}>.mamba.in_proj.weight 16384 4096
            model.layers.<{JAMBA_MAMBA}>.mamba.x_proj.weight 288 8192
            model.layers.<{JAMBA_MAMBA}>.mamba.dt_proj.weight 8192 256
            model.layers.<{JAMBA_MAMBA}>.mamba.dt_proj.bias 8192
            model.layers.<{JAMBA_MAMBA}>.mamba.dt_layernorm.weight 256
            model.layers.<{JAMBA_MAMBA}>.mamba.{{b,c}}_layernorm.weight 16
            model.layers.<{JAMBA_MAMBA}>.mamba.out_proj.weight 4096 8192
            model.layers.<odd>.feed_forward.router.weight 16 4096
            """
            + experts("model.layers.<odd>.feed_forward.experts", 16, 14336, 4096)
            + mlp("model.layers.<even>.feed_forward", 14336, 4096),
            odd=range(1, 32, 2), even=range(0, 32, 2),
        ),
        COMMON | dict(
            model_type="jamba", attn_layer_offset=4, attn_layer_period=8,
            auto_map={"AutoConfig": "configuration_jamba.JambaConfig"}, calc_logits_for_entire_prompt=False,
            expert_layer_offset=1, expert_layer_period=2, hidden_act="silu", hidden_size=4096,
            intermediate_size=14336, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_state=16, mamba_dt_rank=256,
            mamba_expand=2, mamba_inner_layernorms=True, mamba_proj_bias=False, n_ctx=262144, num_attention_heads=32,
            num_experts=16, num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8,
            output_router_logits=False, pad_token_id=0, rms_norm_eps=1e-06, router_aux_loss_coef=0.001,
            sliding_window=None, tie_word_embeddings=False, use_mamba_kernels=True, vocab_size=65536,
        ),
    ),
    "ibm-ai-platform/Bamba-9B": Release(
        9.78e9,
        header(
            "model.embed_tokens.weight 128256 4096\nmodel.final_layernorm.weight 4096\nlm_head.weight 128256 4096\n"
            """
            model.layers.<0-31>.{input,pre_ff}_layernorm.weight 4096
            model.layers.<9,18,27>.self_attn.{q,o}_proj.weight 4096 4096
            model.layers.<9,18,27>.self_attn.{k,v}_proj.weight 1024 4096
            model.layers.<mamba>.mamba.{A_log,D,dt_bias} 128
            model.layers.<mamba>.mamba.conv1d.weight 8448 1 4
            model.layers.<mamba>.mamba.conv1d.bias 8448
            model.layers.<mamba>.mamba.in_proj.weight 16768 4096
            model.layers.<mamba>.mamba.norm.weight 8192
            model.layers.<mamba>.mamba.out_proj.weight 4096 8192
            """ + mlp("model.layers.<0-31>.feed_forward", 14336, 4096),
            mamba=[i for i in range(32) if i not in (9, 18, 27)],
        ),
        COMMON | dict(
            model_type="bamba", attn_layer_indices=[9, 18, 27], attn_rotary_emb=64, hidden_act="silu",
            hidden_size=4096, intermediate_size=14336, mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4,
            mamba_d_head=64, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=128,
            mamba_proj_bias=False, max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32,
            num_key_value_heads=8, num_logits_to_keep=1, pad_token_id=0, rms_norm_eps=1e-05,
            tie_word_embeddings=False, use_mamba_kernels=True, vocab_size=128256, partial_rotary_factor=0.5,
            rope_theta=10000.0,
        ),
    ),
    "tiiuae/Falcon-H1-0.5B-Base": Release(
        521_411_104,
        header("""
            model.embed_tokens.weight 32784 1024
            model.layers.<0-35>.{input,pre_ff}_layernorm.weight 1024
            model.layers.<0-35>.self_attn.q_proj.weight 512 1024
            model.layers.<0-35>.self_attn.{k,v}_proj.weight 128 1024
            model.layers.<0-35>.self_attn.o_proj.weight 1024 512
            model.layers.<0-35>.mamba.{A_log,D,dt_bias} 24
            model.layers.<0-35>.mamba.conv1d.weight 1792 1 4
            model.layers.<0-35>.mamba.conv1d.bias 1792
            model.layers.<0-35>.mamba.in_proj.weight 3352 1024
            model.layers.<0-35>.mamba.out_proj.weight 1024 1536
            model.layers.<0-35>.feed_forward.{gate,up}_proj.weight 2048 1024
            model.layers.<0-35>.feed_forward.down_proj.weight 1024 2048
            model.final_layernorm.weight 1024
            lm_head.weight 32784 1024
        """),
        COMMON | dict(
            model_type="falcon_h1", attention_bias=False, attention_in_multiplier=1.0,
            attention_out_multiplier=0.9375, attn_layer_indices=None, embedding_multiplier=5.656854249492381,
            head_dim=64, hidden_act="silu", hidden_size=1024, intermediate_size=2048, key_multiplier=0.390625,
            lm_head_multiplier=0.0390625, mamba_chunk_size=128, mamba_conv_bias=True, mamba_d_conv=4,
            mamba_d_head=64, mamba_d_ssm=1536, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1,
            mamba_n_heads=24, mamba_norm_before_gate=False, mamba_proj_bias=False, mamba_rms_norm=False,
            mamba_use_mlp=True, max_position_embeddings=16384, mlp_bias=False, mlp_expansion_factor=8,
            mlp_multipliers=[0.8838834764831844, 0.5859375], num_attention_heads=8, num_hidden_layers=36,
            num_key_value_heads=2, num_logits_to_keep=1, pad_token_id=0, projectors_bias=False, rms_norm_eps=1e-05,
            rope_scaling=None, rope_theta=100000000000.0, ssm_in_multiplier=1.25,
            ssm_multipliers=[0.35, 0.25, 0.35, 0.5, 0.35], ssm_out_multiplier=0.23570226039551587,
            tie_word_embeddings=False, time_step_floor=0.0001, time_step_limit=[0.0, float("inf")],
            time_step_max=0.1, time_step_min=0.001, vocab_size=32784,
        ),
    ),
    "nvidia/Nemotron-H-8B-Base-8K": Release(
        8.1e9,
        header("""
            backbone.embeddings.weight 131072 4096
            backbone.layers.<0-51>.norm.weight 4096
            backbone.layers.<mamba>.mixer.{A_log,D,dt_bias} 128
            backbone.layers.<mamba>.mixer.conv1d.weight 10240 1 4
            backbone.layers.<mamba>.mixer.conv1d.bias 10240
            backbone.layers.<mamba>.mixer.in_proj.weight 18560 4096
            backbone.layers.<mamba>.mixer.norm.weight 8192
            backbone.layers.<mamba>.mixer.out_proj.weight 4096 8192
            backbone.layers.<mlp>.mixer.up_proj.weight 21504 4096
            backbone.layers.<mlp>.mixer.down_proj.weight 4096 21504
            backbone.layers.<attention>.mixer.{q,o}_proj.weight 4096 4096
            backbone.layers.<attention>.mixer.{k,v}_proj.weight 1024 4096
            backbone.norm_f.weight 4096
            lm_head.weight 131072 4096
            """, **numbers(NEMOTRON_PATTERN),
        ),
        COMMON | dict(
            model_type="nemotron_h", attention_bias=False, attention_head_dim=128,
            auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, chunk_size=128, conv_kernel=4,
            expand=2, hidden_dropout=0.0, hidden_size=4096, hybrid_override_pattern=NEMOTRON_PATTERN,
            intermediate_size=21504, layer_norm_epsilon=1e-05, mamba_head_dim=64, mamba_hidden_act="silu",
            mamba_num_heads=128, mamba_proj_bias=False, max_position_embeddings=8192, mlp_bias=False,
            mlp_hidden_act="relu2", n_groups=8, num_attention_heads=32, num_hidden_layers=52, num_key_value_heads=8,
            num_logits_to_keep=1, pad_token_id=0, rescale_prenorm_residual=True, residual_in_fp32=False,
            rms_norm_eps=1e-05, sliding_window=None, ssm_state_size=128, tie_word_embeddings=False,
            time_step_floor=0.0001, time_step_limit=[0.0, float("inf")], time_step_max=0.1, time_step_min=0.001,
            time_step_rank=256, use_bias=False, use_conv_bias=True, use_mamba_kernels=True, vocab_size=131072,
        ),
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Release(
        31.58e9,
        header("""
            backbone.embeddings.weight 131072 2688
            backbone.layers.<0-51>.norm.weight 2688
            backbone.layers.<mamba>.mixer.{A_log,D,dt_bias} 64
            backbone.layers.<mamba>.mixer.conv1d.weight 6144 1 4
            backbone.layers.<mamba>.mixer.conv1d.bias 6144
            backbone.layers.<mamba>.mixer.in_proj.weight 10304 2688
            backbone.layers.<mamba>.mixer.norm.weight 4096
            backbone.layers.<mamba>.mixer.out_proj.weight 2688 4096
            backbone.layers.<moe>.mixer.gate.weight 128 2688
            backbone.layers.<moe>.mixer.gate.e_score_correction_bias 128
            backbone.layers.<moe>.mixer.experts.<0-127>.up_proj.weight 1856 2688
            backbone.layers.<moe>.mixer.experts.<0-127>.down_proj.weight 2688 1856
            backbone.layers.<moe>.mixer.shared_experts.up_proj.weight 3712 2688
            backbone.layers.<moe>.mixer.shared_experts.down_proj.weight 2688 3712
            backbone.layers.<attention>.mixer.q_proj.weight 4096 2688
            backbone.layers.<attention>.mixer.{k,v}_proj.weight 256 2688
            backbone.layers.<attention>.mixer.o_proj.weight 2688 4096
            backbone.norm_f.weight 2688
            lm_head.weight 131072 2688
            """, **numbers(NANO_PATTERN),
        ),
        COMMON | dict(
            model_type="nemotron_h", attention_bias=False, chunk_size=128, conv_kernel=4, expand=2, head_dim=128,
            hidden_dropout=0.0, hidden_size=2688, hybrid_override_pattern=NANO_PATTERN, intermediate_size=1856,
            layer_norm_epsilon=1e-05, mamba_head_dim=64, mamba_hidden_act="silu", mamba_num_heads=64,
            mamba_proj_bias=False, mamba_ssm_cache_dtype="float32", max_position_embeddings=262144, mlp_bias=False,
            mlp_hidden_act="relu2", moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1,
            n_groups=8, n_routed_experts=128, n_shared_experts=1, norm_eps=1e-05, norm_topk_prob=True,
            num_attention_heads=32, num_experts_per_tok=6, num_hidden_layers=52, num_key_value_heads=2,
            num_logits_to_keep=1, pad_token_id=0, partial_rotary_factor=1.0, rescale_prenorm_residual=True,
            residual_in_fp32=False, rope_theta=10000, routed_scaling_factor=2.5, sliding_window=None,
            ssm_state_size=128, tie_word_embeddings=False, time_step_floor=0.0001, time_step_max=0.1,
            time_step_min=0.001, topk_group=1, use_bias=False, use_conv_bias=True, use_mamba_kernels=True,
            vocab_size=131072,
        ),
    ),
    "ibm-granite/granite-4.0-h-small": Release(
        32.2e9,
        header("""
            model.embed_tokens.weight 100352 4096
            model.layers.<0-39>.{input,post_attention}_layernorm.weight 4096
            model.layers.<5,15,25,35>.self_attn.{q,o}_proj.weight 4096 4096
            model.layers.<5,15,25,35>.self_attn.{k,v}_proj.weight 1024 4096
            model.layers.<mamba>.mamba.{A_log,D,dt_bias} 128
            model.layers.<mamba>.mamba.conv1d.weight 8448 1 4
            model.layers.<mamba>.mamba.conv1d.bias 8448
            model.layers.<mamba>.mamba.in_proj.weight 16768 4096
            model.layers.<mamba>.mamba.norm.weight 8192
            model.layers.<mamba>.mamba.out_proj.weight 4096 8192
            model.layers.<0-39>.block_sparse_moe.input_linear.weight 72 1536 4096
            model.layers.<0-39>.block_sparse_moe.output_linear.weight 72 4096 768
            model.layers.<0-39>.block_sparse_moe.router.layer.weight 72 4096
            model.layers.<0-39>.shared_mlp.input_linear.weight 3072 4096
            model.layers.<0-39>.shared_mlp.output_linear.weight 4096 1536
            model.norm.weight 4096
            """, mamba=[i for i, kind in enumerate(GRANITE_H) if kind == "mamba"],
        ),
        COMMON | dict(
            model_type="granitemoehybrid", attention_bias=False, attention_multiplier=0.0078125,
            embedding_multiplier=12, hidden_act="silu", hidden_size=4096, init_method="mup", intermediate_size=768,
            layer_types=GRANITE_H, logits_scaling=16, mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4,
            mamba_d_head=64, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=128,
            mamba_proj_bias=False, max_position_embeddings=131072, normalization_function="rmsnorm",
            num_attention_heads=32, num_experts_per_tok=10, num_hidden_layers=40, num_key_value_heads=8,
            num_local_experts=72, output_router_logits=False, pad_token_id=100256, position_embedding_type="nope",
            residual_multiplier=0.22, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000,
            router_aux_loss_coef=0.0, shared_intermediate_size=1536, tie_word_embeddings=True, vocab_size=100352,
        ),
    ),
    "LiquidAI/LFM2-1.2B": Release(
        1_170_340_608,
        header("""
            model.embed_tokens.weight 65536 2048
            model.embedding_norm.weight 2048
            model.layers.<0-15>.{operator,ffn}_norm.weight 2048
            model.layers.<0-15>.feed_forward.{w1,w3}.weight 8192 2048
            model.layers.<0-15>.feed_forward.w2.weight 2048 8192
            model.layers.<attention>.self_attn.{q_proj,out_proj}.weight 2048 2048
            model.layers.<attention>.self_attn.{k,v}_proj.weight 512 2048
            model.layers.<attention>.self_attn.{q,k}_layernorm.weight 64
            model.layers.<conv>.conv.conv.weight 2048 1 3
            model.layers.<conv>.conv.in_proj.weight 6144 2048
            model.layers.<conv>.conv.out_proj.weight 2048 2048
            """, attention=LFM2_ATTENTION, conv=[i for i in range(16) if i not in LFM2_ATTENTION],
        ),
        COMMON | dict(
            model_type="lfm2", block_auto_adjust_ff_dim=True, block_dim=2048, block_ff_dim=12288,
            block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=256, block_norm_eps=1e-05,
            block_out_init_scale=1.0, block_use_swiglu=True, block_use_xavier_init=True, conv_L_cache=3,
            conv_bias=False, conv_dim=2048, conv_dim_out=2048, conv_use_xavier_init=True,
            full_attn_idxs=list(LFM2_ATTENTION), hidden_size=2048, max_position_embeddings=128000, norm_eps=1e-05,
            num_attention_heads=32, num_heads=32, num_hidden_layers=16, num_key_value_heads=8, pad_token_id=0,
            rope_theta=1000000.0, use_pos_enc=True, vocab_size=65536,
        ),
    ),
    "LiquidAI/LFM2-8B-A1B": Release(
        8_339_929_856 + 22 * 32,  # with the biases of the routers, which are buffers
        header("""
            model.embed_tokens.weight 65536 2048
            model.embedding_norm.weight 2048
            model.layers.<0-23>.{operator,ffn}_norm.weight 2048
            model.layers.<0-1>.feed_forward.{w1,w3}.weight 7168 2048
            model.layers.<0-1>.feed_forward.w2.weight 2048 7168
            model.layers.<2-23>.feed_forward.gate.weight 32 2048
            model.layers.<2-23>.feed_forward.expert_bias 32
            model.layers.<attention>.self_attn.{q_proj,out_proj}.weight 2048 2048
            model.layers.<attention>.self_attn.{k,v}_proj.weight 512 2048
            model.layers.<attention>.self_attn.{q,k}_layernorm.weight 64
            model.layers.<conv>.conv.conv.weight 2048 1 3
            model.layers.<conv>.conv.in_proj.weight 6144 2048
            model.layers.<conv>.conv.out_proj.weight 2048 2048
            """ + experts("model.layers.<2-23>.feed_forward.experts", 32, 1792, 2048, "w1,w3,w2"),
            attention=(2, 6, 10, 14, 18, 21), conv=[i for i in range(24) if i not in (2, 6, 10, 14, 18, 21)],
        ),
        COMMON | dict(
            model_type="lfm2_moe", conv_L_cache=3, conv_bias=False, hidden_size=2048, intermediate_size=7168,
            layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
            max_position_embeddings=128000, moe_intermediate_size=1792, norm_eps=1e-05, norm_topk_prob=True,
            num_attention_heads=32, num_dense_layers=2, num_experts=32, num_experts_per_tok=4, num_hidden_layers=24,
            num_key_value_heads=8, pad_token_id=0, rope_theta=1000000.0, routed_scaling_factor=1.0,
            use_expert_bias=True, vocab_size=65536,
        ),
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Release(
        79_674_391_296,  # 81.3 billion with the layers of multi-token prediction
        header(
            ends(151936, 2048) + f"""
            model.layers.<0-47>.{{input,post_attention}}_layernorm.weight 2048
            model.layers.<{LINEAR48}>.linear_attn.{{A_log,dt_bias}} 32
            model.layers.<{LINEAR48}>.linear_attn.conv1d.weight 8192 1 4
            model.layers.<{LINEAR48}>.linear_attn.in_proj_ba.weight 64 2048
            model.layers.<{LINEAR48}>.linear_attn.in_proj_qkvz.weight 12288 2048
            model.layers.<{LINEAR48}>.linear_attn.norm.weight 128
            model.layers.<{LINEAR48}>.linear_attn.out_proj.weight 2048 4096
            model.layers.<{FULL48}>.self_attn.q_proj.weight 8192 2048
            model.layers.<{FULL48}>.self_attn.{{k,v}}_proj.weight 512 2048
            model.layers.<{FULL48}>.self_attn.o_proj.weight 2048 4096
            model.layers.<{FULL48}>.self_attn.{{q,k}}_norm.weight 256
            model.layers.<0-47>.mlp.gate.weight 512 2048
            model.layers.<0-47>.mlp.shared_expert_gate.weight 1 2048
            mtp.fc.weight 2048 4096
            mtp.{{norm,pre_fc_norm_embedding,pre_fc_norm_hidden}}.weight 2048
            mtp.layers.0.mlp.experts.<0-511>.up_proj.weight 512 2048
            """ + experts("model.layers.<0-47>.mlp.experts", 512, 512, 2048)
            + mlp("model.layers.<0-47>.mlp.shared_expert", 512, 2048)
        ),
        COMMON | dict(
            model_type="qwen3_next", decoder_sparse_step=1, full_attention_interval=4, head_dim=256,
            hidden_act="silu", hidden_size=2048, intermediate_size=5120, linear_conv_kernel_dim=4,
            linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
            max_position_embeddings=262144, mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True,
            num_attention_heads=16, num_experts=512, num_experts_per_tok=10, num_hidden_layers=48,
            num_key_value_heads=2, output_router_logits=False, partial_rotary_factor=0.25, rms_norm_eps=1e-06,
            rope_scaling=None, rope_theta=10000000, router_aux_loss_coef=0.001,
            shared_expert_intermediate_size=512, tie_word_embeddings=False, use_sliding_window=False,
            vocab_size=151936,
        ),
    ),
    "Qwen/Qwen3.5-0.8B-Base": Release(
        752_393_024,
        header(
            delta_layers("model.language_model", LINEAR, 1024, 2048, 2048, 16) + f"""
            model.language_model.embed_tokens.weight 248320 1024
            model.language_model.layers.<0-23>.{{input,post_attention}}_layernorm.weight 1024
            model.language_model.layers.<{FULL}>.self_attn.q_proj.weight 4096 1024
            model.language_model.layers.<{FULL}>.self_attn.{{k,v}}_proj.weight 512 1024
            model.language_model.layers.<{FULL}>.self_attn.o_proj.weight 1024 2048
            model.language_model.layers.<{FULL}>.self_attn.{{q,k}}_norm.weight 256
            model.language_model.norm.weight 1024
            model.visual.blocks.<0-11>.attn.qkv.weight 2304 768
            model.visual.pos_embed.weight 2304 768
            mtp.fc.weight 1024 2048
            mtp.layers.0.mlp.down_proj.weight 1024 3584
            """ + mlp("model.language_model.layers.<0-23>.mlp", 3584, 1024)
        ),
        QWEN3_5_FILE | dict(
            architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", tie_word_embeddings=True,
            text_config=QWEN3_5 | dict(
                model_type="qwen3_5_text", hidden_size=1024, intermediate_size=3584, linear_num_value_heads=16,
                num_attention_heads=8, num_hidden_layers=24, tie_word_embeddings=True,
                layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
            ),
        ),
    ),
    "Qwen/Qwen3.5-35B-A3B": Release(
        34_660_610_688,
        header(
            delta_layers("model.language_model", LINEAR40, 2048, 2048, 4096, 32) + f"""
            model.language_model.embed_tokens.weight 248320 2048
            model.language_model.layers.<0-39>.{{input,post_attention}}_layernorm.weight 2048
            model.language_model.layers.<{FULL40}>.self_attn.q_proj.weight 8192 2048
            model.language_model.layers.<{FULL40}>.self_attn.{{k,v}}_proj.weight 512 2048
            model.language_model.layers.<{FULL40}>.self_attn.o_proj.weight 2048 4096
            model.language_model.layers.<{FULL40}>.self_attn.{{q,k}}_norm.weight 256
            model.language_model.layers.<0-39>.mlp.experts.down_proj 256 2048 512
            model.language_model.layers.<0-39>.mlp.experts.gate_up_proj 256 1024 2048
            model.language_model.layers.<0-39>.mlp.gate.weight 256 2048
            model.language_model.layers.<0-39>.mlp.shared_expert_gate.weight 1 2048
            model.language_model.norm.weight 2048
            lm_head.weight 248320 2048
            model.visual.blocks.<0-26>.attn.qkv.weight 3456 1152
            mtp.fc.weight 2048 4096
            mtp.layers.0.mlp.experts.<0-255>.down_proj.weight 2048 512
            """ + mlp("model.language_model.layers.<0-39>.mlp.shared_expert", 512, 2048)
        ),
        QWEN3_5_FILE | dict(
            architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe", tie_word_embeddings=False,
            text_config=QWEN3_5 | dict(
                model_type="qwen3_5_moe_text", hidden_size=2048, linear_num_value_heads=32, num_attention_heads=16,
                num_hidden_layers=40, moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
                output_router_logits=False, router_aux_loss_coef=0.001, shared_expert_intermediate_size=512,
                layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 10,
            ),
        ),
    ),
    "google/recurrentgemma-2b": Release(
        2_682_862_080,
        header("""
            model.embed_tokens.weight 256000 2560
            model.final_norm.weight 2560
            model.layers.<0-25>.{temporal,channel}_pre_norm.weight 2560
            model.layers.<0-25>.mlp_block.{gate,up}_proj.weight 7680 2560
            model.layers.<0-25>.mlp_block.{gate,up}_proj.bias 7680
            model.layers.<0-25>.mlp_block.down_proj.weight 2560 7680
            model.layers.<0-25>.mlp_block.down_proj.bias 2560
            model.layers.<attention>.temporal_block.{q,o}_proj.weight 2560 2560
            model.layers.<attention>.temporal_block.{k,v}_proj.weight 256 2560
            model.layers.<attention>.temporal_block.o_proj.bias 2560
            model.layers.<recurrent>.temporal_block.linear_{x,y,out}.weight 2560 2560
            model.layers.<recurrent>.temporal_block.linear_{x,y,out}.bias 2560
            model.layers.<recurrent>.temporal_block.conv_1d.weight 2560 1 4
            model.layers.<recurrent>.temporal_block.conv_1d.bias 2560
            model.layers.<recurrent>.temporal_block.rg_lru.recurrent_param 2560
            model.layers.<recurrent>.temporal_block.rg_lru.{input,recurrent}_gate_weight 10 256 256
            model.layers.<recurrent>.temporal_block.rg_lru.{input,recurrent}_gate_bias 10 256
            """, attention=range(2, 26, 3), recurrent=[i for i in range(26) if i % 3 != 2],
        ),
        COMMON | dict(
            model_type="recurrent_gemma", _block_types=["recurrent", "recurrent", "attention"], attention_bias=False,
            attention_window_size=2048, conv1d_width=4, embeddings_scale_by_sqrt_dim=True,
            final_w_init_variance_scale=0.07692307692307693, head_dim=256, hidden_activation="gelu_pytorch_tanh",
            hidden_size=2560, intermediate_size=15360, logits_soft_cap=30.0, lru_width=2560, num_attention_heads=10,
            num_hidden_layers=26, num_key_value_heads=1, pad_token_id=0, partial_rotary_factor=0.5,
            rms_norm_eps=1e-06, rope_theta=10000.0, vocab_size=256000, w_init_variance_scale=0.01,
        ),
    ),
    "MiniMaxAI/MiniMax-Text-01-hf": Release(
        456_089_655_296,
        header(
            ends(200064, 6144) + """
            model.layers.<0-79>.{input,post_attention}_layernorm.weight 6144
            model.layers.<linear>.self_attn.qkv_proj.weight 24576 6144
            model.layers.<linear>.self_attn.output_gate.weight 8192 6144
            model.layers.<linear>.self_attn.norm.weight 8192
            model.layers.<linear>.self_attn.out_proj.weight 6144 8192
            model.layers.<full>.self_attn.q_proj.weight 8192 6144
            model.layers.<full>.self_attn.{k,v}_proj.weight 1024 6144
            model.layers.<full>.self_attn.o_proj.weight 6144 8192
            model.layers.<0-79>.block_sparse_moe.gate.weight 32 6144
            """ + experts("model.layers.<0-79>.block_sparse_moe.experts", 32, 9216, 6144, "w1,w3,w2"),
            full=range(7, 80, 8), linear=[i for i in range(80) if i % 8 != 7],
        ),
        COMMON | dict(
            model_type="minimax", block_size=256, full_attn_alpha_factor=3.5565588200778455,
            full_attn_beta_factor=1.0, head_dim=128, hidden_act="silu", hidden_size=6144, intermediate_size=9216,
            layer_types=(["linear_attention"] * 7 + ["full_attention"]) * 10,
            linear_attn_alpha_factor=3.5565588200778455, linear_attn_beta_factor=1.0,
            max_position_embeddings=10240000, mlp_alpha_factor=3.5565588200778455, mlp_beta_factor=1.0,
            num_attention_heads=64, num_experts_per_tok=2, num_hidden_layers=80, num_key_value_heads=8,
            num_local_experts=32, output_router_logits=False, rms_norm_eps=1e-05, rope_theta=10000000,
            rotary_dim=64, router_aux_loss_coef=0.001, router_jitter_noise=0.0, sliding_window=None,
            tie_word_embeddings=False, vocab_size=200064,
        ),
    ),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": Release(
        49_122_681_728,
        header(
            ends(163840, 2304) + f"""
            model.layers.<0-26>.{{input,post_attention}}_layernorm.weight 2304
            model.layers.<0-26>.self_attn.o_proj.weight 2304 4096
            model.layers.<{KDA}>.self_attn.A_log 1 1 32 1
            model.layers.<{KDA}>.self_attn.b_proj.weight 32 2304
            model.layers.<{KDA}>.self_attn.dt_bias 4096
            model.layers.<{KDA}>.self_attn.{{f,g}}_a_proj.weight 128 2304
            model.layers.<{KDA}>.self_attn.{{f,g}}_b_proj.weight 4096 128
            model.layers.<{KDA}>.self_attn.{{q,k,v}}_conv1d.weight 4096 1 4
            model.layers.<{KDA}>.self_attn.{{q,k,v}}_proj.weight 4096 2304
            model.layers.<{KDA}>.self_attn.o_norm.weight 128
            model.layers.<{MLA}>.self_attn.kv_a_layernorm.weight 512
            model.layers.<{MLA}>.self_attn.kv_a_proj_with_mqa.weight 576 2304
            model.layers.<{MLA}>.self_attn.kv_b_proj.weight 8192 512
            model.layers.<{MLA}>.self_attn.q_proj.weight 6144 2304
            model.layers.<1-26>.block_sparse_moe.gate.e_score_correction_bias 256
            model.layers.<1-26>.block_sparse_moe.gate.weight 256 2304
            """ + mlp("model.layers.0.mlp", 9216, 2304)
            + experts("model.layers.<1-26>.block_sparse_moe.experts", 256, 1024, 2304, "w1,w3,w2")
            + mlp("model.layers.<1-26>.block_sparse_moe.shared_experts", 1024, 2304)
        ),
        COMMON | dict(
            model_type="kimi_linear", first_k_dense_replace=1, head_dim=72, hidden_act="silu", hidden_size=2304,
            intermediate_size=9216, kv_lora_rank=512,
            linear_attn_config=dict(
                full_attn_layers=[4, 8, 12, 16, 20, 24, 27], head_dim=128,
                kda_layers=[i for i in range(1, 27) if i % 4], num_heads=32, short_conv_kernel_size=4,
            ),
            mla_use_nope=True, model_max_length=1048576, moe_intermediate_size=1024, moe_layer_freq=1,
            moe_renormalize=True, moe_router_activation_func="sigmoid", num_attention_heads=32, num_expert_group=1,
            num_experts=256, num_experts_per_token=8, num_hidden_layers=27, num_key_value_heads=32,
            num_nextn_predict_layers=0, num_shared_experts=1, pad_token_id=163839, q_lora_rank=None,
            qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0,
            routed_scaling_factor=2.446, tie_word_embeddings=False, topk_group=1, use_grouped_topk=True,
            v_head_dim=128, vocab_size=163840,
        ),
    ),
    "RWKV/rwkv-4-169m-pile": Release(
        169_342_464 + 12 * 5 * 768,  # mixing has a factor of this token and one of the last
        header("""
            rwkv.embeddings.weight 50277 768
            rwkv.blocks.0.pre_ln.{weight,bias} 768
            rwkv.blocks.<0-11>.ln{1,2}.{weight,bias} 768
            rwkv.blocks.<0-11>.attention.time_{decay,first} 768
            rwkv.blocks.<0-11>.attention.time_mix_{key,value,receptance} 1 1 768
            rwkv.blocks.<0-11>.attention.{key,value,receptance,output}.weight 768 768
            rwkv.blocks.<0-11>.feed_forward.time_mix_{key,receptance} 1 1 768
            rwkv.blocks.<0-11>.feed_forward.key.weight 3072 768
            rwkv.blocks.<0-11>.feed_forward.receptance.weight 768 768
            rwkv.blocks.<0-11>.feed_forward.value.weight 768 3072
            rwkv.ln_out.{weight,bias} 768
            head.weight 50277 768
        """),
        COMMON | dict(
            model_type="rwkv", attention_hidden_size=768, context_length=1024, hidden_size=768,
            intermediate_size=3072, layer_norm_epsilon=1e-05, num_hidden_layers=12, rescale_every=6,
            tie_word_embeddings=False, vocab_size=50277,
        ),
    ),
    "Zyphra/Zamba2-1.2B": Release(
        1_215_064_704,
        header("""
            model.embed_tokens.weight 32000 2048
            model.final_layernorm.weight 2048
            model.layers.<mamba>.input_layernorm.weight 2048
            model.layers.<mamba>.mamba.{A_log,D,dt_bias} 64
            model.layers.<mamba>.mamba.conv1d.weight 4352 1 4
            model.layers.<mamba>.mamba.conv1d.bias 4352
            model.layers.<mamba>.mamba.in_proj.weight 8512 2048
            model.layers.<mamba>.mamba.norm.weight 4096
            model.layers.<mamba>.mamba.out_proj.weight 2048 4096
            model.layers.<hybrid>.linear.weight 2048 2048
            model.layers.<hybrid>.mamba_decoder.input_layernorm.weight 2048
            model.layers.<hybrid>.mamba_decoder.mamba.{A_log,D,dt_bias} 64
            model.layers.<hybrid>.mamba_decoder.mamba.conv1d.weight 4352 1 4
            model.layers.<hybrid>.mamba_decoder.mamba.conv1d.bias 4352
            model.layers.<hybrid>.mamba_decoder.mamba.in_proj.weight 8512 2048
            model.layers.<hybrid>.mamba_decoder.mamba.norm.weight 4096
            model.layers.<hybrid>.mamba_decoder.mamba.out_proj.weight 2048 4096
            model.layers.5.shared_transformer.input_layernorm.weight 4096
            model.layers.5.shared_transformer.pre_ff_layernorm.weight 2048
            model.layers.5.shared_transformer.self_attn.{q,k,v}_proj.weight 4096 4096
            model.layers.5.shared_transformer.self_attn.o_proj.weight 2048 4096
            model.layers.5.shared_transformer.self_attn.linear_{q,k,v}_adapter_list.<0-5>.0.weight 128 4096
            model.layers.5.shared_transformer.self_attn.linear_{q,k,v}_adapter_list.<0-5>.1.weight 4096 128
            model.layers.5.shared_transformer.feed_forward.gate_up_proj.weight 16384 2048
            model.layers.5.shared_transformer.feed_forward.gate_up_proj_adapter_list.<0-5>.0.weight 128 2048
            model.layers.5.shared_transformer.feed_forward.gate_up_proj_adapter_list.<0-5>.1.weight 16384 128
            model.layers.5.shared_transformer.feed_forward.down_proj.weight 2048 8192
            """, mamba=[i for i in range(38) if i not in ZAMBA_HYBRID], hybrid=ZAMBA_HYBRID,
        ),
        COMMON | dict(
            model_type="zamba2", add_bias_linear=False, adapter_rank=128, attention_head_dim=128,
            attention_hidden_size=4096, chunk_size=256, ffn_hidden_size=8192, hidden_act="gelu", hidden_size=2048,
            hybrid_layer_ids=ZAMBA_HYBRID, intermediate_size=8192, kv_channels=64,
            layers_block_type=["hybrid" if i in ZAMBA_HYBRID else "mamba" for i in range(38)], mamba_d_conv=4,
            mamba_d_state=128, mamba_expand=2, mamba_headdim=64, mamba_ngroups=1, max_position_embeddings=4096,
            n_mamba_heads=64, num_attention_heads=32, num_hidden_layers=38, num_key_value_heads=32,
            num_logits_to_keep=1, num_mem_blocks=1, num_query_groups=32, pad_token_id=0, rms_norm_eps=1e-05,
            rope_theta=10000, time_step_floor=0.0001, time_step_limit=None, time_step_max=0.1, time_step_min=0.001,
            use_conv_bias=True, use_mamba_kernels=True, use_mem_rope=True, use_shared_attention_adapter=True,
            use_shared_mlp_adapter=True, use_long_context=False, vocab_size=32000,
        ),
    ),
}  # fmt: skip
