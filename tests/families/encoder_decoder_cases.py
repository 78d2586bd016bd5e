"""Small random checkpoints of encoder–decoder families: for each, cases and functions that make a config; `pair_of`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BartConfig,
    BertConfig,
    BertGenerationConfig,
    BigBirdPegasusConfig,
    BlenderbotConfig,
    BlenderbotSmallConfig,
    CamembertConfig,
    ElectraConfig,
    EncoderDecoderConfig,
    FSMTConfig,
    LongT5Config,
    M2M100Config,
    MarianConfig,
    MBartConfig,
    MoonshineConfig,
    MT5Config,
    MvpConfig,
    PegasusConfig,
    PLBartConfig,
    RobertaConfig,
    SwitchTransformersConfig,
    T5Config,
    T5GemmaConfig,
    T5GemmaModuleConfig,
    UMT5Config,
    WhisperConfig,
    XLMRobertaConfig,
)

from lamina.encoder import EncoderDecoder
from tests.families.harness import loaded

SIZES: dict[str, Any] = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=2,
    encoder_ffn_dim=48, decoder_ffn_dim=40, vocab_size=67, max_position_embeddings=64, pad_token_id=1, bos_token_id=0,
    eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
)  # fmt: skip


def small(config: Any, **changes: Any) -> Any:
    return partial(config, **SIZES | changes)


def bart_like(config: Any) -> dict[str, Any]:
    return {
        "plain": small(config, scale_embedding=False),
        "scaled, relu, deep decoder": small(
            config, scale_embedding=True, activation_function="relu", encoder_layers=1, decoder_layers=3
        ),
        "untied, one head": small(
            config, tie_word_embeddings=False, encoder_attention_heads=1, decoder_start_token_id=0
        ),
    }  # fmt: skip


T5_SIZES: dict[str, Any] = dict(
    d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=67, decoder_start_token_id=0,
    relative_attention_num_buckets=8, relative_attention_max_distance=20,
)  # fmt: skip


def t5_like(config: Any) -> dict[str, Any]:
    return {
        "plain": partial(config, **T5_SIZES),
        "ungated gelu, wide heads, deep decoder": partial(
            config, **T5_SIZES | dict(feed_forward_proj="gelu", num_heads=3, d_kv=16, num_decoder_layers=3)
        ),
        "gated silu, few buckets, eps": partial(
            config,
            **T5_SIZES
            | dict(
                feed_forward_proj="gated-silu", relative_attention_num_buckets=6, relative_attention_max_distance=9,
                layer_norm_epsilon=0.1, decoder_start_token_id=3,
            ),
        ),
    }  # fmt: skip


def switch(**changes: Any) -> Any:
    sizes = T5_SIZES | dict(num_layers=4, num_decoder_layers=4, num_experts=4, num_sparse_encoder_layers=2)
    sizes |= dict(num_sparse_decoder_layers=2, expert_capacity=64)
    return partial(SwitchTransformersConfig, **sizes | changes)


def t5gemma(decoder: dict[str, Any] | None = None, whole: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A decoder with other settings than the encoder if `decoder` is given."""
    both = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=67, sliding_window=5, query_pre_attn_scalar=12, max_position_embeddings=64,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    ) | changes  # fmt: skip
    encoder, decoder = T5GemmaModuleConfig(**both), T5GemmaModuleConfig(**both | (decoder or {}))
    return lambda: T5GemmaConfig(encoder=encoder, decoder=decoder, **dict(vocab_size=67) | (whole or {}))


BERT_SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=67,
    max_position_embeddings=64, layer_norm_eps=1e-3,
)  # fmt: skip


def bert_pair(
    encoder: Any, decoder: Any, of_encoder: dict[str, Any] | None = None, of_decoder: dict[str, Any] | None = None
) -> Any:
    def make() -> Any:
        first, second = encoder(**BERT_SIZES | (of_encoder or {})), decoder(**BERT_SIZES | (of_decoder or {}))
        return EncoderDecoderConfig.from_encoder_decoder_configs(first, second, decoder_start_token_id=2)

    return make


