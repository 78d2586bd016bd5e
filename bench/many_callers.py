"""Many callers of one model at once: does each get the tokens of a run alone? `python -m bench.many_callers`

Threads, threads with CUDA streams of their own, asyncio tasks, and streams that are read by turns. On a GPU each
generation borrows a captured step, up to `model.graphs.limit` of them; the others use plain passes.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from lamina.model import Model

PROMPTS = [[5, 9, 12, 3, 44, 8, 21], [7, 2, 30]]
MORE = 24
THREADS, TRIALS = 6, 5
DRAWN: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 0.8, "seed": 5}


def many_callers(model: Model) -> str:
    """ "yes", or which way of calling gave other tokens, and how often."""
    for settings in ({}, DRAWN, {"prompt_lookup_num_tokens": 3}):
        alone = [tokens(model, prompt, output_logits=True, **settings) for prompt in PROMPTS]
        for ways, call in WAYS.items():
            model.graphs.clear()  # programs are captured while others run
            found = [one for _ in range(TRIALS) for one in call(model, settings)]
            wrong = sum(made != alone[number] for number, made in found)
            if wrong:
                return f"no: {ways} with {settings or 'greedy'}: {wrong} of {len(found)} are wrong"
    return "yes"


def tokens(model: Model, prompt: list[int], **settings: Any) -> list[int]:
    return model.generate([prompt], MORE, eos_token_id=None, **settings).tokens[0]


Found = list[tuple[int, list[int]]]  # which prompt, and what was made of it


def in_threads(model: Model, settings: dict[str, Any], apart: bool = False) -> Found:
    """Six threads, each with its prompt; apart: and with a CUDA stream of its own."""
    found: Found = []
    start = threading.Barrier(THREADS)

    def work(number: int) -> None:
        own = torch.cuda.stream(torch.cuda.Stream()) if apart and model.device.type == "cuda" else nullcontext()
        start.wait()
        with own:
            found.append((number, tokens(model, PROMPTS[number], **settings)))

    threads = [threading.Thread(target=guarded(work, found), args=(n % len(PROMPTS),)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def guarded(work: Callable[[int], None], found: Found) -> Callable[[int], None]:
    """A thread that fails has made nothing."""

    def safe(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            found.append((number, []))

    return safe


def by_turns(model: Model, settings: dict[str, Any]) -> Found:
    """As many streams as threads, of which one event at a time is read."""
    streams = [model.stream([PROMPTS[n % 2]], MORE, eos_token_id=None, **settings) for n in range(THREADS)]
    made: list[list[int]] = [[] for _ in streams]
    readers = [iter(stream) for stream in streams]
    for _ in range(MORE):
        for reader, new in zip(readers, made, strict=True):
            new.append(next(reader).token)
    for reader in readers:
        assert not list(reader)  # every event is read
    assert [stream.result.tokens[0] for stream in streams] == made
    return [(n % 2, new) for n, new in enumerate(made)]


def in_tasks(model: Model, settings: dict[str, Any]) -> Found:
    async def one(number: int) -> tuple[int, list[int]]:
        made = [e.token async for e in model.stream([PROMPTS[number]], MORE, eos_token_id=None, **settings)]
        return number, made

    async def all_of_them() -> Found:
        return list(await asyncio.gather(*(one(n % 2) for n in range(THREADS))))

    return asyncio.run(all_of_them())


WAYS: dict[str, Callable[[Model, dict[str, Any]], Found]] = {
    "threads": in_threads,
    "threads with CUDA streams": lambda model, settings: in_threads(model, settings, apart=True),
    "streams by turns": by_turns,
    "asyncio tasks": in_tasks,
}


def main() -> None:
    from tests.families.cases import FIRST
    from tests.families.harness import pair

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    good = True
    for family in ("llama", "mamba2"):
        said = many_callers(pair(family, dict(FIRST)[family])[1].to(device))
        good &= said == "yes"
        print(f"{family} on {device}: {said}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
