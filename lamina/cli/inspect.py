"""`lamina inspect PATH`"""

from __future__ import annotations

import typer

from lamina.cli.common import Path


def inspect(path: Path) -> None:
    import torch

    from lamina.checkpoint import open_source
    from lamina.config import Config
    from lamina.models import family

    config = Config(open_source(path).config)
    with torch.device("meta"):
        model = family(config.model_type).build(config)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    typer.echo(f"{type(model).__name__}: {len(model.blocks)} layers, {numbers / 1e6:.1f} M parameters")
    for i, entry in enumerate(model.specs):
        typer.echo(f"{i:4}  " + ("  ".join(f"{name}: {spec}" for name, spec in entry.items()) or "nothing"))
