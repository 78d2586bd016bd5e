"""AFM (Arcee): Llama with an MLP without gate, whose activation is the square of relu.

https://www.arcee.ai/blog/deep-dive-afm-4-5b-the-first-arcee-foundational-model
"""

from __future__ import annotations

from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import MLP


class Arcee(Transformer):
    eps = ("rms_norm_eps", 1e-5)
    act = ("hidden_act", "relu2")

    def make_mlp(self, c: Config, layer: int) -> MLP:
        return MLP(c.hidden_size, c.intermediate_size, c.get(*self.act), c.get("mlp_bias", False))
