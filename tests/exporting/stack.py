"""A model with a block of every kind of memory, and random histories that a program and the model run alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lamina import Cache, Model, Program, Source
from lamina.attention.window import Chunked, Sliding
from lamina.cache import Memory
from lamina.nn.moe.experts import Experts
from lamina.recurrence import RGLRU, SSD, WKV, GatedDelta, SelectiveScan
from tests.laws.toys import (
    WIDTH,
    Attend,
    AttendLatent,
    AttendSelected,
    AttendShared,
    Convolve,
    EncoderDecoder,
    Highest,
    Index,
    Recur,
    Toy,
    random_ids,
)

ROWS, CAPACITY, CHUNK = 2, 40, 7


class RecurOther(Recur):
    """The rules that have no parameter A."""

    def inputs(self, x: Tensor) -> dict[str, Tensor]:
        found = {name: self.into[f"to_{name}"](x) for name in self.rule.input_shapes}  # all are [channels], or a token
        return {name: torch.ones_like(y[..., 0]) if name == "token" else -y.exp() for name, y in found.items()}

    def constants(self) -> dict[str, Tensor]:
        if not isinstance(self.rule, WKV):
            return {}
        return {"w": -self.decay.exp().expand(self.rule.channels), "first": self.decay.expand(self.rule.channels)}


class Mix(nn.Module):
    """A mixture of experts, without memory: the first two of four by x."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, object] = {}
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts(4, WIDTH, 6)

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        return x + self.experts(x, chosen, weights)


def attentions() -> Toy:
    """Every kind of token store: lines, rings, latents, an indexer, shared ones, vectors."""
    return Toy(
        Attend(), Attend(Sliding(4, keep=2)), Attend(Chunked(3)), AttendLatent(6), AttendSelected(3),
        AttendSelected(source=4), AttendShared(1), Index(Sliding(4)), Mix(),
    )  # fmt: skip


def recurrences() -> Toy:
    """Every recurrence, a convolution, a kind of layer from outside the package, and a window: no longest row."""
    return Toy(
        Convolve(3), Recur(SSD(heads=2, head_dim=3, state=2, groups=1)), Recur(SelectiveScan(channels=4, state=3)),
        Recur(GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=2)), RecurOther(RGLRU(channels=4)),
        RecurOther(WKV(channels=4)), Highest(), Attend(Sliding(4)),
    )  # fmt: skip


def rewindable() -> Toy:
    """A state, a convolution and a window: what only slack can rewind."""
    return Toy(Recur(SelectiveScan(channels=4, state=3)), Convolve(3), Attend(Sliding(4)))


class Translator(EncoderDecoder):
    """The encoder of `EncoderDecoder` as a program."""

    start_ids = (1,)

    def source_example(self, rows: int, positions: int) -> Tensor:
        return torch.zeros(rows, positions, dtype=torch.int64)

    def trace_source(self, given: Tensor, counts: Tensor) -> Source:
        return Source(self.embedding(given).roll(1, dims=-1), counts)


class Listener(Translator):
    """Its source is features [B, WIDTH, frames] instead of ids; two frames are one position."""

    def encode(self, ids: None = None, counts: Sequence[int] | None = None, features: Tensor | None = None) -> Source:
        assert ids is None and features is not None
        given = [features.shape[-1]] * len(features) if counts is None else counts
        return self.trace_source(features, torch.tensor(given))

    def source_example(self, rows: int, positions: int) -> Tensor:
        return torch.zeros(rows, WIDTH, 2 * positions, dtype=self.dtype)

    def trace_source(self, given: Tensor, counts: Tensor) -> Source:
        return Source(given[:, :, ::2].mT.roll(1, dims=-1), (counts + 1) // 2)


def run_both(model: Model, cache: Cache, program: Program, lengths: int, seed: int, tolerance: float = 1e-9) -> None:
    """Feeds random pieces to the rows of the cache and of the program, until each row has `lengths` more tokens. The
    logits of every pass must agree, and so must the most likely tokens."""
    rng, rows = random.Random(seed), cache.rows
    ids, done = random_ids(rows, lengths, seed), [0] * rows
    while min(done) < lengths:
        width = rng.choice([1, 1, 2, rng.randint(2, CHUNK), 2 * CHUNK])
        counts = [min(rng.choice([width, width, rng.randint(0, width)]), lengths - at) for at in done]
        if not any(counts):
            continue
        pieces = [ids[row, at : at + n].tolist() for row, (at, n) in enumerate(zip(done, counts, strict=True))]
        padded = torch.zeros(rows, max(counts), dtype=torch.int64)
        for row, piece in enumerate(pieces):
            padded[row, : len(piece)] = torch.tensor(piece)
        expected = model(padded, cache=cache, counts=counts, logits="last")
        best = program.feed(pieces)
        assert expected is not None and program.logits is not None
        for row, n in enumerate(counts):
            if n:
                torch.testing.assert_close(program.logits[row], expected[row], rtol=tolerance, atol=tolerance)
                assert int(best[row]) == int(expected[row].argmax())
        done = [at + n for at, n in zip(done, counts, strict=True)]
    assert program.lengths == cache.lengths.tolist()
