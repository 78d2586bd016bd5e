"""`lamina.load(path, via="transformers")`: transformers loads the model, and its blocks run over Lamina's caches."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from lamina.bridge.from_transformers import check_model, check_via, with_its_own_blocks
from lamina.checkpoint.hub import locate
from lamina.checkpoint.source import open_source
from lamina.checkpoint.tokenizer import UnknownTokenizer
from lamina.errors import CheckpointError
from lamina.model import Model
from lamina.notices import notice


def load_via(
    via: str,
    path: str | PathLike[str],
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    revision: str | None = None,
    pickle: bool = False,
    context: int | None = None,
) -> Model:
    """Loads a folder or a Hub id. The arguments are those of `lamina.load`."""
    check_via(via)
    folder = locate(path, revision, pickle=pickle)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder, and via={via!r} loads folders as Hugging Face writes them")
    hf_model = loaded(folder, dtype="auto" if dtype is None else dtype)
    hf_model.to(device).eval()
    check_model(hf_model)
    source = open_source(folder, pickle=pickle)
    try:
        tokenizer = source.tokenizer()
    except UnknownTokenizer as error:
        tokenizer = None
        notice(f"the model is loaded without a tokenizer, for ids alone: {error}", unexpected=True)
    return with_its_own_blocks(hf_model, tokenizer, context)


def loaded(folder: Path, **options: Any) -> Any:
    """The model of a folder, by transformers' class for causal language models, else for images and text."""
    try:
        config = AutoConfig.from_pretrained(folder)
        auto: Any = AutoModelForCausalLM
        if type(config) not in auto._model_mapping and type(config) in AutoModelForImageTextToText._model_mapping:
            auto = AutoModelForImageTextToText
        return auto.from_pretrained(folder, config=config, **options)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
