"""Where the time of a prompt goes, kernel by kernel: `python -m bench.profile_prefill SHAPE TOKENS [CHUNK]`

A prompt of random tokens is read into an empty cache, whole or in chunks. The first line has the wall clock time, the
time that kernels run, host time per pass, and peak memory beside the weights; the table the kernels by their share.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lamina.bench.measure import random_ids
from lamina.bench.random_model import random_model
from lamina.checkpoint.shapes import find_shape
from lamina.model import Model


@torch.no_grad()
def read(model: Model, ids: Tensor, chunk: int) -> None:
    """One prompt in chunks, for the logits of the last token."""
    cache = model.new_cache(ids.shape[0]).reserve(ids.shape[1])
    for piece in ids.split(chunk, 1):
        model(piece, cache=cache, logits="last")


def main(shape: str, tokens: int, chunk: int | None = None) -> None:
    device = torch.device("cuda")
    model = random_model(find_shape(shape).config, torch.bfloat16, device)
    ids, chunk = random_ids((1, tokens), model.vocab, device), chunk or tokens
    read(model, ids, chunk)
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    walls, hosts = [], []
    for _ in range(3):
        start = time.perf_counter()
        read(model, ids, chunk)
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - weights
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        read(model, ids, chunk)
        torch.cuda.synchronize()
    times, often = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / 1e3
            often[event.name] += 1
    passes = -(-tokens // chunk)
    print(
        f"\n{shape}, {tokens} tokens in chunks of {chunk}, {torch.cuda.get_device_name()}: "
        f"{sorted(walls)[1] * 1e3:.1f} ms, kernels {sum(times.values()):.1f} ms, "
        f"{sum(often.values()) // passes} launches and "
        f"{sorted(hosts)[1] * 1e3 / passes:.1f} ms of the host a pass, {peak / 2**30:.2f} GiB beside the weights\n"
    )
    print("| kernel | launches | ms |\n|---|---|---|")
    for name, ms in sorted(times.items(), key=lambda one: -one[1])[:16]:
        print(f"| {name[:90]} | {often[name]} | {ms:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))
