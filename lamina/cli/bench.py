"""`lamina bench --shape NAME`, `lamina bench --shape NAME --prefill 512,8192`; tables: `--prefill table`, `--cpu`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamina.cli.common import Device
from lamina.errors import InputError


def bench(
    shape: Annotated[str | None, typer.Option(help="A benchmark shape, or what `lamina plan` takes.")] = None,
    rows: Annotated[str | None, typer.Option(help="Rows decoded at once, such as 1,8,32.")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens each row holds, such as 128,4096.")] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths, such as 512,8192; alone if neither --rows nor --context is given. 0 for none; table: "
            "many shapes and prompts, with targets for one H200."
        ),
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Read prompts in chunks of this many tokens.")] = None,
    ragged: Annotated[str | None, typer.Option(help="Also prompts of several rows, such as 64x100-1024.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 on a GPU and float32 on a CPU when not given.")] = None,
    device: Device = None,
    codec: Annotated[str | None, typer.Option(help="Decode also with caches in codes, such as int8,int4.")] = None,
    page: Annotated[int | None, typer.Option(help="Decode also with caches in pages of this many tokens.")] = None,
    source: Annotated[
        int | None, typer.Option(help="Positions of the encoder's output; those of the shape if not given.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Pack our weights in int8, int4 (embedding and head int8) or fp8.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Measure a peer in the same run: transformers.")] = None,
    compiled: Annotated[bool, typer.Option(help="The peer also with its static cache, compiled.")] = False,
    first_token: Annotated[
        bool | None, typer.Option(help="Time a fresh process up to its first token; yes, if decoding is measured.")
    ] = None,
    cpu: Annotated[
        bool,
        typer.Option("--cpu", help="The CPU table: SmolLM2-135M, float32 and packed, and int8 shapes, with targets."),
    ] = False,
    llama_cpp: Annotated[
        str | None,
        typer.Option(help="With --cpu: Python of an environment that has llama-cpp-python, to compare with."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="After this many seconds nothing new is begun.")] = 300.0,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("bench/results"),
) -> None:
    if cpu:
        given = (shape, rows, context, prefill, chunk, ragged, dtype, codec, page, source, weights, against)
        if given != (None,) * len(given) or compiled or first_token or device not in (None, "cpu"):
            raise InputError(
                "--cpu has its own models and contexts: give only --llama-cpp, --seconds and --out with it"
            )
        return cpu_table(llama_cpp, seconds, out)
    if llama_cpp is not None:
        raise InputError("--llama-cpp is measured by the CPU table alone: add --cpu")
    import torch

    from lamina.bench import BenchSettings, find_shape, run
    from lamina.bench.prefill import Prompts
    from lamina.bench.prefill_table import PREFILL_TABLE, TableReport, run_table
    from lamina.bench.report import BenchReport
    from lamina.dtypes import float_dtype
    from lamina.loading import check_device

    place = check_device(device)
    gpu, table = place.type == "cuda", prefill == "table"
    if table and (shape, rows, context, chunk, ragged) != (None,) * 5:
        raise InputError(
            "--prefill table has its own shapes and prompts: leave --shape, --rows, --context, --chunk and --ragged out"
        )
    if shape is None and not table:
        raise InputError("--shape is missing: name a shape such as llama-3.1-8b, or run --prefill table")
    found = find_shape(shape or PREFILL_TABLE[0].shape)
    if context is None and found.source is not None:
        context = "224"  # decoders of speech and translation write short texts
    lengths = [] if prefill in ("0", "table") else (prefill or ("" if ragged else "8192" if gpu else "512")).split(",")
    prompts = [Prompts.of(text, chunk) for text in (*lengths, *(ragged or "").split(",")) if text]
    alone = table or (bool(prompts) and (prefill, ragged, chunk) != (None,) * 3 and rows is context is None)
    settings = BenchSettings(
        shape=found,
        device=place,
        dtype=float_dtype(dtype) or (torch.bfloat16 if gpu else torch.float32),
        rows=() if alone else numbers(rows or ("1,8,32" if gpu else "1"), "rows"),
        contexts=() if alone else numbers(context or ("128,4096,16384,65536" if gpu else "64,2000"), "context"),
        prefill=(PREFILL_TABLE[0].prompts,) if table else tuple(prompts),
        codecs=tuple(codec.split(",")) if codec else (),
        page=page,
        against=against,
        compiled=compiled,
        first_token=not alone if first_token is None else first_token,
        seconds=seconds,
        source=shape or "",
        encoder_positions=source,
        weights=weights,
    )
    with Bar() as bar:
        report: BenchReport | TableReport
        if table:
            report = TableReport(settings, run_table(settings, progress=bar.tell))
        else:
            report = BenchReport(settings, run(settings, bar.tell))
    report.show()
    for path in report.write(out):
        typer.echo(f"wrote {path}")
    if not any(out.glob(f"{report.stem}.png")):
        typer.echo("no plot was drawn: pip install matplotlib")


def cpu_table(llama_cpp: str | None, seconds: float, out: Path) -> None:
    """Prints the CPU table as Markdown and writes it."""
    from lamina.bench.cpu.report import CpuReport
    from lamina.bench.cpu.table import CpuSettings, run_cpu_table

    settings = CpuSettings(llama_cpp=llama_cpp, seconds=seconds)
    with Bar() as bar:
        report = CpuReport(settings, run_cpu_table(settings, bar.tell))
    typer.echo(report.markdown())
    for path in report.write(out):
        typer.echo(f"wrote {path}")


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
