"""The attention and the mask function that transformers' models call while they run over a Lamina cache.

Both are registered with transformers under the name `NAME`, and find the running pass in `RUNNING`. A mask of
transformers is a function (row, head, query position, key position) -> bool. The mask function keeps that function with
the mask it returns; the attention function evaluates it at the positions that the slots of the layer really hold. So
rows of different lengths, rings, rewound tokens and pages need nothing of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from lamina.attention.core import Backend, attention, without_unused
from lamina.attention.view import View
from lamina.attention.window import Full
from lamina.cache.layers.base import Key
from lamina.errors import InputError

NAME = "lamina_view"
Rule = Callable[[Any, Any, Tensor, Tensor], Tensor]
SPECIAL = ("position_bias", "block_indices")
"""Arguments of an attention function that change scores by a tensor over tokens in order of position."""


class RunningPass(Protocol):
    """What the two functions need of the pass that is running."""

    rules: dict[int, Rule | None]
    """Layer -> the rule of its mask, as found so far"""

    @property
    def positions(self) -> Tensor:
        """[R, T] of the new tokens"""
        ...

    def view_for(self, module: nn.Module, key: Tensor) -> tuple[Key, View] | None:
        """The entry whose keys these are, and what its queries may see; None for keys that are not in the cache."""
        ...

    def attention_of(self, key: Key) -> str | Backend | None: ...


RUNNING: ContextVar[RunningPass | None] = ContextVar("running", default=None)


class RuledMask(Tensor):
    """A mask that knows its rule. What a model computes from it is a plain tensor."""

    rule: Rule

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def view_mask(**given: Any) -> Tensor | None:
    """A mask [R, 1, T, S] over S tokens in order of their positions, with its rule."""
    running = RUNNING.get()
    if running is None or given["q_length"] != running.positions.shape[1]:
        return sdpa_mask(**given)
    rule: Rule = given["mask_function"]
    q = running.positions[:, None, :, None]
    kv = torch.arange(given["kv_length"], device=q.device) + given.get("kv_offset", 0)
    row = torch.arange(len(q), device=q.device)[:, None, None, None]
    seen = rule(row, 0, q, kv[None, None, None]).expand(len(q), 1, q.shape[2], len(kv))
    mask = seen.as_subclass(RuledMask)
    mask.rule = rule
    return mask


def view_attention(
    module: nn.Module,
    query: Tensor,  # [R, Hq, T, D]
    key: Tensor,  # [R, H, S, D]
    value: Tensor,  # [R, H, S, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """-> [R, T, Hq, Dv]"""
    running = RUNNING.get()
    found = None if running is None else running.view_for(module, key)
    special = {name: more[name] for name in SPECIAL if more.get(name) is not None}
    if found is None or running is None:
        mask = None if attention_mask is None else attention_mask.as_subclass(Tensor)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **more)
    entry, view = found
    rule = getattr(attention_mask, "rule", None)
    if attention_mask is not None and rule is None:
        special["mask"] = attention_mask
    elif rule is not None and rule is not causal_mask_function:
        view = ruled(view, rule)
    indices: Tensor | None = more.pop("indices", None)  # [R, T, top] the tokens that an indexer has selected
    if indices is not None:
        chosen = torch.zeros(view.shape, dtype=torch.bool, device=key.device)
        view = view.restricted(chosen.scatter(-1, indices.long(), True))
    running.rules[entry[0]] = None if special or indices is not None else rule
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if special:
        if (blocks := special.pop("block_indices", None)) is not None:
            special["mask"] = module.indexer.build_block_mask(  # type: ignore[union-attr, operator]
                blocks, view.mask(), key.shape[2], query.dtype, query.device, running.positions
            )
        more = {name: value for name, value in more.items() if name not in SPECIAL}
        return of_its_own(module, query, key, value, view, scale, special, more)
    out = attention(
        query, key, value, view, scale=scale, softcap=softcap, sinks=s_aux, backend=running.attention_of(entry)
    )
    return out.transpose(1, 2).contiguous(), None


def ruled(view: View, rule: Rule) -> View:
    """The same slots, of which a query sees what the rule says."""
    kept: dict[Rule, View] = view.__dict__.setdefault("ruled", {})
    if rule not in kept:
        if view.q_spans is not None:
            raise InputError("spans were given, and this model has masks of its own: leave them out")
        kept[rule] = View(
            view.q_positions, view.kv_positions, Full(), causal=False, finite=view.clean,
            q_segments=view.q_segments, kv_segments=view.kv_segments,
            also=lambda row, q, kv: rule(row, 0, q, kv.clamp(min=0)),
        )  # fmt: skip
    return kept[rule]


def of_its_own(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, view: View, scale: float, special: dict[str, Tensor],
    more: dict[str, Any],
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with a mask that the model has changed, or with scores of its own, by transformers' function."""
    if not view.clean:
        key, value = without_unused(key, view), without_unused(value, view)
    mask = view.opened()
    own = special.pop("mask", None)
    if own is not None:
        if own.shape[-1] != key.shape[2]:
            raise InputError(
                f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__}) has a mask over {own.shape[-1]} "
                f"keys and {key.shape[2]} keys: Lamina cannot tell which belong together"
            )
        mask = mask & own if own.dtype == torch.bool else torch.where(mask, own, torch.finfo(own.dtype).min)
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scale, **{**more, **special})


AttentionInterface.register(NAME, view_attention)
AttentionMaskInterface.register(NAME, view_mask)
