"""Traces the modules of an export with torch.export, in strict mode.

A program has a name: `prefill` (2 … chunk tokens a row), `decode` (one token a row), `encode` for encoder–decoder
models, `rewind` where states must be folded again to take rows back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lamina.cache.cache import Cache
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.exporting.modules import Advance, Encode, Rewind
from lamina.exporting.tidy import tidy
from lamina.model import Model

SHORTEST = 2
"""Tokens a row of the shortest `prefill`: sizes of 1 make another program, which is `decode`."""


def trace_all(
    model: Model, cache: Cache, chunk: int, bounded: bool, longest_source: int = 0
) -> dict[str, ExportedProgram]:
    """Every program that this model needs. The tensors of `cache` are the buffers of each."""
    advance, rows = Advance(model, cache, bounded), cache.rows
    counts = torch.ones(rows, dtype=torch.int64, device=model.device)
    ids = counts.new_zeros(rows, SHORTEST + 1)
    found = {
        "prefill": traced("prefill", advance, ids, counts, axis=1, sizes=(SHORTEST, chunk)),
        "decode": traced("decode", advance, ids[:, :1].clone(), counts),
    }
    if cache.slack and any(isinstance(layer, RecurrentLayer) for layer in cache.every_layer()):
        found["rewind"] = traced("rewind", Rewind(model, cache), counts)
    if longest_source:
        given: Tensor = model.source_example(rows, longest_source)  # type: ignore[operator]
        found["encode"] = traced("encode", Encode(model, cache), given, counts, axis=-1, sizes=(1, given.shape[-1]))
    return found


def traced(
    name: str, module: nn.Module, first: Tensor, *others: Tensor, axis: int | None = None, sizes: tuple[int, int] = (0, 0)
) -> ExportedProgram:
    """Exports a module of these inputs; the size of `axis` of the first varies between `sizes`."""
    varies = {} if axis is None else {axis % first.dim(): Dim("tokens", min=sizes[0], max=sizes[1])}
    with torch.no_grad():
        program = torch.export.export(
            module.eval(), (first, *others), dynamic_shapes=(varies, *({} for _ in others)), strict=True
        )
    return tidy(program, name)
