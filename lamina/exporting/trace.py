"""Traces the modules of an export with torch.export, in strict mode.

A program has a name: `prefill` (2 … chunk tokens a row), `decode` (one token a row), `encode` for encoder–decoder
models, `rewind` where states must be folded again to take rows back. Where the host cannot reach the cache, `rewind`
is there for every model, and `reset` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lamina.cache.cache import Cache
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.exporting.modules import Advance, Encode, Reset, Rewind
from lamina.exporting.tidy import tidy
from lamina.model import Model

SHORTEST = 2
"""Tokens a row of the shortest `prefill`: sizes of 1 make another program, which is `decode`."""


def trace_all(
    model: Model, cache: Cache, capacity: int, chunk: int, bounded: bool, longest_source: int = 0, verbs: bool = False
) -> dict[str, ExportedProgram]:
    """Every program that this model needs, for rows of up to `capacity` tokens, over the tensors of `cache`.

    verbs   True: `rewind` and `reset` are programs, for hosts that cannot reach the tensors of the cache
    """
    advance, rows = Advance(model, cache, capacity, bounded), cache.rows
    counts = torch.ones(rows, dtype=torch.int64, device=model.device)
    ids = counts.new_zeros(rows, SHORTEST + 1)
    inputs, sizes = [counts], []
    if advance.bounded:
        between = (advance.least + capacity) // 2  # no special case of any operation
        inputs.append(counts.new_zeros(between, dtype=torch.int8))
        sizes = [{}, {0: Dim("slots", min=advance.least, max=capacity)}]
    tokens = {1: Dim("tokens", min=SHORTEST, max=chunk)}
    found = {
        "prefill": traced("prefill", advance, [ids, *inputs], [tokens, *sizes]),
        "decode": traced("decode", advance, [ids[:, :1].clone(), *inputs], [{}, *sizes]),
    }
    if verbs or (cache.slack and any(isinstance(layer, RecurrentLayer) for layer in cache.every_layer())):
        found["rewind"] = traced("rewind", Rewind(model, cache), [counts])
    if verbs:
        found["reset"] = traced("reset", Reset(model, cache), [counts > 0])
    if longest_source:
        given: Tensor = model.source_example(rows, longest_source)  # type: ignore[operator]
        most = given.shape[-1]  # shorter sources are padded to 2; a program for sources of 1 or 2 has one size
        varies = most > SHORTEST and not given.is_floating_point()  # features are padded to one size
        tokens = {given.dim() - 1: Dim("tokens", min=SHORTEST, max=most)} if varies else {}
        found["encode"] = traced("encode", Encode(model, cache), [given, counts], [tokens])
    return found


def traced(name: str, module: nn.Module, inputs: list[Tensor], sizes: Sequence[dict[int, Dim]] = ()) -> ExportedProgram:
    """Exports a module of these inputs. `sizes` has the sizes that vary, axis -> Dim, for the first of them."""
    varies = [*sizes, *({} for _ in inputs[len(sizes) :])]
    with torch.no_grad(), plain_guards():
        program = torch.export.export(module.eval(), tuple(inputs), dynamic_shapes=tuple(varies), strict=True)
    return tidy(program, name)


@contextmanager
def plain_guards() -> Iterator[None]:
    """While tracing, the code of guards is not shortened: Dynamo writes a function that compares the shape of every
    weight, which nobody calls, and looking for common subexpressions in it takes a tenth of the time of an export."""
    from torch._dynamo import guards

    shortens = getattr(guards, "PyExprCSEPass", None)
    if shortens is None:  # in a version of PyTorch that does not
        yield
        return
    with patch.object(shortens, "ALLOWED_NODE_TYPES", ()):
        yield
