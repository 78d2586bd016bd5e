"""A View's mask as bits, for kernels: rules from outside, which no kernel can evaluate, and selections.

A rule is evaluated for one piece of queries and keys after the other, so no tensor has a value for every pair of query
and key. The bits are an eighth of a byte for each pair. Callers that need more than `MOST_BYTES` of them take the
queries in turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.attention.blocks import Blocks, in_order

if TYPE_CHECKING:
    from lamina.attention.view import View

MOST_BYTES = 1 << 25  # of bits in memory at once
PIECE = 1 << 20  # pairs of query and key for which a rule is evaluated at once, with some 25 bytes each


@dataclass(frozen=True)
class MaskBits:
    """Queries and keys are filled up to whole blocks, which are not seen.

    bits     uint8 [B, T, S / 8]: bit s % 8 of byte s // 8 is 1 where the query sees the key in slot s
    blocks   of keys, for each block of queries
    """

    bits: Tensor
    blocks: Blocks


def queries_at_once(view: View, queries: int, keys: int) -> int:
    """How many queries' bits fit into `MOST_BYTES`, in whole blocks; at least one block.

    >>> from lamina.attention import Full, View
    >>> at = torch.arange(1 << 15)[None]
    >>> queries_at_once(View(at, at, Full()), 128, 64)
    8192
    """
    B, _, S = view.shape
    return max(MOST_BYTES * 8 // (B * -(-S // keys) * keys) // queries, 1) * queries


def mask_bits_of(view: View, queries: int, keys: int) -> MaskBits:
    """For blocks of `queries` queries and `keys` keys, a multiple of 8.

    >>> from lamina.attention import Full, View
    >>> at = torch.arange(3)[None]
    >>> found = mask_bits_of(View(at, at, Full()), queries=2, keys=8)
    >>> found.bits[0].tolist(), found.blocks.seen[0].tolist()
    ([[1], [3], [7], [0]], [1, 1])
    """
    B, T, S = view.shape
    NQ, NK = -(-T // queries), -(-S // keys)
    bits = torch.empty(B, NQ * queries, NK * keys // 8, dtype=torch.uint8, device=view.q_positions.device)
    part, whole = (torch.empty(B, NQ, NK, dtype=torch.bool, device=bits.device) for _ in range(2))
    wide = min(max(PIECE // (B * queries * keys), 1), NK)  # blocks of keys in a piece
    high = max(PIECE // (B * queries * keys * wide), 1)  # blocks of queries
    values = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    for i in range(0, NQ, high):
        for j in range(0, NK, wide):
            q, k = slice(i * queries, (i + high) * queries), slice(j * keys, (j + wide) * keys)
            seen = view.part(q, k).mask()[:, 0]
            seen = F.pad(seen, (0, -seen.shape[2] % keys, 0, -seen.shape[1] % queries)).contiguous()
            bits[:, q, k.start // 8 : k.stop // 8] = (seen.view(torch.uint8).unflatten(2, (-1, 8)) * values).sum(
                3, dtype=torch.uint8
            )
            tiles = seen.unflatten(2, (-1, keys)).unflatten(1, (-1, queries))  # [B, high, queries, wide, keys]
            at = (slice(None), slice(i, i + high), slice(j, j + wide))
            part[at], whole[at] = tiles.any(4).any(2), tiles.all(4).all(2)
    return MaskBits(bits, in_order(part, whole))
