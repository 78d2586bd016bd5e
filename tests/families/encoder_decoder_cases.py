"""Small random checkpoints of encoder–decoder families: for each, cases and functions that make a config."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import (
    BartConfig,
    BlenderbotConfig,
    BlenderbotSmallConfig,
    M2M100Config,
    MarianConfig,
    MBartConfig,
    PegasusConfig,
    PLBartConfig,
)

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
}
