"""One file of tensors in a checkpoint folder: safetensors, or a pickle (pytorch_model.bin) where those are allowed.

A pickle can name any function of any module, to be called when it is read. `torch.load(weights_only=True)` refuses all
but tensors and plain containers; even so, pickles are read only if the caller asks for it.
"""

from __future__ import annotations

import os
import re
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
    def dtype(self, name: str) -> torch.dtype: ...

    @abstractmethod
    def read(self, name: str) -> torch.Tensor: ...


class SafeFile(TensorFile):
    """A safetensors file; its header, and that it is whole, are checked here."""

    def __init__(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        refuse_pointer(file)
        try:
            self._open = safe_open(str(file), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            size = file.stat().st_size
            raise CheckpointError(
                f"{file} ({size} bytes) is cut short or not a safetensors file: {error}; copy or download it again"
            ) from error

    def names(self) -> Iterable[str]:
        return list(self._open.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self._open.get_slice(name)[:0].dtype if self.shape(name) else self.read(name).dtype

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open.get_tensor(name)
        return tensor


class PickledFile(TensorFile):
    """A dict of tensors that torch.save wrote, memory-mapped unless in the format before PyTorch 1.6 (no zip)."""

    def __init__(self, file: Path) -> None:
        import pickle
        import zipfile

        refuse_pointer(file)
        try:
            found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except pickle.UnpicklingError as error:  # PyTorch's text advises to run the code in the file
            names = re.findall(r"GLOBAL ([\w.]+)", str(error))
            what = f"it refers to {names[0]}" if names else "it is cut short or not a file of torch.save"
            raise CheckpointError(
                f"{file} cannot be read as a file of tensors alone: {what}; save the model as safetensors"
            ) from error
        except Exception as error:  # of many types, by what is wrong with the file
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{file} is cut short or not a file of torch.save: {reason}; copy or download it again"
            ) from error
        values = found if isinstance(found, dict) else {"": found}
        if odd := [name for name, value in values.items() if not isinstance(value, torch.Tensor)]:
            what = f"{odd[0]!r} in it is" if odd[0] else "it is"
            kind = type(values[odd[0]]).__name__
            raise CheckpointError(
                f"{file} holds something else than a dict of tensors: {what} a {kind}; save the model's state_dict()"
            )
        self._tensors: dict[str, torch.Tensor] = values

    def names(self) -> Iterable[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


POINTER = b"version https://git-lfs"


def refuse_pointer(file: Path) -> None:
    """Raises CheckpointError for a link to nothing, and for the text that Git LFS puts in place of a large file."""
    if not file.exists() and file.is_symlink():
        raise CheckpointError(
            f"{file} is a link to {os.readlink(file)}, which does not exist; copy or download it again"
        )
    with file.open("rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            raise CheckpointError(
                f"{file} is a pointer of Git LFS, not the file itself: run git lfs pull in its folder"
            )


def open_file(file: Path) -> TensorFile:
    """Opens a file by its name: *.safetensors, or a pickle."""
    return SafeFile(file) if file.suffix == ".safetensors" else PickledFile(file)
