"""Gemma 3n, the text model. Each layer works on several versions of the hidden state, of which it computes one (AltUp).

    versions ← versions + a small matrix · versions           predict, by a router
    y ← (active + attention + LAuReL) / √2, then + mlp        LAuReL: a low-rank residual
    versions ← versions + factors · (y - active)              correct, by the router
    all but the first += norm(project(act(gate(active)) · input of this layer))

The last layers have no keys and values of their own. The first layers keep few activations of their MLPs.

https://developers.googleblog.com/en/introducing-gemma-3n-developer-guide
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.attention.window import Window
from lamina.cache.memory import Memory
from lamina.checkpoint.names import Stack
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import layer_types
from lamina.models.gemma3 import Gemma3
from lamina.models.gemma_parts import (
    LAYER_INPUT_NAMES,
    REUSE_NAMES,
    LayerInput,
    LayerInputs,
    ReusingAttention,
    WithLayerInputs,
    source_of,
    unused,
)  # fmt: skip
from lamina.models.transformer import window_by_type
from lamina.nn import GatedMLP, Linear, RMSNorm


class SparseMLP(GatedMLP):
    """sparsity: the share of gates that become zero if gates are normally distributed; the others are lowered too"""

    def __init__(self, width: int, inner: int, act: str, sparsity: float) -> None:
        super().__init__(width, inner, act)
        self.deviations = NormalDist().inv_cdf(sparsity) if sparsity > 0 else None

    def inner(self, x: Tensor) -> Tensor:
        if self.deviations is None:
            return super().inner(x)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        cutoff = gate.mean(dim=-1, keepdim=True) + gate.std(dim=-1, keepdim=True, correction=0) * self.deviations
        return self.act(F.relu(gate - cutoff)) * up


class AltUp(nn.Module):
    """active: index of the version that layers compute"""

    def __init__(self, width: int, versions: int, active: int, eps: float) -> None:
        super().__init__()
        self.versions, self.active, self.factor = versions, active, 1 / width
        self.norm = RMSNorm(width, eps)
        self.router = Linear(width, versions, bias=False)
        self.prediction = nn.Parameter(torch.zeros(versions**2, versions))
        self.correction = nn.Parameter(torch.zeros(versions, versions))

    def route(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, versions]"""
        logits = self.router(self.norm(x), before=self.factor)
        return logits.to(torch.promote_types(x.dtype, torch.float32)).tanh().to(x.dtype)

    def predict(self, x: Tensor) -> Tensor:
        """[B, T, versions, width] -> the same"""
        mixed = F.linear(self.route(self.pick(x)), self.prediction)
        return x + mixed.unflatten(-1, (self.versions, self.versions)) @ x

    def correct(self, x: Tensor, y: Tensor) -> Tensor:
        """Predictions x [B, T, versions, width] and the computed version y [B, T, width] -> [B, T, versions, width]"""
        factors = F.linear(self.route(y), self.correction) + 1
        return x + factors[..., None] * (y - self.pick(x))[..., None, :]

    def pick(self, x: Tensor) -> Tensor:
        """The active version of x [B, T, versions, width]: [B, T, width]"""
        return x[..., self.active, :]


class Laurel(nn.Module):
    """x + norm(up(down(x))), with few values in between"""

    def __init__(self, width: int, rank: int, eps: float) -> None:
        super().__init__()
        self.down, self.up = Linear(width, rank, bias=False), Linear(rank, width, bias=False)
        self.norm = RMSNorm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(self.down(x)), onto=x)


class Gemma3nBlock(nn.Module):
    """x [B, T, versions · width]"""

    def __init__(self, c: Config, layer: int, attention: ReusingAttention, mlp: nn.Module, eps: float) -> None:
        super().__init__()
        width, self.layer = c.hidden_size, layer
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (
            RMSNorm(width, eps) for _ in range(4)
        )
        self.attention, self.mlp, self.specs = attention, mlp, attention.specs
        self.altup = AltUp(width, c.altup_num_inputs, c.altup_active_idx, eps)
        self.laurel = Laurel(width, c.laurel_rank, eps)
        self.scale = nn.Parameter(torch.zeros(width))
        self.scaled = c.altup_correct_scale
        self.layer_input = LayerInput(width, c.hidden_size_per_layer_input, c.hidden_activation, eps)

    def forward(self, x: Tensor, memory: Memory, shared: WithLayerInputs) -> Tensor:
        versions = self.altup.predict(x.unflatten(-1, (self.altup.versions, -1)))
        active = self.altup.pick(versions)
        normed = self.attention_norm(active)
        y = self.attention_post_norm(self.attention(normed, memory, shared.positions), onto=active)
        y = (y + self.laurel(normed)) * 0.5**0.5
        y = self.mlp_post_norm(self.mlp(self.mlp_norm(y)), onto=y)
        versions = self.altup.correct(versions, y)
        first = self.altup.pick(versions)
        more = self.layer_input(first * self.scale if self.scaled else first, shared.inputs[:, :, self.layer])
        return torch.cat([versions[..., :1, :], versions[..., 1:, :] + more[..., None, :]], dim=-2).flatten(-2)