FAMILIES: dict[str, dict[str, Any]] = {
    "bart": bart_like(BartConfig),
    "plbart": bart_like(PLBartConfig),
    "mbart": bart_like(MBartConfig),
    "blenderbot": bart_like(partial(BlenderbotConfig, encoder_no_repeat_ngram_size=0)),
    "blenderbot-small": bart_like(BlenderbotSmallConfig),
    "pegasus": bart_like(PegasusConfig),
    "marian": bart_like(MarianConfig)
    | {
        "two vocabularies": small(
            MarianConfig, share_encoder_decoder_embeddings=False, decoder_vocab_size=71, vocab_size=67
        )
    },
    "m2m_100": bart_like(M2M100Config),
    "encoder-decoder": {
        "bert and bert": bert_pair(BertConfig, BertConfig),
        "roberta and narrow bert": bert_pair(
            RobertaConfig,
            BertConfig,
            dict(type_vocab_size=1),
            dict(hidden_size=24, num_attention_heads=2, hidden_act="relu", vocab_size=71, num_hidden_layers=1),
        ),
        "narrow electra and xlm-roberta": bert_pair(
            ElectraConfig, XLMRobertaConfig, dict(embedding_size=16, hidden_size=24), dict(type_vocab_size=1)
        ),
        "camembert and electra": bert_pair(
            CamembertConfig, ElectraConfig, None, dict(embedding_size=16, tie_word_embeddings=False)
        ),
        "bert-generation and itself": bert_pair(BertGenerationConfig, BertGenerationConfig),
        "bert and camembert": bert_pair(BertConfig, CamembertConfig, dict(hidden_act="silu")),
    },
    "mvp": bart_like(MvpConfig),
    "bigbird_pegasus": {
        "full": small(BigBirdPegasusConfig, attention_type="original_full"),
        "biases, untied, scaled": small(
            BigBirdPegasusConfig, use_bias=True, tie_word_embeddings=False, scale_embedding=True
        ),
        "sparse": small(BigBirdPegasusConfig, block_size=2, num_random_blocks=1),
        "sparse, two spare blocks, biases": small(
            BigBirdPegasusConfig, block_size=2, num_random_blocks=2, use_bias=True
        ),
    },
    "fsmt": {
        "plain": small(FSMTConfig, num_beams=1, src_vocab_size=67, tgt_vocab_size=71),
        "unscaled, gelu, deep decoder": small(
            FSMTConfig,
            num_beams=1,
            src_vocab_size=67,
            tgt_vocab_size=67,
            scale_embedding=False,
            activation_function="gelu",
            encoder_layers=1,
            decoder_layers=3,
        ),
        "tied": small(FSMTConfig, num_beams=1, src_vocab_size=67, tgt_vocab_size=67, tie_word_embeddings=True),
    },
    "mt5": t5_like(MT5Config),
    "umt5": t5_like(UMT5Config),
    "longt5": {
        "local": partial(LongT5Config, **T5_SIZES, local_radius=3),
        "summaries, gated, unscaled": partial(
            LongT5Config,
            **T5_SIZES,
            local_radius=4,
            encoder_attention_type="transient-global",
            global_block_size=4,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
        "few summaries, deep decoder": partial(
            LongT5Config,
            **T5_SIZES,
            local_radius=1,
            encoder_attention_type="transient-global",
            global_block_size=8,
            num_decoder_layers=3,
        ),
    },
    "switch_transformers": {
        "plain": switch(num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
        "tokens are dropped, router bias, gelu": switch(expert_capacity=3, router_bias=True, dense_act_fn="gelu"),
        "sparse in every layer, odd step, untied": switch(
            num_layers=2,
            num_decoder_layers=3,
            num_sparse_decoder_layers=3,
            num_sparse_encoder_layers=0,
            num_experts=3,
            expert_capacity=7,
            tie_word_embeddings=False,
        ),
    },
    "t5gemma": {
        "plain": t5gemma(),
        "split, biases, no caps": t5gemma(
            decoder=dict(
                hidden_size=24,
                num_attention_heads=3,
                num_key_value_heads=1,
                num_hidden_layers=3,
                intermediate_size=40,
                vocab_size=71,
                sliding_window=3,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            ),
            attention_bias=True,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            rms_norm_eps=1e-2,
            hidden_activation="silu",
        ),
        "untied, linear rope": t5gemma(
            whole=dict(tie_word_embeddings=False),
            num_key_value_heads=4,
            head_dim=16,
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        ),
    },
}

WHISPER_SIZES: dict[str, Any] = dict(
    vocab_size=160, num_mel_bins=80, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
    decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=40, max_source_positions=50, max_target_positions=64,
    decoder_start_token_id=91, pad_token_id=90, bos_token_id=90, eos_token_id=90, begin_suppress_tokens=[3, 90],
)  # fmt: skip
MOONSHINE_SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, vocab_size=67,
    encoder_num_attention_heads=2, decoder_num_attention_heads=2, max_position_embeddings=64,
)  # fmt: skip
SPEECH = {"whisper": partial(WhisperConfig, **WHISPER_SIZES), "moonshine": partial(MoonshineConfig, **MOONSHINE_SIZES)}
FIRST_CASES = {"t5": partial(T5Config, **T5_SIZES)} | {name: next(iter(of.values())) for name, of in FAMILIES.items()}
FIRST_CASES |= SPEECH
"""One case of every encoder–decoder family; t5, whisper and moonshine have tests of their own."""


def pair_of(config: Any, noise: float = 0.05) -> tuple[Any, EncoderDecoder]:
    """A random model of transformers in float32, and ours loaded from what it saved."""
    torch.manual_seed(0)
    auto = AutoModelForSpeechSeq2Seq if config.model_type in SPEECH else AutoModelForSeq2SeqLM
    theirs = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    unsaved = [*(theirs._keys_to_ignore_on_save or [])]
    if config.model_type == "fsmt":  # sines and cosines, which published checkpoints do not have
        unsaved += ["model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"]
    with torch.no_grad():
        for path, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if path not in unsaved and (isinstance(tensor, torch.nn.Parameter) or path == "final_logits_bias"):
                tensor.add_(torch.randn_like(tensor) * noise)
    ours = loaded(theirs)
    assert isinstance(ours, EncoderDecoder)
    return theirs, ours
