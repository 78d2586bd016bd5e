"""Models that read a source: an encoder whose tokens see each other both ways, and a decoder that looks at its output.

An encoder is a stack of blocks like a decoder's, run over the same memory calls in a pass that is not causal. What it
makes is kept as a `Source`; the decoder's cross-attending layers read it and decoder passes never see the source ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.cache.counts import Counts
from lamina.cache.layers.cross import Source
from lamina.cache.step import Step
from lamina.errors import InputError
from lamina.inputs import checked_ids
from lamina.model import Model


class Encoder(nn.Module):
    """Subclasses fill in `blocks` and `embed`, and `prepare` and `finish` where there is something to do."""

    blocks: nn.ModuleList

    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> [B, S, width]"""
        raise InputError(f"{type(self).__name__} does not say how ids are embedded")

    def prepare(self, positions: Tensor) -> Any:
        """What all blocks share in a pass over these positions [B, S]."""
        return None

    def finish(self, x: Tensor) -> Tensor:
        """What the last block gives, as the decoder reads it."""
        return x

    def forward(
        self,
        ids: Tensor | None,
        counts: Tensor | None = None,
        segments: Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> Tensor:
        """ids [B, S], or embeds [B, S, width] instead -> states [B, S, width]; of each row the first `counts` are real,
        or it is packed."""
        given = embeds if embeds is not None else ids
        assert given is not None
        layers = [{name: spec.layer(None) for name, spec in block.specs.items()} for block in self.blocks]  # type: ignore[union-attr, operator]
        step = Step.alone(layers, (given.shape[0], given.shape[1]), given.device, counts, segments, causal=False)
        if embeds is None:
            assert ids is not None
            x = self.embed(ids if step.valid is None else ids.masked_fill(~step.valid, 0))
        else:
            x = embeds if step.valid is None else embeds.masked_fill(~step.valid[..., None], 0)
        shared = self.prepare(step.positions)
        for i, block in enumerate(self.blocks):
            x = block(x, step.memory(i), shared)
        return self.finish(x)


class EncoderDecoder(Model):
    """A model with an encoder in front. Its own blocks are the decoder's; those that read the source have a `Cross`
    spec and say with `cross(states)` what its keys and values [B, H, S, D] are."""

    encoder: Encoder

    def encode(
        self,
        ids: Tensor | Sequence[Sequence[int]] | None = None,
        counts: int | Sequence[int] | Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> Source:
        """What the decoder reads of the source ids [B, S], padded on the right where `counts` [B] says so, or of
        embeddings [B, S, width] in their place.

        >>> source = model.encode([[5, 6, 7]])                       # doctest: +SKIP
        >>> cache = model.new_cache(rows=1, source=source)           # doctest: +SKIP
        """
        ids, embeds = checked_ids(self, ids, embeds, counts)
        rows, width = embeds.shape[:2] if embeds is not None else ids.shape  # type: ignore[union-attr]
        if counts is None:
            lengths = torch.full((rows,), width, dtype=torch.int64, device=self.device)
            return Source(self.encoder(ids, embeds=embeds), lengths)
        real = Counts.of(counts, rows, width, self.device, "counts")
        if 0 in real.high:
            raise InputError(f"row {real.high.index(0)} of the source is empty: give at least one token")
        return Source(self.encoder(ids, real.tensor, embeds=embeds), real.tensor)
