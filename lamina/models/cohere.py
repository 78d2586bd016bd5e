"""Command R: attention and MLP side by side after one norm; RoPE pairs neighbouring dimensions; logits are scaled.

In Cohere 2 three of four layers attend to a window, with RoPE, and the fourth to all tokens, without it.

https://cohere.com/blog/command-r  https://arxiv.org/abs/2504.00698
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina.attention.window import Full, Window
from lamina.config import Config
from lamina.models.transformer import Transformer, window_by_type
from lamina.nn import LayerNorm, SelfAttention


class HeadLayerNorm(LayerNorm):
    """Layer norm of each head, with a weight for each: [..., heads, dim] -> [..., heads, dim]"""

    def __init__(self, heads: int, dim: int, eps: float) -> None:
        super().__init__(dim, eps, weight=False, bias=False)
        self.weights = nn.Parameter(torch.ones(heads, dim))

    def forward(self, x: Tensor, dtype: torch.dtype | None = None, onto: Tensor | None = None) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        y = (super().forward(x, exact) * self.weights).to(dtype or x.dtype)
        return y if onto is None else onto + y


class Cohere(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention.q_norm.weights": "model.layers.{i}.self_attn.q_norm.weight",
        "blocks.{i}.attention.k_norm.weights": "model.layers.{i}.self_attn.k_norm.weight",
    }
    aliases = {"max_position_embeddings": "model_max_length"}  # where a file has both, the other is too small
    order = "parallel"
    tied = True
    eps = ("layer_norm_eps", 1e-5)
    rope_base = 500_000.0

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.head_factor = c.get("logit_scale", 0.0625)

    def make_norm(self, c: Config) -> LayerNorm:
        return LayerNorm(c.hidden_size, c.get(*self.eps), bias=False)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        norms: dict[str, Any] = {}
        if c.get("use_qk_norm", False):
            heads = dict(q_norm=c.num_attention_heads, k_norm=c.get("num_key_value_heads", c.num_attention_heads))
            norms = {name: HeadLayerNorm(count, c.head_width, c.get(*self.eps)) for name, count in heads.items()}
        return super().make_attention(c, layer, **dict(neighbours=True) | norms | options)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), scale=self.head_factor)


class Cohere2(Cohere):
    rope_base = 10_000.0
    no_effect = ("use_parallel_embedding",)

    def __init__(self, c: Config) -> None:
        for name in ("use_parallel_block", "use_gated_activation", "use_embedding_sharing"):  # in published files
            c.require(name, (True,), True)
        c.require("order_of_interleaved_layers", ("local_attn_first",), "local_attn_first")
        c.require("position_embedding_type", ("rope_gptj",), "rope_gptj")
        c.require("rotary_pct", (1.0,), 1.0)
        super().__init__(c)

    def make_window(self, c: Config, layer: int) -> Window:
        every = c.either("sliding_window_pattern", "layer_switch", default=4)
        c.ignore("layer_switch", "sliding_window_pattern")  # the same, and `layer_types` written short
        return window_by_type(c, layer, every=every, default=4096)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        rope = None if self.make_window(c, layer) == Full() else "default"
        return super().make_attention(c.with_values(use_qk_norm=False), layer, rope=rope, **options)
