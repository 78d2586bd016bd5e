"""What undoes that a GGUF file stores a tensor otherwise than the original checkpoint.

Each function is also run on meta tensors, to learn the shape that it gives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.checkpoint.gguf.architecture import Change, Fields, Joined


def unpair_rows(rows: Tensor, heads: int) -> Tensor:
    """Undo the row order of llama GGUF files: pairs (0, 1), (2, 3) … become halves, inside each head.

    >>> unpair_rows(torch.tensor([0, 10, 1, 11]), heads=1).tolist()
    [0, 1, 10, 11]
    """
    # [H * D, ...] -> [H, D/2, 2, ...] -> [H, 2, D/2, ...]
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


UNPAIRED: dict[str, Change] = {
    "blk.{i}.attn_q.*": lambda t, c: unpair_rows(t, c["num_attention_heads"]),
    "blk.{i}.attn_k.*": lambda t, c: unpair_rows(t, c["num_key_value_heads"]),
}
"""Queries and keys of llama and others that are converted in the same way."""


def minus_one(t: Tensor, c: Fields) -> Tensor:
    """Norms that multiply by 1 + weight are stored with that sum."""
    return t - 1


def transposed(t: Tensor, c: Fields) -> Tensor:
    return t.transpose(0, 1)


def log_decay(t: Tensor, c: Fields) -> Tensor:
    """-exp(A_log) -> A_log; one per head is stored as a column."""
    return (-t).log().squeeze(-1) if t.ndim == 2 and t.shape[1] == 1 else (-t).log()


def flat(t: Tensor, c: Fields) -> Tensor:
    return t.reshape(-1)


def row(t: Tensor, c: Fields) -> Tensor:
    """[width] or [1, width] -> [1, width]"""
    return t.reshape(1, -1)


def kernel(t: Tensor, c: Fields) -> Tensor:
    """Convolution kernels [channels, size], or with axes of size 1 -> [channels, 1, size]"""
    return t.reshape(-1, 1, t.shape[-1])


MAMBA: dict[str, Change] = {
    "blk.{i}.ssm_a": log_decay,
    "blk.{i}.ssm_conv1d.weight": kernel,
}
MAMBA2: dict[str, Change] = MAMBA | {"blk.{i}.ssm_d": flat, "blk.{i}.ssm_norm.weight": flat}


def grouped_rows(t: Tensor, groups: int, *sizes: int) -> Tensor:
    """Rows of several parts, each part of all groups one after another -> group by group, all parts of each.

    sizes   rows of each part in a group

    >>> grouped_rows(torch.tensor([1, 2, 3, 10, 11, 20, 21]), 1, 3, 2, 2).tolist()
    [1, 2, 3, 10, 11, 20, 21]
    >>> grouped_rows(torch.tensor([1, 2, 10, 20]), 2, 1, 1).tolist()
    [1, 10, 2, 20]
    """
    parts = t.split([groups * size for size in sizes])
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def stacked_pair(t: Tensor, u: Tensor, c: Fields) -> Tensor:
    """Stacks of gates and of ups [E, inner, width] -> [E, 2 · inner, width]"""
    return torch.cat([t, u], dim=-2)


def gates_ups(name: str, suffix: str = "_exps.weight", fn: Callable[..., Tensor] = stacked_pair) -> Joined:
    """The gates and ups of experts as one tensor."""
    return Joined(name, (f"blk.{{i}}.ffn_gate{suffix}", f"blk.{{i}}.ffn_up{suffix}"), fn)


def up_of_latents(k: Tensor, v: Tensor, c: Fields) -> Tensor:
    """MLA: what makes keys [H, rank, nope] and values [H, v, rank] of latents -> [H · (nope + v), rank]"""
    return torch.cat([k.transpose(1, 2), v], 1).flatten(0, 1)


def regrouped_values(t: Tensor, c: Fields, dim: int | None = None) -> Tensor:
    """Rows of value heads, the first of each key head, then the second of each … -> all of one key head together.
    Rows before them, of queries and keys, stay.

    dim   rows of a head; None: `linear_value_head_dim`
    """
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    dim = c["linear_value_head_dim"] if dim is None else dim
    rest, heads = t.split([t.shape[0] - values * dim, values * dim])
    return torch.cat([rest, heads.unflatten(0, (values // keys, keys, dim)).transpose(0, 1).flatten(0, 2)])
