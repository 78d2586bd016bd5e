"""The memory of 64 ragged prompts, rehearsed on the meta device: `python -m bench.prompts.ragged [--measure]`

Needs no GPU: tensors are made and freed as in a real pass, so the peak is that of PyTorch's allocator. Prints cache and
pass of each line, and the largest tensors alive at the peak with the line of code that made them. --measure: on a GPU
instead, the allocator's peak beside the weights, and the time of the second run.
"""

from __future__ import annotations

import sys
import time
import traceback

import torch

from lamina.bench.measure import Peak
from lamina.bench.prefill import Prompts
from lamina.bench.random_model import random_model
from lamina.cache.cache import Cache
from lamina.cache.pool.pool import Pool
from lamina.checkpoint.shapes import SHAPES, find_shape
from lamina.model import Model
from lamina.planning.meta_model import subject_of
from lamina.rehearsal.meter import AllocationMeter
from lamina.rehearsal.rehearsal import Fused, as_on_gpu
from lamina.runtime.feed import feed

GIB = 2**30
PROMPTS = Prompts.of("64x100-1024")
LINES = (("llama-3.1-8b", None, 10.0), ("llama-3.1-8b", 64, 6.5), ("falcon-h1-7b", None, 14.0))  # page, target in GiB
SHOWN = 6  # tensors


class PeakMeter(AllocationMeter):
    """Also knows which tensors were alive at the peak: (bytes, who made it)."""

    def __init__(self) -> None:
        super().__init__()
        self.at_peak: list[tuple[int, str]] = []
        self._alive: dict[int, tuple[int, str]] = {}

    def _add(self, storage: torch.UntypedStorage) -> None:
        calls = [call for call in traceback.extract_stack(limit=16) if "/lamina/" in call.filename]
        own = [call for call in calls if "/rehearsal/" not in call.filename]
        made_by = f"{own[-1].filename.split('/lamina/')[-1]}: {own[-1].line}" if own else ""
        self._alive[storage._cdata] = storage.nbytes(), made_by
        before = self.most
        super()._add(storage)
        if self.most > before:
            self.at_peak = list(self._alive.values())

    def _drop(self, address: int, nbytes: int) -> None:
        self._alive.pop(address, None)
        super()._drop(address, nbytes)


def cache_of(model: Model, page: int | None) -> tuple[Cache, Pool | None]:
    """A cache for the prompts; with a page, in a pool that has just enough."""
    counts = PROMPTS.counts
    pool = None if page is None else Pool(model, sum(-(-n // page) * page for n in counts), len(counts), page)
    return model.new_cache(len(counts), pool=pool).reserve(max(counts)), pool


def rehearse(shape: str, page: int | None) -> tuple[int, PeakMeter]:
    """-> bytes of the cache, and what the pass held"""
    model, counts = subject_of(dict(SHAPES[shape].config), "bfloat16").model, list(PROMPTS.counts)
    with torch.device("meta"), torch.no_grad(), as_on_gpu(), Fused():
        cache, pool = cache_of(model, page)
        ids = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        with PeakMeter() as held:
            feed(model, cache, ids, counts=counts)
    return cache.nbytes if pool is None else pool.nbytes, held


@torch.no_grad()
def measure() -> None:
    """Reads the prompts on a GPU, each line twice."""
    device = torch.device("cuda")
    print(f"{PROMPTS}, bfloat16, {torch.cuda.get_device_name()}\n")
    print("| shape | GiB beside the weights | target | ms |\n|---|---|---|---|")
    model, held = None, ""
    for shape, page, target in LINES:
        if shape != held:
            model = None
            model, held = random_model(find_shape(shape).config, torch.bfloat16, device), shape
        assert model is not None
        ids = PROMPTS.ids(model.vocab, device)
        for _ in range(2):
            torch.cuda.empty_cache()
            with Peak(device) as peak:
                began = time.perf_counter()
                cache, pool = cache_of(model, page)
                feed(model, cache, ids, counts=list(PROMPTS.counts))
                torch.cuda.synchronize()
                seconds = time.perf_counter() - began
            del cache, pool
        assert peak.nbytes is not None
        name = shape if page is None else f"{shape}, pool with pages of {page}"
        print(f"| {name} | {peak.nbytes / GIB:.2f} | ≤ {target:g} | {seconds * 1e3:.0f} |", flush=True)


def main() -> None:
    if "--measure" in sys.argv[1:]:
        return measure()
    print(f"{PROMPTS}, bfloat16, GiB, rehearsed\n")
    print("| shape | cache | pass | together | target |\n|---|---|---|---|---|")
    largest = []
    for shape, page, target in LINES:
        cache, held = rehearse(shape, page)
        name = shape if page is None else f"{shape}, pool with pages of {page}"
        sizes = " | ".join(f"{n / GIB:.2f}" for n in (cache, held.most, cache + held.most))
        print(f"| {name} | {sizes} | ≤ {target:g} |", flush=True)
        top = sorted(held.at_peak, reverse=True)[:SHOWN]
        largest.append(f"{name}:\n" + "\n".join(f"  {n / 2**20:6.0f} MiB  {made_by}" for n, made_by in top))
    print("\nLargest tensors of the pass at its peak\n\n" + "\n\n".join(largest))


if __name__ == "__main__":
    main()
