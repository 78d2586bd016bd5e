"""Families in which an indexer selects the tokens that attention reads.

Indexers have many heads here: a score is zero where no head's product is positive, and of tokens with equal scores
transformers selects any.
"""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV32Config, GlmMoeDsaConfig

from tests.families.cases.llama_like import small
from tests.families.cases.mixtures import YARN

SPARSE = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10,
    moe_intermediate_size=20, n_routed_experts=8, n_group=1, topk_group=1, num_experts_per_tok=3,
    first_k_dense_replace=1, index_n_heads=16, index_head_dim=8, index_topk=4, initializer_range=0.2,
)  # fmt: skip


def make(**changes: Any) -> GlmMoeDsaConfig:
    return small(GlmMoeDsaConfig, **SPARSE | changes)()


FAMILIES = {
    "deepseek_v32": {
        "four tokens of each": small(DeepseekV32Config, **SPARSE),
        "nine, groups, biases, tied, all sparse": small(
            DeepseekV32Config, **SPARSE | dict(
                index_topk=9, n_group=4, topk_group=2, index_head_dim=12, qk_rope_head_dim=6
            ), attention_bias=True, tie_word_embeddings=True, mlp_layer_types=["sparse", "sparse"],
            n_shared_experts=2,
        ),
        "yarn, not normed, wide latent": small(
            DeepseekV32Config, **SPARSE | dict(kv_lora_rank=40, index_topk=7), norm_topk_prob=False, mlp_bias=True,
            routed_scaling_factor=0.7, rope_parameters=YARN | dict(mscale=0.8, mscale_all_dim=1.1),
        ),
        "more than there are": small(DeepseekV32Config, **SPARSE | dict(index_topk=64)),
    },
    "glm_moe_dsa": {
        "selection shared": small(GlmMoeDsaConfig, **SPARSE, indexer_types=["full", "shared"]),
        "a period, biases, tied": small(
            GlmMoeDsaConfig, **SPARSE | dict(index_topk=9, index_head_dim=4), num_hidden_layers=4, index_topk_freq=3,
            index_skip_topk_offset=1, attention_bias=True, tie_word_embeddings=True,
        ),
        "a pattern, groups": small(
            GlmMoeDsaConfig, **SPARSE | dict(n_group=4, topk_group=2), num_hidden_layers=3, index_topk_pattern="FFS",
        ),
        "more than there are": small(GlmMoeDsaConfig, **SPARSE | dict(index_topk=64)),
    },
}  # fmt: skip
