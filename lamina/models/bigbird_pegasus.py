"""BigBird-Pegasus: Pegasus whose encoder attends sparsely to long sources: to near blocks, and to the first and last.

https://arxiv.org/abs/2007.14062
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.attention import Full, View, attention
from lamina.cache.memory import Memory
from lamina.checkpoint.names import renamed
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.bart import Bart, BartEncoderBlock
from lamina.nn import Positions, SelfAttention

ROOM = 1 << 26  # bytes of gathered keys, gathered values and scores in memory at once


class BlockSparseAttention(SelfAttention):
    """Rows longer than (5 + 2 · spare) · block tokens are divided into blocks. The first and the last block see all
    tokens; any other sees those two, itself and its neighbours.

    In training each block also saw `spare` random blocks. Otherwise the first block takes their places, as in
    transformers: its keys count 1 + spare times.

        blocks of keys     0 1 2 3 4 5
        queries of block 0 █ █ █ █ █ █
                         1 █ █ █ · · █
                         2 █ █ █ █ · █     the five blocks that a query of a middle block sees are gathered
                         3 █ · █ █ █ █
                         4 █ · · █ █ █
                         5 █ █ █ █ █ █
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
        step = memory.step
        if step.segments is not None:
            raise InputError(
                "block-sparse attention does not read packed segments: give each sequence a row of its own"
            )
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).chunk(3, dim=1)  # [B, H, S, D]
        view = step.view("both ways", lambda: step.view_of_new(Full()))
        return self.out(self.attend(q, k, v, view, step.counts).transpose(1, 2).flatten(2), onto)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, view: View, counts: Tensor | None) -> Tensor:
        """q, k and v [B, H, S, D] -> [B, H, S, D]

        view     of the tokens over each other, all of a row
        counts   [B] tokens of each row; None: all
        """
        (B, _, S, _), size = q.shape, self.block
        whole = q.new_full((B,), S, dtype=torch.int64) if counts is None else counts
        last = (whole - 1) // size  # [B] each row's last block
        fill = -S % size
        q_blocks, k_blocks, v_blocks = (F.pad(one, (0, 0, 0, fill)).unflatten(2, (-1, size)) for one in (q, k, v))
        out = self.middle(q_blocks, k_blocks, v_blocks, whole, last)
        row = torch.arange(B, device=q.device)
        ends = torch.cat([q_blocks[:, :, 0], q_blocks[row, :, last]], dim=2)  # [B, H, 2 · size, D]
        seen = View(view.kv_positions.new_zeros(B, 2 * size), view.kv_positions, Full(), causal=False)
        ends = attention(ends, k, v, seen, scale=self.scale)
        out[:, :, 0] = ends[:, :, :size]
        out[row, :, last] = ends[:, :, size:]
        out = out.flatten(2, 3)[:, :, :S]
        if counts is not None:  # short rows see all
            some = slice(int(self.longest_full))
            short = attention(q[:, :, some], k[:, :, some], v[:, :, some], view.part(some, some), scale=self.scale)
            is_short = (counts <= self.longest_full)[:, None, None, None]
            out[:, :, some] = torch.where(is_short, short, out[:, :, some])
        return out

    def middle(self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor, last: Tensor) -> Tensor:
        """q, k and v [B, H, N, size, D] -> the same for blocks that are neither first nor last, some at a time."""
        B, H, N, size, D = q.shape
        out = torch.empty_like(q)
        row, near = torch.arange(B, device=q.device)[:, None, None], torch.arange(-1, 2, device=q.device)
        within, ends = torch.arange(size, device=q.device), torch.stack([torch.zeros_like(last), last], dim=1)  # [B, 2]
        at_once = max(1, ROOM // (B * H * size * 5 * (2 * D * q.element_size() + 4 * size)))
        for start in range(0, N, at_once):
            own = torch.arange(start, min(start + at_once, N), device=q.device)[:, None]
            n = len(own)
            around = (own + near).expand(B, n, 3)
            blocks = torch.cat([ends[:, None].expand(B, n, 2), around.clamp(0, N - 1)], dim=2)  # [B, n, 5]
            hidden = (around <= 0) | (around >= last[:, None, None])  # no blocks, or the first and the last again
            seen = blocks[..., None] * size + within < counts[:, None, None, None]
            seen = seen & ~F.pad(hidden, (2, 0))[..., None]
            bias = torch.zeros(5, 1, dtype=q.dtype, device=q.device)
            bias[0] = math.log(1 + self.spare)
            mask = torch.where(seen, bias, -math.inf).view(B * n, 1, 1, 5 * size)
            keys, values = (x.transpose(1, 2)[row, blocks].transpose(2, 3).reshape(B * n, H, -1, D) for x in (k, v))
            queries = q[:, :, start : start + n].transpose(1, 2).reshape(B * n, H, size, D)
            found = F.scaled_dot_product_attention(
                queries, keys, values, mask.expand(-1, -1, size, -1), scale=self.scale
            )
            out[:, :, start : start + n] = found.unflatten(0, (B, n)).transpose(1, 2)
        return out


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
