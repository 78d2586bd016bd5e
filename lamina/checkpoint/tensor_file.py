"""One file of tensors in a checkpoint folder: safetensors, or a pickle (pytorch_model.bin) where those are allowed.

A pickle can name any function of any module, to be called when it is read. `torch.load(weights_only=True)` refuses all
but tensors and plain containers; even so, pickles are read only if the caller asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lamina.errors import CheckpointError


class TensorFile(ABC):
    """An open file. Opening reads its header, or the structure of a pickle; tensors stay on the memory map."""

    @abstractmethod
    def names(self) -> Iterable[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def read(self, name: str) -> torch.Tensor: ...


class SafeFile(TensorFile):
    """A safetensors file; its header, and that it is whole, are checked here."""

    def __init__(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._open = safe_open(str(file), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            size = file.stat().st_size
            raise CheckpointError(f"{file} ({size} bytes) is cut short or not a safetensors file: {error}") from error

    def names(self) -> Iterable[str]:
        return list(self._open.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open.get_tensor(name)
        return tensor


class PickledFile(TensorFile):
    """A dict of tensors that torch.save wrote, memory-mapped unless in the format before PyTorch 1.6 (no zip)."""

    def __init__(self, file: Path) -> None:
        import zipfile

        try:
            found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except Exception as error:  # of many types, by what is wrong with the file
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{file} cannot be read as a file of tensors alone: {reason}") from error
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise CheckpointError(f"{file} holds something else than a dict of tensors")
        self._tensors: dict[str, torch.Tensor] = found

    def names(self) -> Iterable[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def open_file(file: Path) -> TensorFile:
    """Opens a file by its name: *.safetensors, or a pickle."""
    return SafeFile(file) if file.suffix == ".safetensors" else PickledFile(file)
