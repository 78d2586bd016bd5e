"""How long rows may get (`positions_left`), and how much memory a cache reserves for them (`make_room`).

Length. `model.context` is the number of positions that a model was trained for. A prompt that fills it is refused, and
a row that reaches it ends with the reason "context". With `beyond_context=True` neither happens. A learned table of
positions (`model.max_positions`) still has an end; passing it raises a CapacityError.

Memory. Before the first token, the cache reserves the prompt and up to `INITIAL_NEW` new tokens: a row may end long
before `max_new_tokens`. A full cache doubles, but never beyond the prompt and `max_new_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lamina.cache.cache import Cache
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.model import Model

INITIAL_NEW = 512


def positions_left(model: Model, lengths: Sequence[int], negative: Sequence[int] | None = None) -> list[int] | None:
    """New tokens that each row may get before it fills the model's context; None if the context has no limit.

    lengths    tokens that each row holds after its prompt
    negative   tokens of guidance's negative prompt, for all rows or for each; it gets the same new tokens
    """
    context = model.context
    if context is None:
        return None
    away = list(negative or [0]) * (1 if negative and len(negative) == len(lengths) else len(lengths))
    for row, (length, other) in enumerate(zip(lengths, away, strict=True)):
        if length >= context:
            raise InputError(_too_long(model, f"row {row} has {length} tokens with its prompt", length, context))
        if other >= context:
            raise InputError(_too_long(model, f"the negative prompt of row {row} has {other} tokens", other, context))
    return [context - max(both) for both in zip(lengths, away, strict=True)]


def _too_long(model: Model, what: str, length: int, context: int) -> str:
    full = ", which leaves no room for a new one" if length == context else ""
    if model.max_positions is not None and model.max_positions <= context:
        return f"{what}, and the model has {context} positions{full}: give fewer tokens"
    return (
        f"{what}, and the model was made for {context}{full}: give fewer, or beyond_context=True, which goes on past "
        "them, where the text usually gets worse"
    )


def initial_room(length: int, most: int) -> int:
    """Tokens to reserve at first for a row of `length` tokens that may get `most` new ones.

    >>> initial_room(100, 20), initial_room(100, 2_000_000)
    (120, 612)
    """
    return length + min(most, INITIAL_NEW)


def make_room(cache: Cache, lengths: Sequence[int], most: Sequence[int]) -> None:
    """Reserves memory for rows of `lengths` tokens after prefill that may get `most` new ones each. Raises
    CapacityError if they could never fit."""
    both = list(zip(lengths, most, strict=True))
    cache.reserve(max(initial_room(*one) for one in both), most=max(length + new for length, new in both))
