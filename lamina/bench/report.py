"""What a run found, for people and for programs: a table, and files `<date>-<machine>-<shape>.{json,md,png}`."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lamina.bench.runner import BenchSettings, Decoded, Results

DECODE = (
    "rows", "context", "subject", "tokens/s", "ms a step", "±", "moved", "limit", "share", "by PyTorch's read",
    "lamina is", "peak memory",
)  # fmt: skip
PREFILL = ("tokens", "subject", "tokens/s", "seconds", "TFLOP", "share of matrix rate", "lamina is", "peak memory")
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
        return f"{self.date}-{slug(self.machine)}-{slug(self.settings.shape.name)}"

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
        r, ours = self.results, {one.tokens: one for one in self.results.prefilled if one.subject == "lamina"}
        return [
            (
                str(one.tokens), one.subject, number(one.tokens / one.seconds), f"{one.seconds:.3g}",
                number(one.flops / 1e12), f"{r.share(one):.1%}", faster(ours.get(one.tokens), one),
                size(one.peak_bytes),
            )
            for one in r.prefilled
        ]  # fmt: skip

    def first_lines(self) -> list[tuple[str, ...]]:
        return [
            (
                one.subject, f"{one.imported:.1f} s", f"{one.ready:.1f} s", f"{one.first:.1f} s", f"{one.tenth:.1f} s",
                number(one.tokens_per_second), f"{one.slowest * 1e3:.3g} ms", size(one.peak_bytes),
            )
            for one in self.results.first
        ]  # fmt: skip

    def tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """(title, columns, lines) of each table that has lines."""
        every = [
            ("Decode", DECODE, self.decode_lines()),
            ("Prefill, one row", PREFILL, self.prefill_lines()),
            ("From the start of a process", FIRST, self.first_lines()),
        ]
        return [one for one in every if one[2]]

    def facts(self) -> list[str]:
        r, limits = self.results, self.results.limits
        dtype = str(self.settings.dtype).removeprefix("torch.")
        positions = self.settings.positions
        notes = [self.settings.shape.note, "" if positions is None else f"{positions:,} encoder positions a row"]
        note = f" ({'; '.join(filter(None, notes))})" if any(notes) else ""
        return [
            f"{self.settings.shape.name}: {r.parameters / 1e9:.2f} G parameters, {dtype}, random weights, "
            f"{size(r.weights)}{note}.",
            f"{self.machine}; {', '.join(f'{name} {text}' for name, text in self.versions.items())}; {self.date}.",
            f"Measured in this run: read {limits.read / 1e9:.4g} GB/s (by {limits.read_by}; the best of PyTorch's own "
            f"reductions: {limits.read_by_torch / 1e9:.4g}), copy {limits.copy / 1e9:.4g} GB/s, matrix products "
            f"{limits.matrix / 1e12:.4g} TFLOP/s.",
            "moved: the bytes that a step must read or write. limit: tokens/s if that took only the time of reading "
            "them. share: of that limit; by PyTorch's read: of the limit where bytes are read as fast as PyTorch's "
            "best reduction reads them. Times are medians; ± is half the range from the slowest to the fastest "
            "run.",
        ]

    # -- forms -----------------------------------------------------------------------------------------------------

    def markdown(self, plot: str | None) -> str:
        parts = [f"# {self.settings.shape.name} on {self.machine}, {self.date}", f"`{self.command}`"]
        parts.append("\n".join(f"- {fact}" for fact in self.facts()))
        for title, columns, lines in self.tables():
            parts.append(f"## {title}")
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *lines)))
        if self.results.skipped:
            parts += ["## Skipped", "\n".join(f"- {line}" for line in self.results.skipped)]
        if plot is not None:
            parts.append(f"![share of the limit over context]({plot})")
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
            "weight_bytes": r.weights,
            "limits": asdict(r.limits),
            "decode": [self._decoded(one) for one in r.decoded],
            "prefill": [asdict(one) | {"share": r.share(one)} for one in r.prefilled],
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
        from lamina.bench.plot import draw  # matplotlib is optional

        folder.mkdir(parents=True, exist_ok=True)
        path = {kind: folder / f"{self.stem}.{kind}" for kind in ("json", "md", "png")}
        drawn = draw(self.settings.shape.name, self.machine, self.results, path["png"])
        path["json"].write_text(json.dumps(self.data(), indent=2) + "\n")
        path["md"].write_text(self.markdown(path["png"].name if drawn else None))
        return [path["json"], path["md"], *([path["png"]] if drawn else [])]

    def show(self) -> None:
        """Prints the tables."""
        from rich.console import Console
        from rich.table import Table

        console = Console()
        if not console.is_terminal:
            console.width = 140
        console.print("\n".join(self.facts()), highlight=False, soft_wrap=True)
        for title, columns, lines in self.tables():
            table = Table(title=title, title_justify="left")
            for column in columns:
                table.add_column(column, justify="left" if column == "subject" else "right")
            for line in lines:
                table.add_row(*line)
            console.print(table)
        for skipped in self.results.skipped:
            console.print(f"skipped: {skipped}", highlight=False, soft_wrap=True)


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
    words += [f"--rows {','.join(map(str, s.rows))}", f"--context {','.join(map(str, s.contexts))}"]
    words += [f"--prefill {s.prefill}"]
    words += [f"--codec {','.join(s.codecs)}"] if s.codecs else []
    words += [] if s.page is None else [f"--page {s.page}"]
    words += [] if s.encoder_positions is None else [f"--source {s.encoder_positions}"]
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
