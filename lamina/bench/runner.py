"""One run of the benchmark: limits of the device, first token, decode at every size, prefill, all in a bounded time.

Everything is measured in one process, Lamina and its peers in turn at each size, so that all of them meet the same
clocks and the same bandwidth. What has no room or no time is skipped and said by name.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from lamina.bench.first_token import FirstToken, first_token
from lamina.bench.measure import DeviceRates, Peak, free_memory, limits, seconds
from lamina.bench.prefill import LINE_SECONDS, Prefilled, Prompts, Work, time_prefill
from lamina.bench.random_model import random_model
from lamina.bench.subjects import CompiledLamina, Contestant, Lamina
from lamina.cache.codec.codec import Codec
from lamina.checkpoint.shapes import ModelShape
from lamina.errors import InputError
from lamina.planning.bytes import Moved, decode_bytes
from lamina.weights.inventory import named_weights
from lamina.weights.quantize import check_weights

MOST_STEPS, LEAST_STEPS = 64, 4  # tokens of one timed run
RUNS = 5
RUN_SECONDS = 0.5  # about how long a timed run should take
MARGIN = 2**30  # bytes left free for what a pass holds besides its cache


@dataclass(frozen=True)
class BenchSettings:
    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    rows: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (128,)
    prefill: tuple[Prompts, ...] = ()
    """Prompts whose prefill is timed."""
    codecs: tuple[str, ...] = ()
    """Decode also with caches of these codecs."""
    page: int | None = None
    """Decode also with caches in pages of this many tokens."""
    against: str | None = None
    compiled: bool = False
    first_token: bool = True
    seconds: float = 300.0
    """After this nothing new is begun."""
    source: str = ""
    """What the shape was asked for as: its name, or a path."""
    encoder_positions: int | None = None
    """Positions of the encoder's output that each row reads; None: those of the shape."""
    weights: str | None = None
    """A format that our weights are packed in: int8, int4 or fp8. None: plain"""

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_weights(self.weights)
        for codec in self.codecs:
            Codec.of(codec)
        if self.against not in (None, "transformers"):
            raise InputError(f"against={self.against!r} is not known; the peer is transformers")
        if self.compiled and self.against is None:
            raise InputError("compiled is a way to run the peer: name one with against")
        if self.page is not None and self.page < 1:
            raise InputError(f"page={self.page}: it must be at least 1")
        if min((*self.rows, *self.contexts), default=1) < 1:
            raise InputError(f"rows {self.rows} and contexts {self.contexts} must be 1 or more")
        if not (self.prefill or (self.rows and self.contexts)):
            raise InputError("there is nothing to measure: give rows and contexts, or prompts for a prefill")

    @property
    def positions(self) -> int | None:
        """Of the encoder's output; None for models without one."""
        return self.shape.source if self.encoder_positions is None else self.encoder_positions

    @property
    def peers(self) -> list[str]:
        if self.against is None:
            return []
        return ["transformers", *(["transformers, compiled"] if self.compiled else [])]


@dataclass(frozen=True)
class Decoded:
    """A decode step of one subject: `seconds` is the median of `runs` runs of `steps` steps each."""

    subject: str
    rows: int
    context: int
    seconds: float
    fastest: float
    slowest: float
    steps: int
    runs: int
    moved: Moved
    """What had to move, at the middle of the run."""
    peak_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds


@dataclass
class Results:
    limits: DeviceRates
    """The better of two measurements, before and after all others."""
    parameters: int = 0
    weights: int = 0
    """Bytes of them."""
    decoded: list[Decoded] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    first: list[FirstToken] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def limit(self, decoded: Decoded) -> float:
        """The least seconds that such a step can take at the bandwidth of this run."""
        return decoded.moved.total / self.limits.read

    def share(self, measured: Decoded | Prefilled) -> float:
        """Of the read bandwidth, or of the matrix rate."""
        if isinstance(measured, Decoded):
            return self.limit(measured) / measured.seconds
        return measured.of_compute(self.limits)

    def share_by_torch(self, decoded: Decoded) -> float:
        """Of the bandwidth that PyTorch's best reduction reaches, which others measure by."""
        return decoded.moved.total / self.limits.read_by_torch / decoded.seconds


Progress = Callable[[str, int, int], None]
"""Called as progress(what is measured now, how many measurements are done, how many there are)."""


def run(settings: BenchSettings, progress: Progress = lambda *_: None) -> Results:
    """Measures all that the settings ask for."""
    return _Run(settings, progress).all()


