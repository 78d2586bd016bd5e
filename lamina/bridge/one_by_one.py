"""Passes whose last tokens run one by one, so that a recurrent state is seen after each of them.

A transformers model shows a recurrent state at the end of a pass only. A cache with slack must be able to drop the last
tokens of a pass, and for that it needs the state before each of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lamina.bridge.cache import Cache
from lamina.errors import InputError

BY_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")


def split_passes(model: Any) -> None:
    """Has the model run the last tokens of a pass one by one, over caches that have recurrent states and slack."""
    if getattr(model.forward, "_lamina", False):
        return
    whole = model.forward

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = next(
            (one for one in (kwargs.get("past_key_values"), kwargs.get("cache_params")) if one is not None), None
        )
        ids = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        if args and ids is None:
            ids = kwargs["input_ids"] = args[0]
            args = args[1:]
        single = 0 if ids is None or ids.shape[1] == 1 else _tokens_alone(cache, kwargs.get("attention_mask"))
        if not single or ids is None or cache is None:
            return whole(*args, **kwargs)
        if not any(kind.attends for kind in cache.store.kinds):
            # Without attention a mask hides padding in the first tokens; it has no meaning for a token that runs alone.
            return _run(whole, args, kwargs, ids.shape[1], single, {"attention_mask": None})
        return _run(whole, args, kwargs, ids.shape[1], single, {})

    forward._lamina = True  # type: ignore[attr-defined]
    model.forward = forward


def _tokens_alone(cache: Any, mask: Tensor | None) -> int:
    """How many of the last tokens of a pass over this cache run alone: as many as its slack, but no padding, which
    models hide from their states in passes of several tokens only."""
    if not isinstance(cache, Cache) or not any(kind.states for kind in cache.store.kinds):
        return 0
    slack = cache.store.slack
    if mask is None or mask.dim() != 2:
        return slack
    real = mask[:, -slack:].bool().all(dim=0).flip(0)  # [N] from the last token on
    return int(real.long().cumprod(0).sum()) if slack else 0


def _run(whole: Any, args: Any, kwargs: dict[str, Any], T: int, single: int, of_single: dict[str, Any]) -> Any:
    for name in ("output_hidden_states", "output_attentions", "labels"):
        if kwargs.get(name):
            raise InputError(
                f"{name} was asked for in a pass of {T} tokens over a cache of recurrent states with slack: its last "
                f"tokens run one by one. Give the cache slack=0, or leave {name} out"
            )
    keep = kwargs.get("logits_to_keep", 0)
    ends = [T - n for n in range(min(single, T - 1), -1, -1)]
    logits, out, start = [], None, 0
    for end in ends:
        part = {name: _cut(name, value, T, start, end) for name, value in kwargs.items()}
        if end - start == 1 and start:
            part |= of_single
        if keep:
            part["logits_to_keep"] = 1 if end - start == 1 else max(1, keep - (T - end))
        out = whole(*args, **part)
        logits.append(out.logits)
        start = end
    assert out is not None
    found = torch.cat(logits, dim=1)
    out.logits = found[:, -keep:] if isinstance(keep, int) and keep else found
    return out


def _cut(name: str, value: Any, T: int, start: int, end: int) -> Any:
    """The part of an argument that belongs to tokens start … end - 1 of the pass."""
    if not isinstance(value, Tensor):
        return value
    if name in BY_TOKEN:
        return value[:, start:end] if name != "position_ids" else value[..., start:end]
    if name == "attention_mask" and value.dim() == 2:
        return value[:, : value.shape[1] - T + end]
    return value
