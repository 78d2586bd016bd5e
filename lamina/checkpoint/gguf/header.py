"""The header of a GGUF file: metadata, and the offset of each tensor.

A vocabulary is a hundred thousand short strings, so they are read by plain Python from one buffer. The package gguf
reads the same, and makes several NumPy arrays of each string.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from struct import Struct, error
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
STRING, ARRAY = 8, 9
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
PLAIN = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
SHORT, LONG = Struct("<I"), Struct("<Q")


@dataclass(frozen=True)
class StoredTensor:
    """data: the bytes of each row, or its numbers where NumPy has the kind"""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    def entry(self, index: int) -> StoredTensor:
        """One matrix of a stack of them."""
        return StoredTensor(self.name, self.kind, self.shape[1:], self.data[index])

    def halves(self) -> list[StoredTensor]:
        """The first and the second half of the rows of each matrix of a stack."""
        count, rows, width = self.shape
        parts = (self.data[:, : rows // 2], self.data[:, rows // 2 :])
        return [StoredTensor(self.name, self.kind, (count, rows // 2, width), part) for part in parts]


class GGUFHeader:
    """Maps a file, copy-on-write. One that is cut short, or is no GGUF file, raises ValueError."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, mode="c")
        self._buffer, self._at = self._bytes.data, len(MAGIC)
        if bytes(self._buffer[: len(MAGIC)]) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        try:
            version = self._short()
            if version not in VERSIONS:
                raise ValueError(f"it is of version {version}, and versions {VERSIONS[0]} and {VERSIONS[1]} are read")
            tensors, entries = self._long(), self._long()
            self.metadata: dict[str, Any] = {}
            for _ in range(entries):
                key = self._string()
                self.metadata[key] = self._value(self._short())
            places = [self._place() for _ in range(tensors)]
        except (error, RecursionError) as problem:
            raise ValueError(f"its header does not end: {problem}") from problem
        align = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"its tensors are aligned to {align!r}, which is no number of bytes")
        start = -(-self._at // align) * align
        self.tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in places}
        if len(self.tensors) < tensors:
            raise ValueError("it has two tensors of one name")

    def _short(self) -> int:
        self._at += 4
        (number,) = SHORT.unpack_from(self._buffer, self._at - 4)
        return int(number)

    def _long(self) -> int:
        self._at += 8
        (number,) = LONG.unpack_from(self._buffer, self._at - 8)
        return int(number)

    def _string(self) -> str:
        return str(self._take(self._long()), "utf-8")

    def _strings(self, count: int) -> list[str]:
        """The same as `_string` again and again, in one loop: a vocabulary has a hundred thousand."""
        buffer, at, last, found = self._buffer, self._at, len(self._buffer), []
        for _ in range(count):
            end = at + 8 + LONG.unpack_from(buffer, at)[0]
            if end > last:
                raise ValueError(f"{end - at - 8} bytes at {at + 8} go past its end")
            found.append(str(buffer[at + 8 : end], "utf-8"))
            at = end
        self._at = at
        return found

    def _take(self, size: int) -> memoryview:
        taken = self._buffer[self._at : self._at + size]
        if len(taken) < size:
            raise ValueError(f"{size} bytes at {self._at} go past its end")
        self._at += size
        return taken

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            kind, count = self._short(), self._long()
            if kind in NUMBERS:
                return self._numbers(kind, count)
            if kind == STRING:
                return self._strings(count)
            return [self._value(kind) for _ in range(count)]
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in NUMBERS:
            raise ValueError(f"metadata of type {kind} at {self._at} is unknown")
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, kind and offset."""
        name = self._string()
        shape = [self._long() for _ in range(self._short())]  # the last axis first
        return name, tuple(reversed(shape)), self._short(), self._long()

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> StoredTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{name} has type {number}, which the package gguf does not know") from None
        block, size = GGML_QUANT_SIZES[kind]
        row = shape[-1] if shape else 1
        if row % block:
            raise ValueError(f"{name} has rows of {row} numbers, and {kind.name} is for blocks of {block}")
        stored = (*shape[:-1], row // block * size)
        data = self._bytes[start : start + math.prod(stored)]
        if len(data) < math.prod(stored):
            raise ValueError(f"{name} goes past its end")
        if kind.name in PLAIN:
            return StoredTensor(name, kind, shape, data.view(PLAIN[kind.name]).reshape(shape))
        return StoredTensor(name, kind, shape, data.reshape(stored))
