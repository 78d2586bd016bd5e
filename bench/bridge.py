"""Decoding of a transformers model over our cache and over its own, by turns: `python -m bench.bridge [OUT.md]`

A random model of llama's shape decodes one token after the other, at 128 and at 16,384 tokens. The caches take turns of
a few tokens, so that both see the same machine. The table has the median time of a token, and our share of theirs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from lamina import bridge

SHAPE = dict(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=40_000,
)  # fmt: skip
CONTEXTS = [128, 16_384]
TURNS, TOKENS = 40, 5  # each cache decodes this many tokens in a turn


def filled(cache: Any, tokens: int, device: str) -> Any:
    """The cache with random keys and values of this many tokens."""
    generator = torch.Generator(device).manual_seed(0)
    for i in range(SHAPE["num_hidden_layers"]):
        shape = (1, SHAPE["num_key_value_heads"], tokens, SHAPE["head_dim"])
        cache.update(*(torch.randn(shape, generator=generator, device=device) for _ in range(2)), i)
    return cache


def turn(model: Any, cache: Any) -> list[float]:
    """Decodes TOKENS tokens; -> seconds of each"""
    ids, times = torch.ones((1, 1), dtype=torch.long, device=model.device), []
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
def measure(device: str) -> list[str]:
    """Lines of the table for one device."""
    config = transformers.LlamaConfig(**SHAPE)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(device).eval()
    lines = []
    for context in CONTEXTS:
        kinds: dict[str, Callable[[], Any]] = {
            "theirs": lambda: transformers.DynamicCache(config=config),
            "ours": lambda: bridge.Cache(model),
            "ours, fixed": partial(bridge.Cache, model, capacity=context + (TURNS + 3) * TOKENS),
        }
        caches = {name: filled(make(), context, device) for name, make in kinds.items()}
        times: dict[str, list[float]] = {name: [] for name in caches}
        for cache in caches.values():
            for _ in range(3):
                turn(model, cache)
        for _ in range(TURNS):
            for name, cache in caches.items():
                times[name] += turn(model, cache)
        median = {name: statistics.median(found) for name, found in times.items()}
        for name in ("ours", "ours, fixed"):
            ratio = median[name] / median["theirs"]
            lines.append(
                f"| {device} | {context} | {name} | {1e3 * median['theirs']:.2f} | {1e3 * median[name]:.2f} "
                f"| {ratio:.3f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    lines = [line for device in devices for line in measure(device)]
    shape = ", ".join(f"{name} {value}" for name, value in SHAPE.items())
    text = "\n".join(
        [
            "# Decoding of a transformers model over our cache and over its own", "",
            f"`python -m bench.bridge`; transformers {transformers.__version__}, PyTorch {torch.__version__}, "
            f"{torch.get_num_threads()} thread(s), float32. Random llama: {shape}.", "",
            "| device | context | cache | DynamicCache, ms a token | ours, ms a token | ours / theirs |",
            "|---|---|---|---|---|---|", *lines, "",
        ]
    )  # fmt: skip
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
