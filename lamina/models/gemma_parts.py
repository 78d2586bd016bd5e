"""Parts of Gemma 3n and Gemma 4: attention that may read another layer's keys and values, and inputs for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lamina.activation import activation
from lamina.attention.window import Window
from lamina.cache.memory import Memory
from lamina.cache.spec import Attention, LayerSpecs, Shared
from lamina.checkpoint.names import Value
from lamina.errors import InputError
from lamina.nn import Embedding, Linear, Positions, RMSNorm


class ReusingAttention(nn.Module):
    """Grouped-query attention with norms of queries, keys and values; scores are not scaled.

    rope     name of the RoPE table
    source   index of the layer whose keys and values are read; None: it has its own
    k_is_v   values are the keys before their norm and RoPE
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, *, window: Window, rope: str, eps: float,
        bias: bool = False, source: int | None = None, k_is_v: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_dim, self.rope, self.source, self.k_is_v = head_dim, rope, source, k_is_v
        self.q_norm = RMSNorm(head_dim, eps)
        self.specs: LayerSpecs
        if source is None:
            self.specs = {"attention": Attention(kv_heads, head_dim, head_dim, window)}
            self.parts = [heads, kv_heads] if k_is_v else [heads, kv_heads, kv_heads]
            self.k_norm, self.v_norm = RMSNorm(head_dim, eps), RMSNorm(head_dim, eps, weight=False)
        else:
            self.specs, self.parts = {"attention": Shared(source)}, [heads]
        name = "q" if source is not None else "qk" if k_is_v else "qkv"
        self.add_module(name, Linear(width, sum(self.parts) * head_dim, bias=bias))
        self.project = name
        self.out = Linear(heads * head_dim, width, bias=bias)

    def forward(self, x: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        projected = self.get_submodule(self.project)(x).unflatten(-1, (-1, self.head_dim))
        q, *kv = (part.transpose(1, 2) for part in projected.split(self.parts, dim=2))  # [B, heads, T, D] each
        how: dict[str, Any] = dict(scale=1.0, rope=shared.ropes[self.rope])
        if self.source is None:
            k, v = kv[0], self.v_norm(kv[-1])
            out = memory.attend(q, k, v, norms=(self.q_norm, self.k_norm), **how)
        else:
            out = memory.attend(q, norms=(self.q_norm, self.q_norm), **how)
        return self.out(out.transpose(1, 2).flatten(2), onto)


def source_of(kinds: Sequence[str], layer: int, reusing: int) -> int | None:
    """The layer whose keys and values `layer` reads: the last layer of its kind before the `reusing` last layers.

    >>> [source_of(["sliding", "full", "sliding", "full"], layer, 2) for layer in range(4)]
    [None, None, 0, 1]
    """
    first = len(kinds) - reusing
    if layer < first:
        return None
    found = [i for i in range(first) if kinds[i] == kinds[layer]]
    if not found:
        raise InputError(
            f"num_kv_shared_layers={reusing} of {len(kinds)} layers: layer {layer} reads the keys and values of an "
            f"earlier {kinds[layer]} layer, and there is none"
        )
    return found[-1]


REUSE_NAMES: dict[str, Value] = {
    "blocks.{i}.attention.q": "model.layers.{i}.self_attn.q_proj",
    "blocks.{i}.attention.qk": ("model.layers.{i}.self_attn.q_proj", "model.layers.{i}.self_attn.k_proj"),
}


def unused(layers: Sequence[int]) -> tuple[str, ...]:
    """Tensors that checkpoints may have for layers that read another layer's keys and values."""
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"model.layers.{i}.self_attn.{part}.*" for i in layers for part in parts)


class WithLayerInputs(NamedTuple):
    """What all blocks share: positions, and inputs [B, T, L, P] of which layer i reads the i-th."""

    positions: Positions
    inputs: Tensor


class LayerInputs(nn.Module):
    """A second embedding with a vector of `dim` values for each layer, added to a projection of the first one."""

    def __init__(self, vocab: int, width: int, layers: int, dim: int, eps: float) -> None:
        super().__init__()
        self.shape, self.factor = (layers, dim), width**-0.5
        self.embedding = Embedding(vocab, layers * dim)
        self.project = Linear(width, layers * dim, bias=False)
        self.norm = RMSNorm(dim, eps)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> [B, T, L · P]; ids beyond the table are that of padding, 0"""
        ids = torch.where(ids < self.embedding.num_embeddings, ids, 0)
        return self.embedding(ids, self.shape[1] ** 0.5, rounded=True)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """x [B, T, width], embedded [B, T, L · P] -> [B, T, L, P]"""
        projected = self.norm(self.project(x, scale=self.factor).unflatten(-1, self.shape))
        return (projected + embedded.unflatten(-1, self.shape)) * 2**-0.5


class LayerInput(nn.Module):
    """norm(project(act(gate(x)) · input)): x [B, T, width], input [B, T, P]"""

    def __init__(self, width: int, dim: int, act: str, eps: float) -> None:
        super().__init__()
        self.gate, self.project = Linear(width, dim, bias=False), Linear(dim, width, bias=False)
        self.norm, self.act = RMSNorm(width, eps), activation(act)

    def forward(self, x: Tensor, given: Tensor, onto: Tensor | None = None) -> Tensor:
        return self.norm(self.project(self.act(self.gate(x)) * given), onto=onto)


LAYER_INPUT_NAMES: dict[str, Value] = {
    "layer_inputs.embedding": "model.embed_tokens_per_layer",
    "layer_inputs.project": "model.per_layer_model_projection",
    "layer_inputs.norm": "model.per_layer_projection_norm",
    "blocks.{i}.layer_input.gate": "model.layers.{i}.per_layer_input_gate",
    "blocks.{i}.layer_input.project": "model.layers.{i}.per_layer_projection",
    "blocks.{i}.layer_input.norm": "model.layers.{i}.post_per_layer_input_norm",
}
