"""Further releases: multimodal ones, and families of which one release is known."""

from __future__ import annotations

from tests.families.releases import COMMON, Release
from tests.families.releases.dense import LLAMA3, llama_header, without
from tests.families.releases.encoder_decoder import BART, BERT_HEADER, T5, bart_layers
from tests.families.releases.header import header
from tests.families.releases.mixtures import DEEPSEEK, attention, ends, experts, latent, mlp, prediction

TEXT = "model.language_model"
FULL = [i for i in range(60) if i % 6 == 5]
SLIDING = [i for i in range(60) if i % 6 != 5]


def indexer(n: str, width: int, heads: int, low: int) -> str:
    """Lines of the indexer that chooses which tokens are attended to."""
    layer = f"model.layers.<{n}>.self_attn.indexer"
    return f"""
        {layer}.k_norm.{{weight,bias}} 128
        {layer}.weights_proj.weight {heads} {width}
        {layer}.wk.weight 128 {width}
        {layer}.wq_b.weight {heads * 128} {low}
    """


RELEASES: dict[str, Release] = {
    "google/gemma-3n-E2B-it": Release(
        4.46e9,
        header(f"""
            {TEXT}.embed_tokens.weight 262400 2048
            {TEXT}.embed_tokens_per_layer.weight 262144 7680
            {TEXT}.altup_projections.<0-2>.weight 2048 2048
            {TEXT}.altup_unembed_projections.<0-2>.weight 2048 2048
            {TEXT}.per_layer_model_projection.weight 7680 2048
            {TEXT}.per_layer_projection_norm.weight 256
            {TEXT}.norm.weight 2048
            {TEXT}.layers.<0-29>.altup.correct_output_scale 2048
            {TEXT}.layers.<0-29>.altup.correction_coefs.weight 4 4
            {TEXT}.layers.<0-29>.altup.modality_router.weight 4 2048
            {TEXT}.layers.<0-29>.altup.prediction_coefs.weight 16 4
            {TEXT}.layers.<0-29>.altup.router_norm.weight 2048
            {TEXT}.layers.<0-29>.laurel.linear_left.weight 64 2048
            {TEXT}.layers.<0-29>.laurel.linear_right.weight 2048 64
            {TEXT}.layers.<0-29>.laurel.post_laurel_norm.weight 2048
            {TEXT}.layers.<0-29>.{{input,post_attention,pre_feedforward,post_feedforward}}_layernorm.weight 2048
            {TEXT}.layers.<0-29>.per_layer_input_gate.weight 256 2048
            {TEXT}.layers.<0-29>.per_layer_projection.weight 2048 256
            {TEXT}.layers.<0-29>.post_per_layer_input_norm.weight 2048
            {TEXT}.layers.<0-29>.self_attn.{{q,o}}_proj.weight 2048 2048
            {TEXT}.layers.<0-29>.self_attn.{{k,v}}_proj.weight 512 2048
            {TEXT}.layers.<0-29>.self_attn.{{q,k}}_norm.weight 256
            model.audio_tower.conformer.<0-11>.norm.weight 1536
            model.embed_vision.embedding.weight 128 2048
            model.vision_tower.timm_model.conv_stem.conv.weight 64 3 3 3
        """ + mlp(f"{TEXT}.layers.<0-29>.mlp", 8192, 2048)),
        dict(
            architectures=["Gemma3nForConditionalGeneration"], audio_config=dict(model_type="gemma3n_audio"),
            audio_soft_tokens_per_image=188, boa_token_id=256000, model_type="gemma3n", torch_dtype="bfloat16",
            vision_config=dict(model_type="gemma3n_vision"), vision_soft_tokens_per_image=256,
            text_config=dict(
                activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20, altup_active_idx=0, altup_coef_clip=120.0,
                altup_correct_scale=True, altup_lr_multiplier=1.0, altup_num_inputs=4, attention_bias=False,
                attention_dropout=0.0, final_logit_softcapping=30.0, head_dim=256,
                hidden_activation="gelu_pytorch_tanh", hidden_size=2048, hidden_size_per_layer_input=256,
                initializer_range=0.02, intermediate_size=[8192] * 30, laurel_rank=64,
                layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 6, max_position_embeddings=32768,
                model_type="gemma3n_text", num_attention_heads=8, num_hidden_layers=30, num_key_value_heads=2,
                num_kv_shared_layers=10, rms_norm_eps=1e-06, rope_local_base_freq=10000.0, rope_scaling=None,
                rope_theta=1000000.0, sliding_window=512, torch_dtype="bfloat16", use_cache=True, vocab_size=262400,
                vocab_size_per_layer_input=262144,
            ),
        ),
    ),
    "google/gemma-4-31B-it": Release(
        30.7e9,
        header(f"""
            {TEXT}.embed_tokens.weight 262144 5376
            {TEXT}.norm.weight 5376
            {TEXT}.layers.<n>.{{input,post_attention,pre_feedforward,post_feedforward}}_layernorm.weight 5376
            {TEXT}.layers.<n>.layer_scalar 1
            {TEXT}.layers.<sliding>.self_attn.q_proj.weight 8192 5376
            {TEXT}.layers.<sliding>.self_attn.{{k,v}}_proj.weight 4096 5376
            {TEXT}.layers.<sliding>.self_attn.o_proj.weight 5376 8192
            {TEXT}.layers.<sliding>.self_attn.{{q,k}}_norm.weight 256
            {TEXT}.layers.<full>.self_attn.q_proj.weight 16384 5376
            {TEXT}.layers.<full>.self_attn.k_proj.weight 2048 5376
            {TEXT}.layers.<full>.self_attn.o_proj.weight 5376 16384
            {TEXT}.layers.<full>.self_attn.{{q,k}}_norm.weight 512
            model.vision_tower.patch_embedder.input_proj.weight 1152 768
            model.vision_tower.std_bias 1152
            model.embed_vision.embedding_projection.weight 5376 1152
        """ + mlp(f"{TEXT}.layers.<n>.mlp", 21504, 5376), n=60, full=FULL, sliding=SLIDING),
        dict(
            architectures=["Gemma4ForConditionalGeneration"], audio_config=None, dtype="bfloat16", model_type="gemma4",
            tie_word_embeddings=True, vision_config=dict(model_type="gemma4_vision"),
            text_config=dict(
                attention_bias=False, attention_dropout=0.0, attention_k_eq_v=True, bos_token_id=2, dtype="bfloat16",
                enable_moe_block=False, eos_token_id=1, expert_intermediate_size=None, final_logit_softcapping=30.0,
                global_head_dim=512, head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=5376,
                hidden_size_per_layer_input=0, initializer_range=0.02, intermediate_size=21504,
                layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10, max_position_embeddings=262144,
                model_type="gemma4_text", moe_intermediate_size=None, num_attention_heads=32, num_experts=None,
                num_global_key_value_heads=4, num_hidden_layers=60, num_key_value_heads=16, num_kv_shared_layers=0,
                pad_token_id=0, rms_norm_eps=1e-06,
                rope_parameters=dict(
                    full_attention=dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional"),
                    sliding_attention=dict(rope_theta=10000.0, rope_type="default"),
                ),
                sliding_window=1024, tie_word_embeddings=True, top_k_experts=None,
                use_bidirectional_attention="vision", use_cache=True, use_double_wide_mlp=False, vocab_size=262144,
                vocab_size_per_layer_input=262144,
            ),
        ),
    ),
    "meta-llama/Llama-4-Scout-17B-16E": Release(
        107.8e9,
        header("""
            language_model.model.embed_tokens.weight 202048 5120
            language_model.model.norm.weight 5120
            language_model.lm_head.weight 202048 5120
            language_model.model.layers.<0-47>.{input,post_attention}_layernorm.weight 5120
            language_model.model.layers.<0-47>.self_attn.{q,o}_proj.weight 5120 5120
            language_model.model.layers.<0-47>.self_attn.{k,v}_proj.weight 1024 5120
            language_model.model.layers.<0-47>.feed_forward.experts.gate_up_proj 16 5120 16384
            language_model.model.layers.<0-47>.feed_forward.experts.down_proj 16 8192 5120
            language_model.model.layers.<0-47>.feed_forward.router.weight 16 5120
            multi_modal_projector.linear_1.weight 5120 4096
            vision_model.class_embedding 1408
        """ + mlp("language_model.model.layers.<0-47>.feed_forward.shared_expert", 8192, 5120)),
        dict(
            architectures=["Llama4ForConditionalGeneration"], boi_token_index=200080, eoi_token_index=200081,
            image_token_index=200092, model_type="llama4", torch_dtype="bfloat16",
            vision_config=dict(model_type="llama4_vision_model"),
            text_config=dict(
                _attn_implementation_autoset=True, attention_bias=False, attention_chunk_size=8192,
                attention_dropout=0.0, attn_scale=0.1, attn_temperature_tuning=True, bos_token_id=200000,
                eos_token_id=[200001, 200007], floor_scale=8192, for_llm_compressor=False, head_dim=128,
                hidden_act="silu", hidden_size=5120, initializer_range=0.02, interleave_moe_layer_step=1,
                intermediate_size=8192, intermediate_size_mlp=16384, max_position_embeddings=10485760,
                model_type="llama4_text", moe_layers=list(range(48)), no_rope_layers=[1, 1, 1, 0] * 12,
                num_attention_heads=40, num_experts_per_tok=1, num_hidden_layers=48, num_key_value_heads=8,
                num_local_experts=16, output_router_logits=False, pad_token_id=200018, rms_norm_eps=1e-05,
                rope_scaling=dict(
                    factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
                    rope_type="llama3",
                ),
                rope_theta=500000.0, router_aux_loss_coef=0.001, router_jitter_noise=0.0, torch_dtype="bfloat16",
                use_cache=True, use_qk_norm=True, vocab_size=202048,
            ),
        ),
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": Release(
        23_572_403_200,
        {
            f"language_model.{name}": shape
            for name, shape in llama_header(131072, 5120, 32768, 40, 4096, 1024).items()
        } | header("""
            multi_modal_projector.linear_1.weight 5120 1024
            vision_tower.ln_pre.weight 1024
        """),
        dict(
            architectures=["Mistral3ForConditionalGeneration"], image_token_index=10, model_type="mistral3",
            multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2, torch_dtype="bfloat16",
            vision_feature_layer=-1, vision_config=dict(model_type="pixtral"),
            text_config=dict(
                attention_dropout=0.0, head_dim=128, hidden_act="silu", hidden_size=5120, initializer_range=0.02,
                intermediate_size=32768, max_position_embeddings=131072, model_type="mistral", num_attention_heads=32,
                num_hidden_layers=40, num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=1000000000.0,
                sliding_window=None, use_cache=True, vocab_size=131072,
            ),
        ),
    ),
    "arcee-ai/AFM-4.5B": Release(
        4.62e9,
        without(llama_header(128004, 2560, 18432, 36, 2560, 512), "gate_proj"),
        COMMON | dict(
            model_type="arcee", attention_bias=False, head_dim=128, hidden_act="relu2", hidden_size=2560,
            intermediate_size=18432, max_position_embeddings=65536, mlp_bias=False, num_attention_heads=20,
            num_hidden_layers=36, num_key_value_heads=4, rms_norm_eps=1e-05,
            rope_scaling=dict(
                beta_fast=32.0, beta_slow=1.0, factor=20.0, mscale=1.0, original_max_position_embeddings=4096,
                rope_type="yarn", type="yarn",
            ),
            rope_theta=10000.0, tie_word_embeddings=False, vocab_size=128004,
        ),
    ),
    "ByteDance-Seed/Seed-OSS-36B-Base": Release(
        36_151_104_512,
        llama_header(
            155136, 5120, 27648, 64, 10240, 1024,
            "model.layers.<n>.self_attn.q_proj.bias 10240\nmodel.layers.<n>.self_attn.{k,v}_proj.bias 1024",
        ),
        COMMON | dict(
            model_type="seed_oss", attention_bias=True, attention_dropout=0.1, attention_out_bias=False, head_dim=128,
            hidden_act="silu", hidden_size=5120, intermediate_size=27648, max_position_embeddings=524288,
            mlp_bias=False, num_attention_heads=80, num_hidden_layers=64, num_key_value_heads=8, pad_token_id=1,
            pretraining_tp=1, residual_dropout=0.1, rms_norm_eps=1e-06, rope_scaling=dict(rope_type="default"),
            rope_theta=10000000.0, tie_word_embeddings=False, vocab_size=155136,
        ),
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": Release(
        1_279_391_488,
        without(
            llama_header(
                102400, 2048, 4096, 30, 2048, 512,
                "model.layers.<n>.post_feedforward_layernorm.weight 2048\n"
                "model.layers.<n>.self_attn.{q,k}_norm.weight 64", tied=True,
            ),
            "input_layernorm",
        ),
        COMMON | dict(
            model_type="exaone4", head_dim=64, hidden_act="silu", hidden_size=2048, intermediate_size=4096,
            layer_types=["full_attention"] * 30, max_position_embeddings=65536, num_attention_heads=32,
            num_hidden_layers=30, num_key_value_heads=8, pad_token_id=0, rms_norm_eps=1e-05,
            rope_scaling=LLAMA3 | dict(rope_type="llama3", factor=16.0), rope_theta=1000000, sliding_window=None,
            sliding_window_pattern=None, tie_word_embeddings=True, vocab_size=102400,
        ),
    ),
    "baidu/ERNIE-4.5-0.3B-PT": Release(
        360_748_032,
        llama_header(103424, 1024, 3072, 18, 2048, 256, tied=True),
        COMMON | dict(
            model_type="ernie4_5", head_dim=128, hidden_act="silu", hidden_size=1024, intermediate_size=3072,
            max_position_embeddings=131072, num_attention_heads=16, num_hidden_layers=18, num_key_value_heads=2,
            pad_token_id=0, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=500000, tie_word_embeddings=True,
            use_bias=False, vocab_size=103424,
        ),
    ),
    "rednote-hilab/dots.llm1.base": Release(
        142_774_381_696,
        header(
            ends(152064, 4096) + attention(4096, 4096, 4096, "0-61") + """
            model.layers.<0-61>.self_attn.{q,k}_norm.weight 128
            model.layers.<1-61>.mlp.gate.weight 128 4096
            model.layers.<1-61>.mlp.gate.e_score_correction_bias 128
            """ + mlp("model.layers.0.mlp", 10944, 4096)
            + experts("model.layers.<1-61>.mlp.experts", 128, 1408, 4096)
            + mlp("model.layers.<1-61>.mlp.shared_experts", 2816, 4096)
        ),
        COMMON | dict(
            model_type="dots1", attention_bias=False, first_k_dense_replace=1, hidden_act="silu", hidden_size=4096,
            intermediate_size=10944, max_position_embeddings=32768, max_window_layers=62, moe_intermediate_size=1408,
            moe_layer_freq=1, n_group=1, n_routed_experts=128, n_shared_experts=2, norm_topk_prob=True,
            num_attention_heads=32, num_experts_per_tok=6, num_hidden_layers=62, num_key_value_heads=32,
            pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000000,
            routed_scaling_factor=2.5, scoring_func="noaux_tc", sliding_window=None, tie_word_embeddings=False,
            topk_group=1, use_sliding_window=False, vocab_size=152064,
        ),
    ),
    "zai-org/GLM-5.1": Release(
        743.9e9,
        header(
            ends(154880, 6144) + latent(6144, 64, "0-78", nope=192, value=256, low=2048)
            + indexer("0-78", 6144, 32, 2048) + mlp("model.layers.<0-2>.mlp", 12288, 6144) + """
            model.layers.<3-78>.mlp.gate.weight 256 6144
            model.layers.<3-78>.mlp.gate.e_score_correction_bias 256
            """ + experts("model.layers.<3-78>.mlp.experts", 256, 2048, 6144)
            + mlp("model.layers.<3-78>.mlp.shared_experts", 2048, 6144) + prediction(78, 154880, 6144)
        ),
        COMMON | dict(
            model_type="glm_moe_dsa", attention_bias=False, ep_size=1, first_k_dense_replace=3, hidden_act="silu",
            hidden_size=6144, index_head_dim=128, index_n_heads=32, index_topk=2048, indexer_rope_interleave=True,
            intermediate_size=12288, kv_lora_rank=512, max_position_embeddings=202752, moe_intermediate_size=2048,
            moe_layer_freq=1, n_group=1, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
            num_attention_heads=64, num_experts_per_tok=8, num_hidden_layers=78, num_key_value_heads=64,
            num_nextn_predict_layers=1, pretraining_tp=1, q_lora_rank=2048, qk_head_dim=256, qk_nope_head_dim=192,
            qk_rope_head_dim=64, rms_norm_eps=1e-05, rope_interleave=True,
            rope_parameters=dict(rope_theta=1000000, rope_type="default"), routed_scaling_factor=2.5,
            scoring_func="sigmoid", tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc", v_head_dim=256,
            vocab_size=154880,
        ),
    ),
    "deepseek-ai/DeepSeek-V3.2 in bfloat16": Release(
        671.9e9,
        header(
            ends(129280, 7168) + latent(7168, 128, "0-61", low=1536) + indexer("0-61", 7168, 64, 1536)
            + mlp("model.layers.<0-2>.mlp", 18432, 7168) + """
            model.layers.<3-61>.mlp.gate.weight 256 7168
            model.layers.<3-61>.mlp.gate.e_score_correction_bias 256
            """ + experts("model.layers.<3-61>.mlp.experts", 256, 2048, 7168)
            + mlp("model.layers.<3-61>.mlp.shared_experts", 2048, 7168) + prediction(61, 129280, 7168)
        ),
        COMMON | DEEPSEEK | dict(
            model_type="deepseek_v32", index_head_dim=128, index_n_heads=64, index_topk=2048
        ),
    ),
    "meituan-longcat/LongCat-Flash-Chat": Release(
        561.86e9,
        header(
            ends(131072, 6144) + """
            model.layers.<0-27>.{input,post_attention}_layernorm.<0-1>.weight 6144
            model.layers.<0-27>.self_attn.<0-1>.q_a_proj.weight 1536 6144
            model.layers.<0-27>.self_attn.<0-1>.q_a_layernorm.weight 1536
            model.layers.<0-27>.self_attn.<0-1>.q_b_proj.weight 12288 1536
            model.layers.<0-27>.self_attn.<0-1>.kv_a_proj_with_mqa.weight 576 6144
            model.layers.<0-27>.self_attn.<0-1>.kv_a_layernorm.weight 512
            model.layers.<0-27>.self_attn.<0-1>.kv_b_proj.weight 16384 512
            model.layers.<0-27>.self_attn.<0-1>.o_proj.weight 6144 8192
            model.layers.<0-27>.mlp.router.classifier.weight 768 6144
            model.layers.<0-27>.mlp.router.e_score_correction_bias 768
            model.mtp.layers.0.eh_proj.weight 6144 12288
            """ + mlp("model.layers.<0-27>.mlps.<0-1>", 12288, 6144)
            + experts("model.layers.<0-27>.mlp.experts", 512, 2048, 6144)
        ),
        COMMON | dict(
            model_type="longcat_flash", attention_bias=False, attention_method="MLA",
            auto_map={"AutoConfig": "configuration_longcat_flash.LongcatFlashConfig"}, expert_ffn_hidden_size=2048,
            ffn_hidden_size=12288, hidden_size=6144, kv_lora_rank=512, max_position_embeddings=131072,
            mla_scale_kv_lora=True, mla_scale_q_lora=True, moe_topk=12, n_routed_experts=512, num_attention_heads=64,
            num_layers=28, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-05,
            rope_theta=10000000.0, routed_scaling_factor=6.0, router_bias=False, v_head_dim=128, vocab_size=131072,
            zero_expert_num=256, zero_expert_type="identity",
        ),
    ),
    "google/switch-base-8": Release(
        619.3e6,
        header("""
            shared.weight 32128 768
            {encoder,decoder}.embed_tokens.weight 32128 768
            lm_head.weight 32128 768
            {encoder,decoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32 12
            {encoder,decoder}.block.<0-11>.layer.0.SelfAttention.{q,k,v,o}.weight 768 768
            {encoder,decoder}.block.<0-11>.layer.<0-1>.layer_norm.weight 768
            decoder.block.<0-11>.layer.1.EncDecAttention.{q,k,v,o}.weight 768 768
            decoder.block.<0-11>.layer.2.layer_norm.weight 768
            encoder.block.<0,2,4,6,8,10>.layer.1.mlp.wi.weight 3072 768
            encoder.block.<0,2,4,6,8,10>.layer.1.mlp.wo.weight 768 3072
            encoder.block.<1,3,5,7,9,11>.layer.1.mlp.router.classifier.weight 8 768
            encoder.block.<1,3,5,7,9,11>.layer.1.mlp.experts.expert_<0-7>.wi.weight 3072 768
            encoder.block.<1,3,5,7,9,11>.layer.1.mlp.experts.expert_<0-7>.wo.weight 768 3072
            decoder.block.<0,2,4,6,8,10>.layer.2.mlp.wi.weight 3072 768
            decoder.block.<0,2,4,6,8,10>.layer.2.mlp.wo.weight 768 3072
            decoder.block.<1,3,5,7,9,11>.layer.2.mlp.router.classifier.weight 8 768
            decoder.block.<1,3,5,7,9,11>.layer.2.mlp.experts.expert_<0-7>.wi.weight 3072 768
            decoder.block.<1,3,5,7,9,11>.layer.2.mlp.experts.expert_<0-7>.wo.weight 768 3072
            {encoder,decoder}.final_layer_norm.weight 768
        """),
        T5 | dict(
            model_type="switch_transformers", add_router_probs=False, batch_prioritized_routing=False, d_ff=3072,
            d_model=768, decoder_sparse_step=2, dense_act_fn="relu", encoder_sparse_step=2, expert_capacity=64,
            feed_forward_proj="relu", is_gated_act=False, n_positions=512, num_decoder_layers=12, num_experts=8,
            num_heads=12, num_layers=12, num_selected_experts=1, num_sparse_decoder_layers=6,
            num_sparse_encoder_layers=6, relative_attention_max_distance=128, router_aux_loss_coef=0.001,
            router_bias=False, router_dtype="float32", router_ignore_padding_tokens=False, router_jitter_noise=0.01,
            router_type="tokens_masked", router_z_loss_coef=0.001, transformers_version="4.25.0.dev0", use_cache=True,
            vocab_size=32128,
        ),
    ),
    "facebook/blenderbot_small-90M": Release(
        87_508_992 + 54944,
        header("""
            final_logits_bias 1 54944
            model.shared.weight 54944 512
            model.{encoder,decoder}.embed_tokens.weight 54944 512
            model.{encoder,decoder}.embed_positions.weight 512 512
            model.{encoder,decoder}.layernorm_embedding.{weight,bias} 512
        """ + bart_layers(512, 2048, 8)),
        BART | dict(
            model_type="blenderbot-small", d_model=512, decoder_attention_heads=16, decoder_ffn_dim=2048,
            decoder_layers=8, decoder_start_token_id=1, do_blenderbot_90_layernorm=True, encoder_attention_heads=16,
            encoder_ffn_dim=2048, encoder_layers=8, forced_eos_token_id=2, layernorm_variant="xlm",
            length_penalty=0.65, max_position_embeddings=512, num_hidden_layers=8, pad_token_id=0,
            scale_embedding=True, unk_token_id=3, vocab_size=54944,
        ),
    ),
    "almanach/camembert-base, as a decoder": Release(
        110_655_493,
        header(
            BERT_HEADER.replace("bert.", "roberta.").replace("{gamma,beta}", "{weight,bias}")
            .replace("30522", "32005").replace("512 768", "514 768")
            .replace("type_embeddings.weight 2", "type_embeddings.weight 1")
            .split("    cls.")[0] + """
            lm_head.bias 32005
            lm_head.decoder.weight 32005 768
            lm_head.dense.weight 768 768
            lm_head.dense.bias 768
            lm_head.layer_norm.{weight,bias} 768
        """),
        dict(
            architectures=["CamembertForMaskedLM"], attention_probs_dropout_prob=0.1, bos_token_id=5, eos_token_id=6,
            hidden_act="gelu", hidden_dropout_prob=0.1, hidden_size=768, initializer_range=0.02,
            intermediate_size=3072, layer_norm_eps=1e-05, max_position_embeddings=514, model_type="camembert",
            num_attention_heads=12, num_hidden_layers=12, output_past=True, pad_token_id=1, type_vocab_size=1,
            vocab_size=32005, is_decoder=True,
        ),
    ),
}  # fmt: skip
