"""What a captured prompt costs the host, without a GPU: `python -m bench.short_prompts --host`

`generate(ids, max_new_tokens=1)` runs over a model with the layers and modules of a shape and tiny widths, into a new
cache each time. The way is that of a GPU, except that a replay of a graph does nothing and stores are in memory of the
CPU. So the figures are the time that this CPU works on one thread of the host, and have neither the driver's share
(launches, copies, allocations) nor the graph's. Python calls do not depend on the machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from lamina.bench.random_model import random_model
from lamina.cache.cache import Cache
from lamina.checkpoint.shapes import find_shape
from lamina.generation.feed import prefill
from lamina.generation.prompt import Prompt
from lamina.model import Model
from lamina.runtime.captured import Captured
from lamina.runtime.prompts.captured_prompt import CapturedPrompt

TIMES = 30
LIKE_LLAMA = ("llama-3.1-8b",)
TINY: Mapping[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
"""Widths of a llama; everything else is the shape's."""


def tiny_model(shape: str = "llama-3.1-8b") -> Model:
    """A model with the layers of a shape, and so with its modules, entries and settings."""
    return random_model({**find_shape(shape).config, **TINY}, torch.float32, "cpu")


@dataclass
class Replays:
    """Replays that were asked for: which kind of program, and when."""

    seen: list[tuple[type[Captured], float]] = field(default_factory=list)


@contextmanager
def pretended_gpu() -> Iterator[Replays]:
    """Inside, models on a CPU count as models on a GPU that kernels run on. Replays of their graphs do nothing: what a
    program computes is left as it was."""
    replays = Replays()

    def replay(one: Captured, which: int = 0) -> None:
        replays.seen.append((type(one), time.thread_time()))
        one.replays.setdefault(which, lambda: None)

    with (
        patch("lamina.runtime.eligibility.why_no_graphs", lambda model: None),
        patch("lamina.generation.call.why_no_graphs", lambda model: None),
        patch.object(Captured, "_replay", replay),
        patch.object(CapturedPrompt, "capture", lambda one, *which: None),
    ):
        yield replays


@dataclass(frozen=True)
class Share:
    """Microseconds of host time (the median of `TIMES` calls) and Python calls of one part of a call."""

    microseconds: float
    calls: int


PARTS = ("to the replay of the prompt", "from there to the result")


@torch.no_grad()
def host_of_generate(model: Model, tokens: int) -> tuple[Share, Share]:
    """The parts of `generate` of one new token, behind a prompt of `tokens` tokens."""
    ids = [[(7 * i) % (model.vocab - 1) + 1 for i in range(tokens)]]
    return _host_of(lambda: model.generate(ids, max_new_tokens=1, eos_token_id=()))


@torch.no_grad()
def host_of_prefill(model: Model, tokens: int) -> tuple[Share, Share]:
    """The same of what `lamina bench --prefill` times: a new cache, and the prompt up to its logits."""
    ids = torch.arange(tokens)[None] % (model.vocab - 1) + 1

    def run() -> None:
        cache: Cache = model.new_cache(1).reserve(tokens)
        prefill(model, Prompt(ids, [tokens]), cache)

    return _host_of(run)


def _host_of(run: Callable[[], object]) -> tuple[Share, Share]:
    with pretended_gpu() as replays:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for _ in range(4):  # a graph is captured when its width comes again
            run()
        parts: list[tuple[float, float]] = []
        for _ in range(TIMES):
            replays.seen.clear()
            start = time.thread_time()
            run()
            end, at = time.thread_time(), _replayed(replays)
            parts.append((at - start, end - at))
        calls = calls_of(run, replays)
        torch.set_num_threads(threads)
    before, after = (statistics.median(part[i] for part in parts) * 1e6 for i in range(2))
    return Share(before, calls[0]), Share(after, calls[1])


def _replayed(replays: Replays) -> float:
    """When the prompt's graph was launched."""
    return next(at for kind, at in replays.seen if issubclass(kind, CapturedPrompt))


def calls_of(run: Callable[[], object], replays: Replays) -> tuple[int, int]:
    """Python calls before and after the replay of the prompt."""
    counts, replays.seen = [0, 0], []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counts[len(replays.seen) > 0] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return counts[0], counts[1]


def print_host(shapes: Sequence[str], widths: list[int]) -> None:
    """Prints both parts of both ways, for shapes of llamas and numbers of tokens."""
    print("CPU time of one thread of this host, with tiny widths; replays of graphs are left out\n")
    print("| shape | call | tokens | part | µs | Python calls |\n|---|---|---|---|---|---|")
    for shape in shapes:
        model = tiny_model(shape)
        for name, ask in (("generate", host_of_generate), ("prefill", host_of_prefill)):
            for tokens in widths:
                for part, share in zip(PARTS, ask(model, tokens), strict=True):
                    line = shape, name, tokens, part, f"{share.microseconds:.0f}", share.calls
                    print(f"| {' | '.join(map(str, line))} |", flush=True)
