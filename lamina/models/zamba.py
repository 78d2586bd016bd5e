"""Zamba and Zamba2: Mamba layers, before some of which one of a few shared transformer layers runs.

    x + mamba(norm(x + linear(shared([x | x_0]))))        x_0 is the embedded token; without `shared` in other layers

The shared layers are repeated over the depth with the same weights; in Zamba2 each use of them has adapters (LoRA) of
its own. (In files with `tie_word_embeddings` false, transformers does not share these layers either.) Between blocks a
token is [x | x_0].

https://arxiv.org/abs/2405.16712  https://arxiv.org/abs/2411.15242
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.activation import activation
from lamina.cache.memory import Memory
from lamina.checkpoint.names import Either, Value, either
from lamina.config import Config
from lamina.models.decoder import Decoder, kinds_of_layers, mlp_names, qkv_names
from lamina.nn import (
    GatedRMSNorm,
    Linear,
    Mamba2Mixer,
    Mixer,
    Positions,
    RMSNorm,
    Rotary,
    SelfAttention,
    ZambaMixer,
    mamba2_names,
    zamba_names,
)  # fmt: skip


class Adapted(nn.Module):
    """shared(x) + adapters(x): low-rank products, each for its own outputs, side by side."""

    def __init__(self, shared: Linear, rank: int = 0, outputs: Sequence[int] = ()) -> None:
        super().__init__()
        self.shared = shared
        self.down = nn.ModuleList(Linear(shared.in_features, rank, bias=False) for _ in outputs)
        self.up = nn.ModuleList(Linear(rank, n, bias=False) for n in outputs)

    def forward(self, x: Tensor, before: float = 1.0) -> Tensor:
        if not self.down:
            return self.shared(x)
        return self.shared(x, torch.cat([up(down(x)) for down, up in zip(self.down, self.up, strict=True)], -1))


class TiedLayer(nn.Module):
    """The weights of one transformer layer that several blocks use."""

    def __init__(self, c: Config, head_dim: int, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        width, inner, eps = c.hidden_size, c.intermediate_size, c.get("rms_norm_eps", 1e-5)
        wide = c.get("attention_hidden_size", 2 * width)
        self.attention_norm, self.mlp_norm = RMSNorm(wide, eps), RMSNorm(width, eps)
        self.qkv = Linear(wide, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = Linear(heads * head_dim, width, bias=False)
        self.gate_up = Linear(width, 2 * inner, bias=bias)
        self.down = Linear(inner, width, bias=bias)


class TiedUse(nn.Module):
    """One use of a shared layer: linear(mlp(norm(attention(norm([x | x_0])))))."""

    def __init__(self, c: Config, weights: TiedLayer, attention: SelfAttention, rank: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = weights.attention_norm, weights.mlp_norm
        self.attention = attention
        outputs = [weights.gate_up.out_features] if rank else []
        self.gate_up, self.down = Adapted(weights.gate_up, rank, outputs), weights.down
        self.act = activation(c.get("hidden_act", "gelu"))
        self.linear = Linear(c.hidden_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, memory: Memory, shared: Positions, onto: Tensor) -> Tensor:
        y = self.attention(self.attention_norm(x), memory, shared)
        gate, up = self.gate_up(self.mlp_norm(y)).chunk(2, dim=-1)
        return self.linear(self.down(self.act(gate) * up), onto)


class ZambaBlock(nn.Module):
    def __init__(self, norm: RMSNorm, mixer: Mixer, before: TiedUse | None) -> None:
        super().__init__()
        self.norm, self.mixer, self.before = norm, mixer, before
        self.specs = {**mixer.specs, **({} if before is None else before.attention.specs)}

    def forward(self, stream: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x, first = (part.contiguous() for part in stream.chunk(2, dim=-1))
        y = x if self.before is None else self.before(stream, memory, shared, onto=x)
        return torch.cat([self.mixer(self.norm(y), memory, shared, onto=x), first], dim=-1)


class ZambaBase(Decoder):
    def __init__(self, c: Config) -> None:
        kinds = self.kinds(c)
        self.hybrid = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
        heads, eps, tied = c.num_attention_heads, c.get("rms_norm_eps", 1e-5), c.get("tie_word_embeddings", True)
        rope = Rotary.of(c, self.head_dim(c)) if self.rotates(c) else None
        layers = [
            TiedLayer(c, self.head_dim(c), heads, c.get("num_key_value_heads", heads), self.bias(c))
            for _ in (self.hybrid[: c.get("num_mem_blocks", 1)] if tied else self.hybrid)
        ]
        uses = {i: self.make_use(c, layers[k % len(layers)]) for k, i in enumerate(self.hybrid)}
        super().__init__(
            c,
            (
                ZambaBlock(RMSNorm(c.hidden_size, eps), self.make_mixer(c), uses.get(i))
                for i in range(c.num_hidden_layers)
            ),
            RMSNorm(c.hidden_size, eps),
            rope=rope,
            tied=tied,
        )

    def make_use(self, c: Config, weights: TiedLayer) -> TiedUse:
        """Scores are divided by √(head_dim / 2): half of each input is the embedded token."""
        heads, head_dim, rank = c.num_attention_heads, self.head_dim(c), self.rank(c)
        kv_heads = c.get("num_key_value_heads", heads)
        attention = SelfAttention(
            weights.qkv.in_features, heads, kv_heads, head_dim, scale=(head_dim / 2) ** -0.5,
            rope="default" if self.rotates(c) else None,
        )  # fmt: skip
        outputs = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        adapts = rank and c.get("use_shared_attention_adapter", False)
        attention.qkv = Adapted(weights.qkv, rank, outputs if adapts else ())  # type: ignore[assignment]
        attention.out = weights.out
        return TiedUse(c, weights, attention, rank)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.cat([x, x], dim=-1)  # [x | x_0]

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x.chunk(2, dim=-1)[0].contiguous())

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.finish(x))

    def kinds(self, c: Config) -> Sequence[str]:
        """The kind of each layer: linear_attention or hybrid."""
        raise NotImplementedError

    def make_mixer(self, c: Config) -> Mixer:
        raise NotImplementedError

    def head_dim(self, c: Config) -> int:
        return c.get("attention_head_dim", 2 * c.hidden_size // c.num_attention_heads)

    def rank(self, c: Config) -> int:
        """Of the adapters; 0: there are none."""
        return 0

    def bias(self, c: Config) -> bool:
        return False

    def rotates(self, c: Config) -> bool:
        return False


def listed(c: Config, otherwise: Sequence[str]) -> Sequence[str]:
    """`layers_block_type` with the current names of kinds."""
    found = c.first("layers_block_type", "layer_types", default=None)
    kinds = None if found is None else ["linear_attention" if kind == "mamba" else kind for kind in found]
    return kinds_of_layers("layers_block_type", kinds, c, ["linear_attention", "hybrid"], lambda i: otherwise[i])


def use_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of a use of a shared layer."""
    qkv = qkv_names(f"{ours}.attention", f"{theirs}.self_attn")[f"{ours}.attention.qkv"]
    mlp = mlp_names(ours, f"{theirs}.feed_forward")
    return {
        f"{ours}.attention_norm": f"{theirs}.input_layernorm",
        f"{ours}.mlp_norm": f"{theirs}.pre_ff_layernorm",
        f"{ours}.attention.qkv.shared": qkv,
        f"{ours}.attention.out": f"{theirs}.self_attn.o_proj",
        f"{ours}.gate_up.shared": mlp[f"{ours}.gate_up"],
        f"{ours}.down": mlp[f"{ours}.down"],
    }


