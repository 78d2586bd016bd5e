"""Packed sequences: several sequences in one row, distinguished by a segment id per token."""

from __future__ import annotations

import torch
from torch import Tensor


class Packing:
    """Position of each token in its segment, and the conversion from packed rows to one row per sequence and back.

    segments   [B, T]: consecutive tokens with the same id are one sequence; a change of id starts the next one
    """

    def __init__(self, segments: Tensor) -> None:
        B, T = segments.shape
        starts = torch.ones_like(segments, dtype=torch.bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        time = torch.arange(T, device=segments.device).expand(B, T)
        first = torch.where(starts, time, 0).cummax(dim=1).values
        self.positions = time - first  # [B, T]
        self.segment = starts.cumsum(dim=1) - 1 + torch.arange(B, device=segments.device)[:, None] * T
        _, row = torch.unique(self.segment.flatten(), return_inverse=True)
        self.row = row  # [B·T] the unpacked row of each token
        self.shape = (int(row.max()) + 1, int(self.positions.max()) + 1)
        valid = torch.zeros(self.shape, dtype=torch.bool, device=segments.device)
        valid[self.row, self.positions.flatten()] = True
        self.valid = valid

    def unpack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [sequences, longest, ...], padded with zeros"""
        out = x.new_zeros((*self.shape, *x.shape[2:]))
        out[self.row, self.positions.flatten()] = x.flatten(0, 1)
        return out

    def pack(self, x: Tensor) -> Tensor:
        """[sequences, longest, ...] -> [B, T, ...]"""
        return x[self.row, self.positions.flatten()].unflatten(0, self.positions.shape)
