"""`share_weights`: fills a Lamina model with the tensors of a transformers model, in memory.

A parameter that is one tensor there, or a run of neighbouring tensors in one piece of memory (the experts of a layer),
shares that memory. A parameter that Lamina stores in another way is copied: merged from several tensors (one matrix for
queries, keys and values), or converted (transposed, regrouped, computed, in another dtype).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from lamina.bridge.weights.memory_checkpoint import MemoryCheckpoint
from lamina.cache.summary import size
from lamina.checkpoint.loader import Destination, copy_pieces, finish_buffers, plan, put
from lamina.checkpoint.source import Checkpoint
from lamina.model import Model


@dataclass
class Sharing:
    """What a Lamina model shares with the transformers model it was made from, in bytes.

    >>> sharing = Sharing()
    >>> sharing.add("shared", "norm.weight", torch.zeros(256))
    >>> sharing.add("merged", "blocks.0.attention.qkv.weight", torch.zeros(8, 256))
    >>> print(sharing)
    1.0 KiB shared, 8.0 KiB copied (merged 8.0 KiB)
    """

    bytes: dict[str, int] = field(default_factory=lambda: {"shared": 0, "merged": 0, "converted": 0})
    """How a parameter was filled -> bytes of all such parameters: shared, merged, converted"""
    parameters: dict[str, str] = field(default_factory=dict)
    """Path of a parameter or stored buffer -> how it was filled"""

    @property
    def shared(self) -> int:
        """Bytes in memory of the transformers model: a change there in place is seen here."""
        return self.bytes["shared"]

    @property
    def copied(self) -> int:
        """Bytes in memory of their own."""
        return self.bytes["merged"] + self.bytes["converted"]

    def add(self, how: str, path: str, values: torch.Tensor) -> None:
        self.bytes[how] += values.nbytes
        self.parameters[path] = how

    def __str__(self) -> str:
        parts = [f"{how} {size(self.bytes[how])}" for how in ("merged", "converted") if self.bytes[how]]
        return f"{size(self.shared)} shared, {size(self.copied)} copied" + (f" ({', '.join(parts)})" if parts else "")


def share_weights(model: Model, whole: MemoryCheckpoint, dtype: torch.dtype, device: torch.device) -> Sharing:
    """Gives every parameter of a model that was built on the meta device its values. dtype and device are those of the
    transformers model, so that nothing has to be converted."""
    sharing, source = Sharing(), type(model).part_of(whole)
    for place in plan(model, source, model.names, dtype, (*model.ignored, *whole.aliases)):
        how, values = filled(place, source, whole, device)
        sharing.add(how, place.paths[0], values)
        put(model, place.paths, place.like, values)
    finish_buffers(model, device)
    return sharing


def filled(
    place: Destination, source: Checkpoint, whole: MemoryCheckpoint, device: torch.device
) -> tuple[str, torch.Tensor]:
    """How a parameter is filled ("shared", "merged" or "converted"), and its values."""
    found = [piece.read(source) for entry in place.recipe.entries for piece in entry]
    copied = "merged" if len(found) > 1 else "converted"
    if (joined := as_one(found, tuple(place.like.shape), place.dtype)) is not None:
        return "shared" if whole.shares(joined) else copied, joined
    values = torch.empty(place.like.shape, dtype=place.dtype, device=device)
    copy_pieces(values, place.recipe, source)
    return copied, values


def as_one(tensors: list[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """The tensors joined, as a view of their memory; None if they are not stored one after another without gaps.

    >>> gate_up = torch.arange(24.0).view(2, 6, 2)  # two experts, each a gate [3, 2] and an up [3, 2]
    >>> pieces = [half for expert in gate_up for half in expert.chunk(2)]
    >>> as_one(pieces, (2, 6, 2), torch.float32).equal(gate_up), as_one(pieces[1:], (3, 3, 2), torch.float32).shape
    (True, torch.Size([3, 3, 2]))
    >>> as_one(pieces[::-1], (2, 6, 2), torch.float32)
    """
    first, at = tensors[0], tensors[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        inside = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == at
        if not inside or tensor.dtype != dtype or not tensor.is_contiguous():
            return None
        at += tensor.nbytes
    if sum(tensor.numel() for tensor in tensors) != math.prod(shape):
        return None
    return first.as_strided(shape, torch.empty(shape, device="meta").stride(), first.storage_offset())