class Zamba(ZambaBase):
    """One shared layer, and Mamba mixers of several heads."""

    no_effect = ("time_step_min", "max_position_embeddings")  # of initial weights; there is no RoPE

    def __init__(self, c: Config) -> None:
        super().__init__(c.with_defaults({"intermediate_size": 14_848}))
        self.names = {"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"}
        for i in range(c.num_hidden_layers):
            theirs = f"model.layers.{i}" + (".mamba_decoder" if i in self.hybrid else "")
            self.names |= zamba_names(f"blocks.{i}.mixer", f"{theirs}.mamba")
            self.names |= {f"blocks.{i}.norm": f"{theirs}.input_layernorm"}
        for i in self.hybrid:
            ours, places = f"blocks.{i}.before", (i, self.hybrid[0])
            self.names |= either(*(use_names(ours, f"model.layers.{place}.shared_transf") for place in places))
            self.names |= {f"{ours}.linear": f"model.layers.{i}.linear"}

    def kinds(self, c: Config) -> Sequence[str]:
        period, offset = c.get("attn_layer_period", 6), c.get("attn_layer_offset", 4)
        rest = ("hybrid" if i % period == offset else "linear_attention" for i in range(c.num_hidden_layers))
        return listed(c, ["linear_attention", "linear_attention", "hybrid", *rest])

    def make_mixer(self, c: Config) -> Mixer:
        rank = c.get("mamba_dt_rank", "auto")
        return ZambaMixer(
            c.hidden_size, c.get("mamba_expand", 2) * c.hidden_size, c.get("n_mamba_heads", 2),
            c.get("mamba_d_state", 16), math.ceil(c.hidden_size / 16) if rank == "auto" else rank,
            c.get("mamba_d_conv", 4), act=c.get("hidden_mamba_act", "silu"), bias=c.get("mamba_proj_bias", False),
            conv_bias=c.get("mamba_conv_bias", True),
        )  # fmt: skip


