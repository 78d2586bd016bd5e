"""Decoding of a transformers model over our cache and over its own, by turns:
`python -m bench.bridge [OUT.md] [--device cpu]`; on a GPU if there is one, in bfloat16, and otherwise in float32.

Random models decode one token after the other, from 128 and from 16,384 tokens on; on a GPU, which one row leaves
waiting for Python, also 8 rows. The caches take turns of a few tokens, so that all see the same machine. The table has
the median time of a token, and our share of theirs. On a GPU a growing cache is measured twice: with transformers'
attention for both, and with `lamina.bridge.attend` for ours. `--host` measures the share of Python and PyTorch, without
a GPU (host.py).
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from bench.bridge import host
from lamina import bridge
from lamina.bridge.few_queries import by_products, flash

ONE_ROW = [(1, 128), (1, 16_384)]  # rows, tokens of each
CONTEXTS = {"cpu": ONE_ROW, "cuda": [*ONE_ROW, (8, 16_384)]}
TURNS = {"cpu": 40, "cuda": 24}
TOKENS = 5  # each cache decodes this many in a turn
SIZES: dict[str, dict[str, int]] = {
    "cpu": dict(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=40_000,
    ),
    "cuda": dict(
        vocab_size=32_000, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_000,
    ),
}  # fmt: skip
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def configs(device: str) -> dict[str, tuple[Any, list[tuple[int, int]]]]:
    """Name -> a configuration, and the rows and contexts it is measured with."""
    sizes = SIZES[device]
    windows = ["sliding_attention"] * 3 + ["full_attention"]
    states = dict(mamba_d_ssm=sizes["hidden_size"], mamba_n_heads=sizes["hidden_size"] // 64, mamba_d_head=64)
    return {
        "llama": (transformers.LlamaConfig(**sizes), CONTEXTS[device]),
        "gemma3, windows of 1,024": (
            transformers.Gemma3TextConfig(**sizes, sliding_window=1024, layer_types=windows * 2),
            CONTEXTS[device],
        ),
        "falcon_h1, attention and states": (transformers.FalconH1Config(**sizes, **states), ONE_ROW[:1]),
    }  # fmt: skip


class Pair(NamedTuple):
    """Two caches that are compared, and the models that decode over them, which have the same weights."""

    form: str
    their_model: Any
    theirs: Any
    our_model: Any
    ours: Any


def pairs(model: Any, context: int) -> list[Pair]:
    """The comparisons for one model. On a GPU ours attends; without that a growing cache is measured too."""
    on_gpu, config = model.device.type == "cuda", model.config
    most = context + (TURNS[model.device.type] + 3) * TOKENS + 1
    made = [Pair("growing", model, transformers.DynamicCache(config=config), model, bridge.Cache(model))]
    attends = bridge.attend(copy.deepcopy(model)) if on_gpu else model
    if on_gpu:
        made.append(
            Pair("growing, attend", model, transformers.DynamicCache(config=config), attends, bridge.Cache(attends))
        )
    if config.model_type != "falcon_h1":  # its static cache is compiled
        static = transformers.StaticCache(config=config, max_cache_len=most)
        form = "fixed, attend" if on_gpu else "fixed"
        made.append(Pair(form, model, static, attends, bridge.Cache(attends, capacity=most)))
    return made


def turn(model: Any, cache: Any, rows: int) -> list[float]:
    """Decodes TOKENS tokens; -> seconds of each"""
    ids, times = torch.ones((rows, 1), dtype=torch.long, device=model.device), []
    for _ in range(TOKENS):
        _wait(model)
        start = time.perf_counter()
        model(ids, past_key_values=cache, use_cache=True)
        _wait(model)
        times.append(time.perf_counter() - start)
    return times


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def measure(name: str, model: Any, rows: int, context: int) -> list[str]:
    """Lines of the table for one model, number of rows and context."""
    lines = []
    for pair in pairs(model, context):
        both = {"theirs": (pair.their_model, pair.theirs), "ours": (pair.our_model, pair.ours)}
        times: dict[str, list[float]] = {whose: [] for whose in both}
        for one, cache in both.values():
            host.fill(one, cache, rows, context)
            for _ in range(3):
                turn(one, cache, rows)
        for i in range(TURNS[model.device.type]):  # who comes first alternates too
            for whose in ("theirs", "ours") if i % 2 else ("ours", "theirs"):
                times[whose] += turn(*both[whose], rows)
        their_time, our_time = (statistics.median(times[whose]) for whose in ("theirs", "ours"))
        lines.append(
            f"| {name} | {rows} | {context} | {type(pair.theirs).__name__} | {pair.form} | {1e3 * their_time:.2f} "
            f"| {1e3 * our_time:.2f} | {our_time / their_time:.3f} |"
        )
        print(lines[-1], flush=True)
    return lines


@torch.inference_mode()
def ways() -> list[str]:
    """Lines of a table: one query over the keys of one layer, by the ways that `lamina.bridge.attend` has, and by
    PyTorch's own choice once it has planned this length. Microseconds of the device, in a CUDA graph."""
    sizes, lines = SIZES["cuda"], ["| keys | flash, us | products, us | PyTorch's choice, us |", "|---|---|---|---|"]
    Hq, H, D = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    for S in (128, 1024, 4096, 16_384):
        q = torch.randn(1, Hq, 1, D, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, H, S + 99, D, device="cuda", dtype=torch.bfloat16)[:, :, :S] for _ in range(2))
        calls = [
            partial(flash, q, k, v, D**-0.5),
            partial(by_products, q, k, v, None, D**-0.5),
            partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, enable_gqa=True),
        ]
        expected = calls[-1]().float().transpose(1, 2)
        wrong = [(call().float() - expected).abs().max().item() > 0.02 for call in calls[:-1]] + [False]
        cells = [f"{_replayed(call):.1f}{' WRONG' * bad}" for call, bad in zip(calls, wrong, strict=True)]
        lines.append(f"| {S} | " + " | ".join(cells) + " |")
    print("\n".join(lines), flush=True)
    return lines


