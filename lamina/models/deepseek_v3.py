"""DeepSeek V3: multi-head latent attention (MLA) and many small experts.

    latent, k_rope = down(x)        head h: softmax(q · [up_k(latent) | k_rope]) · up_v(latent)

The cache stores only one latent and one rotary key per token. The first layers have a dense MLP; in the others a token
uses the shared expert and its best routed experts, which must come from a few groups.

https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import Latent
from lamina.checkpoint.names import Stack
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import Decoder, mlp_names
from lamina.nn import Choice, GatedMLP, Linear, Mixture, RMSNorm, Rotary, rope_parameters
from lamina.nn.attention.rotary import RopeTable, yarn_scale


class LatentAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        bias = c.get("attention_bias", False)
        self.heads, self.rank, self.q_rank = c.num_attention_heads, c.kv_lora_rank, c.q_lora_rank
        nope_dim, rope_dim, value_dim = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.neighbours = c.get("rope_interleave", True)
        self.scale = score_scale(c)
        self.spec = Latent(self.rank, rope_dim)
        q_dim, kv_dim = self.heads * (nope_dim + rope_dim), self.rank + rope_dim
        if self.q_rank is None:
            self.q_kv = Linear(c.hidden_size, q_dim + kv_dim, bias=False)
            self.kv_bias = nn.Parameter(torch.zeros(kv_dim)) if bias else None
        else:
            self.down = Linear(c.hidden_size, self.q_rank + kv_dim, bias=bias)
            self.q_norm = RMSNorm(self.q_rank)
            self.q_up = Linear(self.q_rank, q_dim, bias=False)
        self.kv_norm = RMSNorm(self.rank)
        self.kv_up = nn.Parameter(torch.zeros(self.heads * (nope_dim + value_dim), self.rank))
        self.out = Linear(self.heads * value_dim, c.hidden_size, bias=bias)

    def forward(self, x: Tensor, memory: Memory, rope: RopeTable, onto: Tensor | None = None) -> Tensor:
        kv_dim = self.rank + self.spec.rope_dim
        if self.q_rank is None:
            q, kv = self.q_kv(x).tensor_split([-kv_dim], dim=-1)
            kv = kv if self.kv_bias is None else kv + self.kv_bias
        else:
            q, kv = self.down(x).tensor_split([-kv_dim], dim=-1)
            q = self.q_up(self.q_norm(q))
        out = memory.attend_latent(
            q.unflatten(-1, (self.heads, -1)).transpose(1, 2),  # [B, H, T, N + P]
            kv,  # [B, T, rank + P]
            norm=self.kv_norm,
            rope=rope,
            neighbours=self.neighbours,
            up=self.kv_up.unflatten(0, (self.heads, -1)),
            scale=self.scale,
        )  # [B, H, T, V]
        return self.out(out.transpose(1, 2).flatten(2), onto)


def score_scale(c: Config) -> float:
    """The factor on attention scores, larger if YaRN scales positions beyond the trained context."""
    settings = rope_parameters(c)
    stretched = settings["rope_type"] != "default" and settings.get("mscale_all_dim")
    sharper = yarn_scale(settings["factor"], settings["mscale_all_dim"]) if stretched else 1.0
    return sharper**2 * (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5


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


class Block(nn.Module):
    def __init__(self, c: Config, dense: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = LatentAttention(c)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.get("hidden_act", "silu")) if dense else mixture(c)
        self.specs = {"attention": self.attention.spec}

    def forward(self, x: Tensor, memory: Memory, rope: RopeTable) -> Tensor:
        x = self.attention(self.attention_norm(x), memory, rope, onto=x)
        return self.mlp(self.mlp_norm(x), onto=x)


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
            (Block(c, dense=i < c.first_k_dense_replace) for i in range(c.num_hidden_layers)),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            rope=Rotary(c.qk_rope_head_dim, rope_parameters(c), c.get("max_position_embeddings")),
            tied=c.get("tie_word_embeddings", False),
        )
        ahead = range(c.num_hidden_layers, c.num_hidden_layers + c.get("num_nextn_predict_layers", 1))
        self.ignored = tuple(f"model.layers.{i}.*" for i in ahead)  # multi-token prediction layers
