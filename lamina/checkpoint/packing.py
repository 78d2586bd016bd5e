"""Keeps a parameter packed on its way from a checkpoint into a model.

A parameter can stay packed if it is rows of packed tensors: joined (q, k and v), stacked over experts, cut, or in
another order. Whether the transforms between a stored tensor and a parameter do no more than that is found by running
them on row and column numbers instead of values. Anything else (a transpose, a norm plus one) is dequantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lamina.weights.code_room import CodeRoom
from lamina.weights.format import WeightFormat
from lamina.weights.int_groups import IntGroups
from lamina.weights.packed import JoinedWeight, Packed, PackedWeight, along_rows, stacked
from lamina.weights.quantize import PACKED, PLAIN, Owners, check_weights, fits, format_for, packable

if TYPE_CHECKING:
    from lamina.checkpoint.names import Piece, Recipe
    from lamina.checkpoint.source import Checkpoint

Transform = Callable[..., Tensor]
MOST_SEGMENTS = 8  # of one parameter


@dataclass(frozen=True)
class PackedTensors:
    """A tensor of a checkpoint as it is stored: packed tensors, and the function of their values that gives the tensor
    (None: it is the one tensor itself)."""

    tensors: tuple[PackedWeight, ...]
    fn: Transform | None = None


class Packer:
    """Decides for each parameter of a model how it is stored.

    weights   "packed": as the checkpoint stores it; "plain": dequantized; a format's name: quantized in that
    """

    def __init__(self, source: Checkpoint, weights: str, device: torch.device) -> None:
        check_weights(weights)
        self.source, self.weights, self.device = source, weights, device
        self.dequantized: list[str] = []  # names of packed tensors that could not stay so
        self._orders: dict[Any, Tensor | None] = {}

    def pack(self, module: nn.Module, owners: Owners, recipe: Recipe, dtype: torch.dtype) -> Packed | None:
        """The packed weight for a parameter, on the device; None if it is to be a plain tensor.

        owners   modules and attributes that the parameter is known by
        """
        if self.weights == PLAIN or not packable(owners):
            return None
        if self.weights == PACKED:
            owner, leaf = owners[0]
            room = CodeRoom(getattr(owner, leaf).shape[:-1].numel())
            if (found := self._kept(recipe, room)) is not None:
                room.trim(found)
        else:
            found = self._quantized(recipe, format_for(self.weights, module, owners))
        if found is None:
            return None
        for segment in found.segments:
            segment.dtype = dtype
        return found.to(self.device)

    def _kept(self, recipe: Recipe, room: CodeRoom) -> Packed | None:
        entries: list[tuple[PackedWeight, ...]] = []
        for entry in recipe.entries:
            segments: list[PackedWeight] = []
            for piece in entry:
                if (found := self._segments(piece, room)) is None:
                    return None
                segments += found
            if len(segments) > MOST_SEGMENTS:
                self.dequantized += recipe.sources
                return None
            entries.append(along_rows(segments, merge=self._merges(segments)).segments)
        if not recipe.stacked:
            return whole(entries[0])
        columns = [stacked(column) for column in zip(*entries, strict=True)] if same_lengths(entries) else [None]
        if any(one is None for one in columns):
            self.dequantized += recipe.sources
            return None
        return whole([one for one in columns if one is not None])

    def _merges(self, segments: Sequence[PackedWeight]) -> bool:
        """True if neighbours of one format become one tensor; on a CPU not if they are on the memory map."""
        return self.device.type == "cuda" or all(isinstance(one.format, IntGroups) for one in segments)

    def _segments(self, piece: Piece, room: CodeRoom) -> list[PackedWeight] | None:
        """The packed rows of a piece; None if one of its tensors is plain, or if it is more than rows of them."""
        stored = [self.source.packed(name, self.device, room.take) for name in piece.names]
        if any(one is None for one in stored):
            return None
        known = [one for one in stored if one is not None]
        tensors = [tensor for one in known for tensor in one.tensors]
        fns = (piece.fn, *(one.fn for one in known))
        if all(fn is None for fn in fns):
            return tensors
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if (key := (fns, shapes)) not in self._orders:
            self._orders[key] = row_order(composed(piece.fn, known), shapes)
        if (order := self._orders[key]) is None:
            self.dequantized += piece.names
            return None
        return [tensors[i].select(rows) for i, rows in runs(order, [shape[-2] for shape in shapes])]

    def _quantized(self, recipe: Recipe, format: WeightFormat) -> Packed | None:
        """The parameter in another format, quantized tensor by tensor."""
        entries: list[PackedWeight] = []
        for entry in recipe.entries:
            pieces: list[PackedWeight] = []
            for piece in entry:
                if not fits(format, piece.shape(self.source)[-1]):
                    return None
                values = self._values(piece)
                pieces.append(PackedWeight(format, format.pack(values), values.shape))
            joined = along_rows(pieces, merge=True)
            assert isinstance(joined, PackedWeight)  # these formats have no parts that rows share
            entries.append(joined)
        return stacked(entries) if recipe.stacked else entries[0]

    def _values(self, piece: Piece) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(piece.shape(self.source), device="meta")
        return piece.read(self.source).to(self.device)


def holds_packed(source: Checkpoint) -> bool:
    """True if the checkpoint has a tensor that can stay packed."""
    return any(source.packed(name, torch.device("meta")) is not None for name in source.names)


def whole(segments: Sequence[PackedWeight]) -> Packed:
    return segments[0] if len(segments) == 1 else JoinedWeight(segments)


def same_lengths(entries: Sequence[Sequence[PackedWeight]]) -> bool:
    return len({len(entry) for entry in entries}) == 1


def composed(fn: Transform | None, stored: Sequence[PackedTensors]) -> Transform:
    """The function from all stored tensors to the piece."""

    def total(*values: Tensor) -> Tensor:
        rest, made = list(values), []
        for one in stored:
            own, rest = rest[: len(one.tensors)], rest[len(one.tensors) :]
            made.append(own[0] if one.fn is None else one.fn(*own))
        return made[0] if fn is None else fn(*made)

    return total


def row_order(fn: Transform, shapes: Sequence[Sequence[int]]) -> Tensor | None:
    """Which rows fn gives, [out]: row r of tensor k has the number r + Σ rows of the tensors before it. None if fn does
    more than cut, join and reorder rows. Of stacks [E, out, in], the rows of each matrix, in the same way for all.

    >>> row_order(lambda t: t.flip(0), [(3, 8)])
    tensor([2, 1, 0], dtype=torch.int32)
    >>> row_order(lambda t: t * 2, [(3, 8)])
    """
    total, width, count = (
        sum(shape[-2] for shape in shapes),
        shapes[0][-1],
        min([2, *(s[0] for s in shapes if len(s) > 2)]),
    )
    rows, columns, start = [], [], 0
    for shape in shapes:
        own = torch.arange(start, start + shape[-2], dtype=torch.int32)[:, None]
        if len(shape) > 2:  # two matrices of the stack, with other numbers in the second
            own = own + total * torch.arange(count, dtype=torch.int32)[:, None, None]
        size = (*own.shape[:-2], *shape[-2:])
        rows.append(own.expand(size))
        columns.append(torch.arange(shape[-1], dtype=torch.int32).expand(size))
        start += shape[-2]
    try:
        found, across = fn(*rows), fn(*columns)
    except (RuntimeError, IndexError, ValueError, TypeError):  # a function of other shapes, or of floats alone
        return None
    if found.dtype != torch.int32 or found.ndim != len(shapes[0]) or found.shape[-1] != width:
        return None
    if not (torch.equal(across, columns[0][..., :1, :].expand_as(across)) and (found == found[..., :1]).all()):
        return None
    order = found[..., 0].contiguous()
    if order.ndim == 1:
        return order
    offsets = total * torch.arange(count, dtype=torch.int32)[:, None]
    return order[0] if torch.equal(order, order[:1] + offsets) else None


def runs(order: Tensor, sizes: Sequence[int]) -> list[tuple[int, slice | Tensor]]:
    """Row numbers as parts of one tensor each: (tensor, its rows), a slice where they follow each other.

    >>> runs(torch.tensor([0, 1, 4, 3]), [2, 3])
    [(0, slice(0, 2, None)), (1, tensor([2, 1]))]
    """
    starts = torch.tensor([0, *sizes]).cumsum(0)
    owner = torch.bucketize(order, starts, right=True) - 1
    found: list[tuple[int, slice | Tensor]] = []
    cuts = [0, *((owner[1:] != owner[:-1]).nonzero()[:, 0] + 1).tolist(), len(order)]
    for begin, end in pairwise(cuts):
        which = int(owner[begin])
        rows = order[begin:end].long() - starts[which]
        first = int(rows[0])
        consecutive = torch.equal(rows, torch.arange(first, first + len(rows)))
        found.append((which, slice(first, first + len(rows)) if consecutive else rows))
    return found
