"""Mistral: Llama with a sliding window in every layer, if the configuration has one.

Ministral has a window in some layers. In Ministral 3 queries are multiplied by a factor that grows slowly with their
position, once that is beyond the context of the first training phase.

https://arxiv.org/abs/2310.06825  https://mistral.ai/news/ministraux  https://mistral.ai/news/mistral-3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.models.transformer import Transformer, window_by_type
from lamina.nn import Positions, SelfAttention, rope_parameters


class Mistral(Transformer):
    def make_window(self, c: Config, layer: int) -> Window:
        size = c.said("sliding_window", 4096)
        return Full() if size is None else Sliding(size)


class Ministral(Transformer):
    defaults = {"sliding_window": 4096}

    def make_window(self, c: Config, layer: int) -> Window:
        return window_by_type(c, layer, every=1 if c.get("sliding_window") is None else c.num_hidden_layers + 1)


class Ministral3(Mistral):
    defaults = {"head_dim": 128, "sliding_window": None}
    no_effect = ("rope_parameters.max_position_embeddings",)  # the field of the same name again
    eps = ("rms_norm_eps", 1e-5)

    @classmethod
    def complete(cls, config: Config) -> Config:
        c = super().complete(config)
        if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
            c = c.with_values(rope_parameters=ROPE)
        return c

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        settings = Config(rope_parameters(c, more=("llama_4_scaling_beta", "original_max_position_embeddings")))
        self.growth = settings.get("llama_4_scaling_beta")
        self.trained = None if self.growth is None else settings.original_max_position_embeddings

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, factored=True, **options)

    def prepare(self, positions: Tensor) -> Positions:
        found = super().prepare(positions)
        if self.growth is None or self.trained is None:
            return found
        steps = torch.div(positions, self.trained, rounding_mode="floor").float()
        return found._replace(factor=1 + self.growth * steps.log1p())


ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Settings of a configuration that has none."""
