"""`lamina bench --shape NAME`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamina.cli.common import Device
from lamina.errors import InputError


def bench(
    shape: Annotated[str, typer.Option(help="A benchmark shape, or what `lamina plan` takes.")],
    rows: Annotated[str | None, typer.Option(help="Rows decoded at once, such as 1,8,32.")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens each row holds, such as 128,4096.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Tokens of the prefill; 0 for none.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 on a GPU and float32 on a CPU when not given.")] = None,
    device: Device = None,
    codec: Annotated[str | None, typer.Option(help="Decode also with caches in codes, such as int8,int4.")] = None,
    page: Annotated[int | None, typer.Option(help="Decode also with caches in pages of this many tokens.")] = None,
    source: Annotated[
        int | None, typer.Option(help="Positions of the encoder's output; those of the shape if not given.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Measure a peer in the same run: transformers.")] = None,
    compiled: Annotated[bool, typer.Option(help="The peer also with its static cache, compiled.")] = False,
    first_token: Annotated[bool, typer.Option(help="Time a fresh process up to its first token.")] = True,
    seconds: Annotated[float, typer.Option(help="After this many seconds nothing new is begun.")] = 300.0,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("bench/results"),
) -> None:
    import torch

    from lamina.bench import BenchSettings, find_shape, run
    from lamina.bench.report import BenchReport
    from lamina.dtypes import float_dtype
    from lamina.loading import check_device

    place = check_device(device)
    gpu, found = place.type == "cuda", find_shape(shape)
    if context is None and found.source is not None:
        context = "224"  # decoders of speech and translation write short texts
    settings = BenchSettings(
        shape=found,
        device=place,
        dtype=float_dtype(dtype) or (torch.bfloat16 if gpu else torch.float32),
        rows=numbers(rows or ("1,8,32" if gpu else "1"), "rows"),
        contexts=numbers(context or ("128,4096,16384,65536" if gpu else "64,2000"), "context"),
        prefill=(8192 if gpu else 512) if prefill is None else prefill,
        codecs=tuple(codec.split(",")) if codec else (),
        page=page,
        against=against,
        compiled=compiled,
        first_token=first_token,
        seconds=seconds,
        source=shape,
        encoder_positions=source,
    )
    with Bar() as bar:
        report = BenchReport(settings, run(settings, bar.tell))
    report.show()
    for path in report.write(out):
        typer.echo(f"wrote {path}")
    if not any(out.glob(f"{report.stem}.png")):
        typer.echo("no plot was drawn: pip install matplotlib")


def numbers(text: str, what: str) -> tuple[int, ...]:
    """
    >>> numbers("1,8", "rows")
    (1, 8)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{what} {text!r} must be whole numbers with commas between them, such as 1,8") from None


class Bar:
    """A progress bar on the terminal, and what is measured now beside it."""

    def __enter__(self) -> Bar:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=None)
        self._progress.start()
        return self

    def tell(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
