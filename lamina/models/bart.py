"""BART and its relatives: an encoder and a decoder with layer norms and biases, and positions in the embedding.

Families differ in where the norms are, and in the positions: learned, or sines and cosines.

https://arxiv.org/abs/1910.13461
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import Either, From, Value
from lamina.config import Config
from lamina.encoder import Encoder, EncoderDecoder
from lamina.models.t5 import bounded
from lamina.nn import MLP, CrossAttention, Embedding, LayerNorm, Linear, Positions, SelfAttention, Sinusoids


class BartEncoderBlock(nn.Module):
    """pre: norms come before attention and MLP; otherwise after each residual."""

    def __init__(self, c: Config, pre: bool, act: str, side: str = "encoder") -> None:
        super().__init__()
        width = c.d_model
        self.pre = pre
        self.attention_norm = LayerNorm(width)
        self.attention = self.make_attention(c, side)
        self.mlp_norm = LayerNorm(width)
        self.mlp = MLP(width, getattr(c, f"{side}_ffn_dim"), c.get("activation_function", act), bias=True)
        self.specs: LayerSpecs = self.attention.specs

    def make_attention(self, c: Config, side: str) -> SelfAttention:
        heads, bias = getattr(c, f"{side}_attention_heads"), c.get("use_bias", True)
        return SelfAttention(c.d_model, heads, heads, c.d_model // heads, bias=bias, out_bias=bias, rope=None)

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        if self.pre:
            x = self.attention(self.attention_norm(x), memory, shared, onto=x)
            return bounded(self.mlp(self.mlp_norm(x), onto=x))
        x = self.attention_norm(self.attention(x, memory, shared, onto=x))
        return bounded(self.mlp_norm(self.mlp(x, onto=x)))


class BartBlock(BartEncoderBlock):
    def __init__(self, c: Config, pre: bool, act: str) -> None:
        super().__init__(c, pre, act, "decoder")
        width, heads, bias = c.d_model, c.decoder_attention_heads, c.get("use_bias", True)
        self.source_norm = LayerNorm(width)
        self.source = CrossAttention(width, heads, width // heads, bias=bias, out_bias=bias)
        self.specs = {"attention": self.attention.spec, "source": self.source.spec}

    def cross(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(states)

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        if self.pre:
            x = self.attention(self.attention_norm(x), memory["attention"], shared, onto=x)
            x = self.source(self.source_norm(x), memory["source"], onto=x)
            return self.mlp(self.mlp_norm(x), onto=x)
        x = self.attention_norm(self.attention(x, memory["attention"], shared, onto=x))
        x = self.source_norm(self.source(x, memory["source"], onto=x))
        return self.mlp_norm(self.mlp(x, onto=x))


class BartEncoder(Encoder):
    def __init__(self, c: Config, family: type[Bart], embedding: Embedding) -> None:
        super().__init__()
        self.embedding, self.factor = embedding, embedding_factor(c, family)
        self.positions = position_table(c, family)
        self.offset = family.offset
        self.embedding_norm = LayerNorm(c.d_model) if family.norms_embedding else None
        self.blocks = nn.ModuleList(family.encoder_block(c, family.pre, family.act) for _ in range(c.encoder_layers))
        self.norm = LayerNorm(c.d_model) if family.pre else None

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.factor)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.positions(positions + self.offset).to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def prepare(self, positions: Tensor) -> Positions:
        return Positions()

    def finish(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


def embedding_factor(c: Config, family: type[Bart]) -> float:
    return c.d_model**0.5 if c.get("scale_embedding", family.scaled) else 1.0


def position_table(c: Config, family: type[Bart]) -> Embedding | Sinusoids:
    if family.learned:
        return Embedding(c.max_position_embeddings + family.offset, c.d_model)
    return Sinusoids(c.d_model, inclusive=family.offset > 0)


def stack_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of the encoder or the decoder."""
    block, layer = f"{ours}blocks.{{i}}", f"{theirs}.layers.{{i}}"
    return {
        f"{ours}positions": f"{theirs}.embed_positions",
        f"{ours}embedding_norm": f"{theirs}.layernorm_embedding",
        f"{block}.attention_norm": f"{layer}.self_attn_layer_norm",
        f"{block}.attention.qkv": tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv"),
        f"{block}.attention.out": f"{layer}.self_attn.out_proj",
        f"{block}.mlp_norm": f"{layer}.final_layer_norm",
        f"{block}.mlp.up": f"{layer}.fc1",
        f"{block}.mlp.down": f"{layer}.fc2",
        f"{ours}norm": f"{theirs}.layer_norm",
    }


def no_bias(weight: Tensor) -> Tensor:
    """Zeros for a checkpoint without a bias on the logits."""
    return weight.new_zeros(weight.shape[0])


