"""Builds the kernels of captured prompts before they are needed, as `lamina.runtime.prebuild` does for decode steps.

A decode step is run once over a model on the meta device, where launches only request kernels. Each of its memory calls
also requests the kernels with which a captured prompt finds a cache, for one row and caches that are neither quantized
nor in pages. The other kernels of a captured prompt are those of plain passes, one of which has run before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from lamina.attention.window import Full
from lamina.cache.backend import AttendOptions
from lamina.cache.layers.base import Key
from lamina.cache.spec import Cross, Shared
from lamina.runtime.builders import build_together
from lamina.runtime.captured import Captured
from lamina.runtime.eligibility import why_no_kernels
from lamina.runtime.gpu.attend import form_of
from lamina.runtime.gpu.backend import KernelBackend, TableEntry
from lamina.runtime.gpu.select import select_for_prompt
from lamina.runtime.pointers import PLAIN_FORMAT
from lamina.runtime.prompts.captured_prompt import MOST_SCORED
from lamina.runtime.prompts.eligibility import WIDTHS, why_unserved

if TYPE_CHECKING:
    from lamina.model import Model
    from lamina.recurrence.rule import Tensors

# Kernel modules import Triton at their top, so the methods below import them when they first launch.


class PromptRequests(KernelBackend):
    """The memory calls of a decode step, which request the kernels of captured prompts too."""

    def attend(
        self, one: Captured, key: Key, entry: TableEntry, q: Tensor, k: Tensor | None, v: Tensor | None,
        **options: Unpack[AttendOptions],
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.attention.prompt.attend import attend_prompt
        from lamina.kernels.attention.prompt.store import store_tokens

        out = super().attend(one, key, entry, q, k, v, **options)
        if isinstance(entry.spec, Shared):
            layer, name = entry.spec.reads_from
            entry = one.entries[layer][name]
        spec = entry.spec
        how: dict[str, Any] = {name: options[name] for name in ("scale", "softcap", "sinks")}
        for width in (WIDTHS[0], WIDTHS[-1]):  # with and without splits
            heads = ((spec.kv_heads, spec.key_dim), (spec.kv_heads, spec.value_dim))
            new = tuple(q.new_empty(1, width, H, dim).transpose(1, 2) for H, dim in heads)
            queries = q.new_empty(1, width, q.shape[1], q.shape[3]).transpose(1, 2)
            given, window = (None, Full()) if isinstance(spec, Cross) else ((new[0], new[1]), spec.window)
            attend_prompt(
                queries, given, entry.table, spec.kv_heads, spec.value_dim, window, bias=form_of(options["bias"]), **how
            )
            if given is not None:
                store_tokens(*given, entry.table)
        return out

    def attend_latent(self, one: Captured, key: Key, entry: TableEntry, q: Tensor, kv: Tensor, **how: Any) -> Tensor:
        from lamina.kernels.attention.prompt.latent import latent_splits
        from lamina.kernels.attention.prompt.selected import attend_selected
        from lamina.kernels.attention.prompt.store import store_tokens

        spec, chosen = entry.spec, how["restrict"]
        for width in WIDTHS:
            new = kv.new_empty(1, width, spec.rank + spec.rope_dim)
            queries = kv.new_empty(1, q.shape[1], width, new.shape[-1])
            scoring: dict[str, Any] = dict(rank=spec.rank, scale=how["scale"])
            if chosen is None:
                latent_splits(queries, new, entry.table, **scoring)
            else:
                attend_selected(queries, new, entry.table, chosen.new_empty(1, width, chosen.shape[-1]), **scoring)
            store_tokens(new[:, None], None, entry.table)
        return super().attend_latent(one, key, entry, q, kv, **how)

    def select(
        self, one: Captured, key: Key, entry: TableEntry, q: Tensor | None, k: Tensor | None, weights: Tensor | None,
        **how: Any,
    ) -> Tensor:  # fmt: skip
        if q is not None and k is not None and weights is not None:
            B, width = 1, WIDTHS[-1]
            queries = q.new_empty(B, width, q.shape[1], q.shape[3]).transpose(1, 2)
            rows = k.new_empty(B, width, k.shape[-1]), weights.new_empty(B, width, weights.shape[-1])
            select_for_prompt(entry, queries, *rows, MOST_SCORED[0])
        return super().select(one, key, entry, q, k, weights, **how)

    def convolve(
        self, one: Captured, key: Key, entry: TableEntry, x: Tensor, weight: Tensor, bias: Tensor | None, **how: Any
    ) -> Tensor:
        request_inputs(entry, x, weight.shape[1])
        return super().convolve(one, key, entry, x, weight, bias, **how)

    def convolve_product(
        self, one: Captured, key: Key, entry: TableEntry, x: Tensor, conv: Any, product: Any
    ) -> tuple[Tensor, Tensor] | None:
        request_inputs(entry, x, conv.weight.shape[-1])
        return super().convolve_product(one, key, entry, x, conv, product)

    def recur(
        self, one: Captured, key: Key, entry: TableEntry, inputs: Tensors, constants: Tensors,
        around: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        request_state(entry)
        return super().recur(one, key, entry, inputs, constants, around)

    def mix(
        self, one: Captured, key: Key, entry: TableEntry, ring: TableEntry, x: Tensor, *given: Any, **how: Any
    ) -> Tensor | None:
        request_state(entry)
        request_inputs(ring, x, how["conv"].weight.shape[-1])
        return super().mix(one, key, entry, ring, x, *given, **how)


def request_inputs(entry: TableEntry, x: Tensor, taps: int) -> None:
    from lamina.kernels.attention.prompt.store import store_tokens
    from lamina.kernels.recurrent.prompt.carried import load_inputs

    new = x.new_empty(1, WIDTHS[-1], x.shape[-1])
    load_inputs(entry.table, new, taps)
    store_tokens(new[:, None], None, entry.table)


def request_state(entry: TableEntry) -> None:
    from lamina.kernels.recurrent.prompt.carried import load_state, store_state

    store_state(load_state(entry.table, 1, entry.spec.rule.state_shape), entry.table)


@torch.no_grad()
def build_prompt_kernels(model: Model) -> None:
    """Builds the kernels of captured prompts of one row, for a model on the meta device whose decode steps have
    kernels."""
    if why_no_kernels(model.specs, dtype=model.dtype) or why_no_kernels(
        model.specs, dtype=model.dtype, unserved=why_unserved
    ):
        return
    one = Captured(model, 1, 1, PLAIN_FORMAT, counts=1)
    one.backend = PromptRequests()

    def program() -> None:
        with one._using_kernels():
            model.forward(one.ids, one, logits="last")

    build_together(program)
