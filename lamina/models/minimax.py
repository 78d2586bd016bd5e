"""MiniMax: lightning attention and softmax attention in turn, each followed by a mixture of experts.

    x = norm(x)        x = alpha x + beta mixer(x)        and the same with the mixture: residuals start behind the norm

https://arxiv.org/abs/2501.08313
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.attention.window import Full, Sliding, Window
from lamina.cache.memory import Memory
from lamina.checkpoint.names import Either, From, Value
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import layer_types
from lamina.models.transformer import Transformer
from lamina.nn import Choice, LightningMixer, Mixer, Mixture, Norm, Positions, Rotary, SelfAttention
from lamina.nn.moe.names import expert_names
from lamina.nn.recurrent.gated_delta import regroup_by_part

LAYER, ATTENTION = "model.layers.{i}", "model.layers.{i}.self_attn"
FACTORS = [(kind, part) for kind in ("full", "linear") for part in ("alpha", "beta")]


class MiniMaxBlock(nn.Module):
    """alphas: multipliers of the residuals of attention and mixture."""

    def __init__(self, attention: Mixer, mlp: nn.Module, norms: tuple[Norm, Norm], alphas: tuple[float, float]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp, self.alphas = attention, mlp, alphas
        self.specs = attention.specs

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        y = self.attention_norm(x)
        y = self.mlp_norm(self.attention(y, memory, shared, onto=self.alphas[0] * y))
        return self.mlp(y, onto=self.alphas[1] * y)


def tensor_names(c: Config) -> dict[str, Value]:
    """Parameter names. Checkpoints interleave q, k and v of lightning attention by head."""
    head = c.head_width
    return Transformer.names | {
        "blocks.{i}.attention.qkv": Either(
            From(f"{ATTENTION}.qkv_proj", regroup_by_part(c.num_attention_heads, head, head, head)),
            (f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"),
        ),
        "blocks.{i}.attention.gate": f"{ATTENTION}.output_gate",
        "blocks.{i}.attention.norm": f"{ATTENTION}.norm",
        "blocks.{i}.attention.out": Either(f"{ATTENTION}.o_proj", f"{ATTENTION}.out_proj"),
        "blocks.{i}.mlp.router": Either(f"{LAYER}.block_sparse_moe.gate", f"{LAYER}.mlp.gate"),
        **expert_names(
            "blocks.{i}.mlp.experts", f"{LAYER}.block_sparse_moe.experts", f"{LAYER}.mlp.experts",
            parts=("w1", "w3", "w2"),
        ),
    }  # fmt: skip


class MiniMax(Transformer):
    no_effect = ("block_size", "shared_moe_mode")  # how transformers computes; of a shared expert, which none has
    aliases = {  # names in the first release
        **{f"{kind}_attn_{part}_factor": f"layernorm_{kind}_attention_{part}" for kind, part in FACTORS},
        **{f"mlp_{part}_factor": f"layernorm_mlp_{part}" for part in ("alpha", "beta")},
    }
    ignored = tuple(f"{ATTENTION}.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
    eps = ("rms_norm_eps", 1e-5)
    rope_base = 1e6

    def __init__(self, c: Config) -> None:
        c.require("postnorm", (True,), True)  # in published files
        c.ignore("shared_intermediate_size")
        if (shared := c.values.get("shared_intermediate_size", 0)) not in (0, [0]):
            raise InputError(f"shared_intermediate_size={shared} in the configuration is not supported; known: 0")
        c = c.with_values(num_key_value_heads=c.get("num_key_value_heads", 8))
        super().__init__(c)
        self.names = tensor_names(c)

    def make_block(self, c: Config, layer: int) -> nn.Module:
        kind = "linear" if linear(c, layer) else "full"
        alphas = c.get(f"{kind}_attn_alpha_factor", 1), c.get("mlp_alpha_factor", 1)
        norms = self.make_norm(c), self.make_norm(c)
        return MiniMaxBlock(self.make_mixer(c, layer), self.make_mlp(c, layer), norms, alphas)

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        if not linear(c, layer):
            return self.make_attention(c, layer)
        return LightningMixer(
            c.hidden_size, c.num_attention_heads, c.head_width, act=c.get(*self.act), eps=1e-6,
            decay=1 - layer / (c.num_hidden_layers - 1 + 1e-5) + 1e-5, factor=c.get("linear_attn_beta_factor", 1),
        )  # fmt: skip

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        factors = 1.0, c.get("full_attn_beta_factor", 1)
        return super().make_attention(c, layer, **dict(bias=False, out_bias=False, factors=factors) | options)

    def make_rope(self, c: Config) -> Rotary:
        """On the first `rotary_dim` dimensions of a head. (transformers 5 ignores it, and rotates all.)"""
        return Rotary.of(c, c.head_width, self.rope_base, partial=c.get("rotary_dim", c.head_width) / c.head_width)

    def make_window(self, c: Config, layer: int) -> Window:
        window = c.get("sliding_window")
        return Full() if window is None else Sliding(window)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        experts, each = c.either("num_local_experts", "num_experts", default=8), c.get("num_experts_per_tok", 2)
        choice, factor = Choice(each, "softmax", normed=True), c.get("mlp_beta_factor", 1)
        return Mixture(c.hidden_size, experts, c.intermediate_size, c.get(*self.act), choice, factor=factor)


def linear(c: Config, layer: int) -> bool:
    """True if a layer has lightning attention."""
    known = ["full_attention", "linear_attention"]
    attends = c.get("attn_type_list", [i % 2 == 0 for i in range(c.num_hidden_layers)])  # 1: softmax, 0: lightning
    return layer_types(c, known, lambda i: known[not attends[i]])[layer] == "linear_attention"
