"""Prompts that are timed: which rows, in which chunks, and what was found.

    Prompts.of("8192")                     one row of 8,192 tokens in one pass
    Prompts.of("32768", chunk=4096)        the same in chunks
    Prompts.of("64x100-1024")              64 rows of 100 to 1,024 tokens, evenly spread

A subject reads them into an empty cache for the logits after each row's last token. The time is the wall clock's,
from an idle device until these logits are there; the host time ends when all work is queued.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.bench.flops import prefill_bytes, prefill_flops
from lamina.bench.measure import DeviceRates, Peak, random_ids
from lamina.errors import InputError
from lamina.model import Model

RUNS = 5
LINE_SECONDS = 8.0  # about how long the timed runs of one subject over one prompt may take together


@dataclass(frozen=True)
class Prompts:
    """Rows of `counts` tokens, read in passes of up to `chunk` tokens a row (None: one pass).

    >>> Prompts.of("4x1-10").counts
    (1, 7, 4, 10)
    >>> str(Prompts.of("4x1-10", 5)), str(Prompts.of("8192"))
    ('4 rows of 1 to 10 (22) in chunks of 5', '8,192')
    """

    counts: tuple[int, ...]
    chunk: int | None = None

    @staticmethod
    def of(text: str, chunk: int | None = None) -> Prompts:
        """From `tokens`, `rowsxtokens` or `rowsxleast-most`; the order of lengths is mixed, and always the same."""
        found = re.fullmatch(r"(?:(\d+)x)?(\d+)(?:-(\d+))?", text.strip())
        rows, least = (int(found[1] or 1), int(found[2])) if found else (0, 0)
        most = int(found[3] or least) if found else 0
        if rows < 1 or not 0 < least <= most or (chunk is not None and chunk < 1):
            given = f"prompts {text!r}" + ("" if chunk is None else f" in chunks of {chunk}")
            raise InputError(f"{given} must be like 512, 64x512 or 64x100-1024, all numbers 1 or more")
        spread = [least + (most - least) * i // max(rows - 1, 1) for i in range(rows)]
        half = rows // 2  # shorter and longer rows by turns
        turns = [length for both in zip(spread[:half], spread[half:], strict=False) for length in both]
        return Prompts((*turns, *spread[2 * half :]), chunk)

    def __str__(self) -> str:
        least, most, rows = min(self.counts), max(self.counts), len(self.counts)
        text = f"{most:,}" if least == most else f"{least:,} to {most:,} ({sum(self.counts):,})"
        text = text if rows == 1 else f"{rows} rows of {text}"
        return text if self.chunk is None else f"{text} in chunks of {self.chunk:,}"

    @property
    def text(self) -> str:
        """What `of` makes them from."""
        least, most, rows = min(self.counts), max(self.counts), len(self.counts)
        text = str(most) if least == most else f"{least}-{most}"
        return text if rows == 1 else f"{rows}x{text}"

    def ids(self, vocab: int, device: torch.device) -> Tensor:
        """Random ids [R, T], each row padded on the right."""
        return random_ids((len(self.counts), max(self.counts)), vocab, device)


@dataclass(frozen=True)
class Prefilled:
    """One subject's reading of some prompts: `seconds` is the median of `runs` runs."""

    subject: str
    prompts: Prompts
    seconds: float
    host_seconds: float | None
    """Until everything was queued; None on a CPU, where nothing is."""
    runs: int
    flops: float
    moved: float
    """Bytes that any implementation moves: each weight once, and what the cache keeps."""
    extra_bytes: int | None
    """The most memory beside the weights, the cache included."""

    @property
    def tokens(self) -> int:
        return sum(self.prompts.counts)

    def of_compute(self, rates: DeviceRates) -> float:
        """The share of the matrix rate."""
        return self.flops / self.seconds / rates.matrix

    def of_memory(self, rates: DeviceRates) -> float:
        """The share of the read bandwidth."""
        return self.moved / self.seconds / rates.read


class Work:
    """What any implementation has to do for some prompts of a model: counted once, for every subject."""

    def __init__(self, model: Model, prompts: Prompts) -> None:
        self.prompts, self.vocab = prompts, model.vocab
        self.flops = sum(prefill_flops(model, count) * prompts.counts.count(count) for count in set(prompts.counts))
        self.moved = prefill_bytes(model, prompts.counts)


def time_prefill(
    name: str, read: Callable[[Tensor, Prompts], object], work: Work, device: torch.device, until: float = LINE_SECONDS
) -> Prefilled:
    """Times one subject. The first run prepares (kernels, plans) and is not counted.

    read    reads ids [R, T] as the prompts say
    until   seconds that all timed runs may take together; there is one at least
    """
    ids = work.prompts.ids(work.vocab, device)
    with Peak(device) as peak:
        _timed(lambda: read(ids, work.prompts), device)
        walls = [_timed(lambda: read(ids, work.prompts), device)]
        while len(walls) < RUNS and sum(wall for wall, _ in walls) + walls[-1][0] < until:
            walls.append(_timed(lambda: read(ids, work.prompts), device))
    seconds, host = (statistics.median(one[i] for one in walls) for i in range(2))
    return Prefilled(
        name, work.prompts, seconds, host if device.type == "cuda" else None, len(walls), work.flops, work.moved,
        peak.nbytes,
    )  # fmt: skip


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """-> seconds until the device has done it, and until the host has queued it"""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    queued = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, queued - started
