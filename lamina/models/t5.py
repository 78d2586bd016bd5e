"""T5: an encoder and a decoder with similar blocks; positions are a learned bias on the scores, shared by all layers.

https://arxiv.org/abs/1910.10683 (v1.1, with gated feed-forward: https://arxiv.org/abs/2002.05202)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import Value
from lamina.config import Config
from lamina.encoder import Encoder, EncoderDecoder
from lamina.nn import MLP, CrossAttention, Embedding, GatedMLP, Linear, Positions, RelativeBias, RMSNorm, SelfAttention

LARGEST = torch.finfo(torch.float16).max - 1000  # limit on hidden states in float16


def norm(c: Config) -> RMSNorm:
    return RMSNorm(c.d_model, c.layer_norm_epsilon)


def feed_forward(c: Config) -> MLP | GatedMLP:
    known = ("relu", "gelu", "gelu_new", "silu")
    kind = c.require("feed_forward_proj", [*known, *(f"gated-{act}" for act in known)], "relu")
    if not kind.startswith("gated-"):
        return MLP(c.d_model, c.d_ff, kind)
    act = kind.removeprefix("gated-")
    return GatedMLP(c.d_model, c.d_ff, "gelu_new" if act == "gelu" else act)


def position_bias(c: Config, both_ways: bool) -> RelativeBias:
    farthest = c.get("relative_attention_max_distance", 128)
    return RelativeBias(c.num_heads, c.relative_attention_num_buckets, farthest, both_ways=both_ways)


def bounded(x: Tensor) -> Tensor:
    """Clamps values that overflow float16, as transformers does: T5 was trained in bfloat16, which has a larger range.
    Elementwise and always, so that a row does not depend on the other rows of its batch."""
    return x.clamp(-LARGEST, LARGEST) if x.dtype == torch.float16 else x


class EncoderBlock(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm = norm(c)
        self.attention = SelfAttention(c.d_model, c.num_heads, c.num_heads, c.d_kv, scale=1.0, rope=None)
        self.mlp_norm = norm(c)
        self.mlp = feed_forward(c)
        self.specs: LayerSpecs = {"attention": self.attention.spec}

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = bounded(x + self.attention(self.attention_norm(x), memory, shared))
        return bounded(x + self.mlp(self.mlp_norm(x)))


class Block(EncoderBlock):
    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.source_norm = norm(c)
        self.source = CrossAttention(c.d_model, c.num_heads, c.d_kv, scale=1.0)
        self.specs = {"attention": self.attention.spec, "source": self.source.spec}

    def cross(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(states)

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = bounded(x + self.attention(self.attention_norm(x), memory["attention"], shared))
        x = bounded(x + self.source(self.source_norm(x), memory["source"]))
        return bounded(x + self.mlp(self.mlp_norm(x)))


class T5Encoder(Encoder):
    def __init__(self, c: Config, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.bias = position_bias(c, both_ways=True)
        self.blocks = nn.ModuleList(EncoderBlock(c) for _ in range(c.num_layers))
        self.norm = norm(c)

    @property
    def context(self) -> None:
        """None: positions are relative, and `n_positions` in a configuration is the training length, not a limit."""
        return None

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def prepare(self, positions: Tensor) -> Positions:
        return Positions(bias=self.bias)

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)


def stack_names(ours: str, theirs: str, mlp: int) -> dict[str, Value]:
    """Parameter names of the encoder or the decoder; `mlp`: index of the MLP among the sublayers of a block."""
    block, part = f"{ours}blocks.{{i}}", f"{theirs}.block.{{i}}.layer"
    dense = f"{part}.{mlp}.DenseReluDense"
    return {
        f"{ours}bias": f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{block}.attention_norm": f"{part}.0.layer_norm",
        f"{block}.attention.qkv": tuple(f"{part}.0.SelfAttention.{name}" for name in "qkv"),
        f"{block}.attention.out": f"{part}.0.SelfAttention.o",
        f"{block}.mlp_norm": f"{part}.{mlp}.layer_norm",
        f"{block}.mlp.up": f"{dense}.wi",
        f"{block}.mlp.gate_up": (f"{dense}.wi_0", f"{dense}.wi_1"),
        f"{block}.mlp.down": f"{dense}.wo",
        f"{ours}norm": f"{theirs}.final_layer_norm",
    }


class T5(EncoderDecoder):
    names = {
        "embedding": "shared",
        "encoder.embedding": "encoder.embed_tokens",
        **stack_names("encoder.", "encoder", mlp=1),
        **stack_names("", "decoder", mlp=2),
        "blocks.{i}.source_norm": "decoder.block.{i}.layer.1.layer_norm",
        "blocks.{i}.source.q": "decoder.block.{i}.layer.1.EncDecAttention.q",
        "blocks.{i}.source.kv": tuple(f"decoder.block.{{i}}.layer.1.EncDecAttention.{name}" for name in "kv"),
        "blocks.{i}.source.out": "decoder.block.{i}.layer.1.EncDecAttention.o",
        "head": "lm_head",
    }
    ignored = (
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    )

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.vocab = c.vocab_size
        self.start_ids = (c.get("decoder_start_token_id", c.get("pad_token_id", 0)),)
        self.embedding = Embedding(c.vocab_size, c.d_model)
        self.encoder = T5Encoder(c, self.embedding)
        self.bias = position_bias(c, both_ways=False)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.get("num_decoder_layers", c.num_layers)))
        self.norm = norm(c)
        self.head = Linear(c.d_model, c.vocab_size, bias=False)
        tied = c.get("tie_word_embeddings", True)
        if tied:
            self.head.weight = self.embedding.weight
        self.scale = c.d_model**-0.5 if c.get("scale_decoder_outputs", tied) else 1.0

    @property
    def context(self) -> None:
        """None: positions are relative, and `n_positions` in a configuration is the training length, not a limit."""
        return None

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def prepare(self, positions: Tensor) -> Positions:
        return Positions(bias=self.bias)

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x) * self.scale)
