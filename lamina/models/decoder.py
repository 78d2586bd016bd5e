"""The shell that most decoders share: an embedding, blocks, a norm and a head, with rotary tables for all blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lamina.checkpoint.names import Value
from lamina.config import Config
from lamina.model import Model
from lamina.nn import Embedding, Linear, RMSNorm, Rotary


class Decoder(Model):
    """A family gives its blocks and last norm; `rope=None` where positions are not rotary, `tied` where the head is
    the embedding."""

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
    """Queries, keys and values that a checkpoint keeps apart, as the one matrix that `SelfAttention` reads."""
    return {f"{ours}.qkv": (f"{theirs}.q_proj", f"{theirs}.k_proj", f"{theirs}.v_proj")}


def mlp_names(ours: str, theirs: str) -> dict[str, Value]:
    """A gated MLP, gate and up as one matrix."""
    return {
        f"{ours}.gate_up": (f"{theirs}.gate_proj", f"{theirs}.up_proj"),
        f"{ours}.down": f"{theirs}.down_proj",
    }
