"""`attend`: a transformers model computes attention from the store itself, block by block.

An attention function with the name "lamina" is registered in transformers' `AttentionInterface`, with masks as for its
`sdpa`, and none for a single query that sees its whole window. Where keys and values are stored as codes, in pages or
on the host, it reads blocks of slots, dequantizes them, and merges the softmax of one block after the other (online
softmax): no dense copy of the history is made. Of dense keys, few queries go to `few_queries.py`, and others to
transformers' own function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lamina.bridge.few_queries import attend_one, by_products, suits
from lamina.bridge.layers.kinds import layer_kinds, text_config
from lamina.bridge.layers.stored import Stored
from lamina.bridge.one_by_one import split_passes
from lamina.errors import InputError

NAME = "lamina"
BLOCK = 1024  # tokens that are dequantized at a time


def attend(model: Any) -> Any:
    """Makes a transformers model read `lamina.bridge` caches directly. Returns the model.

    Without it, a cache with a codec, in a pool or on the host gives the model a dense copy of the history for every
    token. On a GPU, the attention of one or a few tokens is computed without cuDNN, which would plan a kernel for each
    length. A model with recurrent states also runs the last tokens of each pass one by one, as many as the slack of its
    cache, so that each of them can be cropped.

    >>> lamina.bridge.attend(model)                                                        # doctest: +SKIP
    >>> model.generate(ids, past_key_values=lamina.bridge.Cache(model, codec="int4"))      # doctest: +SKIP
    """
    if not hasattr(model, "set_attn_implementation"):
        raise InputError(f"attend needs a transformers model, not {type(model).__name__}")
    kinds = layer_kinds(text_config(model))
    if any(kind.states for kind in kinds):
        split_passes(model)
    if not any(kind.attends for kind in kinds):
        return model
    if any(kind.indexed for kind in kinds) or not (
        model._supports_sdpa or getattr(model, "_supports_flex_attn", False)
    ):
        raise InputError(
            f"{type(model).__name__} computes attention by a rule of its own, which attend would change. Its caches "
            "work without attend, through a dense copy"
        )
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if NAME not in _implementations(model.config):
        model.set_attn_implementation(before)
        raise InputError(
            f"the attention of {type(model).__name__} cannot be replaced: it does not use transformers' "
            "AttentionInterface. Its caches work without attend, through a dense copy"
        )
    return model


def _implementations(config: Any) -> set[str | None]:
    return {getattr(one, "_attn_implementation", None) for one in (config, config.get_text_config(decoder=True))}


def mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    local_size: int | None = None,  # tokens in a window or chunk; None: all
    allow_is_causal_skip: bool = True,
    attention_mask: Tensor | None = None,  # [B, S + kv_offset] True for tokens, False for padding
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of transformers' `sdpa`, [B, 1, T, S]; None if every query sees every key.

    transformers makes a mask for each token once a window is full. A single query sees all keys of its window, unless
    there is padding in it, so that mask is left out as in layers without a window. Chunks are not windows: of as many
    keys, a query sees those of its own chunk.
    """
    if allow_is_causal_skip and q_length == 1 and q_offset + 1 == kv_offset + kv_length:
        if local_size is not None and kv_length <= local_size and getattr(config, "attention_chunk_size", None) is None:
            local_size = None
        if local_size is None and attention_mask is None:
            return None
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip, attention_mask=attention_mask, config=config, **kwargs,
    )  # fmt: skip


def attention(
    module: Any,
    query: Tensor,  # [B, Hq, T, D]
    key: Tensor,  # [B, H, S, D]
    value: Tensor,  # [B, H, S, Dv]
    attention_mask: Tensor | None,  # [B, 1 or Hq, T, S]: True where a key is seen, or added to the scores
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [Hq] a score of each head that takes part in the softmax, and has no value
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' functions compute it: -> [B, T, Hq, Dv], and no weights"""
    plain = softcap is None and s_aux is None
    drops = bool(dropout and module.training)
    if drops or (plain and type(key) is not Stored):
        if not drops and position_bias is None:
            if attention_mask is None and (found := attend_one(query, key, value, scaling)) is not None:
                return found, None
            if suits(query, key, attention_mask):
                scale = query.shape[-1] ** -0.5 if scaling is None else scaling
                return by_products(query, key, value, attention_mask, scale), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=position_bias, **kwargs,
        )  # fmt: skip
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if position_bias is not None and attention_mask is not None and attention_mask.dtype == torch.bool:
        bias: Tensor | None = position_bias.masked_fill(~attention_mask, float("-inf"))
    elif position_bias is not None:
        bias = position_bias if attention_mask is None else position_bias + attention_mask
    else:
        bias = attention_mask
    merged = _Softmax(query, value.shape[-1], scaling, softcap)
    for first, k, v in _blocks(key, value):
        merged.add(k, v, _seen(bias, causal and attention_mask is None, query.shape[2], key.shape[2], first, k))
    return merged.result(s_aux).transpose(1, 2).contiguous(), None


