"""`WeightFormat`: how the rows of a weight are stored in fewer bits, and the registry of all formats.

A format stores a matrix [out, in] as a few named parts, each a tensor whose second last axis is `out` (or a fraction of
it, or 1). Leading axes are allowed everywhere: the experts of a layer are one stack [E, out, in]. One file for each
family of formats has its layout, a readable dequantize, and `pack` for formats that are written here:

    gguf_blocks.py, gguf_k.py   blocks as GGUF files store them
    int_groups.py               integers with a scale per group: AWQ, GPTQ, compressed-tensors, int8 and int4
    fp8.py                      float8 with a scale per matrix, row or 128 × 128 block
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lamina.errors import CheckpointError, InputError

Parts = Mapping[str, Tensor]

FORMATS: dict[str, WeightFormat] = {}


class WeightFormat(ABC):
    """Formats compare by value: two weights of equal formats can be joined.

    name    as users and errors say it
    group   consecutive values of a row that share a scale
    """

    name: str
    group: int

    @abstractmethod
    def dequantize(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The weight [..., out, in]: the definition of the format, in plain PyTorch."""

    @abstractmethod
    def bytes_of(self, out: int, width: int) -> int:
        """Bytes of a matrix [out, width]."""

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """The parts of a weight [..., out, in], rounded to nearest."""
        raise InputError(f"weights are read in {self.name}, and written in: {', '.join(writable())}")

    def check(self, parts: Parts, shape: Sequence[int], what: str) -> None:
        """Raises CheckpointError if the parts cannot be those of a weight of this shape; `what` names the tensor."""
        if shape[-1] % self.group:
            raise CheckpointError(
                f"{what} is {self} with rows of {shape[-1]} values, which groups of {self.group} do not divide"
            )

    def rows(self, parts: Parts, start: int, end: int) -> tuple[WeightFormat, dict[str, Tensor]]:
        """Format and parts of rows `start` to `end`, as views if the format can be cut there."""
        return self, {name: part if name in self.whole else part[..., start:end, :] for name, part in parts.items()}

    def select(self, parts: Parts, index: Tensor) -> tuple[WeightFormat, dict[str, Tensor]]:
        """Format and parts of these rows, in this order."""
        return self, {
            name: part if name in self.whole else as_bytes(part).index_select(-2, index).view(part.dtype)
            for name, part in parts.items()
        }

    def join(self, several: Sequence[Parts]) -> dict[str, Tensor] | None:
        """The parts of all rows one after another; None if that is no single matrix of this format, as with zeros for
        some rows only, or with scales of two dtypes."""
        kinds = [{name: part.dtype for name, part in parts.items()} for parts in several]
        if any(one != kinds[0] for one in kinds):
            return None
        shared = [(parts[name], several[0][name]) for parts in several for name in self.whole & parts.keys()]
        if any(not one.is_meta and not torch.equal(one, first) for one, first in shared):
            return None
        return {
            name: several[0][name] if name in self.whole else cat([parts[name] for parts in several])
            for name in several[0]
        }

    whole: frozenset[str] = frozenset()
    """Parts that all rows share."""

    def __str__(self) -> str:
        return self.name


def as_bytes(part: Tensor) -> Tensor:
    """The same memory as uint8: PyTorch indexes and joins float8 on few devices."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part


def cat(parts: Sequence[Tensor]) -> Tensor:
    """One after another along the rows: a view if they are so in memory."""
    if follow_each_other(parts):
        first = parts[0]
        return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
    return torch.cat([as_bytes(part) for part in parts], -2).view(parts[0].dtype)


def follow_each_other(parts: Sequence[Tensor]) -> bool:
    """True if matrices are one after another in one memory, without gaps.

    >>> whole = torch.zeros(4, 2)
    >>> follow_each_other(whole.split(2)), follow_each_other([whole[:1], whole[2:]])
    (True, False)
    """
    if any(part.is_meta or part.ndim != 2 or not part.is_contiguous() for part in parts):
        return False
    if len({part.untyped_storage().data_ptr() for part in parts}) > 1:
        return False
    return all(b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairwise(parts))


def register(*formats: WeightFormat) -> None:
    """Makes formats known by their names, which `weight_format` and `lamina.load(weights=…)` take."""
    FORMATS.update((one.name, one) for one in formats)


def weight_format(name: str) -> WeightFormat:
    """The format of this name.

    >>> weight_format("Q4_1").group
    32
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1, cutoff=0.0)[0]
        raise InputError(
            f"there is no weight format {name!r}; the nearest is {near!r}. Formats are {', '.join(FORMATS)}"
        )
    return FORMATS[name]


def writable() -> list[str]:
    """Names of the formats that `pack` writes."""
    return [name for name, one in FORMATS.items() if type(one).pack is not WeightFormat.pack]
