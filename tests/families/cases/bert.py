"""BERT and relatives as decoders without cross-attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import (
    BertConfig,
    BertGenerationConfig,
    CamembertConfig,
    ElectraConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=67,
    max_position_embeddings=256, layer_norm_eps=1e-3, is_decoder=True,
)  # fmt: skip
PADDING = 2  # not an id of the rows that are compared: transformers counts no position for padding


def like_bert(config: Any, **changes: Any) -> dict[str, Any]:
    small = partial(config, **SIZES | changes)
    return {
        "plain": small,
        "relu, one layer, eps": partial(small, hidden_act="relu", num_hidden_layers=1, layer_norm_eps=0.1),
        "untied, one head, no second type": partial(
            small, tie_word_embeddings=False, num_attention_heads=1, type_vocab_size=1
        ),
    }


FAMILIES = {
    "bert": like_bert(BertConfig),
    "roberta": like_bert(RobertaConfig, pad_token_id=PADDING),
    "xlm-roberta": like_bert(XLMRobertaConfig, pad_token_id=PADDING),
    "camembert": like_bert(CamembertConfig, pad_token_id=PADDING),
    "electra": like_bert(ElectraConfig, embedding_size=24)
    | {"as wide as its embeddings": partial(ElectraConfig, **SIZES, embedding_size=32)},
    "bert-generation": like_bert(BertGenerationConfig),
}
