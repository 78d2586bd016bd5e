"""RWKV-4: x + time(norm(x)), then x + channel(norm(x)); both mix each token with the one before it.

Every `rescale_every` layers the stream is halved, and with it what later layers add, so that float16 does not overflow.

https://arxiv.org/abs/2305.13048
"""

from __future__ import annotations

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.config import Config
from lamina.models.decoder import Decoder
from lamina.nn import ChannelMixer, LayerNorm, Positions, TimeMixer, rwkv_names

LAYER = "rwkv.blocks.{i}"


class RwkvBlock(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        width, eps, every = c.hidden_size, c.get("layer_norm_epsilon", 1e-5), c.get("rescale_every", 6)
        factor = 0.5 ** (layer // every) if every > 0 else 1.0
        self.halves = every > 0 and (layer + 1) % every == 0
        self.first_norm = LayerNorm(width, eps) if layer == 0 else None
        self.time_norm, self.channel_norm = LayerNorm(width, eps), LayerNorm(width, eps)
        self.time = TimeMixer(width, c.get("attention_hidden_size", width), factor=factor)
        self.channel = ChannelMixer(width, c.get("intermediate_size", 4 * width), factor=factor)
        self.specs = {**self.time.specs, **self.channel.specs}

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = x if self.first_norm is None else self.first_norm(x)
        x = self.time(self.time_norm(x), memory, shared, onto=x)
        x = self.channel(self.channel_norm(x), memory, onto=x)
        return x / 2 if self.halves else x


class Rwkv(Decoder):
    no_effect = ("context_length",)  # a recurrence goes on at any length
    names = {
        "embedding": "rwkv.embeddings",
        "blocks.{i}.first_norm": f"{LAYER}.pre_ln",
        "blocks.{i}.time_norm": f"{LAYER}.ln1",
        "blocks.{i}.channel_norm": f"{LAYER}.ln2",
        **rwkv_names("blocks.{i}.time", "blocks.{i}.channel", f"{LAYER}.attention", f"{LAYER}.feed_forward"),
        "norm": "rwkv.ln_out",
        "head": "head",
    }

    def __init__(self, c: Config) -> None:
        super().__init__(
            c,
            (RwkvBlock(c, layer) for layer in range(c.num_hidden_layers)),
            LayerNorm(c.hidden_size),
            rope=None,
            tied=c.get("tie_word_embeddings", False),
        )
