"""A checkpoint folder: config.json beside safetensors files, which are memory-mapped.

The tensors are in model.safetensors, or in the shards that model.safetensors.index.json names, or, where
neither exists, in every *.safetensors file of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.checkpoint.source import Checkpoint, listing
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from safetensors import safe_open

    from lamina.checkpoint.tokenizer import Tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class FolderCheckpoint(Checkpoint):
    """config.json, generation_config.json, *.safetensors and tokenizer.json of one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            found = sorted(file.name for file in path.glob("*.gguf"))
            hint = f" (it holds {listing(found)}: give that file instead)" if found else ""
            raise CheckpointError(f"{path} has no config.json{hint}")
        self.config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._files: dict[str, safe_open] = {}  # tensor name -> the open file that holds it
        if (path / SINGLE).is_file():
            self._add_all(path / SINGLE)
        elif (path / INDEX).is_file():
            self._add_shards(path / INDEX)
        else:
            files = sorted(path.glob("*.safetensors"))
            if not files:
                pickled = sorted(file.name for file in path.glob("*.bin"))
                hint = f"; {listing(pickled)} are pickles, save them again as safetensors" if pickled else ""
                raise CheckpointError(f"{path} has no {SINGLE}, no {INDEX} and no *.safetensors{hint}")
            for file in files:
                self._add_all(file)

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def tokenizer(self) -> Tokenizer | None:
        from lamina.checkpoint.tokenizer import folder_tokenizer  # tokenizers is slow to import

        return folder_tokenizer(self.path, self.eos_ids)

    def _file(self, name: str) -> safe_open:
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._files[name]

    def _add_all(self, file: Path) -> None:
        handle = open_file(file)
        names = handle.keys()
        if twice := [name for name in names if name in self._files]:
            raise CheckpointError(f"{file} repeats tensors of another file in {self.path}: {listing(twice)}")
        self._files.update(dict.fromkeys(names, handle))

    def _add_shards(self, index: Path) -> None:
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{index} has no weight_map")
        shards = sorted(set(places.values()))
        if outside := [shard for shard in shards if Path(shard).name != shard]:
            raise CheckpointError(f"{index} names files outside its folder: {listing(outside)}")
        if absent := [shard for shard in shards if not (self.path / shard).is_file()]:
            raise CheckpointError(f"{self.path} lacks {len(absent)} of {len(shards)} shards: {listing(absent)}")
        handles = {shard: open_file(self.path / shard) for shard in shards}
        held = {shard: set(handle.keys()) for shard, handle in handles.items()}
        if lacking := [f"{name} (in {shard})" for name, shard in places.items() if name not in held[shard]]:
            raise CheckpointError(f"{index} names tensors that the shards lack: {listing(lacking)}")
        self._files = {name: handles[shard] for name, shard in places.items()}


def open_file(file: Path) -> safe_open:
    """Memory-map one safetensors file; its header, and that it is whole, are checked here."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise CheckpointError(f"{file} ({size} bytes) is cut short or not a safetensors file: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_hook=plain_float)
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def plain_float(value: dict[str, Any]) -> Any:
    """Configurations write floats that JSON lacks as objects.

    >>> plain_float({"__float__": "Infinity"}), plain_float({"factor": 8})
    (inf, {'factor': 8})
    """
    return float(value["__float__"]) if value.keys() == {"__float__"} else value
