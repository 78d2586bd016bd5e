"""`lamina export PATH --to FILE`: a model as a program that runs without its model code."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from lamina.cli.common import Device, DType, Path, Pickle, Revision


def export(
    path: Path,
    to: Annotated[str, typer.Option("--to", help="The file to write; a folder for the targets aotinductor and onnx.")],
    rows: Annotated[int, typer.Option(help="Sequences that the program runs at once.")] = 1,
    capacity: Annotated[int, typer.Option(help="Most tokens a sequence may hold.")] = 2048,
    slack: Annotated[int, typer.Option(help="Tokens that windows and states can be rewound by.")] = 0,
    codec: Annotated[str | None, typer.Option(help="How keys and values are quantized, such as int8.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Most tokens of a prompt in one call.")] = None,
    source: Annotated[int | None, typer.Option(help="Longest source of an encoder–decoder model.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="pt2, aotinductor, onnx or executorch; by default executorch for FILE.pte, otherwise pt2."),
    ] = None,
    dtype: DType = None,
    device: Device = None,
    revision: Revision = None,
    pickle: Pickle = False,
) -> None:
    from lamina.exporting.export import export as make
    from lamina.loading import load

    model = load(path, dtype, device, revision=revision, pickle=pickle, weights="plain")
    begin = time.perf_counter()
    made = make(
        model, rows, capacity, to=to, slack=slack, codec=codec, chunk=chunk, source=source, target=target
    )  # fmt: skip
    names = ", ".join(made.manifest.programs)
    typer.echo(f"{to}: {names} in {time.perf_counter() - begin:.0f} s; lamina run {to} TEXT runs it", err=True)
