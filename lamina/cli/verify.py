"""`lamina verify PATH`"""

from __future__ import annotations

from typing import Annotated

import typer

from lamina.cli.common import Activations, Device, DType, Path, Pickle, Revision, Weights


def verify(
    path: Path,
    dtype: DType = None,
    device: Device = None,
    revision: Revision = None,
    pickle: Pickle = False,
    weights: Weights = None,
    activations: Activations = None,
    length: Annotated[int | None, typer.Option(help="Tokens of the longest row, at least 2.")] = None,
    tries: Annotated[int, typer.Option(help="How often each law is tried, at least once.")] = 2,
    seed: Annotated[int, typer.Option(help="Other numbers give other cuts and ids.")] = 0,
    residence: Annotated[str, typer.Option(help="Where bytes of caches live: device or host.")] = "device",
    via: Annotated[
        str | None, typer.Option(help="transformers: check its own model of this checkpoint, with its own caches.")
    ] = None,
) -> None:
    from lamina.checking import check_numbers, verify
    from lamina.checking.transformers.load import load_transformers
    from lamina.errors import InputError
    from lamina.loading import load

    check_numbers(length=length, tries=tries, seed=seed)  # before a large model is loaded
    if via not in (None, "transformers"):
        raise InputError(f"--via {via}: it can be transformers")
    report = verify(
        load(path, dtype, device, revision=revision, pickle=pickle, weights=weights, activations=activations)
        if via is None
        else load_transformers(path, dtype, device, revision),
        length=length,
        tries=tries,
        seed=seed,
        residence=residence,
    )
    typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)