class Bart(EncoderDecoder):
    names = {
        "embedding": Either("model.decoder.embed_tokens", "model.shared"),
        "encoder.embedding": Either("model.encoder.embed_tokens", "model.shared"),
        **stack_names("encoder.", "model.encoder"),
        **stack_names("", "model.decoder"),
        "blocks.{i}.source_norm": "model.decoder.layers.{i}.encoder_attn_layer_norm",
        "blocks.{i}.source.q": "model.decoder.layers.{i}.encoder_attn.q_proj",
        "blocks.{i}.source.kv": tuple(f"model.decoder.layers.{{i}}.encoder_attn.{name}_proj" for name in "kv"),
        "blocks.{i}.source.out": "model.decoder.layers.{i}.encoder_attn.out_proj",
        "head": "lm_head",
        "head.bias": Either(
            From("final_logits_bias", lambda t: t.squeeze(0)),
            From("model.shared.weight", no_bias),
            From("lm_head.weight", no_bias),
        ),
    }
    ignored: tuple[str, ...] = ("model.shared.weight", "model.*.version")
    no_effect: tuple[str, ...] = (
        # of the first files, where one configuration was for all of these families; a family knows the values
        "num_hidden_layers", "normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits",
        "static_position_embeddings", "extra_pos_embeddings", "do_blenderbot_90_layernorm", "layernorm_variant",
        "decoder_vocab_size",  # where the encoder has the same vocabulary
    )  # fmt: skip

    pre: ClassVar[bool] = False
    """Norms come before attention and MLP, and once more at the end."""
    norms_embedding: ClassVar[bool] = True
    """The sum of embedding and position is normed."""
    learned: ClassVar[bool] = True
    """Positions are learned."""
    offset: ClassVar[int] = 2
    """Index of the first position."""
    scaled: ClassVar[bool] = False
    """Default of `scale_embedding`: embeddings are multiplied by √width."""
    act: ClassVar[str] = "gelu"
    """Default of `activation_function`."""
    encoder_block: ClassVar[type[BartEncoderBlock]] = BartEncoderBlock

    def __init__(self, c: Config) -> None:
        super().__init__()
        family = type(self)
        self.start_ids = (c.first("decoder_start_token_id", "eos_token_id", default=2),)
        one, tied = c.get("share_encoder_decoder_embeddings", True), c.get("tie_word_embeddings", True)
        self.vocab = c.vocab_size if one else c.get("decoder_vocab_size", c.vocab_size)
        self.source_vocab = c.vocab_size
        self.embedding, self.factor = Embedding(self.vocab, c.d_model), embedding_factor(c, family)
        self.encoder = BartEncoder(c, family, self.embedding if one and tied else Embedding(c.vocab_size, c.d_model))
        self.positions = position_table(c, family)
        self.embedding_norm = LayerNorm(c.d_model) if self.norms_embedding else None
        self.blocks = nn.ModuleList(BartBlock(c, self.pre, self.act) for _ in range(c.decoder_layers))
        self.norm = LayerNorm(c.d_model) if self.pre else None
        self.head = Linear(c.d_model, self.vocab)
        if tied:
            self.head.weight = self.embedding.weight
        if self.learned:
            self.max_positions = self.max_source_positions = c.max_position_embeddings

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.factor)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.positions(positions + self.offset).to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def prepare(self, positions: Tensor) -> Positions:
        return Positions()

    def finish(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.finish(x))


class PLBart(Bart):
    scaled = True


class MBart(Bart):
    pre = True


class Blenderbot(Bart):
    pre, norms_embedding, offset = True, False, 0


class BlenderbotSmall(Bart):
    """The decoder norms its embeddings before it adds positions."""

    offset = 0

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding_norm is not None
        return self.embedding_norm(x) + self.positions(positions)


class Pegasus(Bart):
    """Positions are sines and cosines. Files that transformers 5 writes hold them, the published ones do not."""

    pre, norms_embedding, offset = True, False, 0

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        count, width = c.max_position_embeddings, c.d_model

        def computed(embedding: Tensor) -> Tensor:
            return Sinusoids(width, inclusive=False)(torch.arange(count)).to(embedding.device, embedding.dtype)

        for ours, theirs in (("encoder.positions", "model.encoder"), ("positions", "model.decoder")):
            stored = f"{theirs}.embed_positions.weight"
            self.names = {**self.names, f"{ours}.weight": Either(stored, From("model.shared.weight", computed))}


class Marian(Bart):
    """Encoder and decoder may have vocabularies of their own."""

    norms_embedding, learned, offset = False, False, 0
    ignored = (*Bart.ignored, "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


class M2M100(Bart):
    pre, norms_embedding, learned, scaled, act = True, False, False, True, "relu"
    ignored = (*Bart.ignored, "model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights")


class Mvp(Bart):
    def __init__(self, c: Config) -> None:
        c.require("use_prompt", [False], False)
        c.ignore("prompt_length", "prompt_mid_dim")
        super().__init__(c)


class FSMT(Bart):
    """Encoder and decoder have vocabularies of their own, and the logits have no bias."""

    names = Bart.names | {
        "head": Either("model.decoder.output_projection", "model.decoder.embed_tokens"),
        "head.bias": From("model.decoder.embed_tokens.weight", no_bias),
    }
    ignored = (*Bart.ignored, "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
    norms_embedding, learned, scaled, act = False, False, True, "relu"

    def __init__(self, c: Config) -> None:
        c.require("pad_token_id", [1], 1)  # positions start after it
        c.ignore("langs", "decoder")
        tied = c.get("tie_word_embeddings", False)
        super().__init__(
            c.with_values(
                vocab_size=c.src_vocab_size,
                decoder_vocab_size=c.tgt_vocab_size,
                tie_word_embeddings=tied,
                share_encoder_decoder_embeddings=tied,
            )
        )
