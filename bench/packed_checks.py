"""Prompts on a GPU with kernels and packed rows, against PyTorch's operations: `python -m bench.packed_checks`

Each shape has its first layers alone, in bfloat16 with random weights. Ragged rows are read in one pass and in chunks,
packed; the logits after every row are compared with those of the row alone, by PyTorch's own operations in bfloat16 and
in float32. The median error of rows may be twice that of bfloat16 (a router may choose another expert for some row).
"""

from __future__ import annotations

import time

import torch

import lamina.kernels
from lamina.bench.prefill import Prompts
from lamina.bench.random_model import random_model
from lamina.checkpoint.shapes import find_shape
from lamina.model import Model

SHAPES = ("llama-3.1-8b", "gemma-2-9b", "falcon-h1-7b", "mamba2-2.7b", "mamba-2.8b", "qwen3-next", "deepseek-v2-lite")
LAYERS = 4
PROMPTS = (Prompts.of("12x20-700"), Prompts.of("12x20-700", 256))


@torch.no_grad()
def logits(model: Model, prompts: Prompts, together: bool) -> torch.Tensor:
    """After each row's last token [R, V]: of all rows together, as prompts are read, or of each row alone."""
    ids = prompts.ids(model.vocab, model.device)
    if not together:
        rows = [model(ids[i : i + 1, :count], logits="last") for i, count in enumerate(prompts.counts)]
        return torch.cat([row for row in rows if row is not None])
    cache, longest = model.new_cache(len(prompts.counts)), max(prompts.counts)
    size = prompts.chunk or longest
    for start in range(0, longest, size):
        some = [min(max(count - start, 0), size) for count in prompts.counts]
        model(ids[:, start : start + max(some)], cache=cache, counts=some, logits="last")
    found = cache.logits
    assert found is not None
    return found


def main(device: str = "cuda") -> None:
    fuses, wrong = lamina.kernels.fuses, 0
    print("| shape | prompts | error | of bfloat16 | seconds |\n|---|---|---|---|---|")
    for shape in SHAPES:
        config = dict(find_shape(shape).config, num_hidden_layers=LAYERS)
        model = random_model(config, torch.bfloat16, device)
        exact = random_model(config, torch.float32, device)
        exact.load_state_dict(model.state_dict())
        for prompts in PROMPTS:
            started = time.perf_counter()
            found = logits(model, prompts, together=True).float()
            lamina.kernels.fuses = lambda x: False
            plain, truth = logits(model, prompts, together=False).float(), logits(exact, prompts, together=False)
            lamina.kernels.fuses = fuses
            size = truth.norm(dim=-1)
            error, usual = (float(((one - truth).norm(dim=-1) / size).median()) for one in (found, plain))
            wrong += not error <= 2 * usual + 1e-3
            verdict = "" if error <= 2 * usual + 1e-3 else " WRONG"
            print(f"| {shape} | {prompts} | {error:.4f}{verdict} | {usual:.4f} | {time.perf_counter() - started:.1f} |")
        del model, exact
        torch.cuda.empty_cache()
    print("all right" if not wrong else f"{wrong} WRONG", flush=True)


if __name__ == "__main__":
    main()
