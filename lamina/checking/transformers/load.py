"""Loads a checkpoint as transformers' own model, for `lamina verify PATH --via transformers`."""

from __future__ import annotations

from typing import Any

import torch

from lamina.checkpoint.source import locate
from lamina.dtypes import float_dtype
from lamina.errors import InputError
from lamina.loading import check_device

CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText")


def load_transformers(
    path: str, dtype: str | torch.dtype | None = None, device: str | None = None, revision: str | None = None
) -> Any:
    """The language model of a checkpoint folder, a Hub id or a known name, as transformers builds it."""
    try:
        import transformers
    except ImportError as error:
        raise InputError("transformers is not installed: pip install transformers") from error
    place, kind = check_device(device), float_dtype(dtype)
    folder = locate(path, revision)
    if not folder.is_dir():
        raise InputError(f"{path}: transformers reads folders with config.json and weights")
    config = transformers.AutoConfig.from_pretrained(folder)
    for name in CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto.from_pretrained(folder, dtype="auto" if kind is None else kind).to(place).eval()
    raise InputError(f"{path}: transformers has no language model for {config.model_type!r}")
