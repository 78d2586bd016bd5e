"""What a run found, for people and for programs: a table, and files `<date>-<machine>-<shape>.{json,md,png}`."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lamina.bench.measure import DeviceRates
from lamina.bench.prefill import Prefilled
from lamina.bench.runner import BenchSettings, Decoded, Results

DECODE = (
    "rows", "context", "subject", "tokens/s", "ms a step", "±", "moved", "limit", "share", "by PyTorch's read",
    "lamina is", "peak memory",
)  # fmt: skip
PREFILL = (
    "prompt", "subject", "ms", "tokens/s", "of compute", "of memory", "lamina is", "beside weights", "host ms",
)  # fmt: skip
FIRST = (
    "subject", "imports", "weights there", "first token", "10th token", "then tokens/s", "slowest after", "peak memory",
)  # fmt: skip


class BenchReport:
    """A run with its circumstances."""

    def __init__(self, settings: BenchSettings, results: Results, today: date | None = None) -> None:
        self.settings, self.results = settings, results
        self.date = (today or date.today()).isoformat()
        self.machine = machine(settings.device)
        self.versions = versions()
        self.command = command(settings)

    @property
    def stem(self) -> str:
        alone = "" if self.settings.rows and self.settings.contexts else "-prefill"
        weights = f"-{self.settings.weights}" if self.settings.weights else ""
        return f"{self.date}-{slug(self.machine)}-{slug(self.settings.shape.name)}{weights}{alone}"

    # -- lines -----------------------------------------------------------------------------------------------------

    def decode_lines(self) -> list[tuple[str, ...]]:
        r = self.results
        ours = {(one.rows, one.context): one for one in r.decoded if one.subject == "lamina"}
        return [
            (
                str(one.rows), str(one.context), one.subject, number(one.tokens_per_second), f"{one.seconds * 1e3:.3g}",
                f"{(one.slowest - one.fastest) / 2 / one.seconds:.0%}", size(one.moved.total),
                number(one.rows / r.limit(one)), f"{r.share(one):.1%}", f"{r.share_by_torch(one):.1%}",
                faster(ours.get((one.rows, one.context)), one), size(one.peak_bytes),
            )
            for one in r.decoded
        ]  # fmt: skip

    def prefill_lines(self) -> list[tuple[str, ...]]:
        r, ours = self.results, {one.prompts: one for one in self.results.prefilled if one.subject == "lamina"}
        return [prefill_line(one, ours.get(one.prompts), r.limits) for one in r.prefilled]

    def first_lines(self) -> list[tuple[str, ...]]:
        return [
            (
                one.subject, f"{one.imported:.1f} s", f"{one.ready:.1f} s", f"{one.first:.1f} s", f"{one.tenth:.1f} s",
                number(one.tokens_per_second), f"{one.slowest * 1e3:.3g} ms", size(one.peak_bytes),
            )
            for one in self.results.first
        ]  # fmt: skip

    def tables(self) -> list[Table]:
        """(title, columns, lines) of each table that has lines."""
        every = [
            ("Decode", DECODE, self.decode_lines()),
            ("Prefill", PREFILL, self.prefill_lines()),
            ("From the start of a process", FIRST, self.first_lines()),
        ]
        return [one for one in every if one[2]]

    def facts(self) -> list[str]:
        r, limits = self.results, self.results.limits
        dtype = str(self.settings.dtype).removeprefix("torch.")
        positions = self.settings.positions
        notes = [self.settings.shape.note, "" if positions is None else f"{positions:,} encoder positions a row"]
        note = f" ({'; '.join(filter(None, notes))})" if any(notes) else ""
        facts = [
            f"{self.settings.shape.name}: {r.parameters / 1e9:.2f} G parameters, {dtype}, random weights"
            f"{f' in {self.settings.weights}' if self.settings.weights else ''}, {size(r.weights)}{note}.",
            f"{self.machine}; {', '.join(f'{name} {text}' for name, text in self.versions.items())}; {self.date}.",
            f"Measured in this run: read {limits.read / 1e9:.4g} GB/s (by {limits.read_by}; the best of PyTorch's own "
            f"reductions: {limits.read_by_torch / 1e9:.4g}), copy {limits.copy / 1e9:.4g} GB/s, matrix products "
            f"{limits.matrix / 1e12:.4g} TFLOP/s.",
            *([PREFILL_NOTE] if r.prefilled else []),
            "moved: the bytes that a step must read or write. limit: tokens/s if that took only the time of reading "
            "them. share: of that limit; by PyTorch's read: of the limit where bytes are read as fast as PyTorch's "
            "best reduction reads them. Times are medians; ± is half the range from the slowest to the fastest "
            "run.",
        ]
        return facts if r.decoded else facts[:-1]

    # -- forms -----------------------------------------------------------------------------------------------------

    def markdown(self, plot: str | None) -> str:
        parts = [f"# {self.settings.shape.name} on {self.machine}, {self.date}", f"`{self.command}`"]
        parts.append("\n".join(f"- {fact}" for fact in self.facts()))
        for title, columns, lines in self.tables():
            parts.append(f"## {title}")
            parts.append(markdown_table(columns, lines))
        if self.results.skipped:
            parts += ["## Skipped", "\n".join(f"- {line}" for line in self.results.skipped)]
        if plot is not None:
            parts.append(f"![share of the limit]({plot})")
        return "\n\n".join(parts) + "\n"

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        s, r = self.settings, self.results
        return {
            "date": self.date,
            "machine": self.machine,
            "versions": self.versions,
            "command": self.command,
            "shape": asdict(s.shape),
            "dtype": str(s.dtype).removeprefix("torch."),
            "device": s.device.type,
            "parameters": r.parameters,
            "weights": s.weights or "plain",
            "weight_bytes": r.weights,
            "limits": asdict(r.limits),
            "decode": [self._decoded(one) for one in r.decoded],
            "prefill": [prefill_data(one, r.limits) for one in r.prefilled],
            "first_token": [asdict(one) for one in r.first],
            "skipped": r.skipped,
            "seconds": r.seconds,
        }

    def _decoded(self, one: Decoded) -> dict[str, Any]:
        more = {
            "tokens_per_second": one.tokens_per_second,
            "bytes": one.moved.total,
            "limit_tokens_per_second": one.rows / self.results.limit(one),
            "share": self.results.share(one),
            "share_by_torch": self.results.share_by_torch(one),
        }
        return asdict(one) | more

    def write(self, folder: Path) -> list[Path]:
        """Writes the files; without matplotlib there is no picture."""
        from lamina.bench.plot import draw, draw_prefill  # matplotlib is optional

        name, r = self.settings.shape.name, self.results

        def picture(path: Path) -> bool:
            if r.decoded:
                return draw(name, self.machine, r, path)
            return draw_prefill(self.machine, [(name, one) for one in r.prefilled], r.limits, path)

        return write_files(folder, self.stem, self.data(), self.markdown, picture)

    def show(self) -> None:
        """Prints the tables."""
        show_tables(self.facts(), self.tables(), self.results.skipped)


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # title, columns, lines


def markdown_table(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *lines))


def write_files(
    folder: Path, stem: str, data: dict[str, Any], text: Callable[[str | None], str], picture: Callable[[Path], bool]
) -> list[Path]:
    """Writes `stem`.json, .md and, if it can be drawn, .png.

    text      Markdown, given the name of the picture or None
    picture   draws to a path; False if it could not
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = {kind: folder / f"{stem}.{kind}" for kind in ("json", "md", "png")}
    drawn = picture(path["png"])
    path["json"].write_text(json.dumps(data, indent=2) + "\n")
    path["md"].write_text(text(path["png"].name if drawn else None))
    return [path["json"], path["md"], *([path["png"]] if drawn else [])]


