"""Truth from outside: random checkpoints that transformers made and saved, and what it says about them.

The truth for a row is always transformers' own uncached pass over that row alone.
"""

from __future__ import annotations

import functools
import random
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import lamina
from lamina.checking import Report
from lamina.model import Model
from tests.families.cases import cases

TOLERANCE = 2e-4
COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Buffers of MiniMax that checkpoints hold though they follow from the configuration."""
WRONG_IN_EAGER = {"falcon"}
"""Families whose truth is the sdpa path. Falcon: eager attention adds ALiBi twice, in the mask and to the scores."""


def relative(found: Tensor, truth: Tensor) -> float:
    """max |a - b| / max |b|, infinite where something is not finite."""
    if found.shape != truth.shape or not torch.isfinite(found).all():
        return float("inf")
    return float((found - truth).abs().max() / truth.abs().max())


@functools.cache
def pair(family: str, name: str) -> tuple[Any, Model]:
    """A random model of transformers in float32, and ours loaded from what it saved."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        cases(family)[name](),
        dtype=torch.float32,
        attn_implementation="sdpa" if family in WRONG_IN_EAGER else "eager",
    ).eval()
    with torch.no_grad():  # defaults leave norms at one and biases at zero, which would hide mistakes
        for parameter in theirs.parameters():
            if parameter.requires_grad:  # others are computed: tables of sinusoids
                parameter.add_(torch.randn_like(parameter) * 0.05)
        saved = theirs.state_dict()
        for name, buffer in theirs.named_buffers():
            if name in saved and buffer.is_floating_point() and not name.endswith(COMPUTED):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return theirs, loaded(theirs)


def loaded(theirs: Any) -> Model:
    """Ours, loaded from what a model of transformers saves."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return lamina.load(folder, device="cpu")


def verified(model: Model) -> Report:
    """`lamina.verify` on two rows that go twice past the largest window; core families are verified at full length in
    tests/checking."""
    windows = [getattr(spec, "window", None) for entry in model.specs for spec in entry.values()]
    spans = [window.span for window in windows if window is not None and window.span is not None]
    longest = max([16, *(2 * span + 4 for span in spans)])
    return lamina.verify(model, rows=2, length=min(longest, model.max_positions or longest), tries=1, progress=False)


def random_ids(rows: int, length: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def truth(theirs: Any, ids: Tensor) -> Tensor:
    """Each row by itself, in one uncached pass. ids [B, T] -> [B, T, vocab]"""
    return torch.cat([theirs(row[None], use_cache=False).logits for row in ids])


def random_cuts(length: int, rng: random.Random) -> list[int]:
    """Lengths of the pieces of a sequence, single tokens often among them."""
    pieces = []
    while sum(pieces) < length:
        piece = rng.choice([1, 1, 2, 3, rng.randint(1, 12), rng.randint(1, length)])
        pieces.append(min(piece, length - sum(pieces)))
    return pieces


def run_in_pieces(model: Model, ids: Tensor, cache: lamina.Cache, pieces: list[int]) -> Tensor:
    outs = [model(piece, cache=cache) for piece in ids.split(pieces, dim=1)]
    return torch.cat([out for out in outs if out is not None], dim=1)


def run_ragged(model: Model, rows: list[Tensor], cache: lamina.Cache, rng: random.Random) -> list[Tensor]:
    """Feeds rows of different lengths in passes of random sizes, padding included; every row's logits.

    A pass has 1, 3 or 9 tokens a row; most rows get all of them, some fewer, some none.
    """
    done = [0] * len(rows)
    outs: list[list[Tensor]] = [[] for _ in rows]
    while any(at < len(row) for at, row in zip(done, rows, strict=True)):
        width = rng.choice([1, 1, 3, 9])
        sizes = rng.choices([0, width, rng.randint(1, width)], [1, 3, 2], k=len(rows))
        counts = [min(size, len(row) - at) for size, at, row in zip(sizes, done, rows, strict=True)]
        if not any(counts):
            continue
        ids = torch.full((len(rows), width), -1)
        for r, (row, at, count) in enumerate(zip(rows, done, counts, strict=True)):
            ids[r, :count] = row[at : at + count]
        cache.poison()
        logits = model(ids, cache=cache, counts=counts)
        assert logits is not None
        for r, count in enumerate(counts):
            outs[r].append(logits[r, :count])
            done[r] += count
    return [torch.cat(parts) for parts in outs]
