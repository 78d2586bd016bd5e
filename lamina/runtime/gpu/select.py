"""`memory.select` of a captured step, pass or prompt: RoPE and storing the keys, scores of all tokens, the list of the
highest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable
    from lamina.cache.codec.formats import FieldFormat
    from lamina.runtime.gpu.backend import TableEntry


def select(
    entry: TableEntry, q: Tensor, k: Tensor, weights: Tensor, rope: RopeTable | None, neighbours: bool
) -> Tensor:
    """q [B, H, T, D], k [B, T, D], weights [B, T, H] -> positions of the selected tokens, int32 [B, T, top]"""
    from lamina.kernels.attention.indexer import index_scores, select_tokens  # imports Triton, as the next two do
    from lamina.kernels.attention.rope_append import rotate_and_append
    from lamina.kernels.quant.encode import Side, encode

    table, page, form = entry.table, entry.page, entry.coding.formats.get("x")
    keys = k[:, None]  # one head
    how: dict[str, Any] = dict(neighbours=neighbours, write=form is None, page=page)
    q, keys, _ = rotate_and_append(q, keys, keys[..., :0], rope, table, **how)
    new: Any = keys
    if form is not None:
        new = encode(keys, keys, None, table, Side.of(form, keys.shape[-1]), write=True, page=page)
        q = rotated_as(form, q)
    index_scores(q, weights, new, table, page=page)
    return select_tokens(q.shape[0], q.shape[2], entry.spec.top, table)


def select_for_prompt(entry: TableEntry, q: Tensor, k: Tensor, weights: Tensor, most: int) -> Tensor:
    """The same for the many queries of a prompt, with q and k rotated by RoPE already.

    most   queries of a row that the buffer of scores has room for
    """
    from lamina.kernels.attention.indexer import select_in_turns  # imports Triton, as the next two do
    from lamina.kernels.attention.prompt.store import store_tokens
    from lamina.kernels.quant.encode import Side, encode

    table, page, form = entry.table, entry.page, entry.coding.formats.get("x")
    new: Any = k[:, None]  # one head
    if form is None:
        store_tokens(new, None, table, page)
    else:
        new = encode(new, new, None, table, Side.of(form, new.shape[-1]), write=True, page=page)
        q = rotated_as(form, q)
    return select_in_turns(q, weights, new, table, entry.spec.top, most, page)


def rotated_as(form: FieldFormat, q: Tensor) -> Tensor:
    """Queries rotated by the Hadamard matrix as the codes of keys are, so that products are those of the keys."""
    if form.rotation is None:
        return q
    size = len(form.rotation)
    whole = q.shape[-1] // size * size
    groups = q[..., :whole].unflatten(-1, (-1, size)).to(torch.float32) @ form.rotation.to(torch.float32)
    return torch.cat([groups.flatten(-2).to(q.dtype), q[..., whole:]], dim=-1)
