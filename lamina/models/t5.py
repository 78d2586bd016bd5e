"""T5 and relatives: an encoder and a decoder with similar blocks; positions are a learned bias on the scores.

https://arxiv.org/abs/1910.10683 (v1.1, with gated feed-forward: https://arxiv.org/abs/2002.05202)
mT5: https://arxiv.org/abs/2010.11934. UMT5, with a bias in every layer: https://arxiv.org/abs/2304.09151
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lamina.activation import ACTIVATIONS
from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import Either, Value
from lamina.config import Config
from lamina.encoder import Encoder, EncoderDecoder
from lamina.errors import InputError
from lamina.nn import (
    MLP,
    CrossAttention,
    Embedding,
    GatedMLP,
    Linear,
    Mixer,
    Positions,
    RelativeBias,
    RMSNorm,
    SelfAttention,
)

LARGEST = torch.finfo(torch.float16).max - 1000  # limit on hidden states in float16


def norm(c: Config) -> RMSNorm:
    return RMSNorm(c.d_model, c.get("layer_norm_epsilon", 1e-6))


def feed_forward(c: Config, default: str) -> MLP | GatedMLP:
    kind = c.require("feed_forward_proj", [*ACTIVATIONS, *(f"gated-{act}" for act in ACTIVATIONS)], default)
    gated = kind.startswith("gated-")
    act = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    for name, value in (("dense_act_fn", act), ("is_gated_act", gated)):  # the same again, in newer files
        if (found := c.get(name, value)) != value:
            raise InputError(f"feed_forward_proj={kind!r} in the configuration contradicts {name}={found!r}")
    return (GatedMLP if gated else MLP)(c.d_model, c.d_ff, act)


def position_bias(c: Config, both_ways: bool) -> RelativeBias:
    buckets, farthest = c.get("relative_attention_num_buckets", 32), c.get("relative_attention_max_distance", 128)
    return RelativeBias(c.num_heads, buckets, farthest, both_ways=both_ways)


def bounded(x: Tensor) -> Tensor:
    """Clamps values that overflow float16, as transformers does: T5 was trained in bfloat16, which has a larger range.
    Elementwise and always, so that a row does not depend on the other rows of its batch."""
    return x.clamp(-LARGEST, LARGEST) if x.dtype == torch.float16 else x


class T5EncoderBlock(nn.Module):
    decoder: ClassVar[bool] = False

    def __init__(self, c: Config, family: type[T5], layer: int) -> None:
        super().__init__()
        self.bias = position_bias(c, both_ways=not self.decoder) if family.own_biases else None
        self.attention_norm = norm(c)
        self.attention = self.make_attention(c)
        self.mlp_norm = norm(c)
        self.mlp = family.make_mlp(c, layer, self.decoder)
        self.specs: LayerSpecs = self.attention.specs

    def make_attention(self, c: Config) -> Mixer:
        return SelfAttention(c.d_model, c.num_heads, c.num_heads, c.d_kv, scale=1.0, rope=None)

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        return self.feed_forward(self.attend(x, memory, shared), memory)

    def attend(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        shared = shared if self.bias is None else shared._replace(bias=self.bias)
        return bounded(x + self.attention(self.attention_norm(x), memory, shared))

    def feed_forward(self, x: Tensor, memory: Memory) -> Tensor:
        return bounded(x + self.mlp(self.mlp_norm(x)))


class T5Block(T5EncoderBlock):
    decoder = True

    def __init__(self, c: Config, family: type[T5], layer: int) -> None:
        super().__init__(c, family, layer)
        self.source_norm = norm(c)
        self.source = CrossAttention(c.d_model, c.num_heads, c.d_kv, scale=1.0)
        self.specs = {**self.specs, "source": self.source.spec}

    def cross(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(states)

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = self.attend(x, memory["attention"], shared)
        x = bounded(x + self.source(self.source_norm(x), memory["source"]))
        return self.feed_forward(x, memory)


class T5Encoder(Encoder):
    def __init__(self, c: Config, family: type[T5], embedding: Embedding) -> None:
        super().__init__()
        self.embedding = Embedding(c.vocab_size, c.d_model)
        self.embedding.weight = embedding.weight  # unless the checkpoint has two
        self.bias = None if family.own_biases else position_bias(c, both_ways=True)
        self.blocks = nn.ModuleList(family.encoder_block(c, family, layer) for layer in range(c.num_layers))
        self.norm = norm(c)

    @property
    def context(self) -> None:
        """None: positions are relative, and `n_positions` in a configuration is the training length, not a limit."""
        return None

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def prepare(self, positions: Tensor) -> Any:
        return Positions(bias=self.bias)

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)


def stack_names(ours: str, theirs: str, mlp: int) -> dict[str, Value]:
    """Parameter names of the encoder or the decoder; `mlp`: index of the MLP among the sublayers of a block."""
    block, part = f"{ours}blocks.{{i}}", f"{theirs}.block.{{i}}.layer"
    dense = f"{part}.{mlp}.DenseReluDense"
    return {
        f"{ours}bias": f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{block}.bias": f"{part}.0.SelfAttention.relative_attention_bias",
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
        "embedding": Either("decoder.embed_tokens", "shared"),
        "encoder.embedding": Either("encoder.embed_tokens", "shared"),
        **stack_names("encoder.", "encoder", mlp=1),
        **stack_names("", "decoder", mlp=2),
        "blocks.{i}.source_norm": "decoder.block.{i}.layer.1.layer_norm",
        "blocks.{i}.source.q": "decoder.block.{i}.layer.1.EncDecAttention.q",
        "blocks.{i}.source.kv": tuple(f"decoder.block.{{i}}.layer.1.EncDecAttention.{name}" for name in "kv"),
        "blocks.{i}.source.out": "decoder.block.{i}.layer.1.EncDecAttention.o",
        "head": Either("lm_head", "decoder.embed_tokens", "shared"),
    }
    ignored = ("shared.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")

    act: ClassVar[str] = "relu"
    """Default of `feed_forward_proj`."""
    own_biases: ClassVar[bool] = False
    """Every layer has a bias on the scores; otherwise one is shared by all layers of a stack."""
    encoder_block: ClassVar[type[T5EncoderBlock]] = T5EncoderBlock
    block: ClassVar[type[T5Block]] = T5Block
    stack: ClassVar[type[T5Encoder]] = T5Encoder

    def __init__(self, c: Config) -> None:
        super().__init__()
        c.ignore("n_positions", "is_decoder", "add_cross_attention")
        family = type(self)
        self.vocab = c.vocab_size
        self.start_ids = (c.get("decoder_start_token_id", c.get("pad_token_id", 0)),)
        self.embedding = Embedding(c.vocab_size, c.d_model)
        self.encoder = self.stack(c, family, self.embedding)
        self.bias = None if self.own_biases else position_bias(c, both_ways=False)
        layers = c.get("num_decoder_layers", c.num_layers)
        self.blocks = nn.ModuleList(self.block(c, family, layer) for layer in range(layers))
        self.norm = norm(c)
        self.head = Linear(c.d_model, c.vocab_size, bias=False)
        if c.get("tie_word_embeddings", True):
            self.head.weight = self.embedding.weight
        self.scale = c.d_model**-0.5 if self.scales(c) else 1.0

    @classmethod
    def make_mlp(cls, c: Config, layer: int, decoder: bool) -> nn.Module:
        return feed_forward(c, cls.act)

    def scales(self, c: Config) -> bool:
        """Whether the input of the head is divided by √width."""
        return c.get("scale_decoder_outputs", c.get("tie_word_embeddings", True))

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


class MT5(T5):
    act = "gated-gelu"

    def scales(self, c: Config) -> bool:
        return False


class UMT5(T5):
    act, own_biases = "gated-gelu", True
    no_effect = ("scalable_attention",)

    def scales(self, c: Config) -> bool:
        """As the file says. (transformers 5 reads any file as tied, and so scales for checkpoints that are not.)"""
        return c.get("tie_word_embeddings", True)
