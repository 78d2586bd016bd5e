"""A GGUF model in several files, model-00001-of-00003.gguf …: any one of them opens all.

The first part has the metadata of the model; each part has its own tensors, and says how many parts there are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lamina.checkpoint.gguf.header import GGUFHeader, StoredTensor
from lamina.checkpoint.source import listing
from lamina.checkpoint.tensor_file import refuse_pointer
from lamina.errors import CheckpointError

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def read_parts(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The metadata and the tensors of a GGUF file, or of all parts where it is one of several."""
    header = read_header(path)
    count = header.metadata.get("split.count", 0)
    if count <= 1:
        return header.metadata, header.tensors
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts, and its name does not say which: it should end in "
            f"-00001-of-{count:05}.gguf"
        )
    files = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{path.suffix}") for number in range(1, count + 1)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{path.parent} lacks {len(absent)} of {count} parts: {listing(absent)}; copy or download them again"
        )
    headers = [header if file == path else read_header(file) for file in files]
    tensors: dict[str, StoredTensor] = {}
    for number, (file, part) in enumerate(zip(files, headers, strict=True)):
        if (said := (part.metadata.get("split.no"), part.metadata.get("split.count"))) != (number, count):
            raise CheckpointError(f"{file} says it is part {said[0]} (from 0) of {said[1]}, not {number} of {count}")
        if twice := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{file} repeats tensors of another part: {listing(sorted(twice))}")
        tensors |= part.tensors
    metadata = headers[0].metadata
    if (wanted := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise CheckpointError(f"the {count} parts of {path} have {len(tensors)} tensors, and should have {wanted}")
    return metadata, tensors


def read_header(path: Path) -> GGUFHeader:
    refuse_pointer(path)
    try:
        return GGUFHeader(path)
    except ValueError as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path} ({size} bytes) is cut short or not a GGUF file: {error}; copy or download it again"
        ) from error
