"""`lamina inspect PATH`"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from lamina.cli.common import Pickle, Revision

Path = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint folder, a .gguf file, a Hub id, a config.json, a shape such as llama-3.1-8b, or a known "
        "name: smollm2.",
    ),
]


def inspect(
    path: Path,
    dtype: Annotated[
        str | None, typer.Option(help="In which it would be loaded; the checkpoint's own if none.")
    ] = None,
    revision: Revision = None,
    pickle: Pickle = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    from lamina.dtypes import float_dtype
    from lamina.planning.inspection import inspect as look

    found = look(path, float_dtype(dtype), revision=revision, pickle=pickle)
    typer.echo(json.dumps(asdict(found), indent=2) if as_json else str(found))
    raise typer.Exit(0 if found.problem is None else 1)
