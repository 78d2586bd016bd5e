"""A GGUF file, presented as the Hugging Face checkpoint it was made from.

The metadata becomes a config.json-like dict, tensor names become Hugging Face names, and a tensor is dequantized when
it is read; `packed` gives its blocks on the memory map. Some are stored otherwise than in the original: rows in another
order, norms with one added, matrices split or joined. Reading undoes that; `architectures` has a table for each
architecture.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lamina.checkpoint.gguf.architecture import Architecture, Presented
from lamina.checkpoint.gguf.architectures import ARCHITECTURES
from lamina.checkpoint.gguf.header import StoredTensor
from lamina.checkpoint.gguf.split import read_parts
from lamina.checkpoint.packing import PackedTensors
from lamina.checkpoint.source import Checkpoint
from lamina.errors import CheckpointError
from lamina.notices import notice
from lamina.weights import FORMATS, PackedWeight

if TYPE_CHECKING:
    from lamina.checkpoint.quantized.code_order import Room
    from lamina.checkpoint.tokenizer import Tokenizer

__all__ = ["ARCHITECTURES", "Architecture", "GGUFCheckpoint"]

ROWS_AT_ONCE = 4096  # dequantized together, so that scratch stays far below the tensor itself


class GGUFCheckpoint(Checkpoint):
    """One .gguf file, or all parts of a split one, mapped copy-on-write (never written)."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise CheckpointError(f"reading {path} needs the gguf package: pip install gguf") from error
        self.path = path
        self.metadata, tensors = read_parts(path)
        name = self.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            supported = ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(f"{path} has architecture {name!r}; GGUF files are read for: {supported}")
        tensors = ARCHITECTURES[name].split_fused(tensors)
        try:
            self.config = ARCHITECTURES[name].configure(self.metadata, tensors)
        except KeyError as error:
            raise CheckpointError(f"{path} lacks {error.args[0]}, which {name} needs") from error
        self.generation_config = {}
        self._presented = ARCHITECTURES[name].present(tensors, self.config)

    @property
    def names(self) -> Set[str]:
        return self._presented.keys()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(self.metadata[key] for key in keys if key in self.metadata))

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._find(name)
        shapes = [tensor.shape if found.expert is None else tensor.shape[1:] for tensor in found.stored]
        return (
            shapes[0] if found.fn is None else tuple(found.fn(*(torch.empty(s, device="meta") for s in shapes)).shape)
        )

    def read(self, name: str) -> torch.Tensor:
        found = self._find(name)
        values = [self._dequantize(tensor) for tensor in found.parts]
        return values[0] if found.fn is None else found.fn(*values)

    def packed(self, name: str, device: torch.device, room: Room | None = None) -> PackedTensors | None:
        found = self._find(name)
        tensors = [packed_blocks(tensor) for tensor in found.parts]
        known = tuple(one for one in tensors if one is not None)
        return PackedTensors(known, found.fn) if len(known) == len(tensors) else None

    def tokenizer(self) -> Tokenizer | None:
        from lamina.checkpoint.gguf.tokenizer import gguf_tokenizer  # tokenizers is slow to import
        from lamina.checkpoint.tokenizer import UnknownTokenizer, folder_tokenizer

        beside = self.path.parent / "tokenizer.json"
        try:
            found, why = gguf_tokenizer(self.metadata, self.eos_ids), f"{self.path.name} has none"
        except UnknownTokenizer as error:
            if not beside.is_file():
                raise UnknownTokenizer(f"{error}; a tokenizer.json beside the file would be read instead") from error
            found, why = None, str(error)
        if found is None and beside.is_file():
            notice(f"the tokenizer is that of {beside}: {why}")
            return folder_tokenizer(self.path.parent, self.eos_ids)
        return found

    def _find(self, name: str) -> Presented:
        if name not in self._presented:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._presented[name]

    def _dequantize(self, tensor: StoredTensor) -> torch.Tensor:
        from gguf import GGMLQuantizationType, dequantize

        kind, shape = tensor.kind, tensor.shape
        raw = torch.from_numpy(tensor.data)  # [..., bytes of a row], or numbers where torch has the type
        if raw.dtype != torch.uint8:
            return raw
        if kind == GGMLQuantizationType.BF16:
            return raw.view(torch.bfloat16)
        if (packed := packed_blocks(tensor)) is not None:
            return packed.dense(torch.float32)
        rows = raw.reshape(-1, raw.shape[-1])
        result = torch.empty(rows.shape[0], shape[-1])
        for start in range(0, rows.shape[0], ROWS_AT_ONCE):
            block = rows[start : start + ROWS_AT_ONCE]
            try:
                result[start : start + len(block)] = torch.from_numpy(dequantize(block.numpy(), kind))
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.path}: {tensor.name} is {kind.name}, which gguf cannot dequantize"
                ) from error
        return result.view(shape)


def packed_blocks(tensor: StoredTensor) -> PackedWeight | None:
    """The blocks of a tensor, on the memory map; None if it is stored in numbers, or in a format without kernels."""
    if (kind := FORMATS.get(tensor.kind.name)) is None:
        if tensor.data.dtype == "u1" and tensor.kind.name != "BF16":
            notice(f"weights in {tensor.kind.name} are dequantized; these stay packed: {', '.join(FORMATS)}")
        return None
    packed = PackedWeight(kind, {"blocks": torch.from_numpy(tensor.data)}, tensor.shape)
    kind.check(packed.parts, tensor.shape, tensor.name)
    return packed
