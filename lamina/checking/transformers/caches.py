"""The caches that a transformers model is checked with: its own, its static one, and Lamina's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.checking.transformers.subject import Sources, Subject
from lamina.errors import LaminaError

SLACK = 3
KINDS = ("own", "static", "lamina")
"""Kinds of caches: that which the model makes, transformers' static one, and Lamina's."""


class NotTried(Exception):
    """A path does not exist for this model or cache; the text says why."""


@dataclass(frozen=True)
class Kept:
    """A way of keeping. `make(subject, capacity, sources)` gives an empty cache, None for one that the model makes."""

    name: str
    make: Callable[[Subject, int, Sources | None], Any]
    kind: str

    def __str__(self) -> str:
        return self.name


def own(subject: Subject, capacity: int, sources: Sources | None) -> Any:
    """None lets the model make it; one that returns none is given one, as `generate` gives it."""
    return None if subject.returns_cache else dynamic(subject, capacity, sources)


def dynamic(subject: Subject, capacity: int, sources: Sources | None) -> Any:
    """As `generate` makes it."""
    from transformers import DynamicCache, EncoderDecoderCache

    if not default_cache(subject):
        raise NotTried("its cache is made by the model alone")
    cache = DynamicCache(config=subject.config)
    return EncoderDecoderCache(cache, DynamicCache()) if subject.encoder_decoder else cache


def static(subject: Subject, capacity: int, sources: Sources | None) -> Any:
    from transformers import EncoderDecoderCache, StaticCache

    if not default_cache(subject):
        raise NotTried("its cache is made by the model alone")
    try:
        cache = StaticCache(config=subject.config, max_cache_len=capacity)
        if sources is None:
            return cache
        whole = copy.deepcopy(subject.config)  # cross-attention has no window
        if getattr(whole, "layer_types", None) is not None:
            whole.sliding_window, whole.layer_types = None, ["full_attention"] * len(whole.layer_types)
        return EncoderDecoderCache(cache, StaticCache(config=whole, max_cache_len=sources.hidden.shape[1]))
    except Exception as error:
        raise NotTried(f"there is no static cache for its configuration ({told(error)})") from error


def lamina(slack: int, fixed: bool, residence: str) -> Callable[[Subject, int, Sources | None], Any]:
    def make(subject: Subject, capacity: int, sources: Sources | None) -> Any:
        from lamina import bridge  # which imports transformers

        try:
            cache = bridge.EncoderDecoderCache if subject.encoder_decoder else bridge.Cache
            return cache(subject.model, capacity=capacity if fixed else None, slack=slack, residence=residence)
        except LaminaError as error:
            raise NotTried(f"refused: {error}") from error

    return make


def default_cache(subject: Subject) -> bool:
    """Whether transformers' cache classes are meant for this model."""
    supports = getattr(subject.model, "_supports_default_dynamic_cache", None)
    return subject.cache_name != "state" and (supports is None or bool(supports()))


def ways(subject: Subject, kinds: Sequence[str], residence: str) -> list[Kept]:
    """The caches of these kinds to try, first its own."""
    if subject.cache_name is None:
        return []
    found = [
        Kept("its cache", own, "own"),
        Kept("its static cache", static, "static"),
        Kept("lamina.bridge.Cache, growing", lamina(0, False, residence), "lamina"),
        Kept("lamina.bridge.Cache, fixed", lamina(0, True, residence), "lamina"),
        Kept(f"lamina.bridge.Cache, slack {SLACK}", lamina(SLACK, False, residence), "lamina"),
    ]
    return [kept for kept in found if kept.kind in kinds]


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
