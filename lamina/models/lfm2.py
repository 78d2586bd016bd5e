"""LFM2: most layers mix tokens with a short convolution between two gates, a few with grouped-query attention.

    B, C, x = inward(u)        outward(C · convolve(B · x))

https://arxiv.org/abs/2511.23404
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.checkpoint.names import From
from lamina.config import Config
from lamina.models.decoder import Decoder, layer_types, qkv_names
from lamina.nn import Choice, GatedMLP, Linear, Mixture, Positions, RMSNorm, Rotary, SelfAttention, ShortConvolution
from lamina.nn.moe.names import expert_names


class GatedConvolution(nn.Module):
    """B gates the input of the convolution, C its output."""

    def __init__(self, width: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.inward = Linear(width, 3 * width, bias=bias)
        self.conv = ShortConvolution(width, kernel, bias=bias)
        self.outward = Linear(width, width, bias=bias)
        self.spec = self.conv.spec

    def forward(self, u: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        B, C, x = self.inward(u).chunk(3, dim=-1)
        return self.outward(self.conv(x, memory, gates=(B, C)), onto)


class Block(nn.Module):
    def __init__(self, c: Config, kind: str, head_dim: int, mlp: nn.Module) -> None:
        super().__init__()
        self.mixer: GatedConvolution | SelfAttention
        if kind == "conv":
            self.mixer = GatedConvolution(c.hidden_size, c.get("conv_L_cache", 3), c.get("conv_bias", False))
        else:
            self.mixer = SelfAttention(
                c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim,
                q_norm=RMSNorm(head_dim, c.norm_eps), k_norm=RMSNorm(head_dim, c.norm_eps),
            )  # fmt: skip
        self.mixer_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = mlp
        self.specs = {"conv" if kind == "conv" else "attention": self.mixer.spec}

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = self.mixer(self.mixer_norm(x), memory, shared, onto=x)
        return self.mlp(self.mlp_norm(x), onto=x)


def inner_width(c: Config) -> int:
    """The inner width of the MLP: as configured, or two thirds of that, rounded up to a multiple."""
    width = c.get("block_ff_dim") or c.intermediate_size
    if not c.get("block_auto_adjust_ff_dim", True):
        return width
    width, multiple = int(2 * width / 3), c.get("block_multiple_of", 256)
    return -(-int(c.get("block_ffn_dim_multiplier", 1.0) * width) // multiple) * multiple


def layer_kinds(c: Config) -> Sequence[str]:
    """The kind of each layer: conv or full_attention."""
    attending = c.get("full_attn_idxs", range(c.num_hidden_layers))
    return layer_types(c, ["conv", "full_attention"], lambda i: "full_attention" if i in attending else "conv")


class Lfm2(Decoder):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.mixer_norm": "model.layers.{i}.operator_norm",
        "blocks.{i}.mixer.inward": "model.layers.{i}.conv.in_proj",
        "blocks.{i}.mixer.conv": "model.layers.{i}.conv.conv",
        "blocks.{i}.mixer.conv.weight": From("model.layers.{i}.conv.conv.weight", lambda t: t.squeeze(1)),
        "blocks.{i}.mixer.outward": "model.layers.{i}.conv.out_proj",
        **qkv_names("blocks.{i}.mixer", "model.layers.{i}.self_attn"),
        "blocks.{i}.mixer.q_norm": "model.layers.{i}.self_attn.q_layernorm",
        "blocks.{i}.mixer.k_norm": "model.layers.{i}.self_attn.k_layernorm",
        "blocks.{i}.mixer.out": "model.layers.{i}.self_attn.out_proj",
        "blocks.{i}.mlp_norm": "model.layers.{i}.ffn_norm",
        "blocks.{i}.mlp.gate_up": ("model.layers.{i}.feed_forward.w1", "model.layers.{i}.feed_forward.w3"),
        "blocks.{i}.mlp.down": "model.layers.{i}.feed_forward.w2",
        "norm": "model.embedding_norm",
        "head": "lm_head",
    }

    no_effect = ("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads", "theta")  # the same again

    def __init__(self, c: Config) -> None:
        for name in ("block_use_swiglu", "use_pos_enc"):  # in published files; transformers reads neither
            c.require(name, (True,), True)
        head_dim = c.head_width
        super().__init__(
            c,
            (Block(c, kind, head_dim, self.make_mlp(c, i)) for i, kind in enumerate(layer_kinds(c))),
            RMSNorm(c.hidden_size, c.norm_eps),
            rope=Rotary.of(c, head_dim, base=1_000_000.0),
            tied=c.get("tie_embedding", c.get("tie_word_embeddings", True)),
        )

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return GatedMLP(c.hidden_size, inner_width(c))


class Lfm2Moe(Lfm2):
    """The first layers have a dense MLP, the others a mixture of experts."""

    names = Lfm2.names | {
        "blocks.{i}.mlp.router": "model.layers.{i}.feed_forward.gate",
        "blocks.{i}.mlp.router.bias": "model.layers.{i}.feed_forward.expert_bias",
        **expert_names(
            "blocks.{i}.mlp.experts", "model.layers.{i}.feed_forward.experts", parts=("w1", "w3", "w2")
        ),
    }  # fmt: skip

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        if layer < c.get("num_dense_layers", 2):
            return GatedMLP(c.hidden_size, c.intermediate_size)
        choice = Choice(
            c.get("num_experts_per_tok", 4), "sigmoid", normed=c.get("norm_topk_prob", True),
            factor=c.get("routed_scaling_factor", 1.0), eps=1e-6,
        )  # fmt: skip
        experts, inner = c.get("num_experts", 32), c.get("moe_intermediate_size", 1792)
        return Mixture(c.hidden_size, experts, inner, "silu", choice, balanced=c.get("use_expert_bias", True))
