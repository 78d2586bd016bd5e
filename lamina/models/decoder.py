"""`Decoder`: the base of most families: an embedding, blocks, a norm and a head, and one RoPE table for all blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lamina.checkpoint.names import Value
from lamina.config import Config
from lamina.model import Model
from lamina.nn import Embedding, Linear, RMSNorm, Rotary


class Decoder(Model):
    """A family gives its blocks and final norm. rope=None: no RoPE; tied: the head has the weight of the embedding."""

    def __init__(
        self, c: Config, blocks: Iterable[nn.Module], norm: RMSNorm, *, rope: Rotary | None, tied: bool
    ) -> None:
        super().__init__()
        self.vocab = c.vocab_size
        self.embedding = Embedding(c.vocab_size, c.hidden_size)
        self.rope = rope
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = Linear(c.hidden_size, c.vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def prepare(self, positions: Tensor) -> Any:
        return None if self.rope is None else self.rope(positions)

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def qkv_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names: a checkpoint's separate q, k and v are concatenated to the one matrix of `SelfAttention`."""
    return {f"{ours}.qkv": (f"{theirs}.q_proj", f"{theirs}.k_proj", f"{theirs}.v_proj")}


def mlp_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of a gated MLP: gate and up are concatenated to one matrix."""
    return {
        f"{ours}.gate_up": (f"{theirs}.gate_proj", f"{theirs}.up_proj"),
        f"{ours}.down": f"{theirs}.down_proj",
    }
