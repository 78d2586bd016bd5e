"""BigBird-Pegasus: Pegasus whose encoder attends sparsely to long sources: to near blocks, and to the first and last.

https://arxiv.org/abs/2007.14062
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.cache.memory import Memory
from lamina.checkpoint.names import renamed
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.bart import Bart, BartEncoderBlock
from lamina.nn import Positions, SelfAttention


class BlockSparseAttention(SelfAttention):
    """Rows longer than (5 + 2 · spare) · block tokens are divided into blocks. The first and the last block see all
    tokens; any other sees those two, itself and its neighbours.

    In training each block also saw `spare` random blocks. Otherwise the first block takes their places, as in
    transformers: its keys count 1 + spare times.
    """

    def __init__(self, c: Config) -> None:
        heads, bias = c.encoder_attention_heads, c.use_bias
        super().__init__(c.d_model, heads, heads, c.d_model // heads, bias=bias, out_bias=bias, rope=None)
        sparse = c.require("attention_type", ["block_sparse", "original_full"], "block_sparse") == "block_sparse"
        self.block, self.spare = c.get("block_size", 64), c.get("num_random_blocks", 3)
        self.longest_full = (5 + 2 * self.spare) * self.block if sparse else math.inf

    def forward(self, x: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        if x.shape[1] <= self.longest_full:
            return super().forward(x, memory, shared, onto)
        if memory.step.segments is not None:
            raise InputError(
                "block-sparse attention does not read packed segments: give each sequence a row of its own"
            )
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).chunk(3, dim=1)  # [B, H, S, D]
        out = F.scaled_dot_product_attention(q, k, v, self.mask(x, memory.step.all_counts))
        return self.out(out.transpose(1, 2).flatten(2), onto)

    def mask(self, x: Tensor, counts: Tensor) -> Tensor:
        """What is added to the scores [B, 1, S, S] of rows with this many tokens [B]."""
        at, counts = torch.arange(x.shape[1], device=x.device), counts[:, None, None]
        q, kv, last = at[:, None] // self.block, at // self.block, (counts - 1) // self.block
        full = (counts <= self.longest_full) | (q == 0) | (q == last)  # [B, S, 1] queries that see all
        seen = (full | (kv == 0) | (kv == last) | ((q - kv).abs() <= 1)) & (at < counts)
        bias = torch.where(~full & (kv == 0), math.log(1 + self.spare), 0.0)
        return bias.masked_fill(~seen, -math.inf).to(x.dtype)[:, None]


class BigBirdEncoderBlock(BartEncoderBlock):
    def make_attention(self, c: Config, side: str) -> SelfAttention:
        return BlockSparseAttention(c)


PARTS = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "out_proj": "output"}


def their_name(name: str) -> str:
    """Names of BART -> of this family: its last norm is called the embedding's, its encoder's attention is BERT's."""
    head, _, part = name.rpartition(".self_attn.")
    if head.startswith("model.encoder."):
        return f"{head}.self_attn.{PARTS[part]}"
    return name.replace("coder.layer_norm", "coder.layernorm_embedding")


class BigBirdPegasus(Bart):
    names = renamed(Bart.names, their_name)
    pre, norms_embedding, offset, scaled, act = True, False, 0, True, "gelu_new"
    encoder_block = BigBirdEncoderBlock

    def __init__(self, c: Config) -> None:
        super().__init__(c.with_defaults({"use_bias": False}))
