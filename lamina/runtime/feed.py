"""Feeds tokens to rows of a cache: the one place where a plain pass over a cache is opened and run.

    logits, step = read(model, cache, ids, rows=[0, 2])     # the caller ends it: step.commit(accepted) or step.abort()
    logits, _ = feed(model, cache, ids)                     # all tokens are committed

`Model.__call__`, `generate`, beams, drafts and prefix stores all call these functions. `lamina.generation.feed.Reader`
uses captured passes where they are available, and `read` otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.counts import Counts, CountsLike
from lamina.cache.layers.cross import Source
from lamina.cache.packed import PackedStep, packed, pays, why_not_spread
from lamina.cache.step import Step
from lamina.errors import CapacityError
from lamina.runtime.prefill.backend import backend_for
from lamina.runtime.prefill.packed_backend import packed_backend_for

if TYPE_CHECKING:
    from lamina.model import Logits, Model


def read(
    model: Model,
    cache: Cache,
    ids: Tensor | None,  # [R, T]
    *,
    counts: CountsLike | None = None,
    rows: Sequence[int] | None = None,
    logits: Logits = "last",
    embeds: Tensor | None = None,  # [R, T, width], instead of ids
    spans: Tensor | None = None,
    hidden: Collection[int] = (),
    whole: bool = False,
) -> tuple[Tensor | None, Step]:
    """Opens a pass over these rows (all when None) and runs the model. -> the requested logits, and the open pass

    If the model raises, the pass is aborted and the cache is unchanged. The arguments are those of `Cache.step` and
    `Model.forward`. whole: the caller will commit all real tokens, so layers need not keep what fewer would take.
    """
    given = embeds if ids is None else ids
    assert given is not None
    some = None if rows is None or list(rows) == list(range(cache.rows)) else rows
    step = cache.step(given.shape[1], counts, rows=some, spans=spans)
    step.backend, step.whole = backend_for(model.device), whole
    try:
        with torch.no_grad():  # otherwise the cache would keep the autograd graph of every pass alive
            return run(model, step, ids, logits, embeds, hidden), step
    except BaseException:
        step.abort()
        raise


def run(
    model: Model,
    step: Step,
    ids: Tensor | None,
    logits: Logits = "all",
    embeds: Tensor | None = None,
    hidden: Collection[int] = (),
) -> Tensor | None:
    """`model.forward` in this pass, packed if there is enough padding; the results are those of the rows."""
    one = pack_of(model, step, ids, hidden)
    if one is None:
        return model.forward(ids, step, logits, embeds, hidden)
    step.is_packed = True
    one.backend = packed_backend_for(one)
    given_ids, given_embeds = (None if x is None else one.pack(x) for x in (ids, embeds))
    found = model.forward(given_ids, one, logits, given_embeds, hidden)
    step.hidden = {i: one.spread(x) for i, x in one.hidden.items()}
    step.logits = found if found is None or logits == "last" else one.spread(found)
    return step.logits


def pack_of(model: Model, step: Step, ids: Tensor | None, hidden: Collection[int] = ()) -> PackedStep | None:
    """This pass without its padding; None where it is run as it is."""
    if set(hidden) - {len(model.blocks)}:  # between blocks there may be several streams
        return None
    return packed(step, ids) if pays(step) and why_not_packed(model, step) is None else None


def why_not_packed(model: Model, step: Step | None = None) -> str | None:
    """Why passes of the model are never packed, or this one is not; None if they can be."""
    if not model.takes_packed:
        return f"the blocks of {type(model).__name__} work on rows"
    if model.compiled is not None:
        return "blocks are compiled for rows"
    if step is not None and (step.recomputes or step.packing is not None):
        return "without a cache every pass recomputes whole rows" if step.recomputes else "segments were given"
    return why_not_spread(model.specs)


def feed(
    model: Model,
    cache: Cache,
    ids: Tensor | None,
    *,
    counts: CountsLike | None = None,
    rows: Sequence[int] | None = None,
    logits: Logits = "last",
    embeds: Tensor | None = None,
    spans: Tensor | None = None,
    hidden: Collection[int] = (),
) -> tuple[Tensor | None, Step]:
    """`read`, then commits all real tokens. -> logits, and the closed pass, which has the requested hidden states"""
    found, step = read(
        model,
        cache,
        ids,
        counts=counts,
        rows=rows,
        logits=logits,
        embeds=embeds,
        spans=spans,
        hidden=hidden,
        whole=True,
    )
    step.commit()
    return found, step


def feed_one(
    model: Model, cache: Cache, ids: Tensor, rows: Sequence[int] | None = None, hidden: Collection[int] = ()
) -> tuple[Tensor, Step]:
    """Feeds one token to each of these rows (all when None). ids [R] -> logits [R, V], and the pass"""
    logits, step = feed(model, cache, ids[:, None], rows=rows, hidden=hidden)
    assert logits is not None
    return logits, step


def step_alone(
    model: Model,
    shape: Sequence[int],  # [B, T]
    counts: CountsLike | None = None,
    *,
    segments: Tensor | None = None,
    spans: Tensor | None = None,
    source: Source | None = None,
) -> Step:
    """A pass without a cache: each row is a whole sequence."""
    rows, T = shape
    real = None if counts is None else Counts.of(counts, rows, T, model.device, "counts")
    longest = T if real is None else max(real.high)
    if model.max_positions is not None and segments is None and longest > model.max_positions:
        raise CapacityError(
            f"{longest} tokens were given, but the model has positions for {model.max_positions}. Use a shorter prompt."
        )
    step = Step.alone(model.specs, (rows, T), model.device, None if real is None else real.tensor, segments, spans)
    step.given = real or step.given
    step.backend = backend_for(model.device)
    if source is not None:
        step.source = model.cross_inputs(source, rows)
    return step
