"""Releases with learned positions, ALiBi or biases everywhere: GPT-2 and what came before Llama."""

from __future__ import annotations

from tests.families.releases import COMMON, Release
from tests.families.releases.header import header

RELEASES: dict[str, Release] = {
    "openai-community/gpt2": Release(
        124_439_808,
        header("""
            wte.weight 50257 768
            wpe.weight 1024 768
            h.<0-11>.ln_{1,2}.{weight,bias} 768
            h.<0-11>.attn.bias 1 1 1024 1024
            h.<0-11>.attn.c_attn.weight 768 2304
            h.<0-11>.attn.c_attn.bias 2304
            h.<0-11>.attn.c_proj.weight 768 768
            h.<0-11>.attn.c_proj.bias 768
            h.<0-11>.mlp.c_fc.weight 768 3072
            h.<0-11>.mlp.c_fc.bias 3072
            h.<0-11>.mlp.c_proj.weight 3072 768
            h.<0-11>.mlp.c_proj.bias 768
            ln_f.{weight,bias} 768
        """),
        dict(
            activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=50256,
            embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="gpt2",
            n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, resid_pdrop=0.1,
            summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True,
            summary_type="cls_index", summary_use_proj=True,
            task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, vocab_size=50257,
        ),
    ),
    "distilbert/distilgpt2": Release(
        81_912_576,
        header("""
            transformer.wte.weight 50257 768
            transformer.wpe.weight 1024 768
            transformer.h.<0-5>.ln_{1,2}.{weight,bias} 768
            transformer.h.<0-5>.attn.bias 1 1 1024 1024
            transformer.h.<0-5>.attn.masked_bias
            transformer.h.<0-5>.attn.c_attn.weight 768 2304
            transformer.h.<0-5>.attn.c_attn.bias 2304
            transformer.h.<0-5>.attn.c_proj.weight 768 768
            transformer.h.<0-5>.attn.c_proj.bias 768
            transformer.h.<0-5>.mlp.c_fc.weight 768 3072
            transformer.h.<0-5>.mlp.c_fc.bias 3072
            transformer.h.<0-5>.mlp.c_proj.weight 3072 768
            transformer.h.<0-5>.mlp.c_proj.bias 768
            transformer.ln_f.{weight,bias} 768
            lm_head.weight 50257 768
        """),
        dict(
            _num_labels=1, activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1,
            bos_token_id=50256, embd_pdrop=0.1, eos_token_id=50256, id2label={"0": "LABEL_0"},
            initializer_range=0.02, label2id={"LABEL_0": 0}, layer_norm_epsilon=1e-05, model_type="gpt2", n_ctx=1024,
            n_embd=768, n_head=12, n_layer=6, n_positions=1024, resid_pdrop=0.1, summary_activation=None,
            summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
            task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, vocab_size=50257,
        ),
    ),
    "EleutherAI/gpt-neo-125m": Release(
        125_198_592,
        header("""
            transformer.wte.weight 50257 768
            transformer.wpe.weight 2048 768
            transformer.h.<0-11>.ln_{1,2}.{weight,bias} 768
            transformer.h.<0-11>.attn.attention.bias 1 1 2048 2048
            transformer.h.<0-11>.attn.attention.masked_bias
            transformer.h.<0-11>.attn.attention.{q_proj,k_proj,v_proj,out_proj}.weight 768 768
            transformer.h.<0-11>.attn.attention.out_proj.bias 768
            transformer.h.<0-11>.mlp.c_fc.weight 3072 768
            transformer.h.<0-11>.mlp.c_fc.bias 3072
            transformer.h.<0-11>.mlp.c_proj.weight 768 3072
            transformer.h.<0-11>.mlp.c_proj.bias 768
            transformer.ln_f.{weight,bias} 768
            lm_head.weight 50257 768
        """),
        COMMON | dict(
            model_type="gpt_neo", activation_function="gelu_new", attention_layers=["global", "local"] * 6,
            attention_types=[[["global", "local"], 6]], bos_token_id=50256, embed_dropout=0, eos_token_id=50256,
            gradient_checkpointing=False, hidden_size=768, intermediate_size=None, layer_norm_epsilon=1e-05,
            max_position_embeddings=2048, num_heads=12, num_layers=12, resid_dropout=0, summary_activation=None,
            summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
            vocab_size=50257, window_size=256,
        ),
    ),
    "EleutherAI/gpt-j-6b": Release(
        6_050_882_784,
        header("""
            transformer.wte.weight 50400 4096
            transformer.h.<0-27>.ln_1.{weight,bias} 4096
            transformer.h.<0-27>.attn.bias 1 1 2048 2048
            transformer.h.<0-27>.attn.masked_bias
            transformer.h.<0-27>.attn.{q_proj,k_proj,v_proj,out_proj}.weight 4096 4096
            transformer.h.<0-27>.mlp.fc_in.weight 16384 4096
            transformer.h.<0-27>.mlp.fc_in.bias 16384
            transformer.h.<0-27>.mlp.fc_out.weight 4096 16384
            transformer.h.<0-27>.mlp.fc_out.bias 4096
            transformer.ln_f.{weight,bias} 4096
            lm_head.weight 50400 4096
            lm_head.bias 50400
        """),
        dict(
            activation_function="gelu_new", architectures=["GPTJForCausalLM"], attn_pdrop=0.0, bos_token_id=50256,
            embd_pdrop=0.0, eos_token_id=50256, gradient_checkpointing=False, initializer_range=0.02,
            layer_norm_epsilon=1e-05, model_type="gptj", n_embd=4096, n_head=16, n_inner=None, n_layer=28,
            n_positions=2048, resid_pdrop=0.0, rotary=True, rotary_dim=64, scale_attn_weights=True,
            summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True,
            summary_type="cls_index", summary_use_proj=True,
            task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
            tie_word_embeddings=False, tokenizer_class="GPT2Tokenizer", transformers_version="4.18.0.dev0",
            use_cache=True, vocab_size=50400,
        ),
    ),
    "EleutherAI/pythia-70m": Release(
        70_426_624,
        header("""
            gpt_neox.embed_in.weight 50304 512
            gpt_neox.layers.<0-5>.{input,post_attention}_layernorm.{weight,bias} 512
            gpt_neox.layers.<0-5>.attention.bias 1 1 2048 2048
            gpt_neox.layers.<0-5>.attention.masked_bias
            gpt_neox.layers.<0-5>.attention.rotary_emb.inv_freq 8
            gpt_neox.layers.<0-5>.attention.query_key_value.weight 1536 512
            gpt_neox.layers.<0-5>.attention.query_key_value.bias 1536
            gpt_neox.layers.<0-5>.attention.dense.weight 512 512
            gpt_neox.layers.<0-5>.attention.dense.bias 512
            gpt_neox.layers.<0-5>.mlp.dense_h_to_4h.weight 2048 512
            gpt_neox.layers.<0-5>.mlp.dense_h_to_4h.bias 2048
            gpt_neox.layers.<0-5>.mlp.dense_4h_to_h.weight 512 2048
            gpt_neox.layers.<0-5>.mlp.dense_4h_to_h.bias 512
            gpt_neox.final_layer_norm.{weight,bias} 512
            embed_out.weight 50304 512
        """),
        dict(
            architectures=["GPTNeoXForCausalLM"], bos_token_id=0, eos_token_id=0, hidden_act="gelu", hidden_size=512,
            initializer_range=0.02, intermediate_size=2048, layer_norm_eps=1e-05, max_position_embeddings=2048,
            model_type="gpt_neox", num_attention_heads=8, num_hidden_layers=6, rotary_emb_base=10000,
            rotary_pct=0.25, tie_word_embeddings=False, torch_dtype="float16", transformers_version="4.24.0",
            use_cache=True, use_parallel_residual=True, vocab_size=50304,
        ),
    ),
    "facebook/opt-125m": Release(
        125_239_296 - 2 * 768,  # without the two first positions, of padding
        header("""
            model.decoder.embed_tokens.weight 50272 768
            model.decoder.embed_positions.weight 2050 768
            model.decoder.layers.<0-11>.{self_attn,final}_layer_norm.{weight,bias} 768
            model.decoder.layers.<0-11>.self_attn.{q_proj,k_proj,v_proj,out_proj}.weight 768 768
            model.decoder.layers.<0-11>.self_attn.{q_proj,k_proj,v_proj,out_proj}.bias 768
            model.decoder.layers.<0-11>.fc1.weight 3072 768
            model.decoder.layers.<0-11>.fc1.bias 3072
            model.decoder.layers.<0-11>.fc2.weight 768 3072
            model.decoder.layers.<0-11>.fc2.bias 768
            model.decoder.final_layer_norm.{weight,bias} 768
            lm_head.weight 50272 768
        """),
        dict(
            _name_or_path="facebook/opt-125m", activation_dropout=0.0, activation_function="relu",
            architectures=["OPTForCausalLM"], attention_dropout=0.0, bos_token_id=2, do_layer_norm_before=True,
            dropout=0.1, eos_token_id=2, ffn_dim=3072, hidden_size=768, init_std=0.02, layerdrop=0.0,
            max_position_embeddings=2048, model_type="opt", num_attention_heads=12, num_hidden_layers=12,
            pad_token_id=1, prefix="</s>", torch_dtype="float16", transformers_version="4.21.0.dev0", use_cache=True,
            vocab_size=50272, word_embed_proj_dim=768,
        ),
    ),
    "facebook/opt-350m": Release(
        331_196_416 - 2 * 1024,
        header("""
            decoder.embed_tokens.weight 50272 512
            decoder.embed_positions.weight 2050 1024
            decoder.project_in.weight 1024 512
            decoder.project_out.weight 512 1024
            decoder.layers.<0-23>.{self_attn,final}_layer_norm.{weight,bias} 1024
            decoder.layers.<0-23>.self_attn.{q_proj,k_proj,v_proj,out_proj}.weight 1024 1024
            decoder.layers.<0-23>.self_attn.{q_proj,k_proj,v_proj,out_proj}.bias 1024
            decoder.layers.<0-23>.fc1.weight 4096 1024
            decoder.layers.<0-23>.fc1.bias 4096
            decoder.layers.<0-23>.fc2.weight 1024 4096
            decoder.layers.<0-23>.fc2.bias 1024
        """),
        dict(
            _name_or_path="opt-350m", activation_dropout=0.0, activation_function="relu",
            architectures=["OPTForCausalLM"], attention_dropout=0.0, bos_token_id=2, do_layer_norm_before=False,
            dropout=0.1, eos_token_id=2, ffn_dim=4096, hidden_size=1024, init_std=0.02, layerdrop=0.0,
            max_position_embeddings=2048, model_type="opt", num_attention_heads=16, num_hidden_layers=24,
            pad_token_id=1, prefix="</s>", torch_dtype="float16", transformers_version="4.20.0.dev0", use_cache=True,
            vocab_size=50272, word_embed_proj_dim=512,
        ),
    ),
    "tiiuae/falcon-7b": Release(
        6_921_720_704,
        header("""
            transformer.word_embeddings.weight 65024 4544
            transformer.h.<0-31>.input_layernorm.{weight,bias} 4544
            transformer.h.<0-31>.self_attention.query_key_value.weight 4672 4544
            transformer.h.<0-31>.self_attention.dense.weight 4544 4544
            transformer.h.<0-31>.mlp.dense_h_to_4h.weight 18176 4544
            transformer.h.<0-31>.mlp.dense_4h_to_h.weight 4544 18176
            transformer.ln_f.{weight,bias} 4544
            lm_head.weight 65024 4544
        """),
        COMMON | dict(
            model_type="falcon", alibi=False, apply_residual_connection_post_layernorm=False,
            auto_map={"AutoConfig": "configuration_falcon.FalconConfig"}, bias=False, bos_token_id=11,
            eos_token_id=11, hidden_dropout=0.0, hidden_size=4544, layer_norm_epsilon=1e-05, multi_query=True,
            new_decoder_architecture=False, num_attention_heads=71, num_hidden_layers=32, parallel_attn=True,
            vocab_size=65024,
        ),
    ),
    "tiiuae/falcon-40b": Release(
        41_303_293_952,
        header("""
            transformer.word_embeddings.weight 65024 8192
            transformer.h.<0-59>.ln_{attn,mlp}.{weight,bias} 8192
            transformer.h.<0-59>.self_attention.query_key_value.weight 9216 8192
            transformer.h.<0-59>.self_attention.dense.weight 8192 8192
            transformer.h.<0-59>.mlp.dense_h_to_4h.weight 32768 8192
            transformer.h.<0-59>.mlp.dense_4h_to_h.weight 8192 32768
            transformer.ln_f.{weight,bias} 8192
            lm_head.weight 65024 8192
        """),
        COMMON | dict(
            model_type="falcon", alibi=False, apply_residual_connection_post_layernorm=False, bias=False,
            bos_token_id=11, eos_token_id=11, hidden_dropout=0.0, hidden_size=8192, layer_norm_epsilon=1e-05,
            new_decoder_architecture=True, num_attention_heads=128, num_hidden_layers=60, num_kv_heads=8,
            parallel_attn=True, vocab_size=65024,
        ),
    ),
    "tiiuae/falcon-11B": Release(
        10.84e9,
        header("""
            transformer.word_embeddings.weight 65024 4096
            transformer.h.<0-59>.input_layernorm.{weight,bias} 4096
            transformer.h.<0-59>.self_attention.query_key_value.weight 6144 4096
            transformer.h.<0-59>.self_attention.dense.weight 4096 4096
            transformer.h.<0-59>.mlp.dense_h_to_4h.weight 16384 4096
            transformer.h.<0-59>.mlp.dense_4h_to_h.weight 4096 16384
            transformer.ln_f.{weight,bias} 4096
            lm_head.weight 65024 4096
        """),
        COMMON | dict(
            model_type="falcon", activation="gelu", alibi=False, bias=False, bos_token_id=11, eos_token_id=11,
            ff_factor=4, ffn_hidden_size=16384, hidden_dropout=0.0, hidden_size=4096, layer_norm_epsilon=1e-05,
            max_position_embeddings=8192, multi_query=True, new_decoder_architecture=True, num_attention_heads=32,
            num_hidden_layers=60, num_kv_heads=8, num_ln_in_parallel_attn=1, parallel_attn=True, rope_scaling=None,
            rope_theta=500042.0, vocab_size=65024,
        ),
    ),
    "tiiuae/falcon-rw-1b": Release(
        1_311_625_216,
        header("""
            transformer.word_embeddings.weight 50304 2048
            transformer.h.<0-23>.{input,post_attention}_layernorm.{weight,bias} 2048
            transformer.h.<0-23>.self_attention.query_key_value.weight 6144 2048
            transformer.h.<0-23>.self_attention.query_key_value.bias 6144
            transformer.h.<0-23>.self_attention.dense.weight 2048 2048
            transformer.h.<0-23>.self_attention.dense.bias 2048
            transformer.h.<0-23>.mlp.dense_h_to_4h.weight 8192 2048
            transformer.h.<0-23>.mlp.dense_h_to_4h.bias 8192
            transformer.h.<0-23>.mlp.dense_4h_to_h.weight 2048 8192
            transformer.h.<0-23>.mlp.dense_4h_to_h.bias 2048
            transformer.ln_f.{weight,bias} 2048
            lm_head.weight 50304 2048
        """),
        COMMON | dict(
            model_type="falcon", alibi=True, apply_residual_connection_post_layernorm=False, bias=True,
            hidden_dropout=0.0, hidden_size=2048, layer_norm_epsilon=1e-05, multi_query=False,
            new_decoder_architecture=False, num_attention_heads=32, num_hidden_layers=24, parallel_attn=False,
            vocab_size=50304,
        ),
    ),
    "bigscience/bloom-560m": Release(
        559_214_592,
        header("""
            word_embeddings.weight 250880 1024
            word_embeddings_layernorm.{weight,bias} 1024
            h.<0-23>.{input,post_attention}_layernorm.{weight,bias} 1024
            h.<0-23>.self_attention.query_key_value.weight 3072 1024
            h.<0-23>.self_attention.query_key_value.bias 3072
            h.<0-23>.self_attention.dense.weight 1024 1024
            h.<0-23>.self_attention.dense.bias 1024
            h.<0-23>.mlp.dense_h_to_4h.weight 4096 1024
            h.<0-23>.mlp.dense_h_to_4h.bias 4096
            h.<0-23>.mlp.dense_4h_to_h.weight 1024 4096
            h.<0-23>.mlp.dense_4h_to_h.bias 1024
            ln_f.{weight,bias} 1024
        """),
        dict(
            apply_residual_connection_post_layernorm=False, architectures=["BloomForCausalLM"],
            attention_dropout=0.0, attention_softmax_in_fp32=True, bias_dropout_fusion=True, bos_token_id=1,
            eos_token_id=2, hidden_dropout=0.0, initializer_range=0.02, layer_norm_epsilon=1e-05,
            masked_softmax_fusion=True, model_type="bloom", n_embed=1024, n_inner=None, n_layer=24,
            num_attention_heads=16, offset_alibi=100, pad_token_id=3, pretraining_tp=1, skip_bias_add=True,
            skip_bias_add_qkv=False, slow_but_exact=False, transformers_version="4.20.0", unk_token_id=0,
            use_cache=True, vocab_size=250880,
        ),
    ),
    "mosaicml/mpt-7b": Release(
        6_649_286_656,
        header("""
            transformer.wte.weight 50432 4096
            transformer.blocks.<0-31>.norm_{1,2}.weight 4096
            transformer.blocks.<0-31>.attn.Wqkv.weight 12288 4096
            transformer.blocks.<0-31>.attn.out_proj.weight 4096 4096
            transformer.blocks.<0-31>.ffn.up_proj.weight 16384 4096
            transformer.blocks.<0-31>.ffn.down_proj.weight 4096 16384
            transformer.norm_f.weight 4096
        """),
        dict(
            architectures=["MPTForCausalLM"],
            attn_config=dict(
                alibi=True, alibi_bias_max=8, attn_impl="torch", attn_pdrop=0, attn_type="multihead_attention",
                attn_uses_sequence_id=False, clip_qkv=None, prefix_lm=False, qk_ln=False, softmax_scale=None,
            ),
            auto_map={"AutoConfig": "configuration_mpt.MPTConfig"}, d_model=4096, emb_pdrop=0,
            embedding_fraction=1.0, expansion_ratio=4,
            init_config=dict(
                emb_init_std=None, emb_init_uniform_lim=None, fan_mode="fan_in", init_div_is_residual=True,
                init_gain=0, init_nonlinearity="relu", init_std=0.02, name="kaiming_normal_", verbose=0,
            ),
            init_device="cpu", learned_pos_emb=True, logit_scale=None, max_seq_len=2048, model_type="mpt", n_heads=32,
            n_layers=32, no_bias=True, norm_type="low_precision_layernorm", resid_pdrop=0,
            tokenizer_name="EleutherAI/gpt-neox-20b", torch_dtype="bfloat16", transformers_version="4.28.1",
            use_cache=False, verbose=0, vocab_size=50432,
        ),
    ),
    "bigcode/gpt_bigcode-santacoder": Release(
        1_124_886_528,
        header("""
            transformer.wte.weight 49280 2048
            transformer.wpe.weight 2048 2048
            transformer.h.<0-23>.ln_{1,2}.{weight,bias} 2048
            transformer.h.<0-23>.attn.c_attn.weight 2304 2048
            transformer.h.<0-23>.attn.c_attn.bias 2304
            transformer.h.<0-23>.attn.c_proj.weight 2048 2048
            transformer.h.<0-23>.attn.c_proj.bias 2048
            transformer.h.<0-23>.mlp.c_fc.weight 8192 2048
            transformer.h.<0-23>.mlp.c_fc.bias 8192
            transformer.h.<0-23>.mlp.c_proj.weight 2048 8192
            transformer.h.<0-23>.mlp.c_proj.bias 2048
            transformer.ln_f.{weight,bias} 2048
            lm_head.weight 49280 2048
        """),
        dict(
            activation_function="gelu_pytorch_tanh", architectures=["GPTBigCodeForCausalLM"],
            attention_softmax_in_fp32=True, attn_pdrop=0.1, bos_token_id=49152, embd_pdrop=0.1, eos_token_id=49152,
            inference_runner=0, initializer_range=0.02, layer_norm_epsilon=1e-05, max_batch_size=None,
            max_sequence_length=None, model_type="gpt_bigcode", multi_query=True, n_embd=2048, n_head=16,
            n_inner=8192, n_layer=24, n_positions=2048, pad_key_length=True, pre_allocate_kv_cache=False,
            resid_pdrop=0.1, scale_attention_softmax_in_fp32=True, scale_attn_weights=True, summary_activation=None,
            summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
            torch_dtype="float32", transformers_version="4.28.0.dev0", use_cache=True, validate_runner_input=True,
            vocab_size=49280,
        ),
    ),
    "facebook/xglm-564M": Release(
        564_463_616,
        header("""
            model.embed_tokens.weight 256008 1024
            model.embed_positions.weights 2050 1024
            model.layers.<0-23>.{self_attn,final}_layer_norm.{weight,bias} 1024
            model.layers.<0-23>.self_attn.{q_proj,k_proj,v_proj,out_proj}.weight 1024 1024
            model.layers.<0-23>.self_attn.{q_proj,k_proj,v_proj,out_proj}.bias 1024
            model.layers.<0-23>.fc1.weight 4096 1024
            model.layers.<0-23>.fc1.bias 4096
            model.layers.<0-23>.fc2.weight 1024 4096
            model.layers.<0-23>.fc2.bias 1024
            model.layer_norm.{weight,bias} 1024
            lm_head.weight 256008 1024
        """),
        dict(
            activation_dropout=0, activation_function="gelu", architectures=["XGLMForCausalLM"],
            attention_dropout=0.1, attention_heads=16, bos_token_id=0, d_model=1024, decoder_start_token_id=2,
            dropout=0.1, eos_token_id=2, ffn_dim=4096, init_std=0.02, layerdrop=0.0, max_position_embeddings=2048,
            model_type="xglm", num_layers=24, pad_token_id=1, scale_embedding=True,
            transformers_version="4.16.0.dev0", use_cache=True, vocab_size=256008,
        ),
    ),
    "openai-community/openai-gpt": Release(
        116_534_784,
        header("""
            positions_embed.weight 512 768
            tokens_embed.weight 40478 768
            h.<0-11>.attn.bias 1 1 512 512
            h.<0-11>.attn.c_attn.weight 768 2304
            h.<0-11>.attn.c_attn.bias 2304
            h.<0-11>.attn.c_proj.weight 768 768
            h.<0-11>.attn.c_proj.bias 768
            h.<0-11>.ln_{1,2}.{weight,bias} 768
            h.<0-11>.mlp.c_fc.weight 768 3072
            h.<0-11>.mlp.c_fc.bias 3072
            h.<0-11>.mlp.c_proj.weight 3072 768
            h.<0-11>.mlp.c_proj.bias 768
        """),
        dict(
            afn="gelu", architectures=["OpenAIGPTLMHeadModel"], attn_pdrop=0.1, embd_pdrop=0.1,
            initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="openai-gpt", n_ctx=512, n_embd=768,
            n_head=12, n_layer=12, n_positions=512, n_special=0, predict_special_tokens=True, resid_pdrop=0.1,
            summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True,
            summary_type="cls_index", summary_use_proj=True,
            task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, vocab_size=40478,
        ),
    ),
    "Salesforce/codegen-350M-mono": Release(
        356_712_448,
        header("""
            transformer.wte.weight 51200 1024
            transformer.h.<0-19>.ln_1.{weight,bias} 1024
            transformer.h.<0-19>.attn.causal_mask 1 1 2048 2048
            transformer.h.<0-19>.attn.qkv_proj.weight 3072 1024
            transformer.h.<0-19>.attn.out_proj.weight 1024 1024
            transformer.h.<0-19>.mlp.fc_in.weight 4096 1024
            transformer.h.<0-19>.mlp.fc_in.bias 4096
            transformer.h.<0-19>.mlp.fc_out.weight 1024 4096
            transformer.h.<0-19>.mlp.fc_out.bias 1024
            transformer.ln_f.{weight,bias} 1024
            lm_head.weight 51200 1024
            lm_head.bias 51200
        """),
        dict(
            activation_function="gelu_new", architectures=["CodeGenForCausalLM"], attn_pdrop=0.0, bos_token_id=1,
            embd_pdrop=0.0, eos_token_id=50256, gradient_checkpointing=False, initializer_range=0.02,
            layer_norm_epsilon=1e-05, model_type="codegen", n_ctx=2048, n_embd=1024, n_head=16, n_inner=None,
            n_layer=20, n_positions=2048, resid_pdrop=0.0, rotary_dim=32, scale_attn_weights=True,
            summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True,
            summary_type="cls_index", summary_use_proj=True,
            task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
            tie_word_embeddings=False, tokenizer_class="GPT2Tokenizer", transformers_version="4.21.0.dev0",
            use_cache=True, vocab_size=51200,
        ),
    ),
    "microsoft/biogpt": Release(
        346_763_264 - 2 * 1024,
        header("""
            biogpt.embed_tokens.weight 42384 1024
            biogpt.embed_positions.weight 1026 1024
            biogpt.layers.<0-23>.{self_attn,final}_layer_norm.{weight,bias} 1024
            biogpt.layers.<0-23>.self_attn.{q_proj,k_proj,v_proj,out_proj}.weight 1024 1024
            biogpt.layers.<0-23>.self_attn.{q_proj,k_proj,v_proj,out_proj}.bias 1024
            biogpt.layers.<0-23>.fc1.weight 4096 1024
            biogpt.layers.<0-23>.fc1.bias 4096
            biogpt.layers.<0-23>.fc2.weight 1024 4096
            biogpt.layers.<0-23>.fc2.bias 1024
            biogpt.layer_norm.{weight,bias} 1024
            output_projection.weight 42384 1024
        """),
        dict(
            activation_dropout=0.0, architectures=["BioGptForCausalLM"], attention_probs_dropout_prob=0.1,
            bos_token_id=0, eos_token_id=2, hidden_act="gelu", hidden_dropout_prob=0.1, hidden_size=1024,
            initializer_range=0.02, intermediate_size=4096, layer_norm_eps=1e-12, layerdrop=0.0,
            max_position_embeddings=1024, model_type="biogpt", num_attention_heads=16, num_hidden_layers=24,
            pad_token_id=1, scale_embedding=True, torch_dtype="float32", transformers_version="4.25.0.dev0",
            use_cache=True, vocab_size=42384,
        ),
    ),
}  # fmt: skip
