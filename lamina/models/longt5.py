"""LongT5: T5 whose encoder attends to near tokens, and in one variant to summaries of all blocks of the source.

https://arxiv.org/abs/2112.07916
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels
from lamina.attention import Full, Near, View
from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import either, renamed
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.t5 import T5, T5Encoder, T5EncoderBlock, norm, position_bias
from lamina.nn import Embedding, Linear, Mixer, RelativeBias

MOST_VALUES = 256  # of a head, that the kernels take
LOCAL, GLOBAL = "local", "transient-global"


class LongPositions(NamedTuple):
    """The biases on the scores of near tokens, and of summaries."""

    bias: RelativeBias
    summary_bias: RelativeBias | None


class Summaries(NamedTuple):
    """Keys and values [B, H, G, D] of the summaries of a source.

    of_token   [B, S] the summary that each token counts to, -1 in a row without one
    real       [B, G] which summaries a row has
    """

    keys: Tensor
    values: Tensor
    of_token: Tensor
    real: Tensor


ROOM = 1 << 26  # bytes of scores in memory at once


class LocalAttention(nn.Module):
    """Attention to the tokens at most `radius` away, and to summaries: normed sums of the inputs of `size` tokens each.
    Tokens after the last whole block count to that one. size 0: no summaries

    On a GPU kernels attend to tokens and to summaries, and both parts are merged. Elsewhere a row is cut into blocks of
    radius + 1 tokens, whose queries see at most their own block and the two around it.
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
        step = memory.step
        if step.segments is not None:
            raise InputError("the encoder of LongT5 does not read packed segments: give each sequence a row of its own")
        q, k, v = self.project(x)  # [B, H, S, D]
        far = self.summaries(x, step.all_counts[:, None])
        if kernels.fuses(x) and q.shape[-1] <= MOST_VALUES:
            view = step.view("near", lambda: step.view_of_new(Near(self.radius)))
            out = by_kernels(q, k, v, view, shared, far)
        else:
            out = self.by_blocks(q, k, v, step.all_counts[:, None], shared, far)
        return self.out(out.transpose(1, 2).flatten(2), onto)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [B, T, width] -> queries, keys and values [B, H, T, D]"""
        return self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)

    def summaries(self, x: Tensor, counts: Tensor) -> Summaries | None:
        """The summaries of x [B, S, width], of which counts [B, 1] are real; None if there are none."""
        length = x.shape[1]
        # In a traced program no size may be 1 or 0 for some lengths and more for others: those past a row's are masked.
        whole = length // self.size + 2 * torch.compiler.is_exporting() if self.size else 0
        if whole == 0 or self.summary_norm is None:
            return None
        time, each, last = (
            torch.arange(length, device=x.device),
            torch.arange(whole, device=x.device),
            counts // self.size,
        )
        filled = F.pad(x.masked_fill((time >= counts)[..., None], 0), (0, 0, 0, (whole + 1) * self.size - length))
        exact = torch.promote_types(x.dtype, torch.float32)
        sums = filled.unfold(1, self.size, self.size).sum(-1, dtype=exact)  # [B, whole + 1, width]
        rest = sums.gather(1, last[..., None].expand(-1, -1, x.shape[-1]))  # of the tokens after the last whole block
        sums = sums[:, :whole] + torch.where((each == last - 1)[..., None], rest, 0)
        _, keys, values = self.project(self.summary_norm(sums.to(x.dtype)))
        return Summaries(keys, values, torch.minimum(time // self.size, last - 1), each < last)

    def by_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor, shared: LongPositions, far: Summaries | None
    ) -> Tensor:
        """q, k and v [B, H, S, D] -> [B, H, S, D], for as many blocks at a time as `ROOM` allows"""
        (B, H, length, _), block = q.shape, self.radius + 1
        traced = torch.compiler.is_exporting()
        blocks = length // block + 2 if traced else -(-length // block)
        q, k, v = (F.pad(one, (0, 0, 0, blocks * block - length)) for one in (q, k, v))
        near_k, near_v = (F.pad(one, (0, 0, block, block)).unfold(2, 3 * block, block) for one in (k, v))
        q = q.unfold(2, block, block).mT  # [B, H, N, block, D]; keys and values [B, H, N, D, 3 · block]
        of_token = None
        if far is not None:
            of_token = F.pad(far.of_token, (0, blocks * block - length)).unfold(1, block, block)  # [B, N, block]
        start = torch.arange(blocks, device=q.device) * block
        keys = 3 * block + (0 if far is None else far.keys.shape[2])  # of a query
        turns = [slice(None)]
        if not traced:  # a loop would fix the length
            size = max(1, ROOM // (B * H * block * keys * 12))
            turns = [slice(first, first + size) for first in range(0, blocks, size)]
        parts = []
        for some in turns:
            scores = self.near_scores(q[:, :, some], near_k[:, :, some], start[some], counts, shared.bias)
            if far is None or of_token is None or shared.summary_bias is None:
                parts.append(scores.softmax(-1).to(v.dtype) @ near_v[:, :, some].mT)
                continue
            away = self.far_scores(q[:, :, some], far, of_token[:, some], shared.summary_bias)
            near_w, far_w = torch.cat([scores, away], -1).softmax(-1).to(v.dtype).split([3 * block, away.shape[-1]], -1)
            parts.append(near_w @ near_v[:, :, some].mT + far_w @ far.values[:, :, None])
        return first_tokens((parts[0] if len(parts) == 1 else torch.cat(parts, 2)).flatten(2, 3), length)

    def near_scores(self, q: Tensor, k: Tensor, start: Tensor, counts: Tensor, bias: RelativeBias) -> Tensor:
        """q [B, H, N, block, D], k [B, H, N, D, 3 · block], blocks from tokens `start` [N] on -> [B, H, N, block, 3 ·
        block]"""
        block = self.radius + 1
        at = torch.arange(-block, 2 * block, device=q.device)  # of keys, in a block that starts at 0
        own, head = torch.arange(block, device=q.device)[:, None], torch.arange(self.heads, device=q.device)
        place = start[:, None] + at
        real = (place >= 0) & (place < counts[..., None])  # [B, N, 3 · block]
        seen = ((own - at).abs() <= self.radius) & real[:, None, :, None]
        scores = (q @ k).float() + bias(head[:, None, None], own, at)[:, None]
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)

    def far_scores(self, q: Tensor, far: Summaries, of_token: Tensor, bias: RelativeBias) -> Tensor:
        """q [B, H, N, block, D], of_token [B, N, block] -> [B, H, N, block, G]"""
        head, each = torch.arange(self.heads, device=q.device), torch.arange(far.keys.shape[2], device=q.device)
        added = bias(head[:, None, None, None], of_token[:, None, ..., None], each)
        scores = (q @ far.keys.mT[:, :, None]).float() + added
        return scores.masked_fill(~far.real[:, None, None, None], torch.finfo(scores.dtype).min)


def by_kernels(q: Tensor, k: Tensor, v: Tensor, view: View, shared: LongPositions, far: Summaries | None) -> Tensor:
    """q, k and v [B, H, S, D] -> [B, H, S, D], over the tokens that `view` shows, and over summaries."""
    from lamina.kernels.attention.merge import merge_into  # imports Triton, as the next does
    from lamina.kernels.attention.prefill.many import attend_many

    if far is None or shared.summary_bias is None:
        return attend_many(q, k, v, view, scale=1.0, bias=shared.bias.kernel_form())
    B, H, S, D = q.shape
    near_sums, far_sums = (q.new_empty(B, S, H, dtype=torch.float32) for _ in range(2))
    near = attend_many(q, k, v, view, scale=1.0, bias=shared.bias.kernel_form(), log_sums=near_sums)
    each = torch.arange(far.keys.shape[2], device=q.device)
    summaries = View(far.of_token, torch.where(far.real, each, -1), Full(), causal=False)
    away = attend_many(
        q, far.keys, far.values, summaries, scale=1.0, bias=shared.summary_bias.kernel_form(), log_sums=far_sums
    )
    near, away = (one.transpose(1, 2).reshape(-1, D) for one in (near, away))  # [B · S · H, D]
    merged = merge_into(near, near_sums.view(-1), away, far_sums.view(-1), torch.empty_like(near))
    return merged.view(B, S, H, D).transpose(1, 2)


def first_tokens(x: Tensor, length: int) -> Tensor:
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