class _Run:
    def __init__(self, settings: BenchSettings, progress: Progress) -> None:
        self.s, self.progress = settings, progress
        self.started = time.perf_counter()
        sizes = len(settings.rows) * len(settings.contexts) + len(settings.prefill) + settings.first_token
        self.visited: dict[tuple[int, int], float | None] = {}  # experts, by rows and context
        more = len(settings.codecs) + (settings.page is not None)  # ways to keep the cache
        more *= len(settings.rows) * len(settings.contexts)
        self.done, self.total = 0, 1 + (1 + len(settings.peers)) * sizes + more

    def all(self) -> Results:
        s = self.s
        self._tell("bandwidth and matrix rate")
        self.results = Results(limits(s.device, s.dtype))
        self._tidy()
        encodes = s.positions is not None
        if (
            s.first_token and not encodes and s.weights is None
        ):  # before this process holds weights, which would take the child's room
            for name in ("lamina", *s.peers):
                self._measure(name, "first token", partial(self._first_token, name))
        if encodes and (s.first_token or s.prefill):
            self.results.skipped.append("first token and prefill: decode steps alone are measured with an encoder")
        if s.first_token and s.weights is not None:
            self.results.skipped.append("first token: with plain weights alone")
        self._tell("weights")
        self.model = random_model(s.shape.config, s.dtype, s.device, weights=s.weights)
        ours = [Lamina(self.model, source=s.positions)]
        if s.compiled and s.device.type == "cpu":  # on a GPU steps are captured, not compiled
            ours.append(CompiledLamina(self.model))
        self.subjects: list[Contestant] = [*ours, *self._peers()]
        kept = [Lamina(self.model, codec, source=s.positions) for codec in s.codecs]
        if s.page is not None:
            kept.append(Lamina(self.model, page=s.page, source=s.positions))
        self.results.parameters = sum(weight.numel() for _, weight in named_weights(self.model))
        self.results.weights = self.subjects[0].weights
        for prompts in () if encodes else s.prefill:
            work = Work(self.model, prompts)
            for subject in self.subjects:
                self._measure(subject.name, f"prefill of {prompts}", partial(self._prefill, subject, work))
        for rows in s.rows:
            for context in s.contexts:
                for subject in (*self.subjects, *kept):
                    self._decode(subject, rows, context)
        self._tell("bandwidth and matrix rate again")
        self.results.limits = self.results.limits.better(limits(s.device, s.dtype))
        self.results.seconds = time.perf_counter() - self.started
        return self.results

    def _peers(self) -> Sequence[Contestant]:
        if not self.s.peers:
            return []
        if self.s.positions is not None:
            self.results.skipped.append("transformers: a decoder with an encoder is measured without a peer")
            return []
        from lamina.bench.peers import Dynamic, Static, peer_model  # transformers is optional

        model = peer_model(self.s.shape.config, self.s.dtype, self.s.device)
        return [Dynamic(model), Static(model)][: len(self.s.peers)]

    # -- measurements ----------------------------------------------------------------------------------------------

    def _first_token(self, name: str) -> None:
        device, dtype = str(self.s.device), str(self.s.dtype).removeprefix("torch.")
        shape = self.s.source or self.s.shape.name
        self.results.first.append(first_token(shape, dtype, device, name, timeout=max(self._left(), 60.0)))

    def _decode(self, subject: Contestant, rows: int, context: int) -> None:
        def measure() -> None:
            with Peak(self.s.device) as peak:
                subject.open(rows, context, MOST_STEPS)
                times, steps = self._times(subject)
            if isinstance(subject, Lamina):
                self.visited[rows, context] = subject.experts_visited()
            codec = getattr(subject, "codec", None)
            moved = decode_bytes(
                self.model, rows, context + steps // 2, self.visited.get((rows, context)), self.s.positions, codec
            )
            self.results.decoded.append(
                Decoded(
                    subject.name, rows, context, statistics.median(times), min(times), max(times), steps, len(times),
                    moved, _and(peak.nbytes, subject.weights),
                )
            )  # fmt: skip

        def needed() -> int:
            return subject.needs(rows, context + MOST_STEPS)

        self._measure(subject.name, f"{rows} row{'s' * (rows != 1)} at context {context}", measure, needed)
        subject.close()

    def _times(self, subject: Contestant) -> tuple[list[float], int]:
        """Seconds a step of each run, and the steps of a run."""
        for _ in range(2):  # the first compiles or captures
            subject.restart()
            guess = seconds(partial(subject.run, 3), self.s.device) / 3
        steps = max(LEAST_STEPS, min(MOST_STEPS, round(RUN_SECONDS / guess)))
        times: list[float] = []
        while len(times) < RUNS and (not times or self._left() > 0):
            subject.restart()
            times.append(seconds(partial(subject.run, steps), self.s.device) / steps)
        return times, steps

    def _prefill(self, subject: Contestant, work: Work) -> None:
        until = max(min(LINE_SECONDS, self._left()), 0.0)
        self.results.prefilled.append(time_prefill(subject.name, subject.prefill, work, self.s.device, until))

    # -- bounds ----------------------------------------------------------------------------------------------------

    def _left(self) -> float:
        return self.s.seconds - (time.perf_counter() - self.started)

    def _measure(
        self, name: str, what: str, measure: Callable[[], None], needed: Callable[[], int] | None = None
    ) -> None:
        """Does it if there is time and room; what a peer cannot do is skipped too."""
        self._tell(f"{name}: {what}")
        self.done += 1
        peer = name != "lamina"
        try:
            if self._left() <= 0:
                return self._skip(name, what, f"the {self.s.seconds:.0f} seconds were over")
            if needed is not None and (need := needed() + MARGIN) > (free := free_memory(self.s.device)):
                return self._skip(name, what, f"it needs {need / 1e9:.0f} GB and {free / 1e9:.0f} GB are free")
            measure()
        except torch.OutOfMemoryError:
            self._skip(name, what, "it ran out of memory")
        except Exception as error:
            if not peer:
                raise
            self._skip(name, what, f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}")
        finally:
            self._tidy()

    def _skip(self, name: str, what: str, why: str) -> None:
        self.results.skipped.append(f"{name}, {what}: {why}")

    def _tidy(self) -> None:
        gc.collect()
        if self.s.device.type == "cuda":
            torch.cuda.empty_cache()

    def _tell(self, what: str) -> None:
        self.progress(what, self.done, self.total)


def _and(extra: int | None, weights: int) -> int | None:
    return None if extra is None else extra + weights
