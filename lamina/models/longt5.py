"""LongT5: T5 whose encoder attends to near tokens, and in one variant to summaries of all blocks of the source.

https://arxiv.org/abs/2112.07916
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import either, renamed
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.t5 import T5, T5Encoder, T5EncoderBlock, norm, position_bias
from lamina.nn import Embedding, Linear, Mixer, RelativeBias

LOCAL, GLOBAL = "local", "transient-global"


class LongPositions(NamedTuple):
    """The biases on the scores of near tokens, and of summaries."""

    bias: RelativeBias
    summary_bias: RelativeBias | None


class LocalAttention(nn.Module):
    """Attention to the tokens at most `radius` away, and to summaries: normed sums of the inputs of `size` tokens each.
    Tokens after the last whole block count to that one. size 0: no summaries

    A row is cut into blocks of radius + 1 tokens, whose queries see at most their own block and the two around it.
    """

    def __init__(self, c: Config) -> None:
        super().__init__()
        summarizes = c.require("encoder_attention_type", [LOCAL, GLOBAL], LOCAL) == GLOBAL
        self.heads, self.radius = c.num_heads, c.get("local_radius", 127)
        self.size = c.get("global_block_size", 16) if summarizes else 0
        self.qkv = Linear(c.d_model, 3 * c.num_heads * c.d_kv, bias=False)
        self.out = Linear(c.num_heads * c.d_kv, c.d_model, bias=False)
        self.summary_norm = norm(c) if summarizes else None
        self.specs: LayerSpecs = {}

    def forward(self, x: Tensor, memory: Memory, shared: Any, onto: Tensor | None = None) -> Tensor:
        """x [B, S, width], shared `LongPositions` -> [B, S, width]; `onto`: a residual that the result is added to."""
        if memory.step.segments is not None:
            raise InputError("the encoder of LongT5 does not read packed segments: give each sequence a row of its own")
        length, block = x.shape[1], self.radius + 1
        counts = memory.step.all_counts[:, None]  # [B, 1]
        traced = torch.compiler.is_exporting()  # then no size may be 1 or 0 for some lengths and more for others
        blocks = length // block + 2 if traced else -(-length // block)
        q, k, v = self.project(F.pad(x, (0, 0, 0, blocks * block - length)))  # [B, H, N · block, D]
        near_k, near_v = (F.pad(one, (0, 0, block, block)).unfold(2, 3 * block, block) for one in (k, v))
        q = q.unfold(2, block, block).mT  # [B, H, N, block, D]; keys and values [B, H, N, D, 3 · block]
        at = torch.arange(-block, 2 * block, device=x.device)  # of keys, in a block that starts at 0
        own, head = torch.arange(block, device=x.device)[:, None], torch.arange(self.heads, device=x.device)
        start = torch.arange(blocks, device=x.device)[:, None] * block
        real = (start + at >= 0) & (start + at < counts[..., None])  # [B, N, 3 · block]
        seen = ((own - at).abs() <= self.radius) & real[:, None, :, None]
        scores = (q @ near_k).float() + shared.bias(head[:, None, None], own, at)[:, None]
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)  # [B, H, N, block, 3 · block]
        whole = length // self.size + 2 * traced if self.size else 0  # more than there are for a row are masked
        if whole == 0 or self.summary_norm is None or shared.summary_bias is None:
            out = scores.softmax(-1).to(x.dtype) @ near_v.mT
            return self.out(first(out.flatten(2, 3), length).transpose(1, 2).flatten(2), onto)
        # [B, S] the block of each token; -1 in a row without a whole block
        of_token = torch.minimum(torch.arange(length, device=x.device) // self.size, counts // self.size - 1)
        each = torch.arange(whole, device=x.device)
        real = torch.arange(length, device=x.device) < counts
        parts = ((of_token[..., None] == each) & real[..., None]).to(x.dtype)  # [B, S, G]
        _, far_k, far_v = self.project(self.summary_norm(parts.mT @ x))  # [B, H, G, D]
        bias = shared.summary_bias(head[:, None, None], of_token[:, None, :, None], each)  # [B, H, S, G]
        bias = F.pad(bias, (0, 0, 0, blocks * block - length)).unfold(2, block, block).mT
        far = (q @ far_k.mT[:, :, None]).float() + bias
        far = far.masked_fill((each >= counts // self.size)[:, None, None, None], torch.finfo(far.dtype).min)
        near_w, far_w = torch.cat([scores, far], -1).softmax(-1).to(x.dtype).split([3 * block, whole], -1)
        out = near_w @ near_v.mT + far_w @ far_v[:, :, None]
        return self.out(first(out.flatten(2, 3), length).transpose(1, 2).flatten(2), onto)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [B, T, width] -> queries, keys and values [B, H, T, D]"""
        return self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)


def first(x: Tensor, length: int) -> Tensor:
    """The first tokens of x [B, H, S, D]. A slice would compare the two sizes, which a traced program cannot."""
    if torch.compiler.is_exporting():
        return x.index_select(2, torch.arange(length, device=x.device))
    return x[:, :, :length]


class LongT5EncoderBlock(T5EncoderBlock):
    def make_attention(self, c: Config) -> Mixer:
        return LocalAttention(c)


class LongT5Encoder(T5Encoder):
    def __init__(self, c: Config, family: type[T5], embedding: Embedding) -> None:
        super().__init__(c, family, embedding)
        summarizes = c.get("encoder_attention_type", LOCAL) == GLOBAL
        self.summary_bias = position_bias(c, both_ways=True) if summarizes else None

    def prepare(self, positions: Tensor) -> LongPositions:
        assert self.bias is not None
        return LongPositions(self.bias, self.summary_bias)


def encoder_attention(kind: str) -> Callable[[str], str]:
    """Renames the encoder's attention."""
    return lambda name: name.replace("SelfAttention", kind) if name.startswith("encoder.") else name


SUMMARY = "encoder.block.{i}.layer.0.TransientGlobalSelfAttention.global_input_layer_norm"


class LongT5(T5):
    no_effect = ("global_block_size",)  # where encoder_attention_type is "local"
    names = either(
        renamed(T5.names, encoder_attention("LocalSelfAttention")),
        renamed(T5.names, encoder_attention("TransientGlobalSelfAttention"))
        | {
            "encoder.summary_bias": SUMMARY.replace("{i}", "0").replace("input_layer_norm", "relative_attention_bias"),
            "encoder.blocks.{i}.attention.summary_norm": SUMMARY,
        },
    )
    encoder_block, stack = LongT5EncoderBlock, LongT5Encoder
