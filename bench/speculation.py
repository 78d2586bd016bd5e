"""What passes of several tokens cost, and what speculation makes of it: `python -m bench.speculation [SHAPE …]`

For one row at a context (`--context 4096`), the time of a pass of 1 to 16 tokens of which one is accepted: through a
captured pass, and as a plain pass. A captured decode step stands beside it, and how far the logits of the two are
apart. Then tokens a second (`--new 256` of them) of prompt lookup on a prompt that repeats itself, against plain
decoding of the same prompt. Weights are random; a random model soon repeats itself too, which is what makes lookup
guess right. Without a GPU a model of two layers is run, by plain passes alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch

from lamina.bench.decode import run_steps
from lamina.bench.measure import median_seconds
from lamina.bench.random_model import random_model
from lamina.checkpoint.shapes import SMOLLM2_135M, find_shape
from lamina.model import Model
from lamina.planning.context import fill_context, set_clock
from lamina.runtime import why_no_passes

WIDTHS = (1, 2, 4, 8, 16)
TINY = dict(SMOLLM2_135M.config, num_hidden_layers=2, vocab_size=512)


def main(shapes: list[str], context: int, new: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    for name in shapes or (["llama-3.1-8b", "falcon-h1-7b"] if device.type == "cuda" else ["tiny"]):
        model = random_model(TINY if name == "tiny" else find_shape(name).config, dtype, device)
        print(f"\n## {name}, one row, context {context}, {dtype}, {where}\n")
        passes(model, context)
        speculation(model, context, new)
        del model
        torch.cuda.empty_cache()


@torch.no_grad()
def passes(model: Model, context: int) -> None:
    """The table of passes."""
    device, many = model.device, 16 if model.device.type == "cuda" else 2
    cache = fill_context(model.new_cache(1).reserve(context + 20 * many + max(WIDTHS)), context)
    reason = why_no_passes(model, cache)
    ids = torch.randint(0, model.vocab, (1, max(WIDTHS)), device=device)

    def restarted(work: Callable[[int], object]) -> float:
        def several() -> None:
            set_clock(cache, context)
            work(many)

        return median_seconds(several, device) / many

    def plain(T: int, times: int) -> None:
        for _ in range(times):
            step = cache.step(T)
            model.forward(ids[:, :T], step)
            step.commit([1])

    def captured(T: int, times: int) -> None:
        with model.graphs.pass_of(1, T) as one:
            for _ in range(times):
                one.read(cache, ids[:, :T])
                one.commit([1])

    def apart(T: int) -> float:
        """The greatest difference of logits, relative to the greatest logit."""
        set_clock(cache, context)
        step = cache.step(T)
        expected = model.forward(ids[:, :T], step)
        step.abort()
        with model.graphs.pass_of(1, T) as one:
            found = one.read(cache, ids[:, :T]).clone()
            one.abort()
        assert expected is not None
        return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())

    step = restarted(lambda times: run_steps(model, cache, ids[:, 0], times))
    print(f"A {'captured' if reason is None else 'plain'} decode step: {step * 1e3:.3f} ms.", end="")
    print("" if reason is None else f" Passes are plain, since {reason}.", end="\n\n")
    print("| tokens | captured, ms | of a step | plain, ms | logits apart |\n|---|---|---|---|---|")
    for T in WIDTHS:
        slow = restarted(partial(plain, T))
        if reason is not None:
            print(f"| {T} | – | – | {slow * 1e3:.3f} | – |")
            continue
        fast = restarted(partial(captured, T))
        print(f"| {T} | {fast * 1e3:.3f} | {fast / step:.2f} | {slow * 1e3:.3f} | {apart(T):.1e} |", flush=True)


def speculation(model: Model, context: int, new: int) -> None:
    """The table of whole runs."""
    draw = torch.Generator().manual_seed(1)
    block = torch.randint(0, model.vocab, (64,), generator=draw).tolist()
    prompt = (block * (context // len(block) + 1))[:context]
    print("\n| decoding | tokens a second | of plain | tokens a pass | right | how |\n|---|---|---|---|---|---|")
    ways: dict[str, dict[str, int]] = {"one token a step": {}}
    ways |= {f"prompt lookup of {n}": {"prompt_lookup_num_tokens": n} for n in (3, 7, 15)}
    first = None
    for name, settings in ways.items():
        for _ in range(2):  # the first run captures
            result = model.generate([prompt], new, eos_token_id=(), **settings)
        rate = result.timing.tokens_per_second
        first = first or rate
        stats = result.speculation if settings else None
        found = "1 | –" if stats is None else f"{stats.tokens_per_pass:.2f} | {stats.acceptance_rate:.0%}"
        print(f"| {name} | {rate:.1f} | {rate / first:.2f} | {found} | {result.how} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.speculation")
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--context", type=int, default=4096 if torch.cuda.is_available() else 64)
    parser.add_argument("--new", type=int, default=256 if torch.cuda.is_available() else 16)
    arguments = parser.parse_args(sys.argv[1:])
    main(arguments.shapes, arguments.context, arguments.new)