def show_tables(facts: list[str], tables: list[Table], skipped: list[str]) -> None:
    """Prints facts, tables and what was skipped."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print("\n".join(facts), highlight=False, soft_wrap=True)
    for title, columns, lines in tables:
        table = RichTable(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column in ("subject", "shape", "prompt") else "right")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for one in skipped:
        console.print(f"skipped: {one}", highlight=False, soft_wrap=True)


# -- prefill -------------------------------------------------------------------------------------------------------

PREFILL_NOTE = (
    "Prefill: wall clock until the logits after each row's last token are there, median of up to 5 runs. of compute: "
    "the operations that any implementation must do, at the rate of matrix products measured in this run, over that "
    "time; of memory: the weights and the cache once, at the read bandwidth. beside weights: peak memory, cache "
    "included. host ms: until all work is queued."
)


def prefill_line(one: Prefilled, ours: Prefilled | None, limits: DeviceRates) -> tuple[str, ...]:
    """One line of a table with the columns PREFILL."""
    host = "–" if one.host_seconds is None else f"{one.host_seconds * 1e3:.3g}"
    return (
        str(one.prompts), one.subject, number(one.seconds * 1e3), number(one.tokens / one.seconds),
        f"{one.of_compute(limits):.1%}", f"{one.of_memory(limits):.1%}", faster(ours, one), size(one.extra_bytes), host,
    )  # fmt: skip


def prefill_data(one: Prefilled, limits: DeviceRates) -> dict[str, Any]:
    """The same for JSON."""
    more = {"tokens": one.tokens, "of_compute": one.of_compute(limits), "of_memory": one.of_memory(limits)}
    return asdict(one) | more


# -- circumstances -------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> str:
    """The device's name; of a CPU also how many threads are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or platform.machine())
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads != 1)}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("lamina", "triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def command(s: BenchSettings) -> str:
    """The command that gives this result."""
    shape = s.shape.name if s.source in ("", s.shape.name) else os.path.basename(s.source)
    words = ["lamina bench", f"--shape {shape}", f"--device {s.device.type}", f"--dtype {str(s.dtype)[6:]}"]
    if s.rows and s.contexts:
        words += [f"--rows {','.join(map(str, s.rows))}", f"--context {','.join(map(str, s.contexts))}"]
    words += [f"--prefill {','.join(one.text for one in s.prefill) or '0'}"]
    words += [f"--chunk {s.prefill[0].chunk}"] if s.prefill and s.prefill[0].chunk else []
    words += [f"--codec {','.join(s.codecs)}"] if s.codecs else []
    words += [] if s.page is None else [f"--page {s.page}"]
    words += [] if s.encoder_positions is None else [f"--source {s.encoder_positions}"]
    words += [f"--weights {s.weights}"] if s.weights else []
    words += [f"--against {s.against}"] if s.against else []
    words += ["--compiled"] if s.compiled else []
    words += [] if s.first_token else ["--no-first-token"]
    return " ".join([*words, f"--seconds {s.seconds:.0f}"])


# -- words ---------------------------------------------------------------------------------------------------------


def slug(text: str) -> str:
    """
    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def number(value: float) -> str:
    """Four digits are enough.

    >>> number(243.123), number(1234567.0), number(0.01234)
    ('243.1', '1,234,567', '0.01234')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def size(nbytes: float | None) -> str:
    """
    >>> size(16_060_000_000), size(None)
    ('16.06 GB', '–')
    """
    if nbytes is None:
        return "–"
    return f"{nbytes / 1e9:.4g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.4g} MB"


def faster(ours: Any, theirs: Any) -> str:
    """How many times as fast ours is."""
    if ours is None or ours is theirs:
        return ""
    return f"{theirs.seconds / ours.seconds:.2f}×"
