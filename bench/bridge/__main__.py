"""Decoding of a transformers model over our cache and over its own, by turns:
`python -m bench.bridge [OUT.md] [--device cpu]`; on a GPU if there is one, in bfloat16, and otherwise in float32.

Random models decode one token after the other, from 128 and from 16,384 tokens on. The caches take turns of a few
tokens, so that all see the same machine. The table has the median time of a token, and our share of theirs.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from lamina import bridge

CONTEXTS = [128, 16_384]
TURNS, TOKENS = 40, 5  # each cache decodes this many tokens in a turn
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


def configs(sizes: dict[str, int]) -> dict[str, tuple[Any, list[int]]]:
    """Name -> a configuration, and the contexts it is measured at."""
    windows = ["sliding_attention"] * 3 + ["full_attention"]
    states = dict(mamba_d_ssm=sizes["hidden_size"], mamba_n_heads=sizes["hidden_size"] // 64, mamba_d_head=64)
    return {
        "llama": (transformers.LlamaConfig(**sizes), CONTEXTS),
        "gemma3, windows of 1,024": (
            transformers.Gemma3TextConfig(**sizes, sliding_window=1024, layer_types=windows * 2), CONTEXTS,
        ),
        "falcon_h1, attention and states": (transformers.FalconH1Config(**sizes, **states), CONTEXTS[:1]),
    }  # fmt: skip


def pairs(model: Any, context: int) -> dict[str, tuple[Any, Any]]:
    """Name -> their cache and ours."""
    most, config = context + (TURNS + 3) * TOKENS + 1, model.config
    made = {"growing": (transformers.DynamicCache(config=config), bridge.Cache(model))}
    if config.model_type != "falcon_h1":  # its static cache is compiled
        fixed = transformers.StaticCache(config=config, max_cache_len=most), bridge.Cache(model, capacity=most)
        made["fixed"] = fixed
    return made


def fill(model: Any, cache: Any, tokens: int) -> None:
    """Random keys and values of this many tokens; for a model with states, those of a prompt."""
    config, device = model.config, model.device
    if config.model_type == "falcon_h1":
        model(torch.ones((1, tokens), dtype=torch.long, device=device), past_key_values=cache, use_cache=True)
        return
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    for i in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, generator=generator, device=device, dtype=model.dtype) for _ in range(2)), i)


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
def measure(name: str, model: Any, context: int) -> list[str]:
    """Lines of the table for one model and context."""
    lines = []
    for form, (theirs, ours) in pairs(model, context).items():
        times: dict[str, list[float]] = {"theirs": [], "ours": []}
        both = {"theirs": theirs, "ours": ours}
        for cache in both.values():
            fill(model, cache, context)
            for _ in range(3):
                turn(model, cache)
        for i in range(TURNS):  # who comes first alternates too
            for whose in ("theirs", "ours") if i % 2 else ("ours", "theirs"):
                times[whose] += turn(model, both[whose])
        their_time, our_time = (statistics.median(times[whose]) for whose in ("theirs", "ours"))
        lines.append(
            f"| {name} | {context} | {type(theirs).__name__} | {form} | {1e3 * their_time:.2f} | {1e3 * our_time:.2f} "
            f"| {our_time / their_time:.3f} |"
        )
        print(lines[-1], flush=True)
    return lines


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
    arguments = parser.parse_args()
    device, lines = arguments.device, []
    for name, (config, contexts) in configs(SIZES[device]).items():
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[device]).eval()
        for context in contexts:
            lines += measure(name, model, context)
    sizes = ", ".join(f"{name} {value}" for name, value in SIZES[device].items())
    text = "\n".join(
        [
            "# Decoding of a transformers model over our cache and over its own", "",
            f"Machine: {machine(device)}, {date.today()}. Command: `python -m bench.bridge`; transformers "
            f"{transformers.__version__}, PyTorch {torch.__version__}, {DTYPES[device]}. Random models: {sizes}.", "",
            "| model | from token | their cache | ours | theirs, ms a token | ours, ms a token | ours / theirs |",
            "|---|---|---|---|---|---|---|", *lines, "",
        ]
    )  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