class Zamba2(ZambaBase):
    """Several shared layers in turn, with adapters, and Mamba-2 mixers."""

    no_effect = (
        "use_shared_mlp_adapter", "ffn_hidden_size", "sliding_window", "time_step_limit", "kv_channels",
        "num_query_groups", "use_conv_bias", "max_position_embeddings",
    )  # fmt: skip

    def __init__(self, c: Config) -> None:
        c.require("use_long_context", (False,), False)
        if not self.rotates(c):
            c.ignore("rope_theta", "rope_parameters", "rope_parameters.*")
        c = c.with_values(intermediate_size=c.get("intermediate_size") or 4 * c.hidden_size)
        super().__init__(c)
        inner = int(c.get("mamba_expand", 2) * c.hidden_size)
        for name, value in (  # computed from others, and written to files
            ("attention_hidden_size", 2 * c.hidden_size),
            ("mamba_headdim", inner // c.get("n_mamba_heads", 8)),
            ("hybrid_layer_ids", self.hybrid),
        ):
            c.require(name, (value,), value)
        self.names = {"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"}
        for i in range(c.num_hidden_layers):
            theirs = f"model.layers.{i}" + (".mamba_decoder" if i in self.hybrid else "")
            self.names |= mamba2_names(f"blocks.{i}.mixer", f"{theirs}.mamba")
            self.names |= {f"blocks.{i}.norm": f"{theirs}.input_layernorm"}
        blocks = c.get("num_mem_blocks", 1)
        for k, i in enumerate(self.hybrid):
            # Weights and adapters of all uses of a shared layer are stored with its first use, or with each.
            first, own = (f"model.layers.{layer}.shared_transformer" for layer in (self.hybrid[k % blocks], i))
            ours = f"blocks.{i}.before"
            self.names |= either(use_names(ours, own), use_names(ours, first))
            self.names |= {
                f"{ours}.linear": f"model.layers.{i}.linear",
                f"{ours}.gate_up.shared": Either(*(f"{one}.feed_forward.gate_up_proj" for one in (own, first))),
                **adapter_names(f"{ours}.gate_up", 0, f"feed_forward.gate_up_proj_adapter_list.{k}", own, first),
            }
            for part, name in enumerate("qkv"):
                adapter = f"self_attn.linear_{name}_adapter_list.{k}"
                self.names |= adapter_names(f"{ours}.attention.qkv", part, adapter, own, first)
        copies = [f"model.layers.{i}.shared_transformer.*" for i in self.hybrid[blocks:]]
        self.ignored = (*copies, "*.shared_transformer.*_adapter_list.*")  # of other uses

    def kinds(self, c: Config) -> Sequence[str]:
        mamba, hybrid = ["linear_attention"], ["hybrid"]
        usual = mamba + (mamba * 5 + hybrid) * 7 + mamba * 4 + hybrid + mamba * 3 + hybrid + mamba * 2
        return listed(c, usual)

    def make_mixer(self, c: Config) -> Mixer:
        inner, heads = int(c.get("mamba_expand", 2) * c.hidden_size), c.get("n_mamba_heads", 8)
        groups, bias = c.get("mamba_ngroups", 1), self.bias(c)
        options: dict[str, Any] = dict(bias=bias, out_bias=bias, dt_limit=(c.get("time_step_min", 0.001), math.inf))
        return Mamba2Mixer(
            c.hidden_size, heads, inner // heads, c.get("mamba_d_state", 64), groups, c.get("mamba_d_conv", 4),
            norm=GatedRMSNorm(inner, 1e-5, groups=groups), **options,
        )  # fmt: skip

    def rank(self, c: Config) -> int:
        return c.get("adapter_rank", 128)

    def bias(self, c: Config) -> bool:
        return c.get("add_bias_linear", False)

    def rotates(self, c: Config) -> bool:
        return c.get("use_mem_rope", False)


def adapter_names(ours: str, part: int, name: str, *layers: str) -> dict[str, Value]:
    return {
        f"{ours}.down.{part}": Either(*(f"{layer}.{name}.0" for layer in layers)),
        f"{ours}.up.{part}": Either(*(f"{layer}.{name}.1" for layer in layers)),
    }
