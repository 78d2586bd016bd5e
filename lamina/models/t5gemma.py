"""T5Gemma: an encoder and a decoder of Gemma 2 blocks, each with a configuration of its own.

https://arxiv.org/abs/2504.06225
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.attention.window import Near, Sliding, Window
from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import Value
from lamina.config import Config
from lamina.encoder import Encoder, EncoderDecoder
from lamina.models.decoder import mlp_names, qkv_names
from lamina.models.gemma2 import Gemma2
from lamina.models.transformer import window_by_type
from lamina.nn import CrossAttention, Embedding, GatedMLP, Linear, Positions, RMSNorm, Rotary, SelfAttention
from lamina.nn.attention.rope_settings import positions_of


def norm(c: Config) -> RMSNorm:
    return RMSNorm(c.hidden_size, c.get("rms_norm_eps", 1e-6), plus_one=True)


def heads(c: Config) -> dict[str, Any]:
    """Options that self-attention and cross-attention share."""
    bias, scale, softcap = (
        c.get("attention_bias", False),
        c.query_pre_attn_scalar**-0.5,
        c.get("attn_logit_softcapping"),
    )
    kv_heads = c.get("num_key_value_heads", 4)
    return dict(
        width=c.hidden_size, heads=c.num_attention_heads, kv_heads=kv_heads, head_dim=c.head_dim, bias=bias,
        out_bias=bias, scale=scale, softcap=softcap,
    )  # fmt: skip


class T5GemmaEncoderBlock(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (norm(c) for _ in range(4))
        self.attention = SelfAttention(**heads(c), window=self.make_window(c, layer))
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.get("hidden_activation", "gelu_pytorch_tanh"))
        self.specs: LayerSpecs = self.attention.specs

    def make_window(self, c: Config, layer: int) -> Window:
        window = window_by_type(c, layer, every=2, default=4096)
        return Near(window.size) if isinstance(window, Sliding) else window

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = self.attention_post_norm(self.attention(self.attention_norm(x), memory, shared), onto=x)
        return self.mlp_post_norm(self.mlp(self.mlp_norm(x)), onto=x)


class T5GemmaBlock(T5GemmaEncoderBlock):
    def __init__(self, c: Config, layer: int, source_width: int) -> None:
        super().__init__(c, layer)
        self.source_norm, self.source_post_norm = norm(c), norm(c)
        self.source = CrossAttention(**heads(c), source_width=source_width)
        self.specs = {"attention": self.attention.spec, "source": self.source.spec}

    def make_window(self, c: Config, layer: int) -> Window:
        return window_by_type(c, layer, every=2, default=4096)

    def cross(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(states)

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = self.attention_post_norm(self.attention(self.attention_norm(x), memory["attention"], shared), onto=x)
        x = self.source_post_norm(self.source(self.source_norm(x), memory["source"]), onto=x)
        return self.mlp_post_norm(self.mlp(self.mlp_norm(x)), onto=x)


class T5GemmaEncoder(Encoder):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embedding = Embedding(c.vocab_size, c.hidden_size)
        self.rope = Rotary.of(c, c.head_dim)
        self.blocks = nn.ModuleList(T5GemmaEncoderBlock(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = norm(c)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.embedding.embedding_dim**0.5, rounded=True)

    def prepare(self, positions: Tensor) -> Positions:
        return Positions({"default": self.rope(positions)})

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)


def stack_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of the encoder or the decoder."""
    block, layer = f"{ours}blocks.{{i}}", f"{theirs}.layers.{{i}}"
    norms = {"attention": "self_attn", "source": "cross_attn", "mlp": "feedforward"}
    return {
        f"{ours}embedding": f"{theirs}.embed_tokens",
        **{f"{block}.{our}_norm": f"{layer}.pre_{their}_layernorm" for our, their in norms.items()},
        **{f"{block}.{our}_post_norm": f"{layer}.post_{their}_layernorm" for our, their in norms.items()},
        **qkv_names(f"{block}.attention", f"{layer}.self_attn"),
        f"{block}.attention.out": f"{layer}.self_attn.o_proj",
        f"{block}.source.q": f"{layer}.cross_attn.q_proj",
        f"{block}.source.kv": (f"{layer}.cross_attn.k_proj", f"{layer}.cross_attn.v_proj"),
        f"{block}.source.out": f"{layer}.cross_attn.o_proj",
        **mlp_names(f"{block}.mlp", f"{layer}.mlp"),
        f"{ours}norm": f"{theirs}.norm",
    }


class T5Gemma(EncoderDecoder):
    names = {
        **stack_names("encoder.", "model.encoder"),
        **stack_names("", "model.decoder"),
        "head": "lm_head.out_proj",
    }

    def __init__(self, c: Config) -> None:
        super().__init__()
        source, target = (c.part(name).with_defaults(Gemma2.defaults) for name in ("encoder", "decoder"))
        c.ignore("vocab_size")  # each part has its own
        source = source.with_values(context=c.get("context"))
        for part in (source, target):
            part.ignore("model_type", "is_decoder", "tie_word_embeddings", "final_logit_softcapping")
        self.vocab, self.source_vocab = target.vocab_size, source.vocab_size
        self.start_ids = (c.first("decoder_start_token_id", "bos_token_id", default=target.get("bos_token_id", 2)),)
        self.encoder = T5GemmaEncoder(source)
        self.embedding = Embedding(self.vocab, target.hidden_size)
        self.rope = Rotary.of(target, target.head_dim)
        layers = range(target.num_hidden_layers)
        self.blocks = nn.ModuleList(T5GemmaBlock(target, layer, source.hidden_size) for layer in layers)
        self.norm = norm(target)
        self.head = Linear(target.hidden_size, self.vocab, bias=False)
        if c.get("tie_word_embeddings", True):
            self.head.weight = self.embedding.weight
        self.softcap = target.get("final_logit_softcapping")

    @property
    def context(self) -> int | None:
        return positions_of(self.config.part("decoder"))

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.embedding.embedding_dim**0.5, rounded=True)

    def prepare(self, positions: Tensor) -> Positions:
        return Positions({"default": self.rope(positions)})

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), softcap=self.softcap)
