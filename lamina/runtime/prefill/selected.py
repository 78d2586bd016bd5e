"""Selected tokens in plain passes on a GPU: an indexer's choice as lists of positions, and attention over these tokens.

Neither has a query × key mask or matrix: a few queries are scored at a time, and a list has `top` slots. The kernels
are those of captured prompts. They find tokens through a row of a table, which is made here for the tensors that a
layer returns: keys or latents of all tokens of a row, in order. What packed segments and spans show is `Marks`: the
first and last slot that a query sees, and its span.
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
    from lamina.kernels.attention.indexer import Marks

MOST_SCORES = 1 << 24  # of a few queries and all keys, in memory at once
MOST_QUERIES = 1 << 27  # values of queries and outputs in the latent space, in memory at once


def in_order(view: View) -> bool:
    """Whether queries see the tokens up to their own, apart from segments and spans, and tokens are in slots in their
    order."""
    return view.positional and view.causal and isinstance(view.window, Full)


def is_marked(view: View) -> bool:
    """Whether segments or spans change what queries see."""
    return view.q_spans is not None or view.q_segments is not None


def marks_for(one: Step, view: View) -> Marks | None:
    """What the queries of a View that is `in_order` see, made once per pass; None without segments and spans."""
    return one.once("marks", lambda: marks_of(view, one.before, one.all_counts)) if is_marked(view) else None


def marks_of(view: View, before: Tensor, counts: Tensor) -> Marks:
    """before, counts [B]: tokens of each row before this pass, and how many of its new ones are real.

    >>> segments, at = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 0, 1]])
    >>> view = View(at, at, Full(), q_segments=segments, kv_segments=segments)
    >>> first, stop, _ = marks_of(view, torch.tensor([0]), torch.tensor([4]))
    >>> first.tolist(), stop.tolist()
    ([[0, 0, 2, 2]], [[1, 2, 3, 4]])
    """
    from lamina.kernels.attention.indexer import Marks  # imports Triton

    time = torch.arange(view.q_positions.shape[1], device=before.device)
    first, stop, spans = torch.zeros_like(view.q_positions), before[:, None] + time + 1, view.q_spans
    if spans is not None:
        order = spans.argsort(dim=1, stable=True)  # tokens of one span side by side, the last one last
        last = order.gather(1, run_stops(spans.gather(1, order)) - 1)
        last = torch.empty_like(last).scatter_(1, order, last)  # [B, T] of each token's span
        stop = torch.where(spans >= 0, torch.maximum(stop, before[:, None] + last + 1), stop)
        spans = spans.int().contiguous()
    if view.q_segments is not None:
        first = before[:, None] + time - view.q_positions  # positions count from the first token of a segment
        stop = torch.minimum(stop, before[:, None] + run_stops(view.q_segments))
    return Marks(first.int(), torch.minimum(stop, (before + counts)[:, None]).int(), spans)


def run_stops(values: Tensor) -> Tensor:
    """[B, T] -> for each element, one past the index at which its run of equal values ends.

    >>> run_stops(torch.tensor([[7, 7, 0, 7]])).tolist()
    [[2, 2, 3, 4]]
    """
    T = values.shape[1]
    ends = torch.ones_like(values, dtype=torch.bool)
    ends[:, :-1] = values[:, 1:] != values[:, :-1]
    stops = torch.where(ends, torch.arange(1, T + 1, device=values.device), T)
    return stops.flip(1).cummin(1).values.flip(1)


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


def select_in_pass(one: Step, q: Tensor, keys: Tensor, weights: Tensor, view: View, top: int) -> Tensor:
    """q [R, H, T, D], keys [R, S, D] of all tokens, weights [R, T, H] -> slots of the selected ones, int32 [R, T, top]

    view   `in_order`
    """
    from lamina.kernels.attention.indexer import select_in_turns  # imports Triton

    (R, S, _), T = keys.shape, q.shape[2]
    most = max(1, min(T, MOST_SCORES // (R * S)))
    scores = q.new_empty(R, most, S, dtype=torch.float32)
    table, keys = row_for(one, keys, scores)
    return select_in_turns(q, weights, keys, table, top, most, marks=marks_for(one, view))


def attend_in_pass(
    one: Step, q: Tensor, q_rope: Tensor, kept: Tensor, view: View, chosen: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Attention in the latent space over selected tokens, for as many queries at a time as `MOST_QUERIES` allows.

    q [R, H, T, N], q_rope [R, H, T, P], kept [R, S, rank + P], chosen int32 [R, T, top], up [H, N + V, rank]
    -> [R, H, T, V]
    """
    from lamina.kernels.attention.prompt.selected import attend_selected  # imports Triton

    (R, H, T, nope), rank = q.shape, up.shape[-1]
    out = q.new_empty(R, T, H, up.shape[1] - nope)
    (table, kept), marks = row_for(one, kept), marks_for(one, view)
    size = max(1, MOST_QUERIES // (R * H * (rank + kept.shape[-1])))
    for first in range(0, T, size):
        some = slice(first, first + size)
        latent = torch.cat([q[:, :, some] @ up[:, :nope], q_rope[:, :, some]], dim=-1)
        mean = attend_selected(latent, kept, table, chosen, rank=rank, scale=scale, first=first, marks=marks)
        out[:, some] = (mean @ up[:, nope:].transpose(1, 2)).transpose(1, 2)
    return out.transpose(1, 2)


def as_mask(chosen: Tensor, view: View) -> Tensor:
    """Lists of slots [R, T, top] as a mask [R, T, S] over the slots of a View that is `in_order`, for backends that
    read nothing else."""
    R, T, S = view.shape
    listed = chosen >= 0
    if not is_marked(view):  # the end of a list is not defined
        listed = torch.arange(chosen.shape[-1], device=chosen.device) <= view.q_positions[..., None]
    places = torch.where(listed, chosen.long(), S)
    return torch.zeros(R, T, S + 1, dtype=torch.bool, device=chosen.device).scatter_(2, places, True)[..., :S]
