"""What a plan is made for: a model without numbers, whatever it was given as."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lamina.checkpoint.shapes import SHAPES, find_shape
from lamina.checkpoint.source import config_dtype
from lamina.config import Config
from lamina.dtypes import float_dtype
from lamina.errors import InputError
from lamina.loading import on_meta, refuse_quantized
from lamina.model import Model
from lamina.models import family_of

What = Model | Config | Mapping[str, Any] | str | os.PathLike[str]


@dataclass(frozen=True)
class MetaModel:
    name: str
    model: Model
    """On the meta device, every parameter in the dtype it is loaded in; nobody else has it."""

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def weights(self) -> int:
        """Bytes of all parameters and buffers."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum({id(x): x.nbytes for x in tensors}.values())


def subject_of(what: What, dtype: str | torch.dtype | None = None, revision: str | None = None) -> MetaModel:
    """A model, its configuration, or where that is: a folder, a config.json, a .gguf file, a known name, a Hub id."""
    dtype = float_dtype(dtype)
    if isinstance(what, Model):
        if dtype not in (None, what.dtype):
            raise InputError(f"this model is in {what.dtype}, not in {dtype}: give its configuration to plan another")
        return MetaModel(type(what).__name__, shadow(what))
    if isinstance(what, Config | Mapping):
        config = dict(what.values if isinstance(what, Config) else what)
        name = config.get("model_type", "a model")
    else:
        name, config = find_config(what, revision)
    cls = family_of(Config(config))  # what cannot be built is refused by name
    refuse_quantized(Config(config), name, getattr(cls, "quantized", ()))
    return MetaModel(name, on_meta(config, config_dtype(config) if dtype is None else dtype))


def find_config(what: str | os.PathLike[str], revision: str | None = None) -> tuple[str, dict[str, Any]]:
    """A name to call it by, and the configuration.

    revision  a branch, tag or commit, of a Hub id

    >>> find_config("llama-3.1-8b")[1]["hidden_size"]
    4096
    """
    shape = find_shape(what, revision)
    if shape.name in SHAPES and shape is SHAPES[shape.name]:
        return shape.name, {"dtype": "bfloat16", **shape.config}  # as benchmarks run it on a GPU
    return shape.name, dict(shape.config)


def shadow(model: Model) -> Model:
    """The same model on the meta device; no number is copied."""
    memo: dict[int, Any] = {
        id(model.__dict__[name]): None for name in ("tokenizer", "compiled", "_graphs") if name in model.__dict__
    }
    for x in [*model.parameters(), *model.buffers()]:
        empty: Tensor = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        memo[id(x)] = nn.Parameter(empty, requires_grad=False) if isinstance(x, nn.Parameter) else empty
    twin = copy.deepcopy(model, memo)
    twin.__dict__.pop("_graphs", None)
    return twin
