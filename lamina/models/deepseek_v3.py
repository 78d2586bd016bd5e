"""DeepSeek V3: multi-head latent attention (MLA) and many small experts.

    latent, k_rope = down(x)        head h: softmax(q · [up_k(latent) | k_rope]) · up_v(latent)

The cache stores only one latent and one rotary key per token. The first layers have a dense MLP; in the others a token
uses the shared expert and its best routed experts, which must come from a few groups.

https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

from lamina.checkpoint.names import Stack
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import Decoder, mlp_names
from lamina.nn import Block, Choice, GatedMLP, LatentAttention, Mixture, RMSNorm, Rotary


def mixture(c: Config) -> Mixture:
    """Scores are sigmoids; a bias, which balances the load in training, takes part in the choice only."""
    experts, groups, inner = c.n_routed_experts, c.n_group, c.moe_intermediate_size
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise InputError(
            f"n_routed_experts={experts} cannot be divided into n_group={groups} groups of two experts or more"
        )
    choice = Choice(
        c.num_experts_per_tok, "sigmoid", normed=c.get("norm_topk_prob", True), factor=c.routed_scaling_factor,
        groups=groups, groups_each=c.topk_group,
    )  # fmt: skip
    return Mixture(
        c.hidden_size, experts, inner, c.get("hidden_act", "silu"), choice, shared=inner * c.n_shared_experts,
        balanced=True, exact=True,
    )  # fmt: skip


def block(c: Config, dense: bool) -> Block:
    mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.get("hidden_act", "silu")) if dense else mixture(c)
    norms = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2))
    return Block(LatentAttention(c), mlp, attention_norm=next(norms), mlp_norm=next(norms))


class DeepseekV3(Decoder):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        "blocks.{i}.attention.q_kv": (
            "model.layers.{i}.self_attn.q_proj",
            "model.layers.{i}.self_attn.kv_a_proj_with_mqa",
        ),
        "blocks.{i}.attention.kv_bias": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.bias",
        "blocks.{i}.attention.down": (
            "model.layers.{i}.self_attn.q_a_proj",
            "model.layers.{i}.self_attn.kv_a_proj_with_mqa",
        ),
        "blocks.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_a_layernorm",
        "blocks.{i}.attention.q_up": "model.layers.{i}.self_attn.q_b_proj",
        "blocks.{i}.attention.kv_norm": "model.layers.{i}.self_attn.kv_a_layernorm",
        "blocks.{i}.attention.kv_up": "model.layers.{i}.self_attn.kv_b_proj.weight",
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
        "blocks.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        **mlp_names("blocks.{i}.mlp", "model.layers.{i}.mlp"),
        "blocks.{i}.mlp.router.weight": "model.layers.{i}.mlp.gate.weight",
        "blocks.{i}.mlp.router.bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
        "blocks.{i}.mlp.experts.gate_up": Stack(
            ("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "model.layers.{i}.mlp.experts.{e}.up_proj.weight")
        ),
        "blocks.{i}.mlp.experts.down": Stack("model.layers.{i}.mlp.experts.{e}.down_proj.weight"),
        **mlp_names("blocks.{i}.mlp.shared", "model.layers.{i}.mlp.shared_experts"),
        "norm": "model.norm",
        "head": "lm_head",
    }

    def __init__(self, c: Config) -> None:
        c.require("scoring_func", ("sigmoid",), "sigmoid")
        c.require("topk_method", ("noaux_tc",), "noaux_tc")
        c.require("moe_layer_freq", (1,), 1)
        super().__init__(
            c,
            (block(c, dense=i < c.first_k_dense_replace) for i in range(c.num_hidden_layers)),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            rope=Rotary.of(c.with_values(partial_rotary_factor=1.0), c.qk_rope_head_dim),
            tied=c.get("tie_word_embeddings", False),
        )
        ahead = range(c.num_hidden_layers, c.num_hidden_layers + c.get("num_nextn_predict_layers", 1))
        self.ignored = tuple(f"model.layers.{i}.*" for i in ahead)  # multi-token prediction layers
