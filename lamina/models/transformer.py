"""`Transformer`: a decoder whose layers all are attention and an MLP. Most families change a few methods.

As it stands it is Llama. A family overrides the `make_…` method of what it changes, and calls the one it overrides with
the options that differ:

    class Qwen2(Transformer):
        def make_attention(self, c, layer, **options):
            return super().make_attention(c, layer, bias=True, out_bias=False, **options)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from torch import nn

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import Decoder, layer_types, mlp_names, qkv_names
from lamina.nn import Block, GatedMLP, Mixer, Norm, ParallelBlock, RMSNorm, Rotary, SelfAttention
from lamina.nn.attention.rope_settings import KNOWN, plain

Order = Literal["pre", "post", "both", "parallel"]


class Transformer(Decoder):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        **qkv_names("blocks.{i}.attention", "model.layers.{i}.self_attn"),
        "blocks.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
        "blocks.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
        "blocks.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        **mlp_names("blocks.{i}.mlp", "model.layers.{i}.mlp"),
        "norm": "model.norm",
        "head": "lm_head",
    }
    ignored: tuple[str, ...] = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)

    aliases: ClassVar[Mapping[str, str]] = {}
    """Fields of the configuration by the names used here -> the names that this family's config.json has for them."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of fields that a config.json of this family may lack."""
    order: ClassVar[Order] = "pre"
    """Where a block has norms: before attention and MLP, after them, or both; parallel: attention and MLP side by side
    after one norm."""
    tied: ClassVar[bool] = False
    """Default of `tie_word_embeddings`."""
    eps: ClassVar[tuple[str, float]] = ("rms_norm_eps", 1e-6)
    """The field with the epsilon of norms, and its default."""
    act: ClassVar[tuple[str, str]] = ("hidden_act", "silu")
    """The field with the activation of MLPs, and its default."""
    rope_base: ClassVar[float] = 10_000.0
    """Default of `rope_theta`."""
    rope_partial: ClassVar[float | None] = None
    """Default of `partial_rotary_factor`; None: heads are rotated whole."""
    head_bias: ClassVar[bool] = False
    """Default of `lm_head_bias`: the head adds a bias."""

    @classmethod
    def build(cls, config: Config) -> Self:
        return super().build(cls.complete(config))

    @classmethod
    def complete(cls, config: Config) -> Config:
        """The configuration with the names that are used here, and with defaults."""
        return config.with_aliases(cls.aliases).with_defaults(cls.defaults)

    def __init__(self, c: Config) -> None:
        super().__init__(
            c,
            (self.make_block(c, layer) for layer in range(c.num_hidden_layers)),
            self.make_norm(c),
            rope=self.make_rope(c),
            tied=c.get("tie_word_embeddings", self.tied),
            head_bias=c.get("lm_head_bias", self.head_bias),
        )

    def make_block(self, c: Config, layer: int) -> nn.Module:
        attention, mlp = self.make_mixer(c, layer), self.make_mlp(c, layer)
        if self.order == "parallel":
            return ParallelBlock(attention, mlp, attention_norm=self.make_norm(c))
        before, after = self.order in ("pre", "both"), self.order in ("post", "both")
        return Block(
            attention,
            mlp,
            attention_norm=self.make_norm(c) if before else None,
            attention_post_norm=self.make_norm(c) if after else None,
            mlp_norm=self.make_norm(c) if before else None,
            mlp_post_norm=self.make_norm(c) if after else None,
        )

    def make_norm(self, c: Config) -> Norm:
        return RMSNorm(c.hidden_size, c.get(*self.eps))

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        """What reads the past: attention here; hybrid families also have recurrent layers."""
        return self.make_attention(c, layer)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        """`options` replace those of `SelfAttention`."""
        bias, heads = c.get("attention_bias", False), c.num_attention_heads
        defaults: dict[str, Any] = dict(bias=bias, out_bias=bias, window=self.make_window(c, layer))
        kv_heads, head_dim = c.get("num_key_value_heads", heads), c.head_width
        return SelfAttention(c.hidden_size, heads, kv_heads, head_dim, **defaults | options)

    def make_window(self, c: Config, layer: int) -> Window:
        return Full()

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return GatedMLP(c.hidden_size, c.intermediate_size, c.get(*self.act), c.get("mlp_bias", False))

    def make_rope(self, c: Config) -> Rotary | Mapping[str, Rotary] | None:
        return Rotary.of(c, c.head_width, self.rope_base, partial=self.rope_partial)


def window_by_type(c: Config, layer: int, every: int | None = None, default: int | None = None) -> Window:
    """A sliding window or full attention, by `layer_types` of the configuration.

    every     without `layer_types`, every n-th layer is a full one; None: all are
    default   default of `sliding_window`
    """

    def otherwise(i: int) -> str:
        return "full_attention" if every is None or (i + 1) % every == 0 else "sliding_attention"

    kind = layer_types(c, ["full_attention", "sliding_attention"], otherwise)[layer]
    if kind == "full_attention":
        return Full()
    return Sliding(c.sliding_window if default is None or "sliding_window" in c.values else default)


def with_ropes_by_type(c: Config, base: float, sliding_base: float | None = None) -> Config:
    """The configuration with RoPE settings for full and for sliding attention in `rope_parameters`.

    Older files have `rope_theta` and `rope_scaling`, which are those of full attention, and `rope_local_base_freq`.

    base           default of the base of full attention
    sliding_base   default of the base of sliding attention; None: the base of full attention
    """
    given, theta = plain(c, "rope_parameters"), c.get("rope_theta", base)
    if given and not any(isinstance(value, Mapping) for value in given.values()):
        raise InputError(
            f"rope_parameters={given} in the configuration must have an object for full_attention, and one for "
            "sliding_attention; settings of full attention alone are called rope_scaling"
        )
    given["full_attention"] = (given.get("full_attention") or {}) | plain(c, "rope_scaling")
    c.ignore(*(f"rope_scaling.{name}" for name in KNOWN))
    bases = {
        "full_attention": theta,
        "sliding_attention": c.get("rope_local_base_freq", theta if sliding_base is None else sliding_base),
    }
    ropes = {kind: {"rope_theta": start, **(given.get(kind) or {})} for kind, start in bases.items()}
    return c.with_values(rope_parameters=ropes, rope_scaling=None)


def ropes_by_type(c: Config, head_dim: int) -> dict[str, Rotary]:
    """A RoPE table for full and one for sliding attention, from the settings of `with_ropes_by_type`."""
    return {kind: Rotary.of(c, head_dim, kind=kind) for kind in ("full_attention", "sliding_attention")}
