"""Memory for the codes of one parameter whose pieces are stored apart: q, k and v, gate and up, the experts of a layer.

Codes of pieces that follow each other are put side by side, so that joining (`WeightFormat.join`) and stacking
(`stacked`) them copies nothing. Unlike plain weights, this memory is not in huge pages: decoding from 4-bit codes is
not faster with them, and a virtual machine that gave free memory back to its host gets it again more slowly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.weights.packed import Packed


class CodeRoom:
    """rows   of the parameter, over all matrices of a stack

    >>> room = CodeRoom(3)
    >>> first, second = room.take(2, 16), room.take(1, 16)
    >>> second.data_ptr() - first.data_ptr()
    32
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._blocks: list[tuple[Tensor, int]] = []  # and how many of its rows are taken

    def take(self, rows: int, width: int) -> Tensor:
        """uint8 [rows, width], to be filled."""
        if self._blocks:
            block, taken = self._blocks[-1]
            if block.shape[1] == width and taken + rows <= block.shape[0]:
                self._blocks[-1] = block, taken + rows
                return block[taken : taken + rows]
        left = self.rows - sum(taken for _, taken in self._blocks)
        block = torch.empty(max(left, rows), width, dtype=torch.uint8)
        self._blocks.append((block, rows))
        return block[:rows]

    def trim(self, weight: Packed) -> None:
        """Copies codes out of blocks that more rows were expected in, as where pieces have different bits."""
        loose = {block.untyped_storage().data_ptr() for block, taken in self._blocks if taken < block.shape[0]}
        for segment in weight.segments:
            for name, part in segment.parts.items():
                if part.untyped_storage().data_ptr() in loose:
                    segment._buffers[name] = part.clone()
