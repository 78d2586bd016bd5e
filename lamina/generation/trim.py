"""Rows without the stop string that ended them: `Result.trimmed`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lamina.cache.cache import Cache
from lamina.errors import InputError
from lamina.generation.feed import prefill
from lamina.generation.prompt import from_rows
from lamina.generation.reuse import continuation

if TYPE_CHECKING:
    from lamina.generation.result import Result

NO_WAY = (
    "the rows cannot be taken back to before their stop strings, nor be read anew from their ids, since {why}: "
    "generate with cache=model.new_cache(rows, slack=…), with a slack of the tokens of a stop string and one more"
)


@torch.no_grad()
def trimmed(result: Result) -> Cache:
    """See `Result.trimmed`."""
    given, rows = result.cache, []
    before = result.before or [None] * len(result.tokens)
    for row, (held, new, kept) in enumerate(zip(given.tokens, result.tokens, before, strict=True)):
        start = len(held) - len(new)
        if held[max(start, 0) :] != new:
            raise InputError(f"row {row} of the cache was changed since: it does not end with this result's tokens")
        rows.append(held[: start + (len(new) if kept is None else kept)])
    cache = given.fork()
    try:
        plan = continuation(cache, rows, whole=[True] * len(rows))
    except InputError as error:
        raise InputError(NO_WAY.format(why="tokens were given as embeddings")) from error
    if any(cache.clock.sourced[row] for row in plan.anew):
        raise InputError(NO_WAY.format(why="their source is not kept"))
    plan.begin(cache)
    if any(plan.rest):
        assert cache.model is not None
        prefill(cache.model, from_rows(plan.rest, allow_empty=True), cache)
    return cache
