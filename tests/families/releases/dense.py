"""Releases whose layers all are attention and a dense MLP."""

from __future__ import annotations

from tests.families.releases import COMMON, Release
from tests.families.releases.header import header


def llama_header(
    vocab: int, width: int, inner: int, n: int, q: int, kv: int, more: str = "", tied: bool = False
) -> dict[str, tuple[int, ...]]:
    """The tensors of Llama; `more` are lines that the release has besides."""
    text = f"""
        model.embed_tokens.weight {vocab} {width}
        model.layers.<n>.{{input,post_attention}}_layernorm.weight {width}
        model.layers.<n>.self_attn.q_proj.weight {q} {width}
        model.layers.<n>.self_attn.{{k,v}}_proj.weight {kv} {width}
        model.layers.<n>.self_attn.o_proj.weight {width} {q}
        model.layers.<n>.mlp.{{gate,up}}_proj.weight {inner} {width}
        model.layers.<n>.mlp.down_proj.weight {width} {inner}
        model.norm.weight {width}
        {"" if tied else f"lm_head.weight {vocab} {width}"}
    """
    return header(text + more, n=n)


def without(tensors: dict[str, tuple[int, ...]], *parts: str) -> dict[str, tuple[int, ...]]:
    """The tensors whose names have none of these parts."""
    return {name: shape for name, shape in tensors.items() if not any(part in name for part in parts)}


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)

