"""RoPE: rotates pairs of dimensions of queries and keys by angles that depend on the position.

A table is (cos, sin), each [B, T, P] in float32, for P pairs. Checkpoints pair the dimensions of a head in two ways:
dimension i with i + P (`rotate`), or 2i with 2i + 1 (`rotate_neighbours`).
"""

from __future__ import annotations

import torch
from torch import Tensor

RopeTable = tuple[Tensor, Tensor]


def widened(table: RopeTable) -> RopeTable:
    """The table for `rotate_widened`, [B, 1, T, 2P] each: the factor of each dimension, and that of its partner."""
    cos, sin = table[0][:, None], table[1][:, None]
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate_widened(x: Tensor, wide: RopeTable) -> Tensor:
    """`rotate` in fewer operations, for heads that are rotated whole. x: [B, H, T, 2P]"""
    rotated = torch.addcmul(x * wide[0], x.roll(x.shape[-1] // 2, -1), wide[1])
    return rotated if rotated.dtype == x.dtype else rotated.to(x.dtype)


def rotate(x: Tensor, table: RopeTable) -> Tensor:
    """Rotates the first 2P dimensions of each head, first half paired with second half. x: [B, H, T, D]"""
    cos, sin = table[0][:, None], table[1][:, None]  # [B, 1, T, P]
    half = cos.shape[-1]
    if 2 * half < x.shape[-1]:
        return torch.cat([rotate(x[..., : 2 * half], table), x[..., 2 * half :]], dim=-1)
    a, b = x.chunk(2, dim=-1)  # products promote to float32 or better
    rotated = torch.cat([torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)], dim=-1)
    return rotated if rotated.dtype == x.dtype else rotated.to(x.dtype)


def rotate_neighbours(x: Tensor, table: RopeTable) -> Tensor:
    """Rotates the first 2P dimensions of each head, dimension 2i paired with 2i + 1. x: [B, H, T, D]"""
    cos, sin = (part[:, None] for part in table)
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat([rotate_neighbours(x[..., :rotated], table), x[..., rotated:]], dim=-1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)
