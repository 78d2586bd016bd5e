"""Where the time of a prompt goes, kernel by kernel: `python -m bench.profile_prefill SHAPE PROMPTS [CHUNK]`

A prompt of random tokens, or several (`64x100-1024`), is read into an empty cache, whole or in chunks. The first line
has the wall clock time, the time that kernels run, host time per pass, and peak memory beside the weights; the table
the kernels by their share.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from lamina.bench.prefill import Prompts
from lamina.bench.random_model import random_model
from lamina.bench.subjects import Lamina
from lamina.checkpoint.shapes import find_shape


def main(shape: str, text: str, chunk: str | None = None) -> None:
    device = torch.device("cuda")
    model = random_model(find_shape(shape).config, torch.bfloat16, device)
    prompts = Prompts.of(text, None if chunk is None else int(chunk))
    ids, read = prompts.ids(model.vocab, device), Lamina(model).prefill
    read(ids, prompts)
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    walls, hosts = [], []
    for _ in range(3):
        start = time.perf_counter()
        read(ids, prompts)
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - weights
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        read(ids, prompts)
        torch.cuda.synchronize()
    times, often = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / 1e3
            often[event.name] += 1
    passes = -(-max(prompts.counts) // (prompts.chunk or max(prompts.counts)))
    print(
        f"\n{shape}, {prompts}, {torch.cuda.get_device_name()}: "
        f"{sorted(walls)[1] * 1e3:.1f} ms, kernels {sum(times.values()):.1f} ms, "
        f"{sum(often.values()) // passes} launches and "
        f"{sorted(hosts)[1] * 1e3 / passes:.1f} ms of the host a pass, {peak / 2**30:.2f} GiB beside the weights\n"
    )
    print("| kernel | launches | ms |\n|---|---|---|")
    for name, ms in sorted(times.items(), key=lambda one: -one[1])[:16]:
        print(f"| {name[:90]} | {often[name]} | {ms:.2f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
