"""Selected tokens in plain passes on a GPU: an indexer's choice as lists of positions, and attention over these tokens.

Neither has a query × key mask or matrix: a few queries are scored at a time, and a list has `top` positions. The
kernels are those of captured prompts. They find tokens through a row of a table, which is made here for the tensors
that a layer returns: keys or latents of all positions of a row, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.attention.view import View
from lamina.attention.window import Full
from lamina.cache.clock import on_device
from lamina.kernels.columns import entry_row

if TYPE_CHECKING:
    from lamina.cache.step import Step

MOST_SCORES = 1 << 24  # of a few queries and all keys, in memory at once
MOST_QUERIES = 1 << 27  # values of queries and outputs in the latent space, in memory at once


def in_order(view: View) -> bool:
    """Whether queries see the tokens up to their own, and the token at position p is the p-th of what was returned."""
    marked = view.q_spans is not None or view.q_segments is not None
    return view.positional and view.causal and not marked and isinstance(view.window, Full)


def row_for(one: Step, tokens: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The row of a table for tokens [R, S, W] -> the row, and the tokens, which must be kept until the launch. They are
    copied if no row can describe them."""
    width = tokens.shape[-1]
    regular = tokens.stride(2) == 1 and tokens.stride(1) == width and tokens.stride(0) % width == 0
    if not regular or tokens.data_ptr() % 16:
        tokens = tokens.clone(memory_format=torch.contiguous_format)
    columns = {"k": tokens.data_ptr(), "slots": tokens.stride(0) // width}
    columns |= {"lengths": one.before.data_ptr(), "counts": one.all_counts.data_ptr()}
    if scores is not None:
        columns |= {"scores": scores.data_ptr(), "score_room": scores.shape[-1]}
    return on_device(entry_row(columns), tokens.device), tokens


def select_in_pass(one: Step, q: Tensor, keys: Tensor, weights: Tensor, top: int) -> Tensor:
    """q [R, H, T, D], keys [R, S, D] of all tokens, weights [R, T, H] -> positions of the selected ones, int32
    [R, T, top]"""
    from lamina.kernels.attention.indexer import select_in_turns  # imports Triton

    (R, S, _), T = keys.shape, q.shape[2]
    most = max(1, min(T, MOST_SCORES // (R * S)))
    scores = q.new_empty(R, most, S, dtype=torch.float32)
    table, keys = row_for(one, keys, scores)
    return select_in_turns(q, weights, keys, table, top, most)


def attend_in_pass(
    one: Step, q: Tensor, q_rope: Tensor, kept: Tensor, chosen: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Attention in the latent space over selected tokens, for as many queries at a time as `MOST_QUERIES` allows.

    q [R, H, T, N], q_rope [R, H, T, P], kept [R, S, rank + P], chosen int32 [R, T, top], up [H, N + V, rank]
    -> [R, H, T, V]
    """
    from lamina.kernels.attention.prompt.selected import attend_selected  # imports Triton

    (R, H, T, nope), rank = q.shape, up.shape[-1]
    out = q.new_empty(R, T, H, up.shape[1] - nope)
    table, kept = row_for(one, kept)
    size = max(1, MOST_QUERIES // (R * H * (rank + kept.shape[-1])))
    for first in range(0, T, size):
        some = slice(first, first + size)
        latent = torch.cat([q[:, :, some] @ up[:, :nope], q_rope[:, :, some]], dim=-1)
        mean = attend_selected(latent, kept, table, chosen, rank=rank, scale=scale, first=first)
        out[:, some] = (mean @ up[:, nope:].transpose(1, 2)).transpose(1, 2)
    return out.transpose(1, 2)


def as_mask(chosen: Tensor, view: View) -> Tensor:
    """Lists of positions [R, T, top] as a mask [R, T, S] over the slots of a View that is `in_order`: for backends that
    read nothing else."""
    R, T, S = view.shape
    listed = torch.arange(chosen.shape[-1], device=chosen.device) <= view.q_positions[..., None]
    places = torch.where(listed, chosen.long(), S)
    return torch.zeros(R, T, S + 1, dtype=torch.bool, device=chosen.device).scatter_(2, places, True)[..., :S]
