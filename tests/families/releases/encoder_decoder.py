"""Releases of encoder–decoder models, and of encoders that are decoders here."""

from __future__ import annotations

from typing import Any

from tests.families.releases import Release
from tests.families.releases.header import header


def t5_header(vocab: int, width: int, inner: int, heads: int, n: int, gated: bool, more: str) -> dict[str, Any]:
    """The tensors of T5 whose heads have 64 dimensions; `more`: those that differ between releases."""
    project = "wi_0,wi_1" if gated else "wi"
    return header(
        f"""
        shared.weight {vocab} {width}
        {{encoder,decoder}}.block.<n>.layer.0.SelfAttention.{{q,k,v}}.weight {heads * 64} {width}
        {{encoder,decoder}}.block.<n>.layer.0.SelfAttention.o.weight {width} {heads * 64}
        {{encoder,decoder}}.block.<n>.layer.<0-1>.layer_norm.weight {width}
        decoder.block.<n>.layer.1.EncDecAttention.{{q,k,v}}.weight {heads * 64} {width}
        decoder.block.<n>.layer.1.EncDecAttention.o.weight {width} {heads * 64}
        decoder.block.<n>.layer.2.layer_norm.weight {width}
        encoder.block.<n>.layer.1.DenseReluDense.{{{project}}}.weight {inner} {width}
        encoder.block.<n>.layer.1.DenseReluDense.wo.weight {width} {inner}
        decoder.block.<n>.layer.2.DenseReluDense.{{{project}}}.weight {inner} {width}
        decoder.block.<n>.layer.2.DenseReluDense.wo.weight {width} {inner}
        {{encoder,decoder}}.final_layer_norm.weight {width}
        """
        + more,
        n=n,
    )


def bart_layers(width: int, inner: int, n: int, encoder: int | None = None) -> str:
    """Lines of the layers of an encoder and a decoder; `encoder`: layers of the encoder, if not `n`."""
    sides, counts = ["encoder", "decoder"], {"encoder": n if encoder is None else encoder, "decoder": n}
    attentions = [(side, "self_attn") for side in sides] + [("decoder", "encoder_attn")]
    text = ""
    for side, kind in attentions:
        layer = f"model.{side}.layers.<0-{counts[side] - 1}>"
        text += f"""
        {layer}.{kind}.{{q_proj,k_proj,v_proj,out_proj}}.weight {width} {width}
        {layer}.{kind}.{{q_proj,k_proj,v_proj,out_proj}}.bias {width}
        {layer}.{kind}_layer_norm.{{weight,bias}} {width}
        """
    for side in sides:
        layer = f"model.{side}.layers.<0-{counts[side] - 1}>"
        text += f"""
        {layer}.fc1.weight {inner} {width}
        {layer}.fc1.bias {inner}
        {layer}.fc2.weight {width} {inner}
        {layer}.fc2.bias {width}
        {layer}.final_layer_norm.{{weight,bias}} {width}
        """
    return text


T5: dict[str, Any] = dict(
    architectures=["T5ForConditionalGeneration"], d_kv=64, decoder_start_token_id=0, dropout_rate=0.1, eos_token_id=1,
    initializer_factor=1.0, is_encoder_decoder=True, layer_norm_epsilon=1e-06, output_past=True, pad_token_id=0,
    relative_attention_num_buckets=32,
)  # fmt: skip
BART: dict[str, Any] = dict(
    _name_or_path="bart-base", _num_labels=3, activation_dropout=0.1, activation_function="gelu", add_bias_logits=False,
    add_final_layer_norm=False, attention_dropout=0.1, bos_token_id=0, classif_dropout=0.1, classifier_dropout=0.0,
    decoder_layerdrop=0.0, dropout=0.1, early_stopping=True, encoder_layerdrop=0.0, eos_token_id=2,
    gradient_checkpointing=False, id2label={"0": "LABEL_0"}, init_std=0.02, is_encoder_decoder=True,
    label2id={"LABEL_0": 0}, no_repeat_ngram_size=3, num_beams=4, pad_token_id=1, scale_embedding=False,
    transformers_version="4.12.0.dev0", use_cache=True, normalize_before=False, normalize_embedding=True,
    static_position_embeddings=False, extra_pos_embeddings=2, max_length=20,
)  # fmt: skip

