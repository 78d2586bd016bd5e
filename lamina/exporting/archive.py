"""The file of an exported program: a zip whose weights are stored as they are, or a folder with the same entries.

A .pte file is both a program of ExecuTorch and such a zip: the program comes first and holds the programs and weights,
and the zip with all other entries follows it. ExecuTorch reads no further than its own end, and zip readers begin at
the end of the file.

manifest.json            shapes, dtypes, checksums (manifest.py)
weights.bin              every weight once, each at a multiple of 64 bytes
programs/NAME.pt2        one traced program each, without weights and without the cache
tokenizer.json           if the model has a tokenizer
chat_template.jinja      if it has a chat template
generation_config.json   the checkpoint's own
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lamina.checkpoint.huge_pages import ask_for_huge_pages
from lamina.errors import ProgramError
from lamina.exporting.manifest import DTYPES, Manifest, shape_and_dtype

ALIGNED, PIECE = 64, 1 << 24
PTE = "program.pte"
"""The name by which the manifest knows the first part of a .pte file."""


class Archive:
    """An archive that is open for reading; every entry is checked against the manifest when it is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise ProgramError(f"there is no file {self.path}: lamina export PATH --to FILE makes one")
        self._zip: zipfile.ZipFile | None = None
        if not self.path.is_dir():
            try:
                self._zip = zipfile.ZipFile(self.path)
            except zipfile.BadZipFile:
                raise ProgramError(f"{self.path} is not an exported program, or was cut short") from None
        self.manifest = Manifest.read(b"".join(self._pieces("manifest.json")), str(self.path))

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.files

    def read(self, name: str) -> bytes:
        """The contents of an entry."""
        out = io.BytesIO()
        for piece in self._checked(name):
            out.write(piece)
        return out.getvalue()

    def check(self, name: str) -> None:
        """Reads an entry and compares it with the manifest."""
        for _ in self._checked(name):
            pass

    def weights(self) -> dict[str, Tensor]:
        """Name -> weight, in memory of their own; a weight that is stored once under two names is one tensor."""
        if not self.manifest.weights:
            return {}
        blob = torch.empty(self.manifest.files["weights.bin"]["bytes"], dtype=torch.uint8)
        ask_for_huge_pages(blob)
        view, at = memoryview(blob.numpy()), 0  # type: ignore[arg-type]
        for piece in self._checked("weights.bin"):
            view[at : at + len(piece)] = piece
            at += len(piece)
        found: dict[str, Tensor] = {}
        for name, entry in self.manifest.weights.items():
            if "same" not in entry:
                found[name] = self._weight(blob, name, entry)
        return found | {name: found[e["same"]] for name, e in self.manifest.weights.items() if "same" in e}

    def _weight(self, blob: Tensor, name: str, entry: Mapping[str, Any]) -> Tensor:
        dtype, shape, start = DTYPES[entry["dtype"]], entry["shape"], entry["offset"]
        size = torch.Size(shape).numel() * dtype.itemsize
        if start + size > len(blob):
            raise ProgramError(f"{self.path}: {name} ends after the end of weights.bin. Export the model again")
        return blob[start : start + size].view(dtype).view(shape)

    def _checked(self, name: str) -> Iterator[bytes]:
        """The contents in pieces; raises at the end if they are not those that the manifest was written with."""
        expected, size, crc = self.manifest.files.get(name), 0, 0
        if expected is None:
            raise ProgramError(f"the manifest of {self.path} names no {name}. Export the model again")
        for piece in self._pieces(name):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
            if size > expected["bytes"]:
                break
            yield piece
        if (size, crc) != (expected["bytes"], expected["crc32"]):
            raise ProgramError(f"{name} in {self.path} was altered or cut short: export the model again")

    def _pieces(self, name: str) -> Iterator[bytes]:
        try:
            if name == PTE:
                yield from self._first_bytes(self.manifest.files[name]["bytes"])
                return
            file: Any = (self.path / name).open("rb") if self._zip is None else self._zip.open(name)
            with file:
                while piece := file.read(PIECE):
                    yield piece
        except (KeyError, FileNotFoundError):
            raise ProgramError(f"{self.path} has no {name}: it is not an exported program, or not all of it") from None
        except (zipfile.BadZipFile, EOFError, zlib.error):
            raise ProgramError(f"{name} in {self.path} was altered or cut short: export the model again") from None

    def _first_bytes(self, size: int) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            while piece := file.read(min(PIECE, size)):
                size -= len(piece)
                yield piece


