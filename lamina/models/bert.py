"""BERT and relatives as decoders, with and without cross-attention: bert, roberta, xlm-roberta, camembert, electra and
bert-generation.

    norm(x + attention(x))        norm(x + cross_attention(x))        norm(x + mlp(x))

https://arxiv.org/abs/1810.04805  https://arxiv.org/abs/1907.11692  https://arxiv.org/abs/2003.10555
As decoders: https://arxiv.org/abs/1907.12461
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lamina.activation import activation
from lamina.cache.layers.cross import Source
from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import Either, Value
from lamina.config import Config
from lamina.encoder import Encoder
from lamina.errors import InputError
from lamina.model import Model
from lamina.nn import MLP, CrossAttention, Embedding, LayerNorm, Linear, Positions, SelfAttention


@dataclass(frozen=True)
class BertKind:
    """Where families differ.

    prefix    of the tensors of a decoder, without its head
    head      name of the last matrix
    dense     names of the matrix and the norm before it; None: there are none
    bias      another name of the bias of the last matrix, besides head.bias
    act       activation after that matrix; None: `hidden_act`
    types     embeddings of token types are added; a decoder and an encoder of one text have type 0 throughout
    shifted   the first position is pad_token_id + 1
    narrow    embeddings are `embedding_size` wide
    """

    prefix: str
    head: str
    dense: tuple[str, str] | None
    bias: str | None
    act: str | None = "gelu"
    types: bool = True
    shifted: bool = False
    narrow: bool = False


BERT = BertKind(
    "bert", "cls.predictions.decoder", ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "cls.predictions.bias", act=None,
)  # fmt: skip
ROBERTA = BertKind("roberta", "lm_head.decoder", ("lm_head.dense", "lm_head.layer_norm"), "lm_head.bias", shifted=True)
ELECTRA = BertKind(
    "electra", "generator_lm_head", ("generator_predictions.dense", "generator_predictions.LayerNorm"), None,
    narrow=True,
)  # fmt: skip
GENERATION = BertKind("bert", "lm_head.decoder", None, "lm_head.bias", types=False)

KINDS = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "electra": ELECTRA,
    "bert-generation": GENERATION,
}


def kind_of(c: Config) -> BertKind:
    return KINDS[c.require("model_type", KINDS)]


def make_norm(c: Config, width: int) -> LayerNorm:
    return LayerNorm(width, c.get("layer_norm_eps", 1e-12))


class BertEmbedding(nn.Module):
    """The sum of embeddings of token, position and type 0, normed, and projected if it is narrower than the blocks."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        c.require("position_embedding_type", ["absolute"], "absolute")
        kind = kind_of(c)
        self.width = c.get("embedding_size", 128) if kind.narrow else c.hidden_size
        self.offset = c.get("pad_token_id", 1) + 1 if kind.shifted else 0
        positions = c.get("max_position_embeddings", 512)
        self.count = positions - self.offset
        self.tokens = Embedding(c.vocab_size, self.width)
        self.positions = Embedding(positions, self.width)
        self.types = Embedding(c.get("type_vocab_size", 2), self.width) if kind.types else None
        if self.types is not None:
            self.types.packable = ()  # its first row is read as it is
        self.norm = make_norm(c, self.width)
        self.project = None if self.width == c.hidden_size else Linear(self.width, c.hidden_size)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embedded tokens x [B, T, W], positions [B, T] -> [B, T, width of the blocks]"""
        x = x if self.types is None else x + self.types.weight[0]
        x = self.norm(x + self.positions(positions + self.offset))
        return x if self.project is None else self.project(x)


class BertBlock(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        width, heads = c.hidden_size, c.num_attention_heads
        self.attention = SelfAttention(width, heads, heads, c.head_width, bias=True, out_bias=True, rope=None)
        self.attention_norm = make_norm(c, width)
        self.mlp = MLP(width, c.intermediate_size, c.get("hidden_act", "gelu"), bias=True)
        self.mlp_norm = make_norm(c, width)
        self.specs: LayerSpecs = self.attention.specs

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = self.attention_norm(self.attention(x, memory, shared, onto=x))
        return self.mlp_norm(self.mlp(x, onto=x))


class BertCrossBlock(BertBlock):
    """With cross-attention."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        width, heads = c.hidden_size, c.num_attention_heads
        self.source = CrossAttention(width, heads, c.head_width, bias=True, out_bias=True)
        self.source_norm = make_norm(c, width)
        self.specs = {"attention": self.attention.spec, "source": self.source.spec}

    def cross(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(states)

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = self.attention_norm(self.attention(x, memory["attention"], shared, onto=x))
        x = self.source_norm(self.source(x, memory["source"], onto=x))
        return self.mlp_norm(self.mlp(x, onto=x))


class BertEncoder(Encoder):
    def __init__(self, c: Config) -> None:
        super().__init__()
        c.require("is_decoder", [False], False)
        c.require("add_cross_attention", [False], False)
        self.embedding = BertEmbedding(c)
        self.blocks = nn.ModuleList(BertBlock(c) for _ in range(c.num_hidden_layers))

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding.tokens(ids)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(x, positions)

    def prepare(self, positions: Tensor) -> Positions:
        return Positions()


def norm_names(ours: str, theirs: str) -> dict[str, Value]:
    """Weight and bias of a norm; the first BERT checkpoints call them gamma and beta."""
    return {
        f"{ours}.weight": Either(f"{theirs}.weight", f"{theirs}.gamma"),
        f"{ours}.bias": Either(f"{theirs}.bias", f"{theirs}.beta"),
    }


def stack_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of an encoder or a decoder without its head. `theirs`: a prefix that ends with a dot, or none."""
    block, layer = f"{ours}blocks.{{i}}", f"{theirs}encoder.layer.{{i}}"
    own, source = f"{layer}.attention", f"{layer}.crossattention"
    return {
        f"{ours}embedding.tokens": f"{theirs}embeddings.word_embeddings",
        f"{ours}embedding.positions": f"{theirs}embeddings.position_embeddings",
        f"{ours}embedding.types": f"{theirs}embeddings.token_type_embeddings",
        **norm_names(f"{ours}embedding.norm", f"{theirs}embeddings.LayerNorm"),
        f"{ours}embedding.project": f"{theirs}embeddings_project",
        f"{block}.attention.qkv": tuple(f"{own}.self.{name}" for name in ("query", "key", "value")),
        f"{block}.attention.out": f"{own}.output.dense",
        **norm_names(f"{block}.attention_norm", f"{own}.output.LayerNorm"),
        f"{block}.source.q": f"{source}.self.query",
        f"{block}.source.kv": (f"{source}.self.key", f"{source}.self.value"),
        f"{block}.source.out": f"{source}.output.dense",
        **norm_names(f"{block}.source_norm", f"{source}.output.LayerNorm"),
        f"{block}.mlp.up": f"{layer}.intermediate.dense",
        f"{block}.mlp.down": f"{layer}.output.dense",
        **norm_names(f"{block}.mlp_norm", f"{layer}.output.LayerNorm"),
    }


def decoder_names(kind: BertKind, prefix: str = "") -> dict[str, Value]:
    """Parameter names of a decoder whose tensors have this prefix."""
    head = prefix + kind.head
    names = stack_names("", f"{prefix}{kind.prefix}.")
    names["head.weight"] = f"{head}.weight"
    names["head.bias"] = f"{head}.bias" if kind.bias is None else Either(f"{head}.bias", prefix + kind.bias)
    if kind.dense is not None:
        names["dense"] = prefix + kind.dense[0]
        names |= norm_names("dense_norm", prefix + kind.dense[1])
    return names


class Bert(Model):
    """A decoder. With `add_cross_attention` it reads a source that another model makes, `lamina.cache.Source`."""

    ignored = (
        "*pooler.*", "*embeddings.position_ids", "*embeddings.token_type_ids", "cls.seq_relationship.*",
        "*cls.predictions.bias", "*lm_head.bias",
    )  # fmt: skip

    def __init__(self, c: Config) -> None:
        super().__init__()
        c.require("is_decoder", [True], False)
        kind = kind_of(c)
        self.names = decoder_names(kind)
        self.vocab, self.source_width = c.vocab_size, c.hidden_size
        self.embedding = BertEmbedding(c)
        self.max_positions = self.embedding.count
        block = BertCrossBlock if c.get("add_cross_attention", False) else BertBlock
        self.blocks = nn.ModuleList(block(c) for _ in range(c.num_hidden_layers))
        self.act = activation(kind.act or c.get("hidden_act", "gelu"))
        width = self.embedding.width
        self.dense = None if kind.dense is None else Linear(c.hidden_size, width)
        self.dense_norm = None if kind.dense is None else make_norm(c, width)
        self.head = Linear(width, c.vocab_size)
        if c.get("tie_word_embeddings", True):
            self.head.weight = self.embedding.tokens.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding.tokens(ids)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(x, positions)

    def prepare(self, positions: Tensor) -> Positions:
        return Positions()

    def unembed(self, x: Tensor) -> Tensor:
        if self.dense is not None and self.dense_norm is not None:
            x = self.dense_norm(self.dense(x, act=self.act))
        return self.head(x)

    def encode(self, ids: Any = None, counts: Any = None, embeds: Any = None) -> Source:
        raise InputError(
            f"{type(self).__name__} has no encoder. If it has cross-attention, give it the states of another model: "
            "new_cache(source=Source(states, lengths)) with states [B, S, width]"
        )

    def random_source(self, rows: int, length: int, generator: torch.Generator | None = None) -> Source:
        device = self.device if generator is None else generator.device
        states = torch.randn(rows, length, self.source_width, generator=generator, device=device)
        return Source(states.to(self.device, self.dtype), torch.full((rows,), length, device=self.device))
