"""`lamina build`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def build(
    into: Annotated[
        Path | None,
        typer.Option(
            help="The folder for the library; lamina/native/shipped before a wheel is built. Default: the cache"
        ),
    ] = None,
) -> None:
    """Compiles the native kernels unless they are in the cache, and prints where they are and which they are."""
    from lamina.native.build import build as compile_all
    from lamina.native.library import library, threads

    path = compile_all(into)
    typer.echo(f"{path}: {library().lamina_isa().decode()} kernels, {threads()} threads")
