"""Encoder–decoder models: an encoder with bidirectional attention, and a decoder that cross-attends to its output.

An encoder is a stack of blocks like a decoder's, with the same memory calls, in a pass that is not causal. Its output
is a `Source`, which the decoder's cross-attention layers read; decoder passes never see the source ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.cache.counts import Counts
from lamina.cache.layers.cross import Source
from lamina.cache.spec import specs_of
from lamina.cache.step import Step
from lamina.errors import InputError
from lamina.inputs import checked_ids, random_ids
from lamina.model import Model


class Encoder(nn.Module):
    """Subclasses define `blocks` and `embed`; with learned positions also `add_positions`; `prepare` and `finish` if
    needed."""

    blocks: nn.ModuleList

    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> [B, S, width]"""
        raise InputError(f"{type(self).__name__} does not say how ids are embedded")

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Adds a table of positions. x [B, S, width], positions [B, S] -> [B, S, width]"""
        return x

    def prepare(self, positions: Tensor) -> Any:
        """Makes what all blocks of a pass share, from the positions [B, S]."""
        return None

    def finish(self, x: Tensor) -> Tensor:
        """The encoder's output, usually the final norm of the last block's output. [B, S, width] both"""
        return x

    def forward(
        self,
        ids: Tensor | None,
        counts: Tensor | None = None,
        segments: Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> Tensor:
        """ids [B, S], or embeds [B, S, width] instead -> states [B, S, width].

        counts     [B] how many tokens of each row are real
        segments   [B, S] several sequences packed into one row
        """
        given = embeds if embeds is not None else ids
        assert given is not None
        specs = [specs_of(i, block) for i, block in enumerate(self.blocks)]
        step = Step.alone(specs, (given.shape[0], given.shape[1]), given.device, counts, segments, causal=False)
        if embeds is None:
            assert ids is not None
            x = self.embed(ids if step.valid is None else ids.masked_fill(~step.valid, 0))
        else:
            x = embeds if step.valid is None else embeds.masked_fill(~step.valid[..., None], 0)
        x, shared = self.add_positions(x, step.positions), self.prepare(step.positions)
        for i, block in enumerate(self.blocks):
            x = block(x, step.memory(i), shared)
        return self.finish(x)


class EncoderDecoder(Model):
    """A model with an encoder. `blocks` are the decoder's; a block that cross-attends has a `Cross` spec and a method
    `cross(states)`, which computes the source's keys and values [B, H, S, D]."""

    encoder: Encoder
    source_vocab: int | None = None
    """The size of the encoder's vocabulary, if it has one of its own."""

    def encode(
        self,
        ids: Tensor | Sequence[Sequence[int]] | None = None,
        counts: int | Sequence[int] | Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> Source:
        """Runs the encoder over ids [B, S], or over embeds [B, S, width] instead. `counts` [B]: how many tokens of each
        row are real; the rest is padding on the right.

        >>> source = model.encode([[5, 6, 7]])                       # doctest: +SKIP
        >>> cache = model.new_cache(rows=1, source=source)           # doctest: +SKIP
        """
        ids, embeds = checked_ids(self, ids, embeds, counts, self.source_vocab)
        rows, width = embeds.shape[:2] if embeds is not None else ids.shape  # type: ignore[union-attr]
        if self.max_source_positions is not None and width > self.max_source_positions:
            raise InputError(f"the source has {width} positions, and the encoder has {self.max_source_positions}")
        if counts is None:
            lengths = torch.full((rows,), width, dtype=torch.int64, device=self.device)
            return Source(self.encoder(ids, embeds=embeds), lengths)
        real = Counts.of(counts, rows, width, self.device, "counts")
        if 0 in real.high:
            raise InputError(f"row {real.high.index(0)} of the source is empty: give at least one token")
        return Source(self.encoder(ids, real.tensor, embeds=embeds), real.tensor)

    def source_example(self, rows: int, positions: int) -> Tensor:
        """Input of `trace_source` for a source of this many positions; its last axis may be shorter."""
        return torch.zeros(rows, positions, dtype=torch.int64, device=self.device)

    def trace_source(self, given: Tensor, counts: Tensor) -> Source:
        """`encode` as a pure tensor program, for lamina.exporting: ids [B, S], of which counts [B] are real."""
        return Source(self.encoder(given, counts), counts)

    def random_source(self, rows: int, length: int, generator: torch.Generator | None = None) -> Source:
        vocab = self.vocab if self.source_vocab is None else self.source_vocab
        return self.encode(random_ids(vocab, (rows, length), generator, self.device))
