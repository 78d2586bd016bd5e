"""The positions that a model was made for (`model.context`): prompts that fill them are refused, rows end there.

With `beyond_context=True` nothing is refused and no row ends by it. A learned table of positions
(`model.max_positions`) still has an end, which is then a CapacityError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.model import Model


def positions_left(model: Model, lengths: Sequence[int], negative: Sequence[int] | None = None) -> list[int] | None:
    """How many new tokens each row may get before it fills the model's context; None where there is no such length.

    lengths    tokens that each row holds after its prompt
    negative   the same of what guidance leads away from, one for all rows or one for each; new tokens follow it too
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
