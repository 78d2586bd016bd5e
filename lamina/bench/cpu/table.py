"""Decoding on a CPU beside the memory limit and peers, in one run: `lamina bench --cpu [--llama-cpp PYTHON]`

The demo model SmolLM2-135M decodes one row and reads a prompt, in float32 and with the packed weights of its GGUF file;
two shapes decode with random int8 weights. transformers runs the float32 model uncompiled in the same process,
llama.cpp the same GGUF file in a process of its own (`llama_cpp.py`), all with the same number of threads. Subjects
take turns and the fastest of several turns counts, for the read bandwidth too: other work of the machine only makes
times longer.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from lamina.bench.cpu.llama_cpp import LlamaCpp, LlamaCppError
from lamina.bench.cpu.native_read import cpu_read_bandwidth
from lamina.bench.prefill import Prompts
from lamina.bench.random_model import random_model
from lamina.bench.runner import Progress
from lamina.bench.subjects import Contestant, Lamina
from lamina.checkpoint.shapes import ModelShape
from lamina.checkpoint.source import open_source
from lamina.errors import InputError
from lamina.loading import load
from lamina.model import Model
from lamina.native.library import threads
from lamina.planning.bytes import decode_bytes
from lamina.runtime.native.eligibility import why_not_native
from lamina.weights.inventory import weight_bytes

CPU = torch.device("cpu")
OURS, TRANSFORMERS, LLAMA_CPP = "lamina", "transformers", "llama.cpp"
FLOAT32, PACKED = "float32", "packed"
TURN_SECONDS, LEAST_STEPS, MOST_STEPS = 0.2, 4, 32  # of one turn

MAMBA2_130M = ModelShape(
    "mamba2-130m",
    dict(
        model_type="mamba2", vocab_size=50288, hidden_size=768, num_hidden_layers=24, state_size=128, num_heads=24,
        head_dim=64, n_groups=1, expand=2, conv_kernel=4, layer_norm_epsilon=1e-5, residual_in_fp32=True,
        tie_word_embeddings=True,
    ),
)  # fmt: skip
QWEN3_0_6B = ModelShape(
    "qwen3-0.6b",
    dict(
        model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, attention_bias=False, use_sliding_window=False,
        rms_norm_eps=1e-6, max_position_embeddings=40960, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class CpuSettings:
    path: str | Path = "smollm2"
    """A GGUF file, or a name of one."""
    contexts: tuple[int, ...] = (64, 2000)
    prompt: int = 512
    """Tokens of the prompt whose prefill is timed."""
    shapes: tuple[ModelShape, ...] = (MAMBA2_130M, QWEN3_0_6B)
    """Decoded with random int8 weights, at the first context."""
    llama_cpp: str | None = None
    """Python interpreter of an environment with llama-cpp-python; None: not measured"""
    rounds: int = 6
    """Turns of each subject."""
    seconds: float = 300.0
    """After this nothing new is begun."""


@dataclass(frozen=True)
class CpuDecoded:
    """Decoding of one row: for each subject the seconds per token of every turn."""

    model: str
    weights: str
    context: int
    moved: float
    """Bytes that a step must read or write, halfway through a turn."""
    times: Mapping[str, list[float]]

    def tokens_per_second(self, subject: str) -> float | None:
        return 1 / min(self.times[subject]) if subject in self.times else None

    def share(self, read: float) -> float:
        """Of the limit at a bandwidth of `read` bytes a second."""
        return self.moved / read / min(self.times[OURS])

    def times_as_fast(self, subject: str) -> float | None:
        return min(self.times[subject]) / min(self.times[OURS]) if subject in self.times else None


@dataclass(frozen=True)
class CpuPrefilled:
    """The prefill of one row: for each subject, such as "lamina, packed", the seconds of every turn."""

    tokens: int
    times: Mapping[str, list[float]]

    def tokens_per_second(self, subject: str) -> float:
        return self.tokens / min(self.times[subject])


@dataclass
class CpuResults:
    threads: int
    read: float = 0.0
    """Bytes a second, the best of several measurements."""
    decoded: list[CpuDecoded] = field(default_factory=list)
    prefilled: CpuPrefilled | None = None
    file_bytes: int = 0
    packed_bytes: int = 0
    """Of the GGUF file, and of the weights in memory: those mapped and those that were converted."""
    how: dict[str, str] = field(default_factory=dict)
    """How steps ran, in words, by weights or shape."""
    loads: list[float] = field(default_factory=list)
    """Load averages of the machine at the start and at the end."""
    absent: dict[str, str] = field(default_factory=dict)
    """Why a peer was not measured."""
    llama_cpp: str | None = None
    """Version of llama-cpp-python."""
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Turns(Protocol):
    """A subject that times its own steps."""

    def decode(self, steps: int) -> float: ...


class Here:
    """A subject of this process."""

    def __init__(self, subject: Contestant, context: int) -> None:
        self.subject = subject
        subject.open(1, context, MOST_STEPS)

    def decode(self, steps: int) -> float:
        self.subject.restart()
        return timed(lambda: self.subject.run(steps))


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def steps_of_a_turn(seconds: float) -> int:
    """How many steps of `seconds` each are timed together.

    >>> steps_of_a_turn(0.02), steps_of_a_turn(0.001), steps_of_a_turn(1.0)
    (10, 32, 4)
    """
    return max(LEAST_STEPS, min(MOST_STEPS, round(TURN_SECONDS / seconds)))


def by_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each way returns, `rounds` times; the ways take turns.

    >>> by_turns({"a": lambda: 1.0, "b": lambda: 2.0}, 2)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return found


def decode_by_turns(subjects: Mapping[str, Turns], rounds: int) -> tuple[dict[str, list[float]], int]:
    """-> (seconds per token of every turn, by subject; steps of one turn of ours)"""
    steps = {}
    for name, subject in subjects.items():
        subject.decode(LEAST_STEPS)  # which records, or allocates
        steps[name] = steps_of_a_turn(subject.decode(LEAST_STEPS) / LEAST_STEPS)
    ways = {name: lambda s=subject, n=steps[name]: s.decode(n) / n for name, subject in subjects.items()}
    return by_turns(ways, rounds), steps[OURS]


def run_cpu_table(settings: CpuSettings, progress: Progress = lambda *_: None) -> CpuResults:
    """Measures all that the settings ask for, with PyTorch limited to the threads of native programs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads())
    try:
        return _Run(settings, progress).all()
    finally:
        torch.set_num_threads(before)


