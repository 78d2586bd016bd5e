"""`lamina plan PATH_OR_CONFIG --memory 24GiB`"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from lamina.cli.common import Revision, Weights

What = Annotated[
    str,
    typer.Argument(
        metavar="PATH_OR_CONFIG",
        help="A folder with config.json, a config.json, a .gguf file, a Hub id, a benchmark shape such as "
        "llama-3.1-8b, or a known name: smollm2, whisper-tiny.en.",
    ),
]


def plan(
    what: What,
    memory: Annotated[str | None, typer.Option(help="The budget, such as 24GiB or 80GB.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of the cache.")] = 1,
    length: Annotated[
        int | None, typer.Option(help="Tokens of each row; as many as fit when not given, 4096 without a budget.")
    ] = None,
    capacity: Annotated[int | None, typer.Option(help="Of a cache of fixed room.")] = None,
    reserve: Annotated[bool, typer.Option(help="Make room for all tokens at first, as generate does.")] = True,
    slack: Annotated[int, typer.Option(help="How far rings and states can be taken back.")] = 0,
    prompt: Annotated[int | None, typer.Option(help="Tokens read before one is made; all when not given.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="How many of them in a pass; what fits by default.")] = None,
    source: Annotated[int | None, typer.Option(help="Tokens of a source, for encoder–decoder models.")] = None,
    codec: Annotated[str | None, typer.Option(help="How keys and values are written: int8, k8v4, int4, fp8 …")] = None,
    residence: Annotated[str, typer.Option(help="Where the cache's bytes live: device or host.")] = "device",
    page: Annotated[int | None, typer.Option(help="Tokens of a page, for a cache in a pool.")] = None,
    dtype: Annotated[str | None, typer.Option(help="The checkpoint's own when not given.")] = None,
    device: Annotated[str | None, typer.Option(help="How passes run: cuda, also when not given, or cpu.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Of the memory, such as 4.3TB/s: how fast decoding is.")] = None,
    link: Annotated[str | None, typer.Option(help="The same between host and device, such as 50GB/s.")] = None,
    revision: Revision = None,
    weights: Weights = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    from lamina import planning

    found = planning.plan(
        what, rows=rows, length=length, capacity=capacity, reserve=reserve, slack=slack, prompt=prompt,
        prefill_chunk=prefill_chunk, source=source, codec=codec, residence=residence, page=page, dtype=dtype,
        device=device, memory=memory, bandwidth=bandwidth, link=link, revision=revision, weights=weights,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    elif on_a_terminal():
        from rich.console import Console

        from lamina.planning.show import remarks, rich_table, title

        console = Console(highlight=False, soft_wrap=True)
        console.print(title(found), style="bold", markup=False)
        console.print(rich_table(found))
        for line in remarks(found):
            console.print(line, markup=False)
    else:
        typer.echo(str(found))
    raise typer.Exit(1 if found.fits is False else 0)


def on_a_terminal() -> bool:
    return sys.stdout.isatty()
