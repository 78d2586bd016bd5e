"""The memory of prompts on a GPU: planned, foreseen and measured; chunks that fit: `python -m bench.prompts.memory`

planned    `lamina.plan`: a rehearsal on the meta device
foreseen   `lamina.rehearsal.cost`, from six small passes: what chunks are chosen by (with its margin of a quarter)
measured   the allocator's peak above weights and cache
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

import lamina
from lamina.bench.random_model import random_model
from lamina.checkpoint.shapes import SHAPES
from lamina.generation.feed import prefill
from lamina.generation.prefill.chunks import chunk_for
from lamina.generation.prompt import from_rows
from lamina.model import Model
from lamina.rehearsal.cost import pass_cost
from lamina.rehearsal.free_memory import free_memory

GIB = 2**30
NAMES = ("llama-3.1-8b", "gemma-2-9b", "mamba2-2.7b", "falcon-h1-7b", "qwen3-next", "deepseek-v2-lite")
LAYERS = 8  # of each shape: scratch does not depend on it
PROMPTS = ((8192, None), (32768, 4096))  # tokens, chunk


def main(names: list[str]) -> None:
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {LAYERS} layers of each shape, GiB\n")
    print("| shape | prompt | chunk | planned | foreseen | measured | measured / planned |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        config = dict(SHAPES[name].config, num_hidden_layers=LAYERS)
        model = random_model(config, torch.bfloat16, "cuda")
        for tokens, chunk in PROMPTS:
            memory_line(name, config, model, tokens, chunk)
    model = random_model(dict(SHAPES[NAMES[0]].config, num_hidden_layers=LAYERS), torch.bfloat16, "cuda")
    print(f"\n{model.explain()}\n")
    ragged(model)
    small_prompts(model)
    scoring(model)
    little_memory(model)


def memory_line(name: str, config: dict[str, object], model: Model, tokens: int, chunk: int | None) -> None:
    planned = lamina.plan(config, length=tokens, prefill_chunk=chunk, dtype="bfloat16").scratch or 0
    cost = pass_cost(model, model.new_cache())
    foreseen = 0 if cost is None else cost.nbytes(1, chunk or tokens, tokens)
    cache = model.new_cache().reserve(tokens)
    prompt = from_rows([torch.randint(100, (tokens,)).tolist()])
    with torch.no_grad():
        used = peak(lambda: prefill(model, prompt, cache, chunk or tokens))
    values = " | ".join(f"{x / GIB:.3f}" for x in (planned, foreseen, used))
    print(f"| {name} | {tokens:,} | {chunk or '–'} | {values} | {used / max(planned, 1):.2f} |", flush=True)


def peak(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ragged(model: Model) -> None:
    """Decoding rows beside one that brings a prompt: packed, the same logits as alone."""
    ids = torch.randint(3, 100, (9, 2048), device="cuda")
    counts = [2048, *[1] * 8]
    cache = model.new_cache(9).reserve(2200)
    model(ids[:, :100], cache=cache, logits="last")
    torch.cuda.synchronize()
    used = peak(lambda: model(ids, cache=cache, counts=counts, logits="last"))
    logits, worst = cache.logits, 0.0
    assert logits is not None
    for row in (0, 1, 8):
        alone = model([cache.tokens[row]], logits="last")
        assert alone is not None
        worst = max(worst, float((alone[0] - logits[row]).abs().max() / alone.abs().max()))
    print(f"mixed pass of {sum(counts):,} tokens in 9 rows: {used / GIB:.2f} GiB, error {worst:.2g}", flush=True)


def small_prompts(model: Model) -> None:
    """What choosing a chunk costs a prompt that fits."""
    cache, best = model.new_cache(), {}
    for tokens in (64, 512, 4096, 16384):
        best[tokens] = min(timed(lambda tokens=tokens: chunk_for(model, cache, [tokens])) for _ in range(50))
    print(
        "choosing a chunk takes " + ", ".join(f"{t * 1e6:.0f} µs at {n:,} tokens" for n, t in best.items()), flush=True
    )


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def scoring(model: Model) -> None:
    """Scores of a long text, beside the bytes that all its logits would take."""
    ids = torch.randint(100, (1, 32768))
    model.score(ids[:, :512])
    cache = model.new_cache().reserve(32768)
    seconds: list[float] = []
    used = peak(lambda: seconds.append(timed(lambda: model.score(ids, cache=cache))))
    fed = min(timed(lambda: model(ids, cache=model.new_cache(), logits="last")) for _ in range(2))
    every = ids.numel() * model.vocab * 4
    print(
        f"scoring {ids.numel():,} tokens: {used / GIB:.2f} GiB beside the cache ({every / GIB:.1f} in logits of all "
        f"tokens), {seconds[0]:.2f} s; without scores {fed:.2f} s",
        flush=True,
    )


def little_memory(model: Model) -> None:
    """Prompts that only fit in chunks, with most of the memory taken."""
    for left in (6.0, 3.0):
        torch.cuda.empty_cache()
        free = free_memory(torch.device("cuda")) or 0
        filler = torch.empty(int(free - left * GIB), dtype=torch.uint8, device="cuda")
        result = model.generate(torch.randint(100, (1, 65536)), 1, beyond_context=True)
        print(
            f"{left:.0f} GiB free, 65,536 tokens: {result.prompt_how}, {result.timing.prompt_seconds:.2f} s", flush=True
        )
        del filler, result


if __name__ == "__main__":
    main(sys.argv[1:] or list(NAMES))
