"""Writes a folder in the layout of compressed-tensors, which other programs read too.

    config.json          that of the original, with `quantization_config` (quant_method, format, config_groups, ignore)
    int4, int8           pack-quantized: x.weight_packed int32 [out, in · bits / 32], along the inputs, the first value
                         in the lowest bits, each plus half of the range; x.weight_scale [out, in / group] in the dtype
                         of the checkpoint; x.weight_shape int64 [2]; of int4 also x.weight_zero_point int32
                         [out / 8, in / group], packed along the outputs
    fp8                  float-quantized: x.weight float8_e4m3fn [out, in]; x.weight_scale [out, 1]

Tensors are quantized one at a time; the peak is one file of the folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.checkpoint.progress import Bar
from lamina.checkpoint.source import Checkpoint, config_dtype
from lamina.errors import InputError
from lamina.weights.fp8 import Fp8
from lamina.weights.int_groups import IntGroups
from lamina.weights.nibbles import unpack_nibbles

SHARD = 4 << 30  # bytes of a file
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files beside the weights that belong to the tokenizer and to generation."""


def packed_words(values: Tensor, bits: int) -> Tensor:
    """uint8 values below 2^bits [out, in] -> int32 [out, in · bits / 32]

    >>> hex(int(packed_words(torch.tensor([[1, 2, 3, 0, 0, 0, 0, 0]], dtype=torch.uint8), 4)))
    '0x321'
    """
    each = values.long().unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits, device=values.device)
    words = each.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def encoded(name: str, weight: Tensor, weights: str, group: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that stand for a weight [out, in]; name: of the module, with a dot."""
    if weights == "fp8":
        parts = Fp8().pack(weight)
        return {f"{name}weight": parts["codes"], f"{name}weight_scale": parts["scales"].to(dtype)}
    bits = 4 if weights == "int4" else 8
    parts = IntGroups(bits, group).pack(weight, dtype)
    codes = unpack_nibbles(parts["codes"]) if bits == 4 else parts["codes"] ^ 128
    found = {
        f"{name}weight_packed": packed_words(codes, bits),
        f"{name}weight_scale": parts["scales"],
        f"{name}weight_shape": torch.tensor(weight.shape),
    }
    if "zeros" in parts:
        zeros = F.pad(parts["zeros"].T, (0, -weight.shape[0] % 8))  # [in / group, out], whole words of outputs
        found[f"{name}weight_zero_point"] = packed_words(zeros, bits).T.contiguous()
    return found


def stored_bytes(shape: tuple[int, ...], weights: str | None, group: int, dtype: torch.dtype) -> int:
    """Bytes of a tensor in the folder; weights: None if it is not quantized."""
    count = torch.Size(shape).numel()
    if weights is None:
        return count * dtype.itemsize
    scales = shape[0] if weights == "fp8" else count // group
    zeros = count // group // 2 if weights == "int4" else 0
    return count * (4 if weights == "int4" else 8) // 8 + scales * dtype.itemsize + zeros + 16


def settings_of(weights: str, group: int, ignore: Collection[str]) -> dict[str, Any]:
    """The quantization_config."""
    how: dict[str, Any] = {
        "num_bits": 4 if weights == "int4" else 8,
        "type": "float" if weights == "fp8" else "int",
        "symmetric": weights != "int4",
        "strategy": "channel" if weights == "fp8" else "group",
        "group_size": None if weights == "fp8" else group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    kind = "float-quantized" if weights == "fp8" else "pack-quantized"
    one = {"targets": ["Linear"], "weights": how, "input_activations": None, "output_activations": None, "format": kind}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": one},
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
    }


def write_quantized(
    source: Checkpoint, out: Path, weights: str, group: int, chosen: Collection[str], ignore: Collection[str]
) -> int:
    """Writes the folder; returns the bytes of its weights.

    chosen   names of the tensors to quantize: matrices of linear layers
    ignore   modules that are linear layers too, and stay as they are
    """
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty: give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    dtype = config_dtype(source.config)
    sizes = {
        name: stored_bytes(source.shape(name), weights if name in chosen else None, group, dtype)
        for name in sorted(source.names)
    }
    shards = list(divided(sizes))
    places: dict[str, str] = {}
    total = 0
    with Bar(f"quantizing to {weights}", sum(sizes.values())) as bar:
        for number, names in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for name in names:
                value = source.read(name)
                if name in chosen:
                    tensors |= encoded(name.removesuffix("weight"), value, weights, group, dtype)
                else:
                    tensors[name] = (value.to(dtype) if value.is_floating_point() else value).clone()
                bar.advance(sizes[name])
            save(tensors, out / file)
            places |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {**source.config, "quantization_config": settings_of(weights, group, ignore)}
    copy_files(source, out)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return total


def divided(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Names for each file."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > SHARD:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def save(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def copy_files(source: Checkpoint, out: Path) -> None:
    """Tokenizer and settings for generation; of a GGUF file its tokenizer."""
    if source.path.is_dir():
        for pattern in COPIED:
            for file in source.path.glob(pattern):
                if file.name not in ("config.json", "model.safetensors.index.json"):
                    shutil.copy(file, out / file.name)
        return
    tokenizer = source.tokenizer()
    if tokenizer is not None:
        (out / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if template := tokenizer.templates.get("default"):
            settings["chat_template"] = template
        (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    if source.eos_ids:
        (out / "generation_config.json").write_text(json.dumps({"eos_token_id": list(source.eos_ids)}))
