"""OLMo Hybrid: three layers of the gated delta rule (pre-norm) for each layer of attention (post-norm).

Strengths of the delta rule reach 2, so that a state can change its sign. Released models have no RoPE.

https://allenai.org/olmo
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lamina.checkpoint.names import Either, From
from lamina.config import Config
from lamina.models.decoder import layer_types
from lamina.models.transformer import Transformer
from lamina.nn import Block, GatedDeltaMixer, RMSNorm, Rotary, SelfAttention
from lamina.nn.attention.rope_settings import plain

LAYER, DELTA = "model.layers.{i}", "model.layers.{i}.linear_attn"


def taps(name: str) -> From:
    return From(f"{DELTA}.{name}.weight", lambda t: t.squeeze(1))


class OlmoHybrid(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention_norm": Either(f"{LAYER}.attention_layer_norm", f"{LAYER}.input_layernorm"),
        "blocks.{i}.mlp_norm": Either(f"{LAYER}.feedforward_layer_norm", f"{LAYER}.post_attention_layernorm"),
        "blocks.{i}.attention_post_norm": Either(
            f"{LAYER}.post_attention_layernorm",
            f"{LAYER}.feedforward_layer_norm",  # what transformers writes
        ),
        "blocks.{i}.mlp_post_norm": f"{LAYER}.post_feedforward_layernorm",
        "blocks.{i}.attention.project": tuple(f"{DELTA}.{name}_proj" for name in "qkvgba"),
        "blocks.{i}.attention.conv.weight": Either(
            (taps("q_conv1d"), taps("k_conv1d"), taps("v_conv1d")), taps("conv1d")
        ),
        "blocks.{i}.attention.A": From(f"{DELTA}.A_log", lambda t: -t.float().exp()),
        "blocks.{i}.attention.dt_bias": f"{DELTA}.dt_bias",
        "blocks.{i}.attention.norm": f"{DELTA}.o_norm",
        "blocks.{i}.attention.out": Either(f"{LAYER}.self_attn.o_proj", f"{DELTA}.o_proj"),
    }

    def make_block(self, c: Config, layer: int) -> nn.Module:
        mlp, norms = self.make_mlp(c, layer), (self.make_norm(c), self.make_norm(c))
        if kind(c, layer) == "full_attention":
            attention = self.make_attention(c, layer)
            return Block(attention, mlp, attention_post_norm=norms[0], mlp_post_norm=norms[1])
        return Block(self.make_delta(c), mlp, attention_norm=norms[0], mlp_norm=norms[1])

    def make_delta(self, c: Config) -> GatedDeltaMixer:
        heads = c.num_attention_heads
        key_heads, value_heads = c.get("linear_num_key_heads", heads), c.get("linear_num_value_heads", heads)
        key_dim = c.get("linear_key_head_dim", int(0.75 * c.hidden_size / key_heads))
        return GatedDeltaMixer(
            c.hidden_size, key_heads, value_heads, key_dim, c.get("linear_value_head_dim", 2 * key_dim),
            c.get("linear_conv_kernel_dim", 4), eps=1e-5, act=c.get(*self.act),
            doubled=c.get("linear_allow_neg_eigval", True),
        )  # fmt: skip

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        """Norms of all queries and of all keys together."""
        heads, eps = c.num_attention_heads, c.get(*self.eps)
        sizes = heads * c.head_width, c.get("num_key_value_heads", heads) * c.head_width
        norms = dict(zip(("q_norm", "k_norm"), (RMSNorm(size, eps) for size in sizes), strict=True))
        rope = None if rope_base(c) is None else "default"
        return super().make_attention(c, layer, rope=rope, **norms, **options)

    def make_rope(self, c: Config) -> Rotary | None:
        base = rope_base(c)
        c.ignore("rope_parameters.rope_type", "rope_parameters.rope_theta")  # where there is no RoPE
        return None if base is None else Rotary.of(c, c.head_width, base)


def rope_base(c: Config) -> float | None:
    """The base of RoPE; None, which files have as null: there is no RoPE."""
    given = plain(c, "rope_scaling") or plain(c, "rope_parameters")
    return given.get("rope_theta") if "rope_theta" in given else c.said("rope_theta", 10_000.0)


def kind(c: Config, layer: int) -> str:
    """linear_attention or full_attention; every fourth layer attends, or the last one if there are fewer."""
    count = c.num_hidden_layers
    known = ["linear_attention", "full_attention"]
    return layer_types(c, known, lambda i: known[i % 4 == 3 or (count < 4 and i == count - 1)])[layer]
