"""Checked files: a text and named tensors in one safetensors file, with checksums of every byte.

    8 bytes   length of the header
    header    JSON as in safetensors; its metadata begins with a checksum of the header and one of the data
    data      the bytes of the tensors, one after the other

Every byte is under one of the two checksums, so a file that was cut short or altered anywhere is refused. Tensors are
written, read and hashed one at a time, so there is never a second copy of all of them. A new file is written beside the
old one and replaces it once it is on the disk. If anything fails before that, even if the process is killed, the old
file stays as it was. On systems with O_TMPFILE an incomplete file has no name, so nothing of it remains. On others a
killed process leaves a `.partial` file. Its writer held a lock on it, so the next save to the same path finds it
unlocked and removes it.
"""

from __future__ import annotations

import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lamina.errors import CacheFileError, InputError

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed
    fcntl = None  # type: ignore[assignment]

FORMAT, VERSION = "lamina cache", 1
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
UNKNOWN = "0" * 64  # placeholder of a checksum
OPENING = b'{"__metadata__":{"checksum":"'
OWN = slice(8 + len(OPENING), 8 + len(OPENING) + len(UNKNOWN))  # bytes of the file that hold the header's checksum


# -- writing -------------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], text: str, like: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Writes a file. If that fails, a file that was there before is unchanged.

    like      name -> a tensor with the dtype and shape to write; its values are not read
    tensors   the tensors, in the same order; each is requested after the one before it is written
    """
    table: dict[str, Any] = {}
    end = 0
    for name, one in like.items():
        if one.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise CacheFileError(f"{name} is in {one.dtype}, which a cache file does not hold; it holds {known}")
        table[name] = {
            "dtype": DTYPES[one.dtype], "shape": list(one.shape), "data_offsets": [end, end := end + one.nbytes],
        }  # fmt: skip
    with replace_file(path) as file:
        file.write(_header(text, table))
        data = blake2b(digest_size=32)
        for one, tensor in zip(like.values(), tensors, strict=True):
            assert (tensor.dtype, tensor.shape) == (one.dtype, one.shape)
            piece = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            data.update(piece)
            file.write(piece)
        header = _header(text, table, data.hexdigest())
        file.seek(0)
        file.write(_header(text, table, data.hexdigest(), _sum(header)))


def _header(text: str, table: dict[str, Any], data: str = UNKNOWN, own: str = UNKNOWN) -> bytes:
    """The header, preceded by its length; checksums do not change its size."""
    metadata = {"checksum": own, "data_checksum": data, "format": FORMAT, "version": str(VERSION), "text": text}
    header = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _sum(header: bytes) -> str:
    """The checksum of a header, computed with the placeholder in place of itself."""
    return blake2b(header[: OWN.start] + UNKNOWN.encode() + header[OWN.stop :], digest_size=32).hexdigest()


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file that replaces `path` at the end, or disappears if an exception is raised."""
    target = Path(os.path.realpath(_path(path).expanduser()))  # writes through a symbolic link
    if not target.parent.is_dir():
        raise CacheFileError(f"{path} cannot be written: there is no folder {target.parent}")
    if target.is_dir():
        raise CacheFileError(f"{path} cannot be written: it is a folder; give the path of a file")
    _remove_abandoned(target)
    file, draft = _new_draft(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not draft.exists():
                _give_name(file, draft)
            if fcntl is not None:  # while the lock is held
                os.replace(draft, target)
        if fcntl is None:
            os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name must be on the disk too
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path={path!r}: it must be the path of a file")
    return Path(path)


def _new_draft(target: Path) -> tuple[IO[bytes], Path]:
    """A new locked file in the folder of `target`, and the name that it has or will get."""
    while True:
        draft = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.partial")
        try:  # without a name: it disappears with the process that writes it
            return os.fdopen(os.open(target.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b"), draft
        except (AttributeError, OSError):  # no O_TMPFILE on this system or file system
            file = open(draft, "xb")  # noqa: SIM115
        _lock(file)
        if draft.exists():  # otherwise removed as abandoned before it was locked
            return file, draft
        file.close()


def _give_name(file: IO[bytes], name: Path) -> None:
    _lock(file)
    try:
        os.link(f"/proc/self/fd/{file.fileno()}", name, src_dir_fd=file.fileno())  # like linkat, which follows the link
    except OSError:  # for example, no /proc
        file.seek(0)
        with open(name, "xb") as copy:
            _lock(copy)
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.fsync(copy.fileno())


def _lock(file: IO[bytes]) -> bool:
    """Locks a file until it is closed or its process ends; False if another process has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_abandoned(target: Path) -> None:
    """Removes drafts of this file whose writers were killed."""
    for draft in target.parent.glob(f".{glob.escape(target.name[:200])}.????????.partial"):
        with suppress(OSError), open(draft, "rb+") as file:  # removed meanwhile, or (on Windows) open elsewhere
            if _lock(file):
                draft.unlink()


# -- reading -------------------------------------------------------------------------------------------------------


@contextmanager
def open_file(path: str | os.PathLike[str]) -> Iterator[CheckedFile]:
    """Opens a file to read, and checks its header."""
    source = _path(path).expanduser()
    if not source.is_file():
        raise CacheFileError(f"{path} is a folder, not a cache file" if source.is_dir() else f"{path} does not exist")
    with open(source, "rb") as file:
        yield CheckedFile(source, file)


class CheckedFile:
    """An open file: its `text`, and its tensors in the order in which they were written."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path, self._file = path, file
        size = os.fstat(file.fileno()).st_size
        start = file.read(OWN.stop)
        if start[8 : OWN.start] != OPENING[: max(0, len(start) - 8)]:
            raise CacheFileError(f"{path} is not a cache file; cache.save(path) writes one")
        end = 8 + int.from_bytes(start[:8], "little")
        if len(start) < OWN.stop or end > size:
            raise self._cut_short(size, max(end, OWN.stop), "at least ")
        header = start + file.read(end - len(start))
        if start[OWN].decode(errors="replace") != _sum(header):
            raise self._altered("header")
        self._table = json.loads(header[8:])
        metadata = self._table.pop("__metadata__")
        if (metadata["format"], metadata["version"]) != (FORMAT, str(VERSION)):
            raise CacheFileError(
                f"{path} has the format {metadata['format']!r} {metadata['version']}, and this version of Lamina reads "
                f"{FORMAT!r} {VERSION}: read it with the version that wrote it"
            )
        whole = end + max((entry["data_offsets"][1] for entry in self._table.values()), default=0)
        if size < whole:
            raise self._cut_short(size, whole)
        if size > whole:
            raise CacheFileError(f"{path} was altered: {whole} bytes were saved, it has {size}. Save the cache again.")
        self.text: str = metadata["text"]
        self._data: str = metadata["data_checksum"]

    @property
    def like(self) -> dict[str, Tensor]:
        """Name -> a tensor of that dtype and shape on the meta device."""
        return {
            name: torch.empty(entry["shape"], dtype=BY_NAME[entry["dtype"]], device="meta")
            for name, entry in self._table.items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each name and tensor, on the CPU. Raises CacheFileError after the last one if the checksum differs."""
        data = blake2b(digest_size=32)
        for name, entry in self._table.items():
            dtype, shape = BY_NAME[entry["dtype"]], entry["shape"]
            bytes_ = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
            piece = bytes_.numpy().data
            if self._file.readinto(piece) != len(piece):
                raise self._altered("data")
            data.update(piece)
            yield name, bytes_.view(dtype).view(shape)
        if data.hexdigest() != self._data:
            raise self._altered("data")

    def _cut_short(self, size: int, whole: int, least: str = "") -> CacheFileError:
        return CacheFileError(
            f"{self.path} was cut short: of {least}{whole} bytes it has {size}. Save the cache again."
        )

    def _altered(self, part: str) -> CacheFileError:
        return CacheFileError(
            f"{self.path} was altered after it was saved: the checksum of its {part} is another. Save the cache again."
        )
