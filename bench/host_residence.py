"""Decoding from a cache on the host: `python -m bench.host_residence [OUT.md]`

On a GPU: llama-3.1-8b's shape with random weights, one row of 32,768 tokens. First the link is measured, by copies out
of pinned memory as large as one part of a layer; then a step with the bytes on the host and one with the bytes on the
device, both as plain passes. Before that, small models run the same histories with both residences, and must agree.
Without a GPU the same runs small, to see that it runs.
"""

from __future__ import annotations

import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
from torch import Tensor

from lamina.bench.measure import seconds
from lamina.bench.random_model import random_model
from lamina.cache.cache import Cache
from lamina.cache.summary import size
from lamina.checkpoint.shapes import SHAPES
from lamina.model import Model
from lamina.planning.context import fill_context

SHARE, LAYERS = 0.8, 2  # to reach: of the link's bandwidth, with at most this many layers' bytes on the device
SMALL = ["llama-3.1-8b", "gemma-2-9b", "mamba2-2.7b", "falcon-h1-7b", "qwen3-next", "deepseek-v2-lite"]


@dataclass(frozen=True)
class Measured:
    """One residence: seconds of a step, bytes that it moves over the link, and the most held besides weights."""

    step: float
    moved: float
    peak: int


def measure(model: Model, residence: str, tokens: int, steps: int) -> Measured:
    """Steps of one token at a context of `tokens` in all, those that are measured included."""
    cuda = model.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    cache = fill_context(model.new_cache(capacity=tokens, residence=residence), tokens - steps - 1)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(ids, cache=cache, logits="last")
    fetched = cache.fetcher
    moved = 0 if fetched is None else fetched.moved_in + fetched.moved_out

    def run() -> None:
        for _ in range(steps):
            model(ids, cache=cache, logits="last")

    took = seconds(run, model.device) / steps
    moved = 0 if fetched is None else (fetched.moved_in + fetched.moved_out - moved) // steps
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    return Measured(took, moved, peak)


def link_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes a second of copies of this size from pinned memory, one after the other; the best of several runs."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(4)]
    near = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run() -> None:
        for one in host:
            near.copy_(one, non_blocking=True)

    return max(len(host) * nbytes / seconds(run, device) for _ in range(5))


def agree(model: Model, tokens: int, seed: int = 0) -> float:
    """How far two residences are apart, relative to the largest logit, over one history: ragged, rewound, reordered."""
    rng = random.Random(seed)
    draw = torch.Generator().manual_seed(seed)
    far, near = (model.new_cache(3, slack=4, residence=where) for where in ("host", "device"))
    worst = 0.0
    for T in [tokens, 1, 1, tokens // 3, 1, 4, 1, 1, 2, 1, 1, 1]:
        ids = torch.randint(model.vocab, (3, T), generator=draw)
        counts = [rng.randint(1, T) for _ in range(3)] if T > 1 else None
        outs = [model(ids, cache=cache, counts=counts, logits="last") for cache in (far, near)]
        worst = max(worst, apart(outs))
        back = [rng.randint(0, 2) for _ in range(3)]
        rows = [rng.randrange(3) for _ in range(3)]
        for cache in (far, near):
            cache.rewind([min(n, m) for n, m in zip(back, cache.rewindable.tolist(), strict=True)])
            if T == 1:
                cache.reorder(rows)
        if T == 4:
            far, near = far.fork(), Cache.join([near.select([0]), near.select([1, 2])])
    return worst


def waits(model: Model) -> str:
    """Where a decode pass, whose counts the host knows, waits for the device; "nowhere" is right."""
    cache = model.new_cache(3, slack=2, residence="host")
    ids = torch.zeros(3, 8, dtype=torch.int64, device=model.device)
    model(ids, cache=cache, counts=[8, 3, 1])
    model(ids[:, :1], cache=cache)  # memory for new states is there from now on
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            model(ids[:, :1], cache=cache)
            step = cache.step(4, [4, 2, 0])
            model.forward(ids[:, :4], step)
            step.commit([1, 2, 0])
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "nowhere"


def apart(outs: Sequence[Tensor | None]) -> float:
    one, two = outs
    assert one is not None and two is not None
    return float((one.float() - two.float()).abs().max() / two.float().abs().max())


def few_layers(name: str) -> dict[str, Any]:
    """A shape with four layers. Experts are few and all visited: a choice between them would enlarge rounding."""
    config = dict(SHAPES[name].config) | {"num_hidden_layers": 4, "vocab_size": 1024}
    experts = {key: 4 for key in ("num_experts", "n_routed_experts", "num_experts_per_tok") if key in config}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:4]
    return config | experts


def main(out: str | None = None) -> None:
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    machine = torch.cuda.get_device_name() if cuda else platform.machine()
    command = "Command: `python -m bench.host_residence`."
    lines = [f"Machine: {machine}, PyTorch {torch.__version__}, {date.today()}. {command}", ""]
    ok = True
    if cuda:
        lines += ["| family, float32, 4 layers | host and device apart, relative | waits |", "|---|---|---|"]
        for name in SMALL:
            started, model = time.perf_counter(), random_model(few_layers(name), torch.float32, device)
            far = max(agree(model, 3000, seed) for seed in range(2))
            waiting = waits(model)
            ok &= far < 1e-3 and waiting == "nowhere"
            lines.append(f"| {name} | {far:.1e} | {waiting} |")
            print(lines[-1], f"{time.perf_counter() - started:.0f} s", flush=True)
            del model
        lines.append("")
    shape, tokens, steps = ("llama-3.1-8b", 32768, 12) if cuda else ("smollm2-135m", 128, 2)
    config = SHAPES[shape].config if cuda else dict(SHAPES[shape].config, num_hidden_layers=3)
    model = random_model(config, torch.bfloat16 if cuda else torch.float32, device)
    layer = model.new_cache(capacity=tokens).nbytes // len(model.blocks)
    link = statistics.median(link_bandwidth(model.device, layer // 2) for _ in range(3))
    found = {where: measure(model, where, tokens, steps) for where in ("host", "device")}
    host, near = found["host"], found["device"]
    link = max(link, link_bandwidth(model.device, layer // 2))
    share = host.moved / host.step / link
    worth = host.peak / layer
    lines += [
        f"{shape}, 1 row of {tokens:,} tokens, {model.dtype}: {size(layer)} a layer, {len(model.blocks)} layers. Link: "
        f"{link / 1e9:.1f} GB/s, by copies of {size(layer // 2)}.",
        "",
        "| residence | step, ms | over the link | of the link's bandwidth | peak besides weights | layers' worth |",
        "|---|---|---|---|---|---|",
        f"| host | {host.step * 1e3:.2f} | {size(round(host.moved))} | {share:.1%} | {size(host.peak)} | {worth:.2f} |",
        f"| device | {near.step * 1e3:.2f} | | | {size(near.peak)} | {near.peak / layer:.2f} |",
        "",
        f"To reach: {SHARE:.0%} of the link's bandwidth; {LAYERS} layers' worth, and what any pass holds besides.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        with open(out, "w") as file:
            file.write(text)
    sys.exit(not (ok and (not cuda or share >= SHARE)))


if __name__ == "__main__":
    main(*sys.argv[1:2])