def check_new(path: str | os.PathLike[str]) -> Path:
    """The path of a folder that does not exist yet, or is empty; raises otherwise."""
    folder = Path(path).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProgramError(f"{folder} exists: give the path of a new folder")
    return folder


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder to write an archive into, and removes it again if that fails."""
    folder = check_new(path)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder)
        raise


class Writer:
    """Writes the entries of an archive: into a zip that is open for writing, or into a folder."""

    def __init__(self, target: zipfile.ZipFile | Path) -> None:
        self.target = target
        self.files: dict[str, dict[str, int]] = {}

    def write(self, name: str, contents: bytes | str | Iterator[Any]) -> None:
        """Writes an entry; `contents` may be several buffers, which follow each other."""
        data = contents.encode() if isinstance(contents, str) else contents
        size, crc = 0, 0
        if isinstance(self.target, Path):
            (self.target / name).parent.mkdir(parents=True, exist_ok=True)
            file: Any = (self.target / name).open("wb")
        else:
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_STORED if name == "weights.bin" else zipfile.ZIP_DEFLATED
            file = self.target.open(entry, "w", force_zip64=True)
        with file:
            for piece in [data] if isinstance(data, bytes) else data:
                file.write(piece)
                size, crc = size + memoryview(piece).nbytes, zlib.crc32(piece, crc)
        self.files[name] = {"bytes": size, "crc32": crc}

    def add_file(self, name: str) -> None:
        """Notes a file that something else wrote into the folder."""
        assert isinstance(self.target, Path)
        with (self.target / name).open("rb") as file:
            self.files[name] = checksum(file)


def checksum(file: IO[bytes]) -> dict[str, int]:
    """Size and CRC-32 of a file from its present position to its end, as the manifest has them."""
    size, crc = 0, 0
    while piece := file.read(PIECE):
        size, crc = size + len(piece), zlib.crc32(piece, crc)
    return {"bytes": size, "crc32": crc}


def lay_out(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Where each weight is in weights.bin: `Manifest.weights`."""
    table: dict[str, dict[str, Any]] = {}
    stored: dict[Any, str] = {}
    end = 0
    for name, tensor in weights.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()) if tensor.numel() else name
        if same in stored:
            table[name] = {"same": stored[same]}
            continue
        stored[same] = name
        end += -end % ALIGNED
        table[name] = shape_and_dtype(tensor) | {"offset": end}
        end += tensor.nbytes
    return table


def weight_bytes(weights: Mapping[str, Tensor], table: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    """The contents of weights.bin by this table, one weight after the other."""
    end = 0
    for name, entry in table.items():
        if "same" not in entry:
            yield b"\0" * (entry["offset"] - end)
            if weights[name].numel():
                yield weights[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            end = entry["offset"] + weights[name].nbytes


def program_bytes(program: ExportedProgram) -> bytes:
    """A program as torch.export.save writes it, without the values of its tensors."""
    out = io.BytesIO()
    with without_values(program.state_dict), without_values(program.constants), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No complete tensor found")  # since only one value is stored
        torch.export.save(program, out)
    return out.getvalue()


@contextmanager
def without_values(tensors: dict[str, Any]) -> Iterator[None]:
    """Replaces tensors by one value each, expanded to the shape: the loader puts the real ones in their place."""
    kept = dict(tensors)
    try:
        for name, tensor in kept.items():
            one = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            tensors[name] = nn.Parameter(one, requires_grad=False) if isinstance(tensor, nn.Parameter) else one
        yield
    finally:
        tensors.update(kept)