def _replayed(call: Callable[[], Any]) -> float:
    """Microseconds of a call in a CUDA graph of 20 of them."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 20)
    return min(times)


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return f"{torch.get_num_threads()} thread(s) of {names[0].split(': ')[-1] if names else platform.processor()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--host", action="store_true", help="the host's share alone, with models of almost no size")
    arguments = parser.parse_args()
    if arguments.host:
        write(arguments.out, host_report())
        return
    device, lines = arguments.device, []
    details = ways() if device == "cuda" else []
    for name, (config, contexts) in configs(device).items():
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[device]).eval()
        for rows, context in contexts:
            lines += measure(name, model, rows, context)
    sizes = ", ".join(f"{name} {value}" for name, value in SIZES[device].items())
    text = "\n".join(
        [
            "# Decoding of a transformers model over our cache and over its own", "",
            f"Machine: {machine(device)}, {date.today()}. Command: `python -m bench.bridge`; transformers "
            f"{transformers.__version__}, PyTorch {torch.__version__}, {DTYPES[device]}. Random models: {sizes}.", "",
            "| model | rows | from token | their cache | ours | theirs, ms a token | ours, ms a token | "
            "ours / theirs |",
            "|---|---|---|---|---|---|---|---|", *lines, "", *details, "",
        ]
    )  # fmt: skip
    write(arguments.out, text)


def host_report() -> str:
    return "\n".join(
        [
            "# What a token costs the host, over our cache and over transformers' own", "",
            f"Machine: {machine('cpu')}, {date.today()}. Command: `python -m bench.bridge --host`; transformers "
            f"{transformers.__version__}, PyTorch {torch.__version__}. Random models: "
            f"{', '.join(f'{name} {value}' for name, value in host.SIZES.items())}, "
            f"windows of {host.WINDOW} tokens.", "",
            *host.lines(), "",
        ]
    )  # fmt: skip


def write(out: Path | None, text: str) -> None:
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main()
