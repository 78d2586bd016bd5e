"""Gemma: Llama with wide heads, gelu, norms that multiply by 1 + weight, and embeddings times √width.

https://arxiv.org/abs/2403.08295
"""

from __future__ import annotations

from torch import Tensor

from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import RMSNorm


class Gemma(Transformer):
    defaults = {"head_dim": 256}
    tied = True
    act = ("hidden_act", "gelu_pytorch_tanh")

    def __init__(self, c: Config) -> None:
        c.require("use_bidirectional_attention", (False,), False)
        if self.act[0] == "hidden_act":
            if c.get(*self.act) == "gelu":  # in the first releases, which were trained with the approximation
                c = c.with_values(hidden_act=self.act[1])
            c.require("hidden_activation", (None, c.get(*self.act)))  # an old name
        super().__init__(c)

    def make_norm(self, c: Config) -> RMSNorm:
        return RMSNorm(c.hidden_size, c.get(*self.eps), plus_one=True)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.embedding.embedding_dim**0.5, rounded=True)  # rounded as it was in training