class Gemma3n(Gemma3):
    names = Gemma3.names | REUSE_NAMES | LAYER_INPUT_NAMES | {
        "blocks.{i}.altup.norm": "model.layers.{i}.altup.router_norm",
        "blocks.{i}.altup.router": "model.layers.{i}.altup.modality_router",
        "blocks.{i}.altup.prediction": "model.layers.{i}.altup.prediction_coefs.weight",
        "blocks.{i}.altup.correction": "model.layers.{i}.altup.correction_coefs.weight",
        "blocks.{i}.scale": "model.layers.{i}.altup.correct_output_scale",
        "blocks.{i}.laurel.down": "model.layers.{i}.laurel.linear_left",
        "blocks.{i}.laurel.up": "model.layers.{i}.laurel.linear_right",
        "blocks.{i}.laurel.norm": "model.layers.{i}.laurel.post_laurel_norm",
        "spread": Stack("model.altup_projections.{e}.weight"),
        "gather": Stack("model.altup_unembed_projections.{e}.weight"),
    }  # fmt: skip
    defaults = dict(
        vocab_size=262_400, num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=32_768, sliding_window=512,
        final_logit_softcapping=30.0, vocab_size_per_layer_input=262_144, hidden_size_per_layer_input=256,
        altup_active_idx=0, altup_num_inputs=4, altup_correct_scale=True, num_kv_shared_layers=15, laurel_rank=64,
    )  # fmt: skip

    @classmethod
    def complete(cls, config: Config) -> Config:
        """`intermediate_size` may be a list, with an entry for each layer."""
        c = super().complete(config)
        sizes = c.values.get("intermediate_size")
        return c.with_values(intermediate_size=max(sizes), intermediate_sizes=sizes) if isinstance(sizes, list) else c

    def __init__(self, c: Config) -> None:
        c.ignore("intermediate_size", "altup_coef_clip")  # only used in training
        super().__init__(c)
        layers, width, eps = c.num_hidden_layers, c.hidden_size, c.get(*self.eps)
        self.layer_inputs = LayerInputs(c.vocab_size_per_layer_input, width, layers, c.hidden_size_per_layer_input, eps)
        self.spread, self.gather = (nn.Parameter(torch.zeros(c.altup_num_inputs - 1, width, width)) for _ in range(2))
        self.ignored = (*self.ignored, *unused([i for i in range(layers) if self.source(c, i) is not None]))

    def make_norm(self, c: Config) -> RMSNorm:
        return RMSNorm(c.hidden_size, c.get(*self.eps))

    def make_window(self, c: Config, layer: int) -> Window:
        return window_by_type(c, layer, every=5)

    def make_block(self, c: Config, layer: int) -> Gemma3nBlock:
        return Gemma3nBlock(c, layer, self.make_attention(c, layer), self.make_mlp(c, layer), c.get(*self.eps))

    def make_attention(self, c: Config, layer: int, **options: Any) -> Any:
        return ReusingAttention(
            c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, window=self.make_window(c, layer),
            rope=self.kinds(c)[layer], eps=c.get(*self.eps), bias=c.get("attention_bias", False),
            source=self.source(c, layer),
        )  # fmt: skip

    def make_mlp(self, c: Config, layer: int) -> SparseMLP:
        layers = c.num_hidden_layers
        sparse = c.get("activation_sparsity_pattern") or [0.95 if layers > 10 > i else 0.0 for i in range(layers)]
        inner = c.get("intermediate_sizes") or [c.intermediate_size] * layers
        if len(sparse) != layers or len(inner) != layers:
            raise InputError(
                f"activation_sparsity_pattern={sparse} and intermediate_size={inner} in the configuration must have an "
                f"entry for each of {layers} layers"
            )
        return SparseMLP(c.hidden_size, inner[layer], c.hidden_activation, sparse[layer])

    def kinds(self, c: Config) -> Any:
        known = ["full_attention", "sliding_attention"]
        return layer_types(c, known, lambda i: known[(i + 1) % 5 != 0])

    def source(self, c: Config, layer: int) -> int | None:
        reusing = c.num_kv_shared_layers if c.num_kv_shared_layers < c.num_hidden_layers else 0
        return source_of(self.kinds(c), layer, reusing)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T, width + L · P]: the embedding, and then that of each layer"""
        return torch.cat([super().embed(ids), self.layer_inputs.embed(ids)], dim=-1)

    def enter(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, WithLayerInputs]:
        x, more = embeds.tensor_split([self.embedding.embedding_dim], dim=-1)
        x, prepared = super().enter(x, positions)
        spread = F.linear(x, self.spread.flatten(0, 1)).unflatten(-1, self.spread.shape[:2])
        versions = torch.cat([x[..., None, :], as_large(spread, x)], dim=-2)
        return versions.flatten(-2), WithLayerInputs(prepared, self.layer_inputs(x, more))

    def finish(self, x: Tensor) -> Tensor:
        versions = x.unflatten(-1, (-1, self.embedding.embedding_dim))
        first = versions[..., 0, :]
        others = torch.einsum("...sw,svw->...sv", versions[..., 1:, :], self.gather)
        return self.norm(torch.cat([first[..., None, :], as_large(others, first)], dim=-2).mean(dim=-2))

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.finish(x), softcap=self.softcap)


def as_large(y: Tensor, x: Tensor) -> Tensor:
    """y [..., n, width], each vector as large as x [..., width]"""
    large, is_large = (part.square().mean(dim=-1, keepdim=True) for part in (x, y))
    return y * large.sqrt()[..., None, :] / is_large.clamp(min=1e-5).sqrt()
