"""Code World Model: Llama 3 with a sliding window in three of four layers.

https://arxiv.org/abs/2510.02387
"""

from __future__ import annotations

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.models.decoder import layer_types
from lamina.models.transformer import Transformer


class Cwm(Transformer):
    defaults = {"head_dim": 128, "sliding_window": 8192}
    eps = ("rms_norm_eps", 1e-5)
    rope_base = 1_000_000.0

    @classmethod
    def complete(cls, config: Config) -> Config:
        c = super().complete(config)
        if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
            c = c.with_values(rope_parameters=ROPE)
        return c

    def make_window(self, c: Config, layer: int) -> Window:
        known = ("full_attention", "sliding_attention")
        return (
            Full()
            if layer_types(c, known, lambda i: known[i % 4 > 0])[layer] == known[0]
            else Sliding(c.sliding_window)
        )


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Settings of a configuration that has none."""