BERT_HEADER = """
    bert.embeddings.word_embeddings.weight 30522 768
    bert.embeddings.position_embeddings.weight 512 768
    bert.embeddings.token_type_embeddings.weight 2 768
    bert.embeddings.LayerNorm.{gamma,beta} 768
    bert.encoder.layer.<0-11>.attention.self.{query,key,value}.weight 768 768
    bert.encoder.layer.<0-11>.attention.self.{query,key,value}.bias 768
    bert.encoder.layer.<0-11>.attention.output.dense.weight 768 768
    bert.encoder.layer.<0-11>.attention.output.dense.bias 768
    bert.encoder.layer.<0-11>.attention.output.LayerNorm.{gamma,beta} 768
    bert.encoder.layer.<0-11>.intermediate.dense.weight 3072 768
    bert.encoder.layer.<0-11>.intermediate.dense.bias 3072
    bert.encoder.layer.<0-11>.output.dense.weight 768 3072
    bert.encoder.layer.<0-11>.output.dense.bias 768
    bert.encoder.layer.<0-11>.output.LayerNorm.{gamma,beta} 768
    bert.pooler.dense.weight 768 768
    bert.pooler.dense.bias 768
    cls.predictions.bias 30522
    cls.predictions.transform.dense.weight 768 768
    cls.predictions.transform.dense.bias 768
    cls.predictions.transform.LayerNorm.{gamma,beta} 768
    cls.seq_relationship.weight 2 768
    cls.seq_relationship.bias 2
"""

