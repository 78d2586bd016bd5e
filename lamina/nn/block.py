"""Blocks of a decoder: attention, then an MLP, each with a residual; families differ in where the norms are."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.nn.attention.positions import Positions


class Mixer(Protocol):
    """A module that reads the past: self-attention of some kind. `onto`: a residual that the result is added to."""

    specs: LayerSpecs

    def __call__(self, x: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor: ...


class Block(nn.Module):
    """x + post_norm(attention(norm(x))), then the same with the MLP. Every norm is optional.

    pre-norm (Llama)    attention_norm, mlp_norm
    post-norm (OLMo 2)  attention_post_norm, mlp_post_norm
    both (Gemma 2)      all four
    """

    def __init__(
        self,
        attention: Mixer,
        mlp: nn.Module,
        *,
        attention_norm: nn.Module | None = None,
        attention_post_norm: nn.Module | None = None,
        mlp_norm: nn.Module | None = None,
        mlp_post_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.attention_post_norm = attention_norm, attention, attention_post_norm
        self.mlp_norm, self.mlp, self.mlp_post_norm = mlp_norm, mlp, mlp_post_norm
        self.specs = attention.specs

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        y = x if self.attention_norm is None else self.attention_norm(x)
        if self.attention_post_norm is None:
            x = self.attention(y, memory, shared, onto=x)
        else:
            x = self.attention_post_norm(self.attention(y, memory, shared), onto=x)
        y = x if self.mlp_norm is None else self.mlp_norm(x)
        if self.mlp_post_norm is None:
            return self.mlp(y, onto=x)
        return self.mlp_post_norm(self.mlp(y), onto=x)


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)): one norm for both, or one each."""

    def __init__(
        self, attention: Mixer, mlp: nn.Module, *, attention_norm: nn.Module, mlp_norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.specs = attention.specs

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        y = self.attention_norm(x)
        z = y if self.mlp_norm is None else self.mlp_norm(x)
        return self.mlp(z, onto=self.attention(y, memory, shared, onto=x))


class PostNormBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)): the residual is normed too, as in the first Transformers."""

    def __init__(self, attention: Mixer, mlp: nn.Module, *, attention_norm: nn.Module, mlp_norm: nn.Module) -> None:
        super().__init__()
        self.attention, self.attention_norm = attention, attention_norm
        self.mlp, self.mlp_norm = mlp, mlp_norm
        self.specs = attention.specs

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = self.attention_norm(self.attention(x, memory, shared, onto=x))
        return self.mlp_norm(self.mlp(x, onto=x))
