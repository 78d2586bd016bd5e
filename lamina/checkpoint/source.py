"""What a checkpoint gives: a configuration, named tensors read lazily from a memory map, and a tokenizer.

Three kinds exist: a folder as Hugging Face writes it, a GGUF file, and a folder of CTranslate2. The last two present
themselves under the same configuration keys and tensor names, so nothing after this package needs to know which one it
was.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.checkpoint.demo_weights import NAMED
from lamina.checkpoint.hub import locate
from lamina.dtypes import FLOATS
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from lamina.checkpoint.packing import PackedTensors
    from lamina.checkpoint.quantized.code_order import Room
    from lamina.checkpoint.tokenizer import Tokenizer

LISTED = 8
NESTED = ("text_config", "llm_config", "language_config", "decoder", "decoder_config")


class Checkpoint(ABC):
    """An opened checkpoint. Opening reads headers only; `read` gives one tensor from the memory map."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    @abstractmethod
    def names(self) -> Set[str]:
        """The names of all tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype that a tensor is stored in; None if it is read as floating-point numbers, whatever is stored."""
        return None

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU. Nothing is kept: it lives on the map, or is dequantized at each call."""

    def packed(self, name: str, device: torch.device, room: Room | None = None) -> PackedTensors | None:
        """The tensor as it is stored, if it is stored in a format that can stay packed. On the CPU, from the memory map
        where possible; codes that must be put into another order go to memory of `room`. Without values if `device` is
        meta."""
        return None

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None when the checkpoint has none."""

    @property
    def preprocessor_config(self) -> dict[str, Any]:
        """How audio becomes the model's input: preprocessor_config.json, or a part of processor_config.json in newer
        checkpoints; empty without them."""
        from lamina.checkpoint.folder import read_json  # which imports this module

        for name in ("preprocessor_config.json", "processor_config.json"):
            if (file := self.path / name).is_file():
                found = read_json(file)
                return found.get("feature_extractor", {}) if name.startswith("processor") else found
        return {}

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text: what generation_config says, else the model's configuration."""
        for config in (self.generation_config, self.config, *nested_configs(self.config)):
            if (ids := config.get("eos_token_id")) is not None:
                several = list(ids) if isinstance(ids, list | tuple) else [ids]
                if not all(isinstance(one, int) for one in several):
                    raise CheckpointError(f"eos_token_id={ids!r} of {self.path} must be an id, or a list of ids")
                return tuple(dict.fromkeys(several))
        return ()


def open_source(path: str | os.PathLike[str], *, revision: str | None = None, pickle: bool = False) -> Checkpoint:
    """Open a folder (config.json and *.safetensors), a .gguf file, a checkpoint that has a name (`NAMED`), or a Hub id.

    revision  a branch, tag or commit, of a Hub id
    pickle    whether pytorch_model.bin is read where there are no safetensors

    >>> open_source("/nowhere")
    Traceback (most recent call last):
    lamina.errors.CheckpointError: /nowhere does not exist; expected a folder with config.json \
and *.safetensors, a .gguf file, or a known name: smollm2, whisper-tiny.en; or a Hub id (owner/name)
    """
    from lamina.checkpoint.ctranslate2 import CTranslate2Checkpoint, is_ctranslate2  # which import this module
    from lamina.checkpoint.folder import FolderCheckpoint
    from lamina.checkpoint.gguf.file import GGUFCheckpoint
    from lamina.checkpoint.quantized import with_weights

    path = locate(path, revision, pickle=pickle)
    names = ", ".join(NAMED)
    expected = (
        f"expected a folder with config.json and *.safetensors, a .gguf file, or a known name: {names}; or a Hub id "
        "(owner/name)"
    )
    if path.is_dir():
        return CTranslate2Checkpoint(path) if is_ctranslate2(path) else with_weights(FolderCheckpoint(path, pickle))
    if not path.exists():
        raise CheckpointError(f"{path} does not exist{why_absent(path)}; {expected}")
    if path.suffix.lower() == ".gguf" or begins_as_gguf(path):
        return GGUFCheckpoint(path)
    inside = path.suffix in (".safetensors", ".bin", ".json") and path.parent.is_dir()
    hint = f" (give its folder, {path.parent})" if inside else ""
    raise CheckpointError(f"{path} is neither a folder nor a .gguf file{hint}; {expected}")


def why_absent(path: Path) -> str:
    """What may have been meant by a path that does not exist."""
    from lamina.checkpoint.shapes import SHAPES  # which imports this module

    if str(path) in SHAPES:
        return " (as a shape without weights it can be planned and benchmarked)"
    beside = sorted(file.name for file in path.parent.glob("*.gguf")) if path.suffix.lower() == ".gguf" else []
    return f" ({path.parent} has {listing(beside)})" if beside else ""


def begins_as_gguf(path: Path) -> bool:
    """Whether a file is GGUF by its first bytes; that of another program may have no ending."""
    with path.open("rb") as opened:
        return opened.read(4) == b"GGUF"


def config_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype a configuration asks for (`dtype`, or `torch_dtype` in older files), else float32.

    >>> config_dtype({"torch_dtype": "bfloat16"})
    torch.bfloat16
    """
    if (found := names_dtype(config)) is None:
        return torch.float32
    key, value = found
    name = str(value).removeprefix("torch.")
    if name not in FLOATS:
        raise CheckpointError(f"the configuration's {key} is {value!r}, not one of {', '.join(FLOATS)}; pass dtype=")
    return FLOATS[name]


def names_dtype(config: dict[str, Any]) -> tuple[str, Any] | None:
    """The field of a configuration that names a dtype, and its value; None if none does."""
    named = ((key, part.get(key)) for part in (config, *nested_configs(config)) for key in ("dtype", "torch_dtype"))
    return next(((key, value) for key, value in named if value is not None and value != "auto"), None)


def nested_configs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configurations of the text model inside that of a multimodal model, or of an encoder-decoder pair.

    >>> nested_configs({"text_config": {"dtype": "bfloat16"}, "vision_config": {}})
    [{'dtype': 'bfloat16'}]
    """
    return [part for key in NESTED if isinstance(part := config.get(key), dict)]


def with_context(config: Mapping[str, Any], context: int | None) -> dict[str, Any]:
    """The configuration with the field `context`, also in the nested configuration of a text model.

    >>> with_context({"text_config": {"model_type": "llama"}}, 4096)
    {'text_config': {'model_type': 'llama', 'context': 4096}, 'context': 4096}
    """
    if context is None:
        return dict(config)
    nested = {key: value | {"context": context} for key in NESTED if isinstance(value := config.get(key), dict)}
    return {**config, **nested, "context": context}


def listing(items: Iterable[str], separator: str = ", ") -> str:
    """The first few items, then how many more there are."""
    items = list(items)
    more = f"{separator}and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return separator.join(items[:LISTED]) + more
