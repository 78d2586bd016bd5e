"""What a fork costs in pages of a pool and without them: `python -m bench.fork [SHAPE] [TOKENS] [LAYERS]`

Without arguments the layers of llama-3.1-8b and a row of 16400 tokens: all 32 layers on a GPU, 4 on a CPU. No model is
needed: what it must remember is taken from its shape, and keys and values are whatever the memory held before.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from lamina.cache import Cache, Pool
from lamina.cache.spec import LayerSpecs
from lamina.cache.summary import lines, size
from lamina.checkpoint.shapes import find_shape
from lamina.model import Model
from lamina.planning.meta_model import subject_of

RUNS, PAGE = 30, 64
Made = TypeVar("Made")


class Remembers(nn.Module):
    def __init__(self, specs: LayerSpecs) -> None:
        super().__init__()
        self.specs = specs


class SpecsAlone(Model):
    """A model that says what must be remembered, and does nothing."""

    def __init__(self, like: Model, layers: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.vocab = like.vocab
        self.blocks = nn.ModuleList(Remembers(specs) for specs in like.specs[:layers])
        self.one = nn.Parameter(torch.zeros(1, dtype=dtype, device=device), requires_grad=False)


def passed_over(cache: Cache, tokens: int) -> None:
    """What a pass does besides the model."""
    step = cache.step(tokens)
    step.ran = True
    step.commit()


def filled(cache: Cache, tokens: int) -> Cache:
    """A cache with rows of this many tokens, whose values were never written."""
    passed_over(cache, tokens)
    assert cache.model is not None
    cache._kept_logits(cache.model.vocab, cache.dtype)
    return cache


def main(shape: str = "llama-3.1-8b", tokens: int = 16400, layers: int | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    like = subject_of(find_shape(shape).config).model
    model = SpecsAlone(like, layers or (len(like.blocks) if device == "cuda" else 4), dtype, device)
    pool = Pool(model, tokens=2 * tokens, page=PAGE)
    print(f"\n{shape}, {len(model.blocks)} layers, a row of {tokens} tokens, {dtype} on {device}, medians of {RUNS}\n")
    print("| kept | fork, ms | of it until the host goes on | bytes copied | first token after it, ms | pages copied |")
    print("|---|---|---|---|---|---|")
    for kept, cache in (("plain", model.new_cache()), (f"pages of {PAGE}", model.new_cache(pool=pool))):
        filled(cache, tokens)
        whole, host, first = [], [], []
        copies = pool.copied
        for _ in range(RUNS):
            fork, passed, waited = timed(cache.fork)
            host.append(passed)
            whole.append(waited)
            first.append(timed(lambda fork=fork: passed_over(fork, 1))[2])
        in_pages = 0 if cache.pages is None else sum(cache.pages.own_and_shared)
        nbytes = sum(line.nbytes for line in lines(cache)) - in_pages
        told = "" if cache.pages is None else f"{(pool.copied - copies) / RUNS:g}"
        medians = [statistics.median(times) * 1e3 for times in (whole, host, first)]
        print(f"| {kept} | {medians[0]:.3f} | {medians[1]:.3f} | {size(nbytes)} | {medians[2]:.3f} | {told} |")
    print(f"\n{pool}")


def timed(do: Callable[[], Made]) -> tuple[Made, float, float]:
    """What it gives, the seconds until the host went on, and those until the device was ready."""
    wait()
    started = time.perf_counter()
    made = do()
    passed = time.perf_counter() - started
    wait()
    return made, passed, time.perf_counter() - started


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:2], *(int(number) for number in sys.argv[2:]))
