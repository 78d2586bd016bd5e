"""What a plan is made for: a model without numbers, whatever it was given as."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lamina.checkpoint.hub import locate
from lamina.checkpoint.quantized import method_of
from lamina.checkpoint.shapes import SHAPES, find_shape
from lamina.checkpoint.source import Checkpoint, config_dtype, open_source
from lamina.config import Config
from lamina.dtypes import float_dtype
from lamina.errors import CheckpointError, InputError
from lamina.loading import refuse_quantized, stored_on_meta
from lamina.model import Model
from lamina.models import family_of
from lamina.rehearsal.rehearsal import shadow
from lamina.weights.quantize import PACKED

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


def subject_of(
    what: What, dtype: str | torch.dtype | None = None, revision: str | None = None, weights: str | None = None
) -> MetaModel:
    """A model, its configuration, or where that is: a folder, a config.json, a .gguf file, a known name, a Hub id.

    weights   how matrices are stored, as in `lamina.load`
    """
    dtype = float_dtype(dtype)
    if isinstance(what, Model):
        if weights is not None:
            raise InputError(f"weights={weights!r}: this model has its weights; give its configuration to plan others")
        if dtype not in (None, what.dtype):
            raise InputError(f"this model is in {what.dtype}, not in {dtype}: give its configuration to plan another")
        return MetaModel(type(what).__name__, shadow(what))
    source = None
    if isinstance(what, Config | Mapping):
        config = dict(what.values if isinstance(what, Config) else what)
        name = config.get("model_type", "a model")
    else:
        name, config = find_config(what, revision)
        source = weights_of(what, revision) if weights in (None, PACKED) else None
    cls = family_of(Config(config))  # what cannot be built is refused by name
    refuse_quantized(Config(config), name, getattr(cls, "quantized", ()))
    if source is None and weights is None and (method := method_of(config)) is not None:
        raise InputError(
            f"{name} is quantized with {method!r}, and only its tensors tell which: plan it from its folder, or give "
            "weights='plain' or a format"
        )
    kind = config_dtype(config) if dtype is None else dtype
    return MetaModel(name, stored_on_meta(config, kind, source, weights or PACKED))


def weights_of(what: str | os.PathLike[str], revision: str | None) -> Checkpoint | None:
    """The checkpoint at a path, if its weights are there; nothing is downloaded for that."""
    if what in SHAPES:
        return None
    try:
        place = locate(what, revision, weights=False)
        return None if place.suffix == ".json" else open_source(place)
    except CheckpointError:
        return None


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