RELEASES: dict[str, Release] = {
    "meta-llama/Llama-2-7b-hf": Release(
        6_738_415_616,
        llama_header(
            32000, 4096, 11008, 32, 4096, 4096, "model.layers.<n>.self_attn.rotary_emb.inv_freq 64"
        ),
        COMMON | dict(
            model_type="llama", hidden_act="silu", hidden_size=4096, intermediate_size=11008,
            max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
            pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None, tie_word_embeddings=False, vocab_size=32000,
        ),
    ),
    "huggyllama/llama-7b": Release(
        6_738_415_616,
        llama_header(32000, 4096, 11008, 32, 4096, 4096, "model.layers.<n>.self_attn.rotary_emb.inv_freq 64"),
        COMMON | dict(
            model_type="llama", hidden_act="silu", hidden_size=4096, intermediate_size=11008,
            max_position_embeddings=2048, max_sequence_length=2048, num_attention_heads=32, num_hidden_layers=32,
            pad_token_id=0, rms_norm_eps=1e-06, tie_word_embeddings=False, vocab_size=32000,
        ),
    ),
    "meta-llama/Llama-3.1-8B": Release(
        8_030_261_248,
        llama_header(128256, 4096, 14336, 32, 4096, 1024),
        COMMON | dict(
            model_type="llama", attention_bias=False, hidden_act="silu", hidden_size=4096, intermediate_size=14336,
            max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=32,
            num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=LLAMA3 | dict(rope_type="llama3"),
            rope_theta=500000.0, tie_word_embeddings=False, vocab_size=128256,
        ),
    ),
    "meta-llama/Llama-3.2-1B": Release(
        1_235_814_400,
        llama_header(128256, 2048, 8192, 16, 2048, 512, tied=True),
        COMMON | dict(
            model_type="llama", attention_bias=False, head_dim=64, hidden_act="silu", hidden_size=2048,
            intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32,
            num_hidden_layers=16, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
            rope_scaling=LLAMA3 | dict(rope_type="llama3", factor=32.0), rope_theta=500000.0, tie_word_embeddings=True,
            vocab_size=128256,
        ),
    ),
    "HuggingFaceTB/SmolLM2-135M": Release(
        134_515_008,
        llama_header(49152, 576, 1536, 30, 576, 192, tied=True),
        COMMON | dict(
            model_type="llama", attention_bias=False, hidden_act="silu", hidden_size=576, intermediate_size=1536,
            is_llama_config=True, max_position_embeddings=8192, num_attention_heads=9, num_hidden_layers=30,
            num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None,
            rope_theta=100000, tie_word_embeddings=True, vocab_size=49152,
        ),
    ),
    "mistralai/Mistral-7B-v0.1": Release(
        7_241_732_096,
        llama_header(32000, 4096, 14336, 32, 4096, 1024),
        COMMON | dict(
            model_type="mistral", hidden_act="silu", hidden_size=4096, intermediate_size=14336,
            max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
            rms_norm_eps=1e-05, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, vocab_size=32000,
        ),
    ),
    "mistralai/Mistral-7B-v0.3": Release(
        7_248_023_552,
        llama_header(32768, 4096, 14336, 32, 4096, 1024),
        COMMON | dict(
            model_type="mistral", hidden_act="silu", hidden_size=4096, intermediate_size=14336,
            max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
            rms_norm_eps=1e-05, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False, vocab_size=32768,
        ),
    ),
    "mistralai/Mistral-Nemo-Base-2407": Release(
        12_247_782_400,
        llama_header(131072, 5120, 14336, 40, 4096, 1024),
        COMMON | dict(
            model_type="mistral", head_dim=128, hidden_act="silu", hidden_size=5120, intermediate_size=14336,
            max_position_embeddings=128000, num_attention_heads=32, num_hidden_layers=40, num_key_value_heads=8,
            rms_norm_eps=1e-05, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False,
            vocab_size=131072,
        ),
    ),
    "mistralai/Ministral-8B-Instruct-2410": Release(
        8_019_808_256,
        llama_header(131072, 4096, 12288, 36, 4096, 1024),
        COMMON | dict(
            model_type="mistral", head_dim=128, hidden_act="silu", hidden_size=4096, intermediate_size=12288,
            max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=36, num_key_value_heads=8,
            rms_norm_eps=1e-05, rope_theta=100000000.0, sliding_window=32768, tie_word_embeddings=False,
            vocab_size=131072,
        ),
    ),
    "Qwen/Qwen2.5-7B": Release(
        7_615_616_512,
        llama_header(
            152064, 3584, 18944, 28, 3584, 512,
            "model.layers.<n>.self_attn.q_proj.bias 3584\nmodel.layers.<n>.self_attn.{k,v}_proj.bias 512",
        ),
        COMMON | dict(
            model_type="qwen2", hidden_act="silu", hidden_size=3584, intermediate_size=18944,
            max_position_embeddings=131072, max_window_layers=28, num_attention_heads=28, num_hidden_layers=28,
            num_key_value_heads=4, rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=131072,
            tie_word_embeddings=False, use_mrope=False, use_sliding_window=False, vocab_size=152064,
        ),
    ),
    "Qwen/Qwen3-0.6B": Release(
        596_049_920,
        llama_header(
            151936, 1024, 3072, 28, 2048, 1024, "model.layers.<n>.self_attn.{q,k}_norm.weight 128"
        ),  # the head is tied, and stored again
        COMMON | dict(
            model_type="qwen3", attention_bias=False, head_dim=128, hidden_act="silu", hidden_size=1024,
            intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28, num_attention_heads=16,
            num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000,
            sliding_window=None, tie_word_embeddings=True, use_sliding_window=False, vocab_size=151936,
        ),
    ),
    "google/gemma-2b": Release(
        2_506_172_416,
        llama_header(256000, 2048, 16384, 18, 2048, 256, tied=True),
        COMMON | dict(
            model_type="gemma", attention_bias=False, head_dim=256, hidden_act="gelu", hidden_size=2048,
            intermediate_size=16384, max_position_embeddings=8192, num_attention_heads=8, num_hidden_layers=18,
            num_key_value_heads=1, pad_token_id=0, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000.0,
            vocab_size=256000, hidden_activation=None,
        ),
    ),
    "google/gemma-2-9b": Release(
        9_241_705_984,
        llama_header(
            256000, 3584, 14336, 42, 4096, 2048, "model.layers.<n>.{pre,post}_feedforward_layernorm.weight 3584",
            tied=True,
        ),
        COMMON | dict(
            model_type="gemma2", attention_bias=False, attn_logit_softcapping=50.0, cache_implementation="hybrid",
            final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh", hidden_size=3584, intermediate_size=14336,
            max_position_embeddings=8192, num_attention_heads=16, num_hidden_layers=42, num_key_value_heads=8,
            pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_theta=10000.0, sliding_window=4096,
            sliding_window_size=4096, vocab_size=256000,
        ),
    ),
    "google/gemma-3-1b-pt": Release(
        999_885_952,
        llama_header(
            262144, 1152, 6912, 26, 1024, 256,
            "model.layers.<n>.{pre,post}_feedforward_layernorm.weight 1152\n"
            "model.layers.<n>.self_attn.{q,k}_norm.weight 256",
            tied=True,
        ),
        COMMON | dict(
            model_type="gemma3_text", attention_bias=False, attn_logit_softcapping=None, cache_implementation="hybrid",
            eos_token_id=[1, 106], final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh",
            hidden_size=1152, intermediate_size=6912, max_position_embeddings=32768, num_attention_heads=4,
            num_hidden_layers=26, num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256,
            rms_norm_eps=1e-06, rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
            sliding_window_pattern=6, vocab_size=262144,
        ),
    ),
    "google/gemma-3-12b-it": Release(
        11_766_034_176,
        header("""
            language_model.model.embed_tokens.weight 262208 3840
            language_model.model.layers.<0-47>.{input,post_attention}_layernorm.weight 3840
            language_model.model.layers.<0-47>.{pre,post}_feedforward_layernorm.weight 3840
            language_model.model.layers.<0-47>.self_attn.q_proj.weight 4096 3840
            language_model.model.layers.<0-47>.self_attn.{k,v}_proj.weight 2048 3840
            language_model.model.layers.<0-47>.self_attn.o_proj.weight 3840 4096
            language_model.model.layers.<0-47>.self_attn.{q,k}_norm.weight 256
            language_model.model.layers.<0-47>.mlp.{gate,up}_proj.weight 15360 3840
            language_model.model.layers.<0-47>.mlp.down_proj.weight 3840 15360
            language_model.model.norm.weight 3840
            multi_modal_projector.mm_input_projection_weight 1152 3840
            multi_modal_projector.mm_soft_emb_norm.weight 1152
            vision_tower.vision_model.embeddings.patch_embedding.weight 1152 3 14 14
            vision_tower.vision_model.encoder.layers.<0-26>.mlp.fc1.weight 4304 1152
        """),
        dict(
            architectures=["Gemma3ForConditionalGeneration"], boi_token_index=255999, eoi_token_index=256000,
            eos_token_id=[1, 106], image_token_index=262144, initializer_range=0.02, mm_tokens_per_image=256,
            model_type="gemma3", torch_dtype="bfloat16", transformers_version="4.50.0.dev0",
            text_config=dict(
                hidden_size=3840, intermediate_size=15360, model_type="gemma3_text", num_attention_heads=16,
                num_hidden_layers=48, num_key_value_heads=8, rope_scaling=dict(factor=8.0, rope_type="linear"),
                sliding_window=1024,
            ),
            vision_config=dict(hidden_size=1152, model_type="siglip_vision_model"),
        ),
    ),
    "microsoft/phi-2": Release(
        2_779_683_840,
        header("""
            model.embed_tokens.weight 51200 2560
            model.layers.<0-31>.input_layernorm.{weight,bias} 2560
            model.layers.<0-31>.self_attn.{q_proj,k_proj,v_proj,dense}.weight 2560 2560
            model.layers.<0-31>.self_attn.{q_proj,k_proj,v_proj,dense}.bias 2560
            model.layers.<0-31>.mlp.fc1.weight 10240 2560
            model.layers.<0-31>.mlp.fc1.bias 10240
            model.layers.<0-31>.mlp.fc2.weight 2560 10240
            model.layers.<0-31>.mlp.fc2.bias 2560
            model.final_layernorm.{weight,bias} 2560
            lm_head.weight 51200 2560
            lm_head.bias 51200
        """),
        COMMON | dict(
            model_type="phi", bos_token_id=50256, embd_pdrop=0.0, eos_token_id=50256, hidden_act="gelu_new",
            hidden_size=2560, intermediate_size=10240, layer_norm_eps=1e-05, max_position_embeddings=2048,
            num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, partial_rotary_factor=0.4,
            qk_layernorm=False, resid_pdrop=0.1, rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False,
            torch_dtype="float16", vocab_size=51200,
        ),
    ),
    "microsoft/Phi-3.5-mini-instruct": Release(
        3_821_079_552,
        header("""
            model.embed_tokens.weight 32064 3072
            model.layers.<0-31>.{input,post_attention}_layernorm.weight 3072
            model.layers.<0-31>.self_attn.qkv_proj.weight 9216 3072
            model.layers.<0-31>.self_attn.o_proj.weight 3072 3072
            model.layers.<0-31>.mlp.gate_up_proj.weight 16384 3072
            model.layers.<0-31>.mlp.down_proj.weight 3072 8192
            model.norm.weight 3072
            lm_head.weight 32064 3072
        """),
        COMMON | dict(
            model_type="phi3", attention_bias=False, auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
            embd_pdrop=0.0, hidden_act="silu", hidden_size=3072, intermediate_size=8192,
            max_position_embeddings=131072, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
            original_max_position_embeddings=4096, pad_token_id=32000, resid_pdrop=0.0, rms_norm_eps=1e-05,
            rope_scaling=dict(long_factor=[2.0] * 48, short_factor=[1.0] * 48, type="longrope"), rope_theta=10000.0,
            sliding_window=262144, tie_word_embeddings=False, vocab_size=32064,
        ),
    ),
    "microsoft/Phi-4-mini-instruct": Release(
        3_836_021_760,
        header("""
            model.embed_tokens.weight 200064 3072
            model.layers.<0-31>.{input,post_attention}_layernorm.weight 3072
            model.layers.<0-31>.self_attn.qkv_proj.weight 5120 3072
            model.layers.<0-31>.self_attn.o_proj.weight 3072 3072
            model.layers.<0-31>.mlp.gate_up_proj.weight 16384 3072
            model.layers.<0-31>.mlp.down_proj.weight 3072 8192
            model.norm.weight 3072
        """),
        COMMON | dict(
            model_type="phi3", attention_bias=False, embd_pdrop=0.0, full_attn_mod=1, hidden_act="silu",
            hidden_size=3072, intermediate_size=8192, interpolate_factor=1, lm_head_bias=False,
            max_position_embeddings=131072, mlp_bias=False, num_attention_heads=24, num_hidden_layers=32,
            num_key_value_heads=8, original_max_position_embeddings=4096, pad_token_id=199999,
            partial_rotary_factor=0.75, resid_pdrop=0.0, rms_norm_eps=1e-05,
            rope_scaling=dict(long_factor=[2.0] * 48, short_factor=[1.0] * 48, type="longrope"), rope_theta=10000.0,
            sliding_window=262144, tie_word_embeddings=True, vocab_size=200064,
        ),
    ),
    "ibm-granite/granite-3.3-8b-instruct": Release(
        8_170_864_640,
        llama_header(49159, 4096, 12800, 40, 4096, 1024, tied=True),
        COMMON | dict(
            model_type="granite", attention_bias=False, attention_multiplier=0.0078125, embedding_multiplier=12.0,
            hidden_act="silu", hidden_size=4096, intermediate_size=12800, logits_scaling=16.0,
            max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=40,
            num_key_value_heads=8, pad_token_id=0, residual_multiplier=0.22, rms_norm_eps=1e-05, rope_scaling=None,
            rope_theta=10000000.0, tie_word_embeddings=True, vocab_size=49159,
        ),
    ),
    "CohereForAI/c4ai-command-r-v01": Release(
        34_980_831_232,
        without(llama_header(256000, 8192, 22528, 40, 8192, 8192, tied=True), "post_attention"),
        COMMON | dict(
            model_type="cohere", attention_bias=False, hidden_act="silu", hidden_size=8192, intermediate_size=22528,
            layer_norm_eps=1e-05, logit_scale=0.0625, max_position_embeddings=8192, model_max_length=131072,
            num_attention_heads=64, num_hidden_layers=40, num_key_value_heads=64, pad_token_id=0, pretraining_tp=1,
            rope_theta=8000000.0, use_qk_norm=False, vocab_size=256000,
        ),
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": Release(
        8.03e9,
        without(llama_header(256000, 4096, 14336, 32, 4096, 1024, tied=True), "post_attention"),
        COMMON | dict(
            model_type="cohere2", attention_bias=False, cache_implementation="hybrid", head_dim=128, hidden_act="silu",
            hidden_size=4096, intermediate_size=14336, layer_norm_eps=1e-05, layer_switch=4, logit_scale=0.25,
            max_position_embeddings=8192, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
            order_of_interleaved_layers="local_attn_first", pad_token_id=0, position_embedding_type="rope_gptj",
            rope_scaling=None, rope_theta=50000, rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4,
            use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
            use_parallel_embedding=True, vocab_size=256000,
        ),
    ),
    "allenai/OLMo-7B-hf": Release(
        6_888_095_744,
        without(llama_header(50304, 4096, 11008, 32, 4096, 4096), "norm"),
        COMMON | dict(
            model_type="olmo", attention_bias=False, clip_qkv=None, hidden_act="silu", hidden_size=4096,
            intermediate_size=11008, max_position_embeddings=2048, num_attention_heads=32, num_hidden_layers=32,
            num_key_value_heads=32, pad_token_id=1, pretraining_tp=1, rope_scaling=None, rope_theta=10000.0,
            tie_word_embeddings=False, vocab_size=50304,
        ),
    ),
    "allenai/OLMo-2-1124-7B": Release(
        7_298_617_344,
        without(
            llama_header(
                100352, 4096, 11008, 32, 4096, 4096,
                "model.layers.<n>.post_feedforward_layernorm.weight 4096\n"
                "model.layers.<n>.self_attn.{q,k}_norm.weight 4096",
            ),
            "input_layernorm",
        ),
        COMMON | dict(
            model_type="olmo2", attention_bias=False, hidden_act="silu", hidden_size=4096, intermediate_size=11008,
            max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
            pad_token_id=100277, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
            vocab_size=100352,
        ),
    ),
    "allenai/Olmo-3-7B-Instruct": Release(
        7_298_011_136,
        without(
            llama_header(
                100278, 4096, 11008, 32, 4096, 4096,
                "model.layers.<n>.post_feedforward_layernorm.weight 4096\n"
                "model.layers.<n>.self_attn.{q,k}_norm.weight 4096",
            ),
            "input_layernorm",
        ),
        COMMON | dict(
            model_type="olmo3", attention_bias=False, hidden_act="silu", hidden_size=4096, intermediate_size=11008,
            layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8, max_position_embeddings=65536,
            num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, pad_token_id=100277,
            rms_norm_eps=1e-06,
            rope_scaling=dict(
                attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
                original_max_position_embeddings=8192, rope_type="yarn",
            ),
            rope_theta=500000, sliding_window=4096, tie_word_embeddings=False, vocab_size=100278,
        ),
    ),
    "microsoft/bitnet-b1.58-2B-4T": Release(
        2_412_820_480,
        header("""
            model.embed_tokens.weight 128256 2560
            model.layers.<0-29>.{input,post_attention}_layernorm.weight 2560
            model.layers.<0-29>.self_attn.{q,o}_proj.weight 640 2560
            model.layers.<0-29>.self_attn.{k,v}_proj.weight 160 2560
            model.layers.<0-29>.self_attn.{q,k,v,o}_proj.weight_scale 1
            model.layers.<0-29>.self_attn.attn_sub_norm.weight 2560
            model.layers.<0-29>.mlp.{gate,up}_proj.weight 1728 2560
            model.layers.<0-29>.mlp.down_proj.weight 640 6912
            model.layers.<0-29>.mlp.{gate,up,down}_proj.weight_scale 1
            model.layers.<0-29>.mlp.ffn_sub_norm.weight 6912
            model.norm.weight 2560
        """),
        COMMON | dict(
            model_type="bitnet", hidden_act="relu2", hidden_size=2560, intermediate_size=6912,
            max_position_embeddings=4096, num_attention_heads=20, num_hidden_layers=30, num_key_value_heads=5,
            rms_norm_eps=1e-05, rope_theta=500000.0, tie_word_embeddings=True, vocab_size=128256,
            quantization_config=dict(
                quant_method="bitnet", linear_class="autobitlinear", quantization_mode="offline",
            ),
        ),
    ),
    "swiss-ai/Apertus-8B-2509": Release(
        8_053_338_240,
        header("""
            model.embed_tokens.weight 131072 4096
            model.layers.<0-31>.{attention,feedforward}_layernorm.weight 4096
            model.layers.<0-31>.self_attn.{q,o}_proj.weight 4096 4096
            model.layers.<0-31>.self_attn.{k,v}_proj.weight 1024 4096
            model.layers.<0-31>.self_attn.{q,k}_norm.weight 128
            model.layers.<0-31>.mlp.up_proj.weight 21504 4096
            model.layers.<0-31>.mlp.down_proj.weight 4096 21504
            model.layers.<0-31>.mlp.act_fn.alpha_{n,p} 1
            model.layers.<0-31>.mlp.act_fn.beta
            model.layers.<0-31>.mlp.act_fn.eps
            model.norm.weight 4096
            lm_head.weight 131072 4096
        """),
        COMMON | dict(
            model_type="apertus", attention_bias=False, hidden_act="xielu", hidden_dropout=0.0, hidden_size=4096,
            intermediate_size=21504, max_position_embeddings=65536, mlp_bias=False, num_attention_heads=32,
            num_hidden_layers=32, num_key_value_heads=8, pad_token_id=3, post_norm=False, qk_norm=True,
            rms_norm_eps=1e-05, rope_scaling=LLAMA3 | dict(rope_type="llama3", type="llama3"), rope_theta=12000000,
            tie_word_embeddings=False, vocab_size=131072,
        ),
    ),
    "THUDM/glm-4-9b-hf": Release(
        9_399_951_360,
        without(
            llama_header(
                151552, 4096, 13696, 40, 4096, 256,
                "model.layers.<n>.mlp.gate_up_proj.weight 27392 4096\n"
                "model.layers.<n>.self_attn.q_proj.bias 4096\nmodel.layers.<n>.self_attn.{k,v}_proj.bias 256",
            ),
            "mlp.gate_proj", "mlp.up_proj",
        ),
        COMMON | dict(
            model_type="glm", attention_bias=True, eos_token_id=[151329, 151336, 151338], head_dim=128,
            hidden_act="silu", hidden_size=4096, intermediate_size=13696, max_position_embeddings=8192,
            num_attention_heads=32, num_hidden_layers=40, num_key_value_heads=2, pad_token_id=151329,
            partial_rotary_factor=0.5, rms_norm_eps=1.5625e-07, rope_theta=10000.0, tie_word_embeddings=False,
            vocab_size=151552,
        ),
    ),
    "zai-org/GLM-4-9B-0414": Release(
        9_400_279_040,
        without(
            llama_header(
                151552, 4096, 13696, 40, 4096, 256,
                "model.layers.<n>.mlp.gate_up_proj.weight 27392 4096\n"
                "model.layers.<n>.{post_self_attn,post_mlp}_layernorm.weight 4096\n"
                "model.layers.<n>.self_attn.q_proj.bias 4096\nmodel.layers.<n>.self_attn.{k,v}_proj.bias 256",
            ),
            "mlp.gate_proj", "mlp.up_proj",
        ),
        COMMON | dict(
            model_type="glm4", attention_bias=True, eos_token_id=[151329, 151336, 151338], head_dim=128,
            hidden_act="silu", hidden_size=4096, intermediate_size=13696, max_position_embeddings=32768,
            num_attention_heads=32, num_hidden_layers=40, num_key_value_heads=2, pad_token_id=151329,
            partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_theta=10000.0, tie_word_embeddings=False,
            vocab_size=151552,
        ),
    ),
    "kyutai/helium-1-2b": Release(
        2_023_868_416,
        llama_header(64000, 2048, 8192, 28, 2048, 1024),
        COMMON | dict(
            model_type="helium", attention_bias=False, head_dim=128, hidden_act="silu", hidden_size=2048,
            intermediate_size=8192, max_position_embeddings=4096, mlp_bias=False, num_attention_heads=16,
            num_hidden_layers=28, num_key_value_heads=8, pad_token_id=3, rms_norm_eps=1e-08, rope_theta=20000.0,
            tie_word_embeddings=False, vocab_size=64000,
        ),
    ),
    "tencent/Hunyuan-7B-Instruct": Release(
        7.5e9,
        llama_header(
            128167, 4096, 14336, 32, 4096, 1024, "model.layers.<n>.self_attn.{query,key}_layernorm.weight 128",
            tied=True,
        ),
        COMMON | dict(
            model_type="hunyuan_v1_dense", add_classification_head=False, attention_bias=False, attention_head_dim=128,
            cla_share_factor=2, class_num=0, dense_list=[4096, 0], head_dim=128, hidden_act="silu", hidden_size=4096,
            im_end_id=5, im_newline_id=11, im_start_id=4, intermediate_size=14336, mask_init_id=12,
            max_position_embeddings=262144, mlp_bias=False, norm_type="rms", num_attention_heads=32,
            num_hidden_layers=32, num_key_value_heads=8, org_vocab_size=128167, pad_id=127961, pad_token_id=127961,
            pool_type="last", pretraining_tp=1, rms_norm_eps=1e-05,
            rope_scaling=dict(
                alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0, type="dynamic"
            ),
            rope_theta=10000.0, sep_token_id=127962, text_end_id=7, text_start_id=6, tie_word_embeddings=True,
            use_cla=False, use_qk_norm=True, use_rotary_pos_emb=True, vocab_size=128167, xla_dtype="bf16",
        ),
    ),
    "HuggingFaceTB/SmolLM3-3B": Release(
        3_075_098_624,
        llama_header(128256, 2048, 11008, 36, 2048, 512, tied=True),
        COMMON | dict(
            model_type="smollm3", attention_bias=False, hidden_act="silu", hidden_size=2048, intermediate_size=11008,
            layer_types=["full_attention"] * 36, max_position_embeddings=65536, max_window_layers=28, mlp_bias=False,
            no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, num_attention_heads=16, num_hidden_layers=36,
            num_key_value_heads=4, pad_token_id=128004, pretraining_tp=2, rms_norm_eps=1e-06, rope_scaling=None,
            rope_theta=5000000.0, sliding_window=None, use_sliding_window=False, vocab_size=128256,
        ),
    ),
    "stabilityai/stablelm-2-1_6b": Release(
        1_644_515_328,
        llama_header(
            100352, 2048, 5632, 24, 2048, 2048,
            "model.layers.<n>.{input,post_attention}_layernorm.bias 2048\nmodel.norm.bias 2048\n"
            "model.layers.<n>.self_attn.{q,k,v}_proj.bias 2048",
        ),
        COMMON | dict(
            model_type="stablelm", hidden_act="silu", hidden_size=2048, intermediate_size=5632, layer_norm_eps=1e-05,
            max_position_embeddings=4096, norm_eps=1e-05, num_attention_heads=32, num_heads=32, num_hidden_layers=24,
            num_key_value_heads=32, partial_rotary_factor=0.25, rope_pct=0.25, rope_theta=10000,
            rotary_scaling_factor=1.0, tie_word_embeddings=False, use_qkv_bias=True, vocab_size=100352,
        ),
    ),
    "stabilityai/stablelm-2-12b": Release(
        12_143_185_920,
        without(
            llama_header(
                100352, 5120, 13824, 40, 5120, 1280,
                "model.layers.<n>.self_attn.q_layernorm.norms.<0-31>.weight 160\n"
                "model.layers.<n>.self_attn.k_layernorm.norms.<0-7>.weight 160\n"
                "model.layers.<n>.input_layernorm.bias 5120\nmodel.norm.bias 5120",
            ),
            "post_attention",
        ),
        COMMON | dict(
            model_type="stablelm", hidden_act="silu", hidden_dropout=0.0, hidden_size=5120, intermediate_size=13824,
            layer_norm_eps=1e-05, max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=40,
            num_key_value_heads=8, partial_rotary_factor=0.25, qk_layernorm=True, rope_theta=10000,
            tie_word_embeddings=False, use_parallel_residual=True, use_qkv_bias=False, vocab_size=100352,
        ),
    ),
    "bigcode/starcoder2-3b": Release(
        3_030_371_328,
        header("""
            model.embed_tokens.weight 49152 3072
            model.layers.<0-29>.{input,post_attention}_layernorm.{weight,bias} 3072
            model.layers.<0-29>.self_attn.{q,o}_proj.weight 3072 3072
            model.layers.<0-29>.self_attn.{q,o}_proj.bias 3072
            model.layers.<0-29>.self_attn.{k,v}_proj.weight 256 3072
            model.layers.<0-29>.self_attn.{k,v}_proj.bias 256
            model.layers.<0-29>.mlp.c_fc.weight 12288 3072
            model.layers.<0-29>.mlp.c_fc.bias 12288
            model.layers.<0-29>.mlp.c_proj.weight 3072 12288
            model.layers.<0-29>.mlp.c_proj.bias 3072
            model.norm.{weight,bias} 3072
        """),
        COMMON | dict(
            model_type="starcoder2", activation_function="gelu", embedding_dropout=0.1,
            hidden_act="gelu_pytorch_tanh", hidden_size=3072, initializer_range=0.018042, intermediate_size=12288,
            layer_norm_epsilon=1e-05, max_position_embeddings=16384, mlp_type="default", norm_epsilon=1e-05,
            norm_type="layer_norm", num_attention_heads=24, num_hidden_layers=30, num_key_value_heads=2,
            residual_dropout=0.1, rope_theta=999999.4420358813, sliding_window=4096, use_bias=True, vocab_size=49152,
        ),
    ),
    "nvidia/Minitron-4B-Base": Release(
        4.19e9,
        header("""
            model.embed_tokens.weight 256000 3072
            model.layers.<0-31>.{input,post_attention}_layernorm.{weight,bias} 3072
            model.layers.<0-31>.self_attn.q_proj.weight 3072 3072
            model.layers.<0-31>.self_attn.{k,v}_proj.weight 1024 3072
            model.layers.<0-31>.self_attn.o_proj.weight 3072 3072
            model.layers.<0-31>.mlp.up_proj.weight 9216 3072
            model.layers.<0-31>.mlp.down_proj.weight 3072 9216
            model.norm.{weight,bias} 3072
            lm_head.weight 256000 3072
        """),
        COMMON | dict(
            model_type="nemotron", attention_bias=False, head_dim=128, hidden_act="relu2", hidden_dropout=0.0,
            hidden_size=3072, intermediate_size=9216, kv_channels=128, max_position_embeddings=4096, mlp_bias=False,
            norm_eps=1e-05, num_attention_heads=24, num_hidden_layers=32, num_key_value_heads=8,
            partial_rotary_factor=0.5, rope_theta=10000.0, rope_scaling=None, tie_word_embeddings=False,
            vocab_size=256000,
        ),
    ),
}  # fmt: skip
