"""OPT, XGLM and BioGPT: pre-norm decoders with biases, their positions learned (OPT, BioGPT) or sinusoids (XGLM).

https://arxiv.org/abs/2205.01068  https://arxiv.org/abs/2112.10668  https://arxiv.org/abs/2210.10341
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.checkpoint.names import From, Value, renamed
from lamina.config import Config
from lamina.models.gpt import Gpt
from lamina.nn import Embedding, LayerNorm, Linear, Norm, PostNormBlock, SelfAttention, Sinusoids

BODY: dict[str, Value] = {
    "embedding": "model.embed_tokens",
    "blocks.{i}.attention_norm": "model.layers.{i}.self_attn_layer_norm",
    "blocks.{i}.attention.qkv": tuple(f"model.layers.{{i}}.self_attn.{part}_proj" for part in "qkv"),
    "blocks.{i}.attention.out": "model.layers.{i}.self_attn.out_proj",
    "blocks.{i}.mlp_norm": "model.layers.{i}.final_layer_norm",
    "blocks.{i}.mlp.up": "model.layers.{i}.fc1",
    "blocks.{i}.mlp.down": "model.layers.{i}.fc2",
    "norm": "model.layer_norm",
    "head": "lm_head",
}
LEARNED: dict[str, Value] = {"position": From("model.embed_positions", lambda t: t[2:])}
"""The table of positions has two rows more, for padding, in front."""


class OPT(Gpt):
    names = renamed(
        BODY
        | LEARNED
        | {"norm": "model.final_layer_norm", "project_in": "model.project_in", "project_out": "model.project_out"},
        lambda name: name.replace("model.", "model.decoder."),
    )
    aliases = {"intermediate_size": "ffn_dim"}
    defaults = {"intermediate_size": 3072}
    act = ("activation_function", "relu")
    learned_positions = True

    def __init__(self, c: Config) -> None:
        bias = c.get("enable_bias", True)
        super().__init__(c.with_values(attention_bias=bias, mlp_bias=bias))
        if c.get("_remove_final_layer_norm", False) or not c.get("do_layer_norm_before", True):
            self.norm = nn.Identity()  # type: ignore[assignment]
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if (width := c.get("word_embed_proj_dim", c.hidden_size)) != c.hidden_size:
            self.embedding, self.head = Embedding(c.vocab_size, width), Linear(width, c.vocab_size, bias=False)
            if c.get("tie_word_embeddings", self.tied):
                self.head.weight = self.embedding.weight
            self.project_in = Linear(width, c.hidden_size, bias=False)
            self.project_out = Linear(c.hidden_size, width, bias=False)

    def make_norm(self, c: Config) -> Norm:
        learned = c.get("layer_norm_elementwise_affine", True)
        return LayerNorm(c.hidden_size, weight=learned, bias=learned)

    def make_block(self, c: Config, layer: int) -> nn.Module:
        if c.get("do_layer_norm_before", True):
            return super().make_block(c, layer)
        attention, mlp = self.make_attention(c, layer), self.make_mlp(c, layer)
        return PostNormBlock(attention, mlp, attention_norm=self.make_norm(c), mlp_norm=self.make_norm(c))

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x if self.project_in is None else self.project_in(x)

    def finish(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x if self.project_out is None else self.project_out(x)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.finish(x))


class BioGPT(Gpt):
    names = renamed(BODY | LEARNED, lambda name: name.replace("model.", "biogpt.")) | {"head": "output_projection"}
    act = ("hidden_act", "gelu")
    defaults = {"intermediate_size": 4096}
    learned_positions = True

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.scale = c.hidden_size**0.5 if c.get("scale_embedding", True) else 1.0

    def make_norm(self, c: Config) -> Norm:
        c.ignore("layer_norm_eps")  # which transformers does not read
        return LayerNorm(c.hidden_size)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.scale)


class XGLM(BioGPT):
    names = BODY
    ignored = ("model.embed_positions.weights",)
    aliases = {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
        "intermediate_size": "ffn_dim",
    }
    defaults = {"max_position_embeddings": 2048, "intermediate_size": 4096}
    act = ("activation_function", "gelu")
    learned_positions = False

    def __init__(self, c: Config) -> None:
        c.require("add_cross_attention", (False,), False)
        super().__init__(c)
        self.sinusoids = Sinusoids(c.hidden_size, offset=2, padding=c.said("pad_token_id", 1))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(rope=None) | options)

    def make_rope(self, c: Config) -> None:
        return None

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.sinusoids(positions).to(x.dtype)
