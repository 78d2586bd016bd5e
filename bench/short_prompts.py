"""Short prompts, captured and by plain passes: `python -m bench.short_prompts [SHAPE ...] [--tokens 64,128,512]`

For each shape and number of tokens: milliseconds and host milliseconds of a prompt into an empty cache by a plain pass
and by a captured graph, behind a row of 2,048 tokens by the graph, the time that capturing took, and memory beside the
weights while plain passes run and that all graphs keep. "error" is the difference between the logits of both ways
behind that row; "noise" the same between two plain ways, one pass and two: where routers choose experts by scores that
nearly tie, roundings choose others, and random weights make much of that. --exact compares in float32, in models of
four layers, where roundings are small, and times nothing. --variants times prompts that are given as embeddings, and
texts that are scored. --host needs no GPU: what a captured prompt costs the host (`prompt_host.py`).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.kernels.build import config_of
from bench.prompt_host import LIKE_LLAMA, print_host
from lamina.bench.measure import random_ids
from lamina.bench.random_model import random_model
from lamina.cache.cache import Cache
from lamina.checkpoint.shapes import find_shape
from lamina.errors import LaminaError
from lamina.generation.feed import prefill
from lamina.generation.prefill.scorer import Scorer
from lamina.generation.prefill.watch import Watch
from lamina.generation.prompt import Prompt
from lamina.model import Model
from lamina.runtime.prompts.captured_prompt import FIRST_USE, CapturedPrompt

SHAPES = ("llama-3.1-8b", "gemma-2-9b", "mamba2-2.7b", "falcon-h1-7b", "qwen3-next", "deepseek-v2-lite")
BEHIND, TIMES = 2048, 7
COLUMNS = (
    "shape", "tokens", "plain ms", "host ms", "captured ms", "host ms", "behind 2,048", "capture s", "plain GiB",
    "graphs GiB", "error", "noise",
)  # fmt: skip
VARIANT_COLUMNS = "shape", "tokens", "of", "plain ms", "host ms", "captured ms", "host ms", "how"


def timed(run: Callable[[Cache], object], new: Callable[[], Cache]) -> tuple[float, float]:
    """-> (milliseconds, host milliseconds) of a run over a new cache, the median of a few."""
    walls, hosts = [], []
    for _ in range(TIMES):
        cache = new()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(cache)
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
    return statistics.median(walls) * 1e3, statistics.median(hosts) * 1e3


def errors_of(model: Model, one: CapturedPrompt, ids: Tensor, filled: Cache) -> tuple[float, float]:
    """The largest difference to the logits of a plain pass behind a filled cache, relative to the largest logit: of the
    graph, and of two plain passes, the second of which reads 16 tokens."""
    by_graph, by_pass, in_two = filled.fork(), filled.fork(), filled.fork()
    one.feed(by_graph, ids)
    model(ids, cache=by_pass, logits="last")
    for piece in (ids[:, :-16], ids[:, -16:]):
        model(piece, cache=in_two, logits="last")
    found, expected, other = (cache.logits for cache in (by_graph, by_pass, in_two))
    assert found is not None and expected is not None and other is not None
    error, noise = (float((x - expected).float().abs().max() / expected.float().abs().max()) for x in (found, other))
    return error, noise


@torch.no_grad()
def measure(name: str, widths: list[int]) -> None:
    gc.collect()  # the model before
    torch.cuda.empty_cache()
    device = torch.device("cuda")
    model = random_model(find_shape(name).config, torch.bfloat16, device)
    most = max(widths)
    filled = model.new_cache(1).reserve(BEHIND + most)
    model(random_ids((1, BEHIND), model.vocab, device), cache=filled, logits="last")
    one = model.graphs.prompt_of(1, filled)
    held = 0
    for tokens in sorted(widths, reverse=True):
        ids = random_ids((1, tokens), model.vocab, device)

        def new() -> Cache:
            return model.new_cache(1).reserve(most)

        def by_pass(cache: Cache, ids: Tensor = ids) -> None:
            model(ids, cache=cache, logits="last")

        def by_graph(cache: Cache, ids: Tensor = ids) -> None:
            one.feed(cache, ids)

        by_pass(new())
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        plain = timed(by_pass, new)
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        start = time.perf_counter()
        by_graph(new())
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        torch.cuda.empty_cache()
        held += torch.cuda.memory_reserved() - reserved
        captured = timed(by_graph, new)
        behind = timed(by_graph, filled.fork)
        error, noise = errors_of(model, one, ids, filled)
        print(
            f"| {name} | {tokens} | {plain[0]:.1f} | {plain[1]:.1f} | {captured[0]:.2f} | {captured[1]:.2f} "
            f"| {behind[0]:.2f} | {took:.1f} | {peak / 2**30:.2f} | {held / 2**30:.2f} | {error:.1e} | {noise:.1e} |",
            flush=True,
        )
    one.release()


@torch.no_grad()
def measure_variants(name: str, widths: list[int]) -> None:
    """Prints milliseconds and host milliseconds of prompts of embeddings and of scored texts, into an empty cache."""
    device = torch.device("cuda")
    model = random_model(find_shape(name).config, torch.bfloat16, device)
    for tokens in widths:
        ids = random_ids((1, tokens), model.vocab, device)
        embeds, rows = model.embed(ids), ids.tolist()

        def new(tokens: int = tokens) -> Cache:
            return model.new_cache(1).reserve(tokens)

        def embedded(cache: Cache, embeds: Tensor = embeds) -> Watch:
            return _watched(model, Prompt(None, [embeds.shape[1]], embeds), cache, Watch())

        def scored(cache: Cache, rows: list[list[int]] = rows) -> Watch:
            watch = Watch(scorer=Scorer(model, rows))
            return _watched(model, Prompt(torch.tensor(rows), [len(rows[0])]), cache, watch)

        for what, run in (("embeddings", embedded), ("scores", scored)):
            model.uncaptured = "plain passes are timed"
            run(new())
            plain = timed(run, new)
            model.uncaptured = None
            for _ in range(FIRST_USE):
                how = run(new()).how
            captured = timed(run, new)
            times = " | ".join(f"{one:.2f}" for one in (*plain, *captured))
            print(f"| {name} | {tokens} | {what} | {times} | {how} |", flush=True)


def _watched(model: Model, prompt: Prompt, cache: Cache, watch: Watch) -> Watch:
    prefill(model, prompt, cache, None, watch)
    return watch


@torch.no_grad()
def compare(name: str, widths: list[int]) -> None:
    """Prints the errors of four layers in float32."""
    device = torch.device("cuda")
    model = random_model(config_of(name), torch.float32, device)
    filled = model.new_cache(1).reserve(BEHIND + max(widths))
    model(random_ids((1, BEHIND), model.vocab, device), cache=filled, logits="last")
    with model.graphs.prompt_of(1, filled) as one:
        for tokens in widths:
            error, noise = errors_of(model, one, random_ids((1, tokens), model.vocab, device), filled)
            print(f"{name}, four layers in float32, {tokens} tokens: error {error:.1e}, noise {noise:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--tokens", default="64,128,512")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--host", action="store_true")
    given = parser.parse_args()
    widths = [int(number) for number in given.tokens.split(",")]
    if given.host:
        print_host(given.shapes or LIKE_LLAMA, widths)
        return
    print(torch.cuda.get_device_name())
    run, columns = (measure_variants, VARIANT_COLUMNS) if given.variants else (measure, COLUMNS)
    if not given.exact:
        print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name in given.shapes or SHAPES:
        try:
            (compare if given.exact else run)(name, widths)
        except (LaminaError, RuntimeError) as problem:
            print(f"| {name} | {type(problem).__name__}: {str(problem)[:1500]} |", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