def _blocks(key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Blocks of keys and values: (index of the first key, keys, values)."""
    if isinstance(key, Stored) and isinstance(value, Stored) and key.tokens is value.tokens:
        for first, fields in key.tokens.blocks(BLOCK):
            yield first, fields[key.field], fields[value.field]
    else:
        k, v = (x.dense() if isinstance(x, Stored) else x for x in (key, value))
        yield 0, k, v


def _seen(bias: Tensor | None, causal: bool, T: int, S: int, first: int, k: Tensor) -> Tensor | None:
    """What is added to the scores of a block of keys, [B, 1 or Hq, T, N]; None: nothing."""
    N = k.shape[-2]
    found = None if bias is None else bias[..., first : first + N]
    if found is not None and found.dtype == torch.bool:
        found = torch.zeros_like(found, dtype=torch.float32).masked_fill(~found, float("-inf"))
    if causal and T > 1:
        query_at = torch.arange(S - T, S, device=k.device)[:, None]
        later = torch.arange(first, first + N, device=k.device) > query_at  # [T, N]
        hidden = torch.zeros((T, N), device=k.device).masked_fill(later, float("-inf"))
        found = hidden if found is None else found + hidden
    return found


class _Softmax:
    """The softmax of queries over keys that come in blocks.

    best   [B, H, G·T, 1] the highest score so far
    total  [B, H, G·T, 1] the sum of exp(score - best)
    mixed  [B, H, G·T, Dv] the values, weighted by exp(score - best)
    """

    def __init__(self, query: Tensor, value_dim: int, scaling: float | None, softcap: float | None) -> None:
        self.query, self.softcap = query, softcap
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        self.value_dim = value_dim
        self.best: Tensor | None = None
        self.total: Tensor
        self.mixed: Tensor

    def add(self, k: Tensor, v: Tensor, seen: Tensor | None) -> None:
        """Adds a block of keys [B, H, N, D] and values [B, H, N, Dv]."""
        B, Hq, T, D = self.query.shape
        H, N = k.shape[1], k.shape[-2]
        q = self.query.reshape(B, H, Hq // H * T, D)
        scores = torch.matmul(q, k.to(q.dtype).transpose(-1, -2)).float() * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if seen is not None:
            scores = (scores.reshape(B, Hq, T, N) + seen).reshape(B, H, Hq // H * T, N)
        # Of a row that sees nothing, the highest score is finite too: its weights are then all zero, not NaN.
        best = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        if self.best is not None:
            best = torch.maximum(best, self.best)
        weights = torch.exp(scores - best)
        mixed = torch.matmul(weights.to(q.dtype), v.to(q.dtype)).float()
        total = weights.sum(dim=-1, keepdim=True)
        if self.best is not None:
            before = torch.exp(self.best - best)
            total, mixed = total + before * self.total, mixed + before * self.mixed
        self.best, self.total, self.mixed = best, total, mixed

    def result(self, sinks: Tensor | None) -> Tensor:
        """[B, Hq, T, Dv]. sinks: [Hq] further scores without values"""
        assert self.best is not None
        B, Hq, T, _ = self.query.shape
        total, mixed = self.total, self.mixed
        if sinks is not None:
            H = self.best.shape[1]
            score = sinks.float().reshape(1, Hq, 1).expand(B, Hq, T).reshape(B, H, Hq // H * T, 1)
            best = torch.maximum(self.best, score)
            before = torch.exp(self.best - best)
            total, mixed = total * before + torch.exp(score - best), mixed * before
        out = mixed / total.clamp(min=torch.finfo(torch.float32).tiny)
        return out.reshape(B, Hq, T, self.value_dim).to(self.query.dtype)