class _Run:
    def __init__(self, settings: CpuSettings, progress: Progress) -> None:
        self.s, self.progress, self.started = settings, progress, time.perf_counter()
        self.done, self.total = 0, 2 * len(settings.contexts) + len(settings.shapes) + 1
        self.results = CpuResults(threads())

    def all(self) -> CpuResults:
        s, r = self.s, self.results
        r.loads.append(os.getloadavg()[0])
        self._read()
        file = Path(open_source(s.path).path)
        if file.suffix != ".gguf":
            raise InputError(f"{s.path} is not a GGUF file, which llama.cpp and the packed weights need")
        packed = load(file, dtype=torch.float32, device=CPU)
        r.file_bytes, r.packed_bytes = file.stat().st_size, weight_bytes(packed)
        plain = load(file, dtype=torch.float32, device=CPU, weights="plain")
        peer = self._transformers(plain)
        theirs = self._llama_cpp(file)
        try:
            self._prefill(plain, packed, peer, theirs)
            for context in s.contexts:
                others = {} if peer is None else {TRANSFORMERS: peer}
                self._decode(file.stem, FLOAT32, context, plain, others)
            del plain, peer
            for context in s.contexts:
                self._decode(file.stem, PACKED, context, packed, {}, theirs)
        finally:
            if theirs is not None:
                theirs.close()
        del packed
        for shape in s.shapes:
            gc.collect()
            model = random_model(shape.config, torch.float32, CPU, weights="int8")
            self._decode(shape.name, "int8", s.contexts[0], model, {})
        r.loads.append(os.getloadavg()[0])
        r.seconds = time.perf_counter() - self.started
        return r

    # -- peers -----------------------------------------------------------------------------------------------------

    def _transformers(self, model: Model) -> Any:
        try:
            from lamina.bench.peers import Dynamic, peer_model  # which imports transformers

            return Dynamic(peer_model(model.config.values, torch.float32, CPU))
        except ImportError as error:
            self.results.absent[TRANSFORMERS] = f"{error.name} is not installed"
            return None

    def _llama_cpp(self, file: Path) -> LlamaCpp | None:
        if self.s.llama_cpp is None:
            self.results.absent[LLAMA_CPP] = "--llama-cpp names no environment that has llama-cpp-python"
            return None
        try:
            most = max(self.s.prompt, *self.s.contexts) + 2 * MOST_STEPS
            theirs = LlamaCpp(self.s.llama_cpp, file, self.results.threads, most)
        except LlamaCppError as error:
            self.results.absent[LLAMA_CPP] = str(error)
            return None
        self.results.llama_cpp = theirs.version
        return theirs

    # -- measurements ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        self.results.read = max(self.results.read, cpu_read_bandwidth(self.results.threads))

    def _decode(
        self,
        name: str,
        weights: str,
        context: int,
        model: Model,
        others: Mapping[str, Contestant],
        theirs: LlamaCpp | None = None,
    ) -> None:
        if not self._begin(f"{name}, {weights}: context {context}"):
            return
        self._read()
        ours = Lamina(model)
        subjects: dict[str, Turns] = {OURS: Here(ours, context)}
        subjects |= {key: Here(subject, context) for key, subject in others.items()}
        if theirs is not None:
            theirs.open(context)
            subjects[LLAMA_CPP] = theirs
        times, steps = decode_by_turns(subjects, self.s.rounds)
        why = why_not_native(model, ours.cache)
        self.results.how[f"{name}, {weights}"] = "native steps" if why is None else f"plain passes: {why}"
        moved = decode_bytes(model, 1, context + steps // 2).total
        self.results.decoded.append(CpuDecoded(name, weights, context, moved, times))
        for subject in (ours, *others.values()):
            subject.close()
        self._read()

    @torch.no_grad()
    def _prefill(self, plain: Model, packed: Model, peer: Any, theirs: LlamaCpp | None) -> None:
        if not self._begin(f"prefill of {self.s.prompt} tokens"):
            return
        prompts = Prompts((self.s.prompt,))
        ids = prompts.ids(plain.vocab, CPU)
        here: dict[str, Contestant] = {f"{OURS}, {FLOAT32}": Lamina(plain), f"{OURS}, {PACKED}": Lamina(packed)}
        if peer is not None:
            here[f"{TRANSFORMERS}, {FLOAT32}"] = peer
        ways: dict[str, Callable[[], float]] = {
            name: lambda one=one: timed(lambda: one.prefill(ids, prompts))  # type: ignore[misc]
            for name, one in here.items()
        }
        if theirs is not None:
            ways[f"{LLAMA_CPP}, {PACKED}"] = lambda: theirs.prefill(self.s.prompt)
        by_turns(ways, 1)
        self.results.prefilled = CpuPrefilled(self.s.prompt, by_turns(ways, max(1, self.s.rounds // 2)))

    def _begin(self, what: str) -> bool:
        """False, with a note, if the time is over."""
        self.progress(what, self.done, self.total)
        self.done += 1
        if time.perf_counter() - self.started <= self.s.seconds:
            return True
        self.results.skipped.append(f"{what}: the {self.s.seconds:.0f} seconds were over")
        return False