RELEASES: dict[str, Release] = {
    "google-t5/t5-small": Release(
        60_506_624,
        t5_header(32128, 512, 2048, 8, 6, False, """
            decoder.embed_tokens.weight 32128 512
            encoder.embed_tokens.weight 32128 512
            lm_head.weight 32128 512
            {encoder,decoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32 8
            decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight 32 8
        """),
        T5 | dict(
            model_type="t5", d_ff=2048, d_model=512, n_positions=512, num_heads=8, num_layers=6,
            task_specific_params={"summarization": {"early_stopping": True, "prefix": "summarize: "}},
            vocab_size=32128,
        ),
    ),
    "google/flan-t5-small": Release(
        76_961_152,
        t5_header(32128, 512, 1024, 6, 8, True, """
            decoder.embed_tokens.weight 32128 512
            encoder.embed_tokens.weight 32128 512
            lm_head.weight 32128 512
            {encoder,decoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32 6
        """),
        T5 | dict(
            model_type="t5", d_ff=1024, d_model=512, feed_forward_proj="gated-gelu", n_positions=512, num_heads=6,
            num_decoder_layers=8, num_layers=8, relative_attention_max_distance=128, tie_word_embeddings=False,
            transformers_version="4.23.1", use_cache=True, vocab_size=32128,
        ),
    ),
    "google/mt5-small": Release(
        300_176_768,
        t5_header(250112, 512, 1024, 6, 8, True, """
            lm_head.weight 250112 512
            {encoder,decoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32 6
        """),
        T5 | dict(
            model_type="mt5", _name_or_path="/home/patrick/hugging_face/t5/mt5-small", d_ff=1024, d_model=512,
            feed_forward_proj="gated-gelu", num_decoder_layers=8, num_heads=6, num_layers=8,
            tie_word_embeddings=False, tokenizer_class="T5Tokenizer", transformers_version="4.10.0.dev0",
            use_cache=True, vocab_size=250112,
        ),
    ),
    "google/umt5-small": Release(
        306.6e6,
        t5_header(256384, 512, 1024, 6, 8, True, """
            lm_head.weight 256384 512
            {encoder,decoder}.block.<n>.layer.0.SelfAttention.relative_attention_bias.weight 32 6
        """),
        T5 | dict(
            model_type="umt5", d_ff=1024, d_model=512, dense_act_fn="gelu_new", feed_forward_proj="gated-gelu",
            is_gated_act=True, num_decoder_layers=8, num_heads=6, num_layers=8,
            relative_attention_max_distance=128, scalable_attention=True, tie_word_embeddings=False,
            tokenizer_class="T5Tokenizer", transformers_version="4.31.0.dev0", use_cache=True, vocab_size=256384,
            torch_dtype="bfloat16",
        ),
    ),
    "facebook/bart-base": Release(
        139_420_416 + 50265,  # with the bias on the logits, a buffer in the file
        header("""
            final_logits_bias 1 50265
            model.shared.weight 50265 768
            model.{encoder,decoder}.embed_tokens.weight 50265 768
            model.{encoder,decoder}.embed_positions.weight 1026 768
            model.{encoder,decoder}.layernorm_embedding.{weight,bias} 768
        """ + bart_layers(768, 3072, 6)),
        BART | dict(
            model_type="bart", architectures=["BartModel"], d_model=768, decoder_attention_heads=12,
            decoder_ffn_dim=3072, decoder_layers=6, decoder_start_token_id=2, encoder_attention_heads=12,
            encoder_ffn_dim=3072, encoder_layers=6, forced_bos_token_id=0, forced_eos_token_id=2,
            max_position_embeddings=1024, num_hidden_layers=6, vocab_size=50265,
            task_specific_params={"summarization": {"length_penalty": 1.0, "max_length": 128}},
        ),
    ),
    "facebook/mbart-large-50-many-to-many-mmt": Release(
        610_879_488 + 250054,
        header("""
            final_logits_bias 1 250054
            lm_head.weight 250054 1024
            model.shared.weight 250054 1024
            model.{encoder,decoder}.embed_tokens.weight 250054 1024
            model.{encoder,decoder}.embed_positions.weight 1026 1024
            model.{encoder,decoder}.{layernorm_embedding,layer_norm}.{weight,bias} 1024
        """ + bart_layers(1024, 4096, 12)),
        BART | dict(
            model_type="mbart", activation_function="relu", add_final_layer_norm=True,
            architectures=["MBartForConditionalGeneration"], d_model=1024, decoder_attention_heads=16,
            decoder_ffn_dim=4096, decoder_layers=12, decoder_start_token_id=2, encoder_attention_heads=16,
            encoder_ffn_dim=4096, encoder_layers=12, forced_eos_token_id=2, max_length=200,
            max_position_embeddings=1024, normalize_before=True, normalize_embedding=True, num_beams=5,
            num_hidden_layers=12, output_past=True, scale_embedding=True, tokenizer_class="MBart50Tokenizer",
            vocab_size=250054,
        ),
    ),
    "Helsinki-NLP/opus-mt-en-de": Release(
        73_886_208 + 58101,
        header("""
            final_logits_bias 1 58101
            model.shared.weight 58101 512
            model.{encoder,decoder}.embed_tokens.weight 58101 512
            model.{encoder,decoder}.embed_positions.weight 512 512
        """ + bart_layers(512, 2048, 6)),
        BART | dict(
            model_type="marian", activation_function="swish", architectures=["MarianMTModel"],
            bad_words_ids=[[58100]], d_model=512, decoder_attention_heads=8, decoder_ffn_dim=2048, decoder_layers=6,
            decoder_start_token_id=58100, decoder_vocab_size=58101, encoder_attention_heads=8, encoder_ffn_dim=2048,
            encoder_layers=6, eos_token_id=0, forced_eos_token_id=0, max_length=512, max_position_embeddings=512,
            normalize_embedding=False, num_beams=6, num_hidden_layers=6, pad_token_id=58100, scale_embedding=True,
            share_encoder_decoder_embeddings=True, static_position_embeddings=True, vocab_size=58101,
        ),
    ),
    "google/pegasus-xsum": Release(
        568_699_904 + 96103 + 2 * 512 * 1024,  # with sines and cosines, which the file does not hold
        header("""
            final_logits_bias 1 96103
            model.shared.weight 96103 1024
            model.{encoder,decoder}.embed_tokens.weight 96103 1024
            model.{encoder,decoder}.layer_norm.{weight,bias} 1024
        """ + bart_layers(1024, 4096, 16)),
        BART | dict(
            model_type="pegasus", activation_function="relu", add_final_layer_norm=True,
            architectures=["PegasusForConditionalGeneration"], d_model=1024, decoder_attention_heads=16,
            decoder_ffn_dim=4096, decoder_layers=16, decoder_start_token_id=0, encoder_attention_heads=16,
            encoder_ffn_dim=4096, encoder_layers=16, eos_token_id=1, extra_pos_embeddings=1,
            force_bos_token_to_be_generated=False, forced_eos_token_id=1, length_penalty=0.6, max_length=64,
            max_position_embeddings=512, normalize_before=True, normalize_embedding=False, num_beams=8,
            num_hidden_layers=16, pad_token_id=0, scale_embedding=True, static_position_embeddings=True,
            vocab_size=96103,
        ),
    ),
    "facebook/blenderbot-400M-distill": Release(
        364_802_560 + 8008,
        header("""
            final_logits_bias 1 8008
            model.shared.weight 8008 1280
            model.{encoder,decoder}.embed_tokens.weight 8008 1280
            model.{encoder,decoder}.embed_positions.weight 128 1280
            model.{encoder,decoder}.layer_norm.{weight,bias} 1280
            lm_head.weight 8008 1280
        """ + bart_layers(1280, 5120, 12, encoder=2)),
        BART | dict(
            model_type="blenderbot", architectures=["BlenderbotForConditionalGeneration"], d_model=1280,
            decoder_attention_heads=32, decoder_ffn_dim=5120, decoder_layers=12, decoder_start_token_id=1,
            do_blenderbot_90_layernorm=True, encoder_attention_heads=32, encoder_ffn_dim=5120, encoder_layers=2,
            encoder_no_repeat_ngram_size=3, forced_eos_token_id=2, layernorm_variant="prelayernorm",
            length_penalty=0.65, max_length=60, max_position_embeddings=128, min_length=20, normalize_before=True,
            normalize_embedding=False, num_beams=10, num_hidden_layers=2, scale_embedding=True, unk_token_id=3,
            add_final_layer_norm=True, vocab_size=8008,
        ),
    ),
    "facebook/m2m100_418M": Release(
        483_905_536 + 128112,  # with a bias on the logits, zeros here
        header("""
            lm_head.weight 128112 1024
            model.shared.weight 128112 1024
            model.{encoder,decoder}.embed_tokens.weight 128112 1024
            model.{encoder,decoder}.layer_norm.{weight,bias} 1024
        """ + bart_layers(1024, 4096, 12)),
        BART | dict(
            model_type="m2m_100", activation_function="relu", architectures=["M2M100ForConditionalGeneration"],
            d_model=1024, decoder_attention_heads=16, decoder_ffn_dim=4096, decoder_layers=12,
            decoder_start_token_id=2, encoder_attention_heads=16, encoder_ffn_dim=4096, encoder_layers=12,
            max_length=200, max_position_embeddings=1024, num_beams=5, num_hidden_layers=12, scale_embedding=True,
            vocab_size=128112,
        ),
    ),
    "openai/whisper-tiny": Release(
        37_760_640 + 12 * 384,  # with a bias of keys, zeros here
        header("""
            model.encoder.conv1.weight 384 80 3
            model.encoder.conv2.weight 384 384 3
            model.encoder.{conv1,conv2}.bias 384
            model.encoder.embed_positions.weight 1500 384
            model.decoder.embed_positions.weight 448 384
            model.decoder.embed_tokens.weight 51865 384
            model.{encoder,decoder}.layer_norm.{weight,bias} 384
        """ + bart_layers(384, 1536, 4).replace("q_proj,k_proj,v_proj,out_proj}.bias", "q_proj,v_proj,out_proj}.bias")),
        dict(
            model_type="whisper", _name_or_path="openai/whisper-tiny", activation_dropout=0.0,
            activation_function="gelu", apply_spec_augment=False,
            architectures=["WhisperForConditionalGeneration"], attention_dropout=0.0,
            begin_suppress_tokens=[220, 50257], bos_token_id=50257, classifier_proj_size=256, d_model=384,
            decoder_attention_heads=6, decoder_ffn_dim=1536, decoder_layerdrop=0.0, decoder_layers=4,
            decoder_start_token_id=50258, dropout=0.0, encoder_attention_heads=6, encoder_ffn_dim=1536,
            encoder_layerdrop=0.0, encoder_layers=4, eos_token_id=50257, forced_decoder_ids=[[1, 50259], [2, 50359]],
            init_std=0.02, is_encoder_decoder=True, mask_feature_length=10, mask_feature_min_masks=0,
            mask_feature_prob=0.0, mask_time_length=10, mask_time_min_masks=2, mask_time_prob=0.05, max_length=448,
            max_source_positions=1500, max_target_positions=448, median_filter_width=7, num_hidden_layers=4,
            num_mel_bins=80, pad_token_id=50257, scale_embedding=False, suppress_tokens=[1, 2],
            torch_dtype="float32", transformers_version="4.27.0.dev0", use_cache=True,
            use_weighted_layer_sum=False, vocab_size=51865,
        ),
    ),
    "google-bert/bert-base-uncased, as a decoder": Release(
        109_514_298,
        header(BERT_HEADER),
        dict(
            architectures=["BertForMaskedLM"], attention_probs_dropout_prob=0.1, gradient_checkpointing=False,
            hidden_act="gelu", hidden_dropout_prob=0.1, hidden_size=768, initializer_range=0.02,
            intermediate_size=3072, layer_norm_eps=1e-12, max_position_embeddings=512, model_type="bert",
            num_attention_heads=12, num_hidden_layers=12, pad_token_id=0, position_embedding_type="absolute",
            transformers_version="4.6.0.dev0", type_vocab_size=2, use_cache=True, vocab_size=30522,
            is_decoder=True,
        ),
    ),
    "FacebookAI/roberta-base, as a decoder": Release(
        124_697_433,
        header(
            BERT_HEADER.replace("bert.", "roberta.").replace("{gamma,beta}", "{weight,bias}")
            .replace("30522", "50265").replace("512 768", "514 768")
            .replace("type_embeddings.weight 2", "type_embeddings.weight 1")
            .split("    cls.")[0] + """
            roberta.embeddings.position_ids 1 514
            lm_head.bias 50265
            lm_head.dense.weight 768 768
            lm_head.dense.bias 768
            lm_head.layer_norm.{weight,bias} 768
        """),
        dict(
            architectures=["RobertaForMaskedLM"], attention_probs_dropout_prob=0.1, bos_token_id=0, eos_token_id=2,
            hidden_act="gelu", hidden_dropout_prob=0.1, hidden_size=768, initializer_range=0.02,
            intermediate_size=3072, layer_norm_eps=1e-05, max_position_embeddings=514, model_type="roberta",
            num_attention_heads=12, num_hidden_layers=12, pad_token_id=1, type_vocab_size=1, vocab_size=50265,
            is_decoder=True,
        ),
    ),
}  # fmt: skip
