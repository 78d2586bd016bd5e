"""LongCat-Flash: two latent attentions and two dense MLPs per layer, and a mixture that runs beside the second half.

A router may also choose identity experts, which return their input: easy tokens cost less.

https://arxiv.org/abs/2509.01322
"""

from __future__ import annotations

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.checkpoint.names import Either, From, Names, choices
from lamina.config import Config
from lamina.models.decoder import Decoder, mlp_names
from lamina.models.deepseek import latent_names
from lamina.nn import Choice, GatedMLP, LatentAttention, Mixture, Positions, RMSNorm, Rotary
from lamina.nn.moe.names import expert_names


class ShortcutBlock(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        width, inner, act, eps = c.hidden_size, c.ffn_hidden_size, c.get("hidden_act", "silu"), c.rms_norm_eps
        self.attention_norms = nn.ModuleList(RMSNorm(width, eps) for _ in range(2))
        self.attentions = nn.ModuleList(attention(c) for _ in range(2))
        self.mlp_norms = nn.ModuleList(RMSNorm(width, eps) for _ in range(2))
        self.mlps = nn.ModuleList(GatedMLP(width, inner, act) for _ in range(2))
        choice = Choice(c.moe_topk, factor=c.get("routed_scaling_factor", 6.0))
        self.mixture = Mixture(
            width, c.n_routed_experts, c.expert_ffn_hidden_size, act, choice, balanced=True, exact=True,
            identity=c.get("zero_expert_num", 256),
        )  # fmt: skip
        self.specs = {f"attention{i}": one.spec for i, one in enumerate(self.attentions)}

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = self.attentions[0](self.attention_norms[0](x), memory["attention0"], shared, onto=x)
        y = self.mlp_norms[0](x)
        beside = self.mixture(y)
        x = self.mlps[0](y, onto=x)
        x = self.attentions[1](self.attention_norms[1](x), memory["attention1"], shared, onto=x)
        return self.mlps[1](self.mlp_norms[1](x), onto=x) + beside


def attention(c: Config) -> LatentAttention:
    """Queries are multiplied by a factor, which is one on the scores."""
    made = LatentAttention(c)
    made.scale *= (c.hidden_size / c.q_lora_rank) ** 0.5
    return made


EXPERTS = "blocks.{i}.mixture.experts"


def tensor_names(c: Config) -> Names:
    """Parameter names. Latents are multiplied by a factor after their norm, which is part of the norm's weight here."""
    factor = (c.hidden_size / c.kv_lora_rank) ** 0.5
    layer = "model.layers.{i}"
    experts, gate_up = expert_names(EXPERTS, f"{layer}.mlp.experts"), f"{EXPERTS}.gate_up"
    # a stack in transformers has matrices of identity experts too
    stack = From(f"{layer}.mlp.experts.gate_up_proj", lambda t: t[: c.n_routed_experts])
    kv_norm = From(f"{layer}.self_attn.{{n}}.kv_a_layernorm.weight", lambda t: t * factor)
    return {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norms.{n}": f"{layer}.input_layernorm.{{n}}",
        **latent_names("blocks.{i}.attentions.{n}", f"{layer}.self_attn.{{n}}"),
        "blocks.{i}.attentions.{n}.kv_norm.weight": kv_norm,
        "blocks.{i}.mlp_norms.{n}": f"{layer}.post_attention_layernorm.{{n}}",
        **mlp_names("blocks.{i}.mlps.{n}", f"{layer}.mlps.{{n}}"),
        "blocks.{i}.mixture.router.weight": f"{layer}.mlp.router.classifier.weight",
        "blocks.{i}.mixture.router.bias": f"{layer}.mlp.router.e_score_correction_bias",
        **experts,
        gate_up: Either(choices(experts[gate_up])[0], stack),
        "norm": "model.norm",
        "head": "lm_head",
    }


class LongcatFlash(Decoder):
    no_effect = ("num_key_value_heads",)
    ignored: tuple[str, ...] = ("model.mtp.*",)  # multi-token prediction

    def __init__(self, c: Config) -> None:
        c.require("router_bias", (False,), False)
        c.require("rope_interleave", (True,), True)
        c.require("attention_method", ("MLA",), "MLA")  # in published files; transformers reads none of these
        c.require("zero_expert_type", ("identity",), "identity")
        for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
            c.require(name, (True,), True)
        c.require("head_dim", (c.qk_rope_head_dim,), c.qk_rope_head_dim)  # by which transformers rotates
        dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        c.require("qk_head_dim", (dim,), dim)
        layers = c.get("num_layers") or c.num_hidden_layers // 2
        super().__init__(
            c,
            (ShortcutBlock(c) for _ in range(layers)),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            rope=Rotary.of(c, c.qk_rope_head_dim, 10_000_000.0),
            tied=c.get("tie_word_embeddings", False),
        )
        self.names = tensor_names(c)
        last = c.n_routed_experts + c.get("zero_expert_num", 256)  # transformers saves matrices of identity experts too
        unused = (f"model.layers.{{i}}.mlp.experts.{e}.*" for e in range(c.n_routed_experts, last))
        self.ignored = (*self.ignored, *unused)
