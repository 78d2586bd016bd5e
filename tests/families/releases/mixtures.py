"""Releases with mixtures of experts, with latent attention, or with both."""

from __future__ import annotations

from typing import Any

from tests.families.releases import COMMON, Release
from tests.families.releases.header import header


def attention(width: int, q: int, kv: int, n: str, norms: str = "input,post_attention") -> str:
    """Lines of embedding-free attention layers under Llama's names."""
    layer = f"model.layers.<{n}>"
    return f"""
        {layer}.{{{norms}}}_layernorm.weight {width}
        {layer}.self_attn.q_proj.weight {q} {width}
        {layer}.self_attn.{{k,v}}_proj.weight {kv} {width}
        {layer}.self_attn.o_proj.weight {width} {q}
    """


def ends(vocab: int, width: int, tied: bool = False) -> str:
    """Lines of embedding, last norm and head."""
    head = "" if tied else f"lm_head.weight {vocab} {width}"
    return f"""
        model.embed_tokens.weight {vocab} {width}
        model.norm.weight {width}
        {head}
    """


def experts(prefix: str, count: int, inner: int, width: int, parts: str = "gate_proj,up_proj,down_proj") -> str:
    """Lines of experts that are stored one by one."""
    gate, up, down = parts.split(",")
    return f"""
        {prefix}.<0-{count - 1}>.{{{gate},{up}}}.weight {inner} {width}
        {prefix}.<0-{count - 1}>.{down}.weight {width} {inner}
    """


def mlp(prefix: str, inner: int, width: int) -> str:
    return f"""
        {prefix}.{{gate,up}}_proj.weight {inner} {width}
        {prefix}.down_proj.weight {width} {inner}
    """


def latent(width: int, heads: int, n: str, nope: int = 128, value: int = 128, low: int | None = None) -> str:
    """Lines of latent attention whose keys and values have rank 512; `low`: rank of the queries."""
    layer, q = f"model.layers.<{n}>.self_attn", heads * (nope + 64)
    queries = f"{layer}.q_proj.weight {q} {width}"
    if low is not None:
        queries = f"""{layer}.q_a_proj.weight {low} {width}
        {layer}.q_a_layernorm.weight {low}
        {layer}.q_b_proj.weight {q} {low}"""
    return f"""
        model.layers.<{n}>.{{input,post_attention}}_layernorm.weight {width}
        {queries}
        {layer}.kv_a_proj_with_mqa.weight 576 {width}
        {layer}.kv_a_layernorm.weight 512
        {layer}.kv_b_proj.weight {heads * (nope + value)} 512
        {layer}.o_proj.weight {width} {heads * value}
    """


def prediction(layer: int, vocab: int, width: int) -> str:
    """Lines that a layer of multi-token prediction has besides those of a layer."""
    return f"""
        model.layers.{layer}.eh_proj.weight {width} {2 * width}
        model.layers.{layer}.embed_tokens.weight {vocab} {width}
        model.layers.{layer}.{{enorm,hnorm,shared_head.norm}}.weight {width}
        model.layers.{layer}.shared_head.head.weight {vocab} {width}
    """


DEEPSEEK: dict[str, Any] = dict(
    attention_bias=False, aux_loss_alpha=0.001, first_k_dense_replace=3, hidden_act="silu", hidden_size=7168,
    intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=163840, moe_intermediate_size=2048,
    moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
    num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128,
    num_nextn_predict_layers=1, pretraining_tp=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
    rms_norm_eps=1e-06, rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True,
    tie_word_embeddings=False, topk_group=4, topk_method="noaux_tc", v_head_dim=128, vocab_size=129280, ep_size=1,
    rope_scaling=dict(
        beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096,
        type="yarn",
    ),
)  # fmt: skip

