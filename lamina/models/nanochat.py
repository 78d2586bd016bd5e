"""nanochat: norms without weights, also of the embeddings and of rotated queries and keys; an MLP of squared relus.

https://github.com/karpathy/nanochat
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import MLP, Norm, RMSNorm, Rotary, SelfAttention


class NanoChat(Transformer):
    names = Transformer.names | {
        "blocks.{i}.mlp.up": "model.layers.{i}.mlp.fc1",
        "blocks.{i}.mlp.down": "model.layers.{i}.mlp.fc2",
    }
    act = ("hidden_act", "relu2")

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.softcap = c.said("final_logit_softcapping", 15.0)

    def make_norm(self, c: Config) -> Norm:
        return RMSNorm(c.hidden_size, c.get(*self.eps), weight=False)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return MLP(c.hidden_size, c.intermediate_size, c.get(*self.act))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        norms = (RMSNorm(c.head_width, c.get(*self.eps), weight=False) for _ in range(2))
        own = dict(zip(("q_norm", "k_norm"), norms, strict=True))
        return super().make_attention(c, layer, **dict(norms_last=True) | own | options)

    def make_rope(self, c: Config) -> Rotary:
        return BackwardRotary.of(c, c.head_width, self.rope_base)

    def embed(self, ids: Tensor) -> Tensor:
        return self.norm(super().embed(ids))

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), softcap=self.softcap)


class BackwardRotary(Rotary):
    """RoPE that rotates by negative angles."""

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.frequencies = -self.frequencies
