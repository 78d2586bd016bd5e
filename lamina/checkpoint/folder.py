"""A checkpoint folder: config.json beside safetensors files, which are memory-mapped.

The tensors are in model.safetensors, or in the shards that model.safetensors.index.json names, or, where
neither exists, in every *.safetensors file of the folder but adapters and Mistral's own consolidated.safetensors. Where
there are none at all, and the caller allows pickles, they are in pytorch_model.bin or its shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.checkpoint.source import Checkpoint, listing, names_dtype, nested_configs
from lamina.checkpoint.tensor_file import TensorFile, open_file
from lamina.dtypes import FLOATS
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = (
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id",
    "suppress_tokens", "begin_suppress_tokens", "num_beam_groups", "diversity_penalty", "remove_invalid_values",
)  # fmt: skip
"""Settings for generation that a config.json may have where there is no generation_config.json."""
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.\w+")
FOREIGN = {
    "adapter*.safetensors": "an adapter of another model: merge it into that model and save the result",
    "consolidated*": "a release in Mistral's or Meta's own format: take the one in Hugging Face's format",
    "*.h5": "weights of TensorFlow: save the model as safetensors",
    "*.msgpack": "weights of Flax: save the model as safetensors",
}
"""Files that are no checkpoint here -> what they are, and the way out."""


class FolderCheckpoint(Checkpoint):
    """config.json, generation_config.json, *.safetensors and tokenizer files of one folder.

    pickle  whether pytorch_model.bin is read where there are no safetensors
    """

    def __init__(self, path: Path, pickle: bool = False) -> None:
        self.path = path
        self.config = read_config(path)
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else generation_fields(self.config)
        self._files: dict[str, TensorFile] = {}  # tensor name -> the open file that holds it
        if (path / SINGLE).is_file():
            self._add_all([path / SINGLE])
        elif (path / INDEX).is_file():
            self._add_shards(path / INDEX)
        elif files := plain_files(path):
            self._add_all(files)
        else:
            self._add_pickles(pickle)
        if not names_dtype(self.config) and (dtype := self._first_dtype()) is not None:
            self.config["dtype"] = dtype

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._file(name).dtype(name)

    def read(self, name: str) -> torch.Tensor:
        return self._file(name).read(name)

    def tokenizer(self) -> Tokenizer | None:
        from lamina.checkpoint.tokenizer import folder_tokenizer  # tokenizers is slow to import

        return folder_tokenizer(self.path, self.eos_ids)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._files[name]

    def _first_dtype(self) -> str | None:
        """The name of the first floating-point dtype that tensors are stored in."""
        known = {dtype: name for name, dtype in FLOATS.items()}
        return next((known[dtype] for name in sorted(self.names) if (dtype := self.dtype(name)) in known), None)

    def _add_all(self, files: Sequence[Path]) -> None:
        refuse_missing(self.path, numbered([file.name for file in files]))
        for file in files:
            handle = open_file(file)
            names = handle.names()
            if twice := [name for name in names if name in self._files]:
                raise CheckpointError(
                    f"{file} repeats tensors of another file in {self.path}: {listing(twice)}; leave one of the two"
                )
            self._files.update(dict.fromkeys(names, handle))

    def _add_shards(self, index: Path) -> None:
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{index} has no weight_map, which names the file of each tensor")
        if odd := [name for name, shard in places.items() if not isinstance(shard, str)]:
            raise CheckpointError(f"{index} must name a file for each tensor, and does not for {listing(odd)}")
        shards = sorted(set(places.values()))
        if outside := [shard for shard in shards if Path(shard).name != shard]:
            raise CheckpointError(f"{index} names files outside its folder: {listing(outside)}")
        refuse_missing(self.path, shards)
        handles = {shard: open_file(self.path / shard) for shard in shards}
        held = {shard: set(handle.names()) for shard, handle in handles.items()}
        if lacking := [f"{name} (in {shard})" for name, shard in places.items() if name not in held[shard]]:
            raise CheckpointError(
                f"{index} names tensors that the shards lack: {listing(lacking)}; they are of another release"
            )
        self._files = {name: handles[shard] for name, shard in places.items()}

    def _add_pickles(self, allowed: bool) -> None:
        """Opens pytorch_model.bin or its shards; names them in the error where that is not allowed."""
        found = sorted(file.name for file in self.path.glob("pytorch_model*.bin"))
        if not found or not allowed:
            hint = (
                f"; {listing(found)}: a pickle, which can run code when it is read: save the model again as "
                "safetensors, or allow it with pickle=True (--pickle), which reads tensors alone"
            )
            raise CheckpointError(
                f"{self.path} has no {SINGLE}, no {INDEX} and no *.safetensors"
                f"{hint if found else other_files(self.path)}"
            )
        if (self.path / PICKLE).is_file():
            self._add_all([self.path / PICKLE])
        elif (self.path / PICKLE_INDEX).is_file():
            self._add_shards(self.path / PICKLE_INDEX)
        else:
            self._add_all([self.path / name for name in found])


def plain_files(path: Path) -> list[Path]:
    """The safetensors files of a folder without an index; model*.safetensors if there are some."""
    foreign = {file for pattern in FOREIGN for file in path.glob(pattern)}
    files = sorted(file for file in path.glob("*.safetensors") if file not in foreign)
    return [file for file in files if file.name.startswith("model")] or files


def numbered(names: Sequence[str]) -> list[str]:
    """The names of all shards where those of some say how many there are.

    >>> numbered(["model-00002-of-00002.safetensors"])
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    matches = [match for name in names if (match := SHARD.fullmatch(name)) is not None]
    return [
        f"{match[1]}-{number:05}-of-{match[3]}{Path(match[0]).suffix}"
        for match in matches[:1]
        for number in range(1, int(match[3]) + 1)
    ]


def refuse_missing(path: Path, shards: Sequence[str]) -> None:
    if absent := [shard for shard in shards if not (path / shard).exists()]:
        raise CheckpointError(
            f"{path} lacks {len(absent)} of {len(shards)} shards: {listing(absent)}; copy or download them again"
        )


def other_files(path: Path) -> str:
    """What else a folder holds, and the way out; empty if that says nothing."""
    if found := sorted(file.name for file in path.glob("*.gguf")):
        each = "that file" if len(found) == 1 else "one of them"
        return f" (it holds {listing(found)}: give the path of {each})"
    for pattern, what in FOREIGN.items():
        if found := sorted(file.name for file in path.glob(pattern)):
            return f" (it holds {listing(found)}: {what})"
    if inside := sorted(file.parent.name for file in path.glob("*/config.json")):
        return f" (folders in it have one: give the path of {listing(inside)})"
    return "" if any(path.iterdir()) else " (it is empty)"


def generation_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The settings for generation in a config.json, where older checkpoints have them; the outer configuration wins.

    >>> generation_fields({"num_beams": 4, "hidden_size": 8, "decoder": {"num_beams": 2, "max_length": 64}})
    {'max_length': 64, 'num_beams': 4}
    """
    parts = (config, *nested_configs(config))
    found = {name: next((part[name] for part in parts if part.get(name) is not None), None) for name in GENERATION}
    return {name: value for name, value in found.items() if value is not None}


def read_config(path: Path) -> dict[str, Any]:
    """The configuration of a checkpoint folder."""
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json, which describes the model{other_files(path)}")
    return read_json(path / "config.json")


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
