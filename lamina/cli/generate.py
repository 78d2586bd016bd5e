"""`lamina generate PATH TEXT`: the continuation on stdout, the text before it on stderr."""

from __future__ import annotations

from typing import Annotated

import typer

from lamina.cli.common import (
    Activations,
    Device,
    DType,
    Path,
    Pickle,
    Revision,
    Sample,
    Seed,
    Temperature,
    Tokens,
    TopK,
    TopP,
    Weights,
    choosing,
    print_answer,
)


def generate(
    path: Path,
    text: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Tokens = 100,
    sample: Sample = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    dtype: DType = None,
    device: Device = None,
    revision: Revision = None,
    pickle: Pickle = False,
    weights: Weights = None,
    activations: Activations = None,
) -> None:
    from lamina.loading import load

    model = load(path, dtype, device, revision=revision, pickle=pickle, weights=weights, activations=activations)
    stream = model.stream(text, max_new_tokens, **choosing(sample, temperature, top_k, top_p, seed))
    if not print_answer(stream, before=text):
        raise typer.Exit(130)
    typer.echo(f"{stream.result.timing.tokens_per_second:.1f} tokens/s", err=True)