RELEASES: dict[str, Release] = {
    "mistralai/Mixtral-8x7B-v0.1": Release(
        46_702_792_704,
        header(
            ends(32000, 4096) + attention(4096, 4096, 1024, "0-31")
            + "model.layers.<0-31>.block_sparse_moe.gate.weight 8 4096"
            + experts("model.layers.<0-31>.block_sparse_moe.experts", 8, 14336, 4096, "w1,w3,w2")
        ),
        COMMON | dict(
            model_type="mixtral", hidden_act="silu", hidden_size=4096, intermediate_size=14336,
            max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
            num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-05,
            rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
            vocab_size=32000,
        ),
    ),
    "microsoft/Phi-3.5-MoE-instruct": Release(
        41_873_153_344,
        header(
            ends(32064, 4096) + attention(4096, 4096, 1024, "0-31") + """
            model.norm.bias 4096
            lm_head.bias 32064
            model.layers.<0-31>.{input,post_attention}_layernorm.bias 4096
            model.layers.<0-31>.self_attn.{q,o}_proj.bias 4096
            model.layers.<0-31>.self_attn.{k,v}_proj.bias 1024
            model.layers.<0-31>.block_sparse_moe.gate.weight 16 4096
            """ + experts("model.layers.<0-31>.block_sparse_moe.experts", 16, 6400, 4096, "w1,w3,w2")
        ),
        COMMON | dict(
            model_type="phimoe", attention_bias=True, auto_map={"AutoConfig": "configuration_phimoe.PhiMoEConfig"},
            hidden_act="silu", hidden_dropout=0.0, hidden_size=4096, input_jitter_noise=0.01, intermediate_size=6400,
            lm_head_bias=True, max_position_embeddings=131072, num_attention_heads=32, num_experts_per_tok=2,
            num_hidden_layers=32, num_key_value_heads=8, num_local_experts=16,
            original_max_position_embeddings=4096, output_router_logits=False, rms_norm_eps=1e-05,
            rope_scaling=dict(
                long_factor=[2.0] * 64, long_mscale=1.243163121016122, original_max_position_embeddings=4096,
                short_factor=[1.0] * 64, short_mscale=1.243163121016122, type="longrope",
            ),
            rope_theta=10000.0, router_aux_loss_coef=0.0, router_jitter_noise=0.01, sliding_window=131072,
            tie_word_embeddings=False, vocab_size=32064,
        ),
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": Release(
        14_315_784_192,
        header(
            ends(151936, 2048) + attention(2048, 2048, 2048, "0-23") + """
            model.layers.<0-23>.self_attn.{q,k,v}_proj.bias 2048
            model.layers.<0-23>.mlp.gate.weight 60 2048
            model.layers.<0-23>.mlp.shared_expert_gate.weight 1 2048
            """ + experts("model.layers.<0-23>.mlp.experts", 60, 1408, 2048)
            + mlp("model.layers.<0-23>.mlp.shared_expert", 5632, 2048)
        ),
        COMMON | dict(
            model_type="qwen2_moe", decoder_sparse_step=1, hidden_act="silu", hidden_size=2048,
            intermediate_size=5632, max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408,
            norm_topk_prob=False, num_attention_heads=16, num_experts=60, num_experts_per_tok=4,
            num_hidden_layers=24, num_key_value_heads=16, output_router_logits=False, rms_norm_eps=1e-06,
            rope_theta=1000000.0, router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632,
            sliding_window=32768, tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
        ),
    ),
    "Qwen/Qwen3-30B-A3B": Release(
        30_532_122_624,
        header(
            ends(151936, 2048) + attention(2048, 4096, 512, "0-47") + """
            model.layers.<0-47>.self_attn.{q,k}_norm.weight 128
            model.layers.<0-47>.mlp.gate.weight 128 2048
            """ + experts("model.layers.<0-47>.mlp.experts", 128, 768, 2048)
        ),
        COMMON | dict(
            model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1, head_dim=128, hidden_act="silu",
            hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960, max_window_layers=48,
            mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32,
            num_experts=128, num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4,
            output_router_logits=False, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000.0,
            router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
            vocab_size=151936,
        ),
    ),
    "allenai/OLMoE-1B-7B-0924": Release(
        6_919_161_856,
        header(
            ends(50304, 2048) + attention(2048, 2048, 2048, "0-15") + """
            model.layers.<0-15>.self_attn.{q,k}_norm.weight 2048
            model.layers.<0-15>.mlp.gate.weight 64 2048
            """ + experts("model.layers.<0-15>.mlp.experts", 64, 1024, 2048)
        ),
        COMMON | dict(
            model_type="olmoe", attention_bias=False, clip_qkv=None, hidden_act="silu", hidden_size=2048,
            intermediate_size=1024, max_position_embeddings=4096, norm_topk_prob=False, num_attention_heads=16,
            num_experts=64, num_experts_per_tok=8, num_hidden_layers=16, num_key_value_heads=16,
            output_router_logits=False, pad_token_id=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0,
            router_aux_loss_coef=0.01, tie_word_embeddings=False, vocab_size=50304,
        ),
    ),
    "ibm-granite/granite-3.1-1b-a400m-instruct": Release(
        1_334_628_352,
        header(
            ends(49155, 1024, tied=True) + attention(1024, 1024, 512, "0-23") + """
            model.layers.<0-23>.block_sparse_moe.input_linear.weight 32 1024 1024
            model.layers.<0-23>.block_sparse_moe.output_linear.weight 32 1024 512
            model.layers.<0-23>.block_sparse_moe.router.layer.weight 32 1024
            """
        ),
        COMMON | dict(
            model_type="granitemoe", attention_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0,
            hidden_act="silu", hidden_size=1024, intermediate_size=512, logits_scaling=6.0,
            max_position_embeddings=131072, num_attention_heads=16, num_experts_per_tok=8, num_hidden_layers=24,
            num_key_value_heads=8, num_local_experts=32, output_router_logits=False, pad_token_id=0,
            residual_multiplier=0.22, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1500000.0,
            router_aux_loss_coef=0.0, tie_word_embeddings=True, vocab_size=49155,
        ),
    ),
    "openai/gpt-oss-20b": Release(
        20_914_757_184,
        header(
            ends(201088, 2880) + attention(2880, 4096, 512, "0-23") + """
            model.layers.<0-23>.self_attn.q_proj.bias 4096
            model.layers.<0-23>.self_attn.{k,v}_proj.bias 512
            model.layers.<0-23>.self_attn.o_proj.bias 2880
            model.layers.<0-23>.self_attn.sinks 64
            model.layers.<0-23>.mlp.router.weight 32 2880
            model.layers.<0-23>.mlp.router.bias 32
            model.layers.<0-23>.mlp.experts.down_proj_bias 32 2880
            model.layers.<0-23>.mlp.experts.down_proj_blocks 32 2880 90 16
            model.layers.<0-23>.mlp.experts.down_proj_scales 32 2880 90
            model.layers.<0-23>.mlp.experts.gate_up_proj_bias 32 5760
            model.layers.<0-23>.mlp.experts.gate_up_proj_blocks 32 5760 90 16
            model.layers.<0-23>.mlp.experts.gate_up_proj_scales 32 5760 90
            """
        ),
        COMMON | dict(
            model_type="gpt_oss", attention_bias=True, experts_per_token=4, head_dim=64, hidden_act="silu",
            hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
            layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072,
            num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8,
            num_local_experts=32, output_router_logits=False, pad_token_id=199999,
            quantization_config=dict(
                modules_to_not_convert=[
                    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
                ],
                quant_method="mxfp4",
            ),
            rms_norm_eps=1e-05,
            rope_scaling=dict(
                beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
                truncate=False,
            ),
            rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
            tie_word_embeddings=False, vocab_size=201088,
        ),
    ),
    "deepseek-ai/DeepSeek-V2-Lite": Release(
        15_706_484_224,
        header(
            ends(102400, 2048) + latent(2048, 16, "0-26") + mlp("model.layers.0.mlp", 10944, 2048)
            + "model.layers.<1-26>.mlp.gate.weight 64 2048"
            + experts("model.layers.<1-26>.mlp.experts", 64, 1408, 2048)
            + mlp("model.layers.<1-26>.mlp.shared_experts", 2816, 2048)
        ),
        COMMON | dict(
            model_type="deepseek_v2", attention_bias=False,
            auto_map={"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, aux_loss_alpha=0.001,
            first_k_dense_replace=1, hidden_act="silu", hidden_size=2048, intermediate_size=10944, kv_lora_rank=512,
            max_position_embeddings=163840, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1,
            n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False, num_attention_heads=16,
            num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16, pretraining_tp=1, q_lora_rank=None,
            qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06,
            rope_scaling=dict(
                beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707,
                original_max_position_embeddings=4096, type="yarn",
            ),
            rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True,
            tie_word_embeddings=False, topk_group=1, topk_method="greedy", v_head_dim=128, vocab_size=102400,
        ),
    ),
    "unsloth/DeepSeek-V3-bf16": Release(
        671_026_419_200,
        header(
            ends(129280, 7168) + latent(7168, 128, "0-61", low=1536) + mlp("model.layers.<0-2>.mlp", 18432, 7168) + """
            model.layers.<3-61>.mlp.gate.weight 256 7168
            model.layers.<3-61>.mlp.gate.e_score_correction_bias 256
            """ + experts("model.layers.<3-61>.mlp.experts", 256, 2048, 7168)
            + mlp("model.layers.<3-61>.mlp.shared_experts", 2048, 7168) + prediction(61, 129280, 7168)
        ),
        COMMON | DEEPSEEK | dict(model_type="deepseek_v3"),
    ),
    "zai-org/GLM-4.7-Flash": Release(
        29_943_393_920,  # 31.2 billion with the layer of multi-token prediction
        header(
            ends(154880, 2048) + latent(2048, 20, "0-47", nope=192, value=256, low=768)
            + mlp("model.layers.0.mlp", 10240, 2048) + """
            model.layers.<1-47>.mlp.gate.weight 64 2048
            model.layers.<1-47>.mlp.gate.e_score_correction_bias 64
            """ + experts("model.layers.<1-47>.mlp.experts", 64, 1536, 2048)
            + mlp("model.layers.<1-47>.mlp.shared_experts", 1536, 2048) + prediction(47, 154880, 2048)
        ),
        COMMON | dict(
            model_type="glm4_moe_lite", attention_bias=False, eos_token_id=[154820, 154827], hidden_act="silu",
            hidden_size=2048, intermediate_size=10240, max_position_embeddings=202752, moe_intermediate_size=1536,
            topk_method="noaux_tc", norm_topk_prob=True, num_attention_heads=20, n_group=1, topk_group=1,
            n_routed_experts=64, n_shared_experts=1, routed_scaling_factor=1.8, num_experts_per_tok=4,
            first_k_dense_replace=1, num_hidden_layers=47, num_key_value_heads=20, num_nextn_predict_layers=1,
            partial_rotary_factor=1.0, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000,
            tie_word_embeddings=False, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
            v_head_dim=256, vocab_size=154880,
        ),
    ),
    "zai-org/GLM-4.5-Air": Release(
        106_852_251_264,  # 110.5 billion with the layer of multi-token prediction
        header(
            ends(151552, 4096) + attention(4096, 12288, 1024, "0-46") + """
            model.layers.<0-46>.self_attn.q_proj.bias 12288
            model.layers.<0-46>.self_attn.{k,v}_proj.bias 1024
            """ + mlp("model.layers.0.mlp", 10944, 4096) + """
            model.layers.<1-46>.mlp.gate.weight 128 4096
            model.layers.<1-46>.mlp.gate.e_score_correction_bias 128
            """ + experts("model.layers.<1-46>.mlp.experts", 128, 1408, 4096)
            + mlp("model.layers.<1-46>.mlp.shared_experts", 1408, 4096) + prediction(46, 151552, 4096)
        ),
        COMMON | dict(
            model_type="glm4_moe", attention_bias=True, eos_token_id=[151329, 151336], first_k_dense_replace=1,
            head_dim=128, hidden_act="silu", hidden_size=4096, intermediate_size=10944,
            max_position_embeddings=131072, moe_intermediate_size=1408, n_group=1, n_routed_experts=128,
            n_shared_experts=1, norm_topk_prob=True, num_attention_heads=96, num_experts_per_tok=8,
            num_hidden_layers=46, num_key_value_heads=8, num_nextn_predict_layers=1, pad_token_id=151329,
            partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000,
            routed_scaling_factor=1.0, tie_word_embeddings=False, topk_group=1, use_qk_norm=False, vocab_size=151552,
        ),
    ),
    "MiniMaxAI/MiniMax-M2 in bfloat16": Release(
        228_689_764_864,
        header(
            ends(200064, 3072) + attention(3072, 6144, 1024, "0-61") + """
            model.layers.<0-61>.self_attn.q_norm.weight 6144
            model.layers.<0-61>.self_attn.k_norm.weight 1024
            model.layers.<0-61>.block_sparse_moe.gate.weight 256 3072
            model.layers.<0-61>.block_sparse_moe.e_score_correction_bias 256
            """ + experts("model.layers.<0-61>.block_sparse_moe.experts", 256, 1536, 3072, "w1,w3,w2")
        ),
        COMMON | dict(
            model_type="minimax_m2", attn_type_list=[1] * 62, head_dim=128, hidden_act="silu", hidden_size=3072,
            intermediate_size=1536, max_position_embeddings=204800, mtp_transformer_layers=1, num_attention_heads=48,
            num_experts_per_tok=8, num_hidden_layers=62, num_key_value_heads=8, num_local_experts=256,
            num_mtp_modules=3, qk_norm_type="per_layer", rms_norm_eps=1e-06, rope_theta=5000000, rotary_dim=64,
            scoring_func="sigmoid", shared_intermediate_size=0, tie_word_embeddings=False, use_mtp=True,
            use_qk_norm=True, use_routing_bias=True, vocab_size=200064,
        ),
    ),
    "tencent/Hunyuan-A13B-Instruct": Release(
        80_393_183_232,
        header(
            ends(128167, 4096, tied=True) + attention(4096, 4096, 1024, "0-31") + """
            model.layers.<0-31>.self_attn.{query,key}_layernorm.weight 128
            model.layers.<0-31>.mlp.gate.wg.weight 64 4096
            """ + experts("model.layers.<0-31>.mlp.experts", 64, 3072, 4096)
            + mlp("model.layers.<0-31>.mlp.shared_mlp", 3072, 4096)
        ),
        COMMON | dict(
            model_type="hunyuan_v1_moe", add_classification_head=False, anyres_pooling_size=2,
            anyres_vit_max_image_size=None, anyres_vit_two_views=False, attention_bias=False, attention_head_dim=128,
            capacity_factor=1.0, cla_share_factor=2, class_num=0, dense_list=[4096, 0], eod_token_id=127967,
            group_limited_greedy=False, head_dim=128, hidden_act="silu", hidden_size=4096, im_end_id=6,
            im_newline_id=12, im_start_id=5, image_token_id=127962, intermediate_size=3072, kv_lora_rank=None,
            mask_init_id=13, max_position_embeddings=32768, mlp_bias=False, moe_drop_tokens=False,
            moe_intermediate_size=[3072] * 32, moe_layer_num_skipped=0, moe_random_routing_dropped_token=False,
            moe_topk=[8] * 32, n_group=False, norm_topk_prob=True, norm_type="rms", num_attention_heads=32,
            num_experts=64, num_hidden_layers=32, num_key_value_heads=8, num_media_embeds=257,
            num_shared_expert=[1] * 32, org_vocab_size=128167, pad_id=127961, pad_token_id=127961, pool_type="last",
            position_embedding_xdrope=False, pretraining_tp=1, q_lora_rank=None, qk_nope_head_dim=None,
            qk_rope_head_dim=None, rms_norm_eps=1e-05,
            rope_scaling=dict(
                alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=0.0, type="dynamic"
            ),
            rope_theta=10000.0, routed_scaling_factor=False, skip_cls_token=False, text_end_id=8, text_start_id=7,
            tie_word_embeddings=True, topk_group=False, use_cla=False, use_mixed_mlp_moe=True, use_mla=False,
            use_qk_norm=True, use_rotary_pos_emb=True, v_head_dim=None, vocab_size=128167,
        ),
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": Release(
        21_825_437_888,
        header(
            ends(103424, 2560, tied=True) + attention(2560, 2560, 512, "0-27") + mlp("model.layers.0.mlp", 12288, 2560)
            + """
            model.layers.<1-27>.mlp.gate.weight 64 2560
            model.layers.<1-27>.mlp.moe_statics.e_score_correction_bias 1 64
            """ + experts("model.layers.<1-27>.mlp.experts", 64, 1536, 2560)
            + mlp("model.layers.<1-27>.mlp.shared_experts", 3072, 2560)
        ),
        COMMON | dict(
            model_type="ernie4_5_moe", hidden_act="silu", hidden_size=2560, intermediate_size=12288,
            max_position_embeddings=131072, moe_capacity=[64, 64, 64], moe_gate="topk", moe_intermediate_size=1536,
            moe_k=6, moe_layer_end_index=27, moe_layer_interval=1, moe_layer_start_index=1, moe_num_experts=64,
            moe_num_shared_experts=2, moe_use_aux_free=True, num_attention_heads=20, num_hidden_layers=28,
            num_key_value_heads=4, num_nextn_predict_layers=1, pad_token_id=0, rms_norm_eps=1e-05, rope_scaling=None,
            rope_theta=500000.0, tie_word_embeddings=True, use_bias=False, vocab_size=103424,
        ),
    ),
}  # fmt: skip
