"""The prefill of many shapes in one run: `lamina bench --prefill table`, on a GPU with 100 GB.

Shape after shape is loaded, measured over its prompts and released again, so that one model is on the device at a time,
with its peer beside it if one was asked for. Lines have targets: what a good implementation reaches on one H200 in
bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from lamina.bench.measure import DeviceRates
from lamina.bench.prefill import Prefilled, Prompts
from lamina.bench.report import (
    PREFILL,
    PREFILL_NOTE,
    Table,
    machine,
    markdown_table,
    prefill_data,
    prefill_line,
    show_tables,
    slug,
    versions,
    write_files,
)
from lamina.bench.runner import BenchSettings, Progress, run
from lamina.checkpoint.shapes import find_shape

COLUMNS = ("shape", *PREFILL, "target")
Target = tuple[float, float | None]  # milliseconds, GiB beside the weights


@dataclass(frozen=True)
class TableLine:
    shape: str
    prompts: Prompts
    target: Target | None = None


RAGGED = "64x100-1024"
PREFILL_TABLE: Sequence[TableLine] = [
    TableLine(shape, Prompts.of(text, chunk), target)
    for shape, text, chunk, target in (
        ("llama-3.1-8b", "64", None, (7.5, None)),
        ("llama-3.1-8b", "512", None, (15.0, None)),
        ("llama-3.1-8b", "8192", None, (225.0, None)),
        ("llama-3.1-8b", "32768", None, (1300.0, None)),
        ("llama-3.1-8b", "32768", 4096, (1500.0, None)),
        ("llama-3.1-8b", "131072", 8192, (12000.0, 19.0)),
        ("llama-3.1-8b", RAGGED, None, (1000.0, 10.0)),
        ("gemma-2-9b", "2048", None, (75.0, 4.0)),
        ("gemma-2-9b", "8192", None, (330.0, 4.0)),
        ("mamba2-2.7b", "512", None, (25.0, 3.0)),
        ("mamba2-2.7b", "8192", None, (140.0, 3.0)),
        ("falcon-h1-7b", "512", None, (35.0, 3.0)),
        ("falcon-h1-7b", "8192", None, (280.0, 3.0)),
        ("falcon-h1-7b", RAGGED, None, (1200.0, 14.0)),
        ("qwen3-next", "512", None, (60.0, 4.0)),
        ("qwen3-next", "8192", None, (260.0, 4.0)),
        ("deepseek-v2-lite", "512", None, (25.0, None)),
        ("deepseek-v2-lite", "8192", None, (120.0, None)),
        ("mamba-2.8b", "8192", None, (300.0, None)),
    )
]


@dataclass
class TableResults:
    """Measurements by shape, the best rates of the device, and what was skipped."""

    limits: DeviceRates | None = None
    found: list[tuple[str, Prefilled]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_table(
    settings: BenchSettings, lines: Sequence[TableLine] = PREFILL_TABLE, progress: Progress = lambda *_: None
) -> TableResults:
    """Measures every line. The settings give device, dtype, peer and seconds; their shape and prompts are replaced."""
    results, started = TableResults(), time.perf_counter()
    shapes = list(dict.fromkeys(line.shape for line in lines))
    for i, shape in enumerate(shapes):
        left = settings.seconds - (time.perf_counter() - started)
        if left <= 0:
            results.skipped.append(f"{shape}: the {settings.seconds:.0f} seconds were over")
            continue
        prompts = tuple(line.prompts for line in lines if line.shape == shape)
        one = run(
            replace(settings, shape=find_shape(shape), prefill=prompts, seconds=left),
            lambda what, *_, at=i, name=shape: progress(f"{name}: {what}", at, len(shapes)),
        )
        results.found += [(shape, prefilled) for prefilled in one.prefilled]
        results.skipped += [f"{shape}: {text}" for text in one.skipped]
        results.limits = one.limits if results.limits is None else results.limits.better(one.limits)
    results.seconds = time.perf_counter() - started
    return results


class TableReport:
    """A run of the table with its circumstances."""

    def __init__(
        self,
        settings: BenchSettings,
        results: TableResults,
        lines: Sequence[TableLine] = PREFILL_TABLE,
        today: date | None = None,
    ) -> None:
        self.settings, self.results = settings, results
        self.targets = {(line.shape, line.prompts): line.target for line in lines}
        self.date, self.machine = (today or date.today()).isoformat(), machine(settings.device)
        self.stem = f"{self.date}-{slug(self.machine)}-prefill"
        against = f" --against {settings.against}" if settings.against else ""
        self.command = f"lamina bench --prefill table{against} --seconds {settings.seconds:.0f}"

    def table(self) -> Table:
        limits = self.results.limits
        if limits is None:
            return ("Prefill", COLUMNS, [])
        ours = {(shape, one.prompts): one for shape, one in self.results.found if one.subject == "lamina"}
        lines = [
            (shape, *prefill_line(one, ours.get((shape, one.prompts)), limits), self._target(shape, one))
            for shape, one in self.results.found
        ]
        return ("Prefill", COLUMNS, lines)

    def _target(self, shape: str, one: Prefilled) -> str:
        """The target, and whether it was reached."""
        target = self.targets[shape, one.prompts]
        if target is None or one.subject != "lamina":
            return ""
        ms, most = target
        reached = one.seconds * 1e3 <= ms and (most is None or (one.extra_bytes or 0) <= most * 2**30)
        text = f"≤ {ms:,g} ms" + ("" if most is None else f", {most * 2**30 / 1e9:.3g} GB")
        return f"{text}: {'reached' if reached else 'missed'}"

    def facts(self) -> list[str]:
        limits, texts = self.results.limits, ", ".join(f"{name} {text}" for name, text in versions().items())
        rates = "Nothing was measured."
        if limits is not None:
            matrix = f"matrix products {limits.matrix / 1e12:.4g} TFLOP/s"
            rates = f"Measured in this run: read {limits.read / 1e9:.4g} GB/s, {matrix}."
        dtype = str(self.settings.dtype).removeprefix("torch.")
        return [f"{self.machine}; {texts}; {dtype}, random weights; {self.date}.", rates, PREFILL_NOTE]

    def markdown(self, plot: str | None) -> str:
        parts = [f"# Prefill on {self.machine}, {self.date}", f"`{self.command}`"]
        parts.append("\n".join(f"- {fact}" for fact in self.facts()))
        parts.append(markdown_table(*self.table()[1:]))
        if self.results.skipped:
            parts += ["## Skipped", "\n".join(f"- {line}" for line in self.results.skipped)]
        if plot is not None:
            parts.append(f"![share of the limit of compute]({plot})")
        return "\n\n".join(parts) + "\n"

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        r = self.results
        return {
            "date": self.date,
            "machine": self.machine,
            "versions": versions(),
            "command": self.command,
            "dtype": str(self.settings.dtype).removeprefix("torch."),
            "limits": None if r.limits is None else asdict(r.limits),
            "prefill": [] if r.limits is None else [{"shape": n} | prefill_data(one, r.limits) for n, one in r.found],
            "skipped": r.skipped,
            "seconds": r.seconds,
        }

    def write(self, folder: Path) -> list[Path]:
        """Writes `<date>-<machine>-prefill.json`, .md and .png; without matplotlib there is no picture."""
        from lamina.bench.plot import draw_prefill  # matplotlib is optional

        def picture(path: Path) -> bool:
            limits = self.results.limits
            return limits is not None and draw_prefill(self.machine, self.results.found, limits, path)

        return write_files(folder, self.stem, self.data(), self.markdown, picture)

    def show(self) -> None:
        """Prints the table."""
        show_tables(self.facts(), [self.table()], self.results.skipped)
