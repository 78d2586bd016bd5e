"""`lamina build`"""

from __future__ import annotations


def build() -> None:
    """Compiles the native kernels unless they are in the cache, and prints where they are and which they are."""
    import typer

    from lamina.native.build import build as compile_all
    from lamina.native.library import library, threads

    path = compile_all()
    typer.echo(f"{path}: {library().lamina_isa().decode()} kernels, {threads()} threads")
