"""`lamina generate PATH TEXT`"""

from __future__ import annotations

from typing import Annotated

import typer

from lamina.cli.common import (
    Device,
    DType,
    Path,
    Sample,
    Seed,
    Temperature,
    Tokens,
    TopK,
    TopP,
    choosing,
    errors_in_one_line,
    open_model,
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
) -> None:
    model = open_model(path, dtype, device)
    typer.echo(text, nl=False)
    with errors_in_one_line():
        stream = model.stream(text, max_new_tokens, **choosing(sample, temperature, top_k, top_p, seed))
        for event in stream:
            typer.echo(event.text, nl=False)
    typer.echo(f"\n{stream.result.timing.tokens_per_second:.1f} tokens/s", err=True)
