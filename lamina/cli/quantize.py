"""`lamina quantize PATH --to int4 --out DIR`"""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Annotated

import typer

from lamina.cli.common import Device, Path, Revision


def quantize(
    path: Path,
    to: Annotated[str, typer.Option(help="int4, int8 or fp8.")],
    out: Annotated[FilePath, typer.Option(help="A new folder, in the layout of compressed-tensors.")],
    group: Annotated[int, typer.Option(help="Values that share a scale, for int4 and int8: 32, 64 or 128.")] = 32,
    text: Annotated[
        FilePath | None, typer.Option(help="A text on which the result is compared with the original.")
    ] = None,
    device: Device = None,
    revision: Revision = None,
) -> None:
    from lamina.cache.summary import size
    from lamina.quantizing import quantize_checkpoint

    given = None if text is None else text.read_text(encoding="utf-8")
    made = quantize_checkpoint(path, to, out, group=group, text=given, device=device, revision=revision)
    typer.echo(f"wrote {made.path}: {made.tensors} matrices in {to}, {size(made.before)} -> {size(made.after)}")
    typer.echo(f"not quantized: {', '.join(made.plain)}")
    typer.echo(f"against the original: {made.quality}" if made.quality else "no tokenizer: the two were not compared")
