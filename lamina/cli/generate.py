"""`lamina generate PATH TEXT`"""

from __future__ import annotations

from typing import Annotated

import typer

from lamina.cli.common import Device, DType, Path, Tokens, open_model


def generate(
    path: Path,
    text: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Tokens = 100,
    dtype: DType = None,
    device: Device = None,
) -> None:
    model = open_model(path, dtype, device)
    typer.echo(text, nl=False)
    result = model.generate(text, max_new_tokens, stream=lambda event: typer.echo(event.text, nl=False))
    typer.echo(f"\n{result.timing.tokens_per_second:.1f} tokens/s", err=True)
