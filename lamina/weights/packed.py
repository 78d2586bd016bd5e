"""`PackedWeight` and `JoinedWeight`: what takes the place of a weight that stays packed.

A `PackedWeight` is one tensor in one format; its parts are buffers, which may be views of a memory-mapped file. A
matrix that a family merges (q, k and v, or gate and up) is a `JoinedWeight`, one after another along the rows, each in
its own format. Both stand where the parameter stood (`linear.weight`), so they move, are saved and are shared like any
module. They have no gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from lamina.errors import InputError
from lamina.weights.format import Parts, WeightFormat, as_bytes

AT_ONCE = 1 << 20  # values that are dequantized together on a CPU: the float32 scratch is 4 MiB
AT_ONCE_ELSEWHERE = 1 << 25
ROWS = 128  # blocks of rows are multiples of this, as float8 scales of 128 × 128 are


class Packed(nn.Module):
    """A packed weight [..., out, in].

    dtype         in which its values are used: that of the model
    activations   of products with it on a CPU: "float32", or "int8" in groups of 32 if its format has integers
    """

    shape: torch.Size
    dtype: torch.dtype
    activations: str = "float32"

    @property
    def segments(self) -> tuple[PackedWeight, ...]:
        """Its rows, in parts of one format each."""
        raise NotImplementedError

    def entry(self, index: int) -> Packed:
        """The matrix of one expert of a stack, as a view."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return True

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.buffers())

    @property
    def device(self) -> torch.device:
        return next(iter(self.segments[0].parts.values())).device

    @property
    def is_meta(self) -> bool:
        return self.device.type == "meta"

    @property
    def formats(self) -> list[str]:
        return list(dict.fromkeys(one.format.name for one in self.segments))

    def numel(self) -> int:
        return self.shape.numel()

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """All values [..., out, in]."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        for start, end, values in self.dequantized(out.dtype):
            out[..., start:end, :] = values
        return out

    def dequantized(self, dtype: torch.dtype, at_once: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """(start, end, values [..., end - start, in]) for blocks of rows, so that the scratch is bounded."""
        start = 0
        for segment in self.segments:
            for begin, end in segment.row_blocks(at_once):
                yield start + begin, start + end, segment.values(begin, end, dtype)
            start += segment.shape[-2]

    def rows(self, ids: Tensor) -> Tensor:
        """The rows with these numbers: ids [...] -> [..., in]. Only these are dequantized."""
        flat, segments = ids.reshape(-1), self.segments
        if len(segments) == 1:
            return segments[0].lookup(flat).view(*ids.shape, -1)
        out, start = torch.empty(flat.numel(), self.shape[-1], dtype=self.dtype, device=self.device), 0
        for segment in segments:
            inside = ((flat >= start) & (flat < start + segment.shape[-2])).nonzero()[:, 0]
            out[inside] = segment.lookup(flat[inside] - start)
            start += segment.shape[-2]
        return out.view(*ids.shape, -1)

    def take(self, index: Tensor) -> Tensor:
        """The values with these numbers, counted over all of them: index [n] -> [n]"""
        rows, columns = index // self.shape[-1], index % self.shape[-1]
        if self.ndim == 2:
            return self.rows(rows.to(self.device)).gather(1, columns[:, None].to(self.device))[:, 0]
        each = self.numel() // self.shape[0]
        return torch.cat([self.entry(int(i) // each).take(i[None] % each) for i in index])


class PackedWeight(Packed):
    """
    >>> from lamina.weights.format import weight_format
    >>> int8 = weight_format("int8")
    >>> weight = PackedWeight(int8, int8.pack(torch.eye(32)), (32, 32))
    >>> weight.nbytes, weight.dense().shape, weight.rows(torch.tensor([3])).shape
    (1088, torch.Size([32, 32]), torch.Size([1, 32]))
    """

    def __init__(
        self, format: WeightFormat, parts: Parts, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.format, self.shape, self.dtype = format, torch.Size(shape), dtype
        for name, part in parts.items():
            self.register_buffer(name, part)

    def __getstate__(self) -> dict[str, Any]:
        """For pickles. Parts of one byte are written as uint8: PyTorch does not read float8 from pickles."""
        return {**self.__dict__, "_buffers": {name: (as_bytes(part), part.dtype) for name, part in self.parts.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parts = {name: part.view(dtype) for name, (part, dtype) in state["_buffers"].items()}
        super().__setstate__({**state, "_buffers": parts})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Without `__getstate__`, so that a memo's tensors (`rehearsal`: those on meta) take the place of the parts."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    @property
    def parts(self) -> dict[str, Tensor]:
        return {name: part for name, part in self._buffers.items() if part is not None}

    @property
    def segments(self) -> tuple[PackedWeight, ...]:
        return (self,)

    def entry(self, index: int) -> PackedWeight:
        parts = {name: part[index] for name, part in self.parts.items()}
        one = PackedWeight(self.format, parts, self.shape[1:], self.dtype)
        one.activations = self.activations
        return one

    def select(self, rows: slice | Tensor) -> PackedWeight:
        """Some rows: those of a slice as a view, those of an index as a copy in that order."""
        if isinstance(rows, slice):
            start, end, _ = rows.indices(self.shape[-2])
            count, (format, parts) = end - start, self.format.rows(self.parts, start, end)
        else:
            count, (format, parts) = len(rows), self.format.select(self.parts, rows.to(self.device))
        return PackedWeight(format, parts, (*self.shape[:-2], count, self.shape[-1]), self.dtype)

    def values(self, start: int, end: int, dtype: torch.dtype, ordered: bool = True) -> Tensor:
        """Rows `start` to `end`, dequantized. ordered False: columns in the order in which they are stored."""
        format, parts = self.format.rows(self.parts, start, end)
        if not ordered:
            parts.pop("order", None)
        return format.dequantize(parts, (*self.shape[:-2], end - start, self.shape[-1]), dtype)

    def lookup(self, ids: Tensor) -> Tensor:
        """ids [n] -> [n, in]"""
        format, parts = self.format.select(self.parts, ids)
        return format.dequantize(parts, (len(ids), self.shape[-1]), self.dtype)

    def row_blocks(self, at_once: int | None = None) -> Iterator[tuple[int, int]]:
        """Ranges of rows with about `at_once` values."""
        if at_once is None:
            at_once = AT_ONCE if self.device.type == "cpu" else AT_ONCE_ELSEWHERE
        out = self.shape[-2]
        each = self.numel() // max(out, 1)  # values per row, of all entries of a stack
        size = max(at_once // max(each, 1) // ROWS, 1) * ROWS
        return ((start, min(start + size, out)) for start in range(0, out, size))

    def replace(self, format: WeightFormat, parts: Parts) -> None:
        """Stores the same values in another format."""
        for name in self.parts:
            del self._buffers[name]
        self.format = format
        for name, part in parts.items():
            self.register_buffer(name, part)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Moves the parts. A conversion to another dtype changes `dtype` alone: parts keep the bits of the format."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        for name, part in self.parts.items():
            self._buffers[name] = fn(part.view(torch.uint8)).view(part.dtype)
        if self.device.type == "cuda":
            from lamina.weights.repack import repack  # which imports this module

            repack(self)
        return self

    def extra_repr(self) -> str:
        return f"{self.format}, {list(self.shape)}, {self.nbytes} bytes"


class JoinedWeight(Packed):
    """Packed weights along the rows: [out, in] with out = Σ out of each; `dtype` is that of the first."""

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        super().__init__()
        self.several = nn.ModuleList(weights)
        first = weights[0].shape
        self.shape = torch.Size((*first[:-2], sum(one.shape[-2] for one in weights), first[-1]))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.segments[0].dtype

    @property
    def segments(self) -> tuple[PackedWeight, ...]:
        return tuple(self.several)  # type: ignore[arg-type]

    def entry(self, index: int) -> JoinedWeight:
        one = JoinedWeight([one.entry(index) for one in self.segments])
        one.activations = self.activations
        return one


def along_rows(weights: Sequence[PackedWeight], merge: bool = False) -> Packed:
    """The weights one after another along their rows; neighbours of one format as one tensor (a copy) if `merge`."""
    found: list[PackedWeight] = []
    for one in weights:
        last = found[-1] if found else None
        joined = last.format.join([last.parts, one.parts]) if merge and last and last.format == one.format else None
        if joined is None or last is None:
            found.append(one)
        else:
            shape = (*last.shape[:-2], last.shape[-2] + one.shape[-2], last.shape[-1])
            found[-1] = PackedWeight(last.format, joined, shape, last.dtype)
    return found[0] if len(found) == 1 else JoinedWeight(found)


def stacked(entries: Sequence[PackedWeight]) -> PackedWeight | None:
    """The matrices of experts as one stack [E, out, in]; None if their formats or parts differ. A view if they are
    evenly spaced in one memory, as they are in a GGUF file."""
    first = entries[0]
    kinds = [(one.format, one.shape, {name: part.dtype for name, part in one.parts.items()}) for one in entries]
    if any(kind != kinds[0] for kind in kinds):
        return None
    parts = {name: stacked_part([one.parts[name] for one in entries]) for name in first.parts}
    return PackedWeight(first.format, parts, (len(entries), *first.shape), first.dtype)


def stacked_part(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    if first.is_meta or len(parts) == 1:
        return torch.empty(len(parts), *first.shape, dtype=first.dtype, device="meta") if first.is_meta else first[None]
    step = parts[1].data_ptr() - first.data_ptr()
    spaced = all(
        part.data_ptr() == first.data_ptr() + i * step and part.stride() == first.stride()
        for i, part in enumerate(parts)
    )
    same = spaced and len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if same and step > 0 and step % first.itemsize == 0:
        return first.as_strided((len(parts), *first.shape), (step // first.itemsize, *first.stride()))
    return torch.stack([part.view(torch.uint8) for part in parts]).view(first.dtype)


def first_weight(module: nn.Module) -> nn.Parameter | Packed:
    """`next(module.parameters())`, or the packed weight that takes its place, in a tenth of the time: no names are
    built. A plain parameter behind packed ones may be kept in float32 whatever the dtype of the model is."""
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Packed):
            return one
        for parameter in one._parameters.values():
            if parameter is not None:
                return parameter
        waiting += [child for child in reversed(one._modules.values()) if child is not None]
    raise InputError(f"{type(module).__name__} has no parameters, which would say its device and dtype")


def every_module(module: nn.Module) -> list[nn.Module]:
    """A module and all modules below it, level by level. `module.modules()` takes many times as long: it builds
    names."""
    found = [module]
    for one in found:  # which grows meanwhile
        for child in one._modules.values():
            if child is not None:
                found.append(child)
    return found
