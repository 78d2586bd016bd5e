"""What a run of `lamina bench --cpu` found: Markdown, and files `<date>-<machine>-cpu.{json,md}`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from lamina.bench.cpu.table import (
    CPU,
    FLOAT32,
    LLAMA_CPP,
    OURS,
    PACKED,
    TRANSFORMERS,
    CpuDecoded,
    CpuResults,
    CpuSettings,
)
from lamina.bench.report import machine, markdown_table, number, size, slug, versions, write_files

DECODE = (
    "model", "weights", "context", "tokens/s", "moved", "limit", "share", "transformers", "lamina is", "llama.cpp",
    "lamina is", "target",
)  # fmt: skip


@dataclass(frozen=True)
class CpuTarget:
    """The least share of the limit, and how many times as fast as the peers ours should be."""

    share: float | None = None
    transformers: float | None = None
    llama_cpp: float | None = None

    def told(self, one: CpuDecoded, read: float) -> str:
        """Each part of it, and whether it was reached."""
        parts = [
            (self.share, f"≥ {self.share or 0:.0%} of the limit", one.share(read)),
            (self.transformers, f"≥ {self.transformers} × transformers", one.times_as_fast(TRANSFORMERS)),
            (self.llama_cpp, f"≥ {self.llama_cpp} × llama.cpp", one.times_as_fast(LLAMA_CPP)),
        ]
        return ", ".join(f"{text}: {verdict(found, least)}" for least, text, found in parts if least is not None)


def verdict(found: float | None, least: float) -> str:
    """
    >>> verdict(1.2, 1.05), verdict(1.0, 1.05), verdict(None, 1.05)
    ('reached', 'missed', 'not measured')
    """
    return "not measured" if found is None else "reached" if found >= least else "missed"


TARGETS = {
    (FLOAT32, 64): CpuTarget(share=0.66, transformers=2.4),
    (FLOAT32, 2000): CpuTarget(share=0.66, transformers=2.4),
    (PACKED, 64): CpuTarget(llama_cpp=1.05),
    (PACKED, 2000): CpuTarget(llama_cpp=1.5),
    ("int8", 64): CpuTarget(share=0.6),
}
"""By weights and context."""
MOST_BYTES = 1.1  # weights in memory, of the bytes of the file


class CpuReport:
    """A run with its circumstances."""

    def __init__(self, settings: CpuSettings, results: CpuResults, today: date | None = None) -> None:
        self.settings, self.results = settings, results
        self.date, self.machine = (today or date.today()).isoformat(), machine(CPU)
        self.stem = f"{self.date}-{slug(self.machine)}-cpu"
        peer = " --llama-cpp PYTHON" if settings.llama_cpp else ""
        self.command = f"lamina bench --cpu{peer} --seconds {settings.seconds:.0f}"

    def facts(self) -> list[str]:
        r = self.results
        known = versions() | ({} if r.llama_cpp is None else {"llama-cpp-python": r.llama_cpp})
        how = "; ".join(f"{name}: {text}" for name, text in r.how.items())
        return [
            f"{self.machine}; {', '.join(f'{name} {text}' for name, text in known.items())}; {self.date}.",
            f"{r.threads} threads for every subject and for reading; read {r.read / 1e9:.4g} GB/s, the run's best.",
            f"Load of the machine {' and '.join(f'{load:.1f}' for load in r.loads)} at start and end; where other work "
            "runs, times are longer, and ratios say more than tokens/s.",
            f"One row, greedy. Subjects take turns; each figure is the fastest of {self.settings.rounds} turns. "
            "transformers: random weights in float32, uncompiled. llama.cpp: the same GGUF file, its cache in float16.",
            "moved: bytes that a step must read or write. limit: tokens/s if that took only the time of reading them. "
            "share: of that limit. lamina is: how many times as fast as the peer to the left.",
            f"How steps ran: {how or 'none ran'}.",
            *(f"No {name} column: {why}." for name, why in r.absent.items()),
        ]

    def decode_lines(self) -> list[tuple[str, ...]]:
        read = self.results.read
        lines = []
        for one in self.results.decoded:
            target = TARGETS.get((one.weights, one.context))
            peers = [
                text
                for peer in (TRANSFORMERS, LLAMA_CPP)
                for text in (rate(one.tokens_per_second(peer)), ratio(one.times_as_fast(peer)))
            ]
            lines.append(
                (
                    one.model, one.weights, str(one.context), rate(one.tokens_per_second(OURS)), size(one.moved),
                    number(read / one.moved), f"{one.share(read):.0%}", *peers,
                    "" if target is None else target.told(one, read),
                )
            )  # fmt: skip
        return lines

    def prefill_lines(self) -> list[tuple[str, ...]]:
        found = self.results.prefilled
        if found is None:
            return []
        ours = f"{OURS}, {PACKED}"
        return [
            (
                name, number(min(times) * 1e3), number(found.tokens_per_second(name)),
                "" if name == ours else ratio(min(times) / min(found.times[ours])), self._prefill_target(name),
            )
            for name, times in found.times.items()
        ]  # fmt: skip

    def _prefill_target(self, name: str) -> str:
        found = self.results.prefilled
        if found is None or name != f"{OURS}, {PACKED}":
            return ""
        least = found.tokens_per_second(f"{OURS}, {FLOAT32}")
        return f"no slower than float32: {verdict(found.tokens_per_second(name), least)}"

    def weight_lines(self) -> list[tuple[str, ...]]:
        r = self.results
        if not r.file_bytes:
            return []
        of_file = r.packed_bytes / r.file_bytes
        reached = "reached" if of_file <= MOST_BYTES else "missed"
        return [(size(r.file_bytes), size(r.packed_bytes), ratio(of_file), f"≤ {MOST_BYTES} ×: {reached}")]

    def markdown(self, plot: str | None = None) -> str:
        parts = [f"# Decoding on {self.machine}, {self.date}", f"`{self.command}`"]
        parts.append("\n".join(f"- {fact}" for fact in self.facts()))
        tokens = self.settings.prompt
        for title, columns, lines in (
            ("Decode, tokens per second", DECODE, self.decode_lines()),
            (f"Prefill of {tokens} tokens", ("subject", "ms", "tokens/s", "packed is", "target"), self.prefill_lines()),
            ("Packed weights", ("file", "in memory", "of the file", "target"), self.weight_lines()),
        ):
            if lines:
                parts += [f"## {title}", markdown_table(columns, lines)]
        if self.results.skipped:
            parts += ["## Skipped", "\n".join(f"- {line}" for line in self.results.skipped)]
        return "\n\n".join(parts) + "\n"

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        found = asdict(self.results)
        for entry, one in zip(found["decoded"], self.results.decoded, strict=True):
            entry |= {"tokens_per_second": one.tokens_per_second(OURS), "share": one.share(self.results.read)}
        about = {"date": self.date, "machine": self.machine, "versions": versions(), "command": self.command}
        return about | found

    def write(self, folder: Path) -> list[Path]:
        """Writes the JSON and the Markdown."""
        return write_files(folder, self.stem, self.data(), self.markdown, lambda path: False)


def rate(value: float | None) -> str:
    return "–" if value is None else number(value)


def ratio(value: float | None) -> str:
    """
    >>> ratio(1.5), ratio(None)
    ('1.50 ×', '–')
    """
    return "–" if value is None else f"{value:.2f} ×"
