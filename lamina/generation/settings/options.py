"""Keyword arguments of `generate`, `stream` and `Chat` with their types, for editors and type checkers.

The settings among them (`Options`) are written from their declarations into typed.py. A setting may be passed in more
forms than `Settings` stores (a list or a tensor instead of a tuple), and None turns it off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lamina.generation.settings.typed import Options

if TYPE_CHECKING:
    from lamina.cache.cache import Cache
    from lamina.generation.prefill.watch import Progress
    from lamina.generation.prefix_store import PrefixStore


class AllOptions(Options, total=False):
    """Every setting, for `Chat`."""

    max_new_tokens: int | None


class CallOptions(Options, total=False):
    """Keyword arguments of `generate` and `stream`: every setting, and the arguments of one call (see `generate`)."""

    attention_mask: Tensor | None
    inputs_embeds: Tensor | Sequence[Tensor] | None
    decoder_input_ids: Any
    decoder_attention_mask: Tensor | None
    chat_options: Mapping[str, Any] | None
    cache: Cache | None
    whole: bool | None
    prefixes: PrefixStore | None
    row_ids: Sequence[int] | Tensor | None
    progress: Progress | None


CALL = tuple(name for name in CallOptions.__annotations__ if name not in Options.__annotations__)
"""Names of the arguments of one call that are not settings."""
