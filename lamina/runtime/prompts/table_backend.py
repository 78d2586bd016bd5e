"""`PromptTableBackend`: the memory calls of a captured prompt: kernels for many tokens over rows of a table.

Products, norms and activations of a captured prompt run as in a plain pass on a GPU. Its memory calls do too, except
that they find the cache through tables (`TableEntry`), so that one graph serves any cache:

    attend          new tokens of lines are stored before the attention, those of rings at the end of the pass
    attend_latent   in the latent space: for up to 512 tokens this costs little more than expanding keys
    select          the indexer's keys are stored first; a few queries of each row are scored at a time
    recall          PyTorch quantizes and dequantizes vectors; kernels copy them to and from the store
    recur           the state is copied out of the cache, the rule's prompt kernel (or its chunked form in PyTorch) runs
                    on, and the new state is stored; with slack, first the log of inputs and the base state
    convolve        the same with the inputs before the pass
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from lamina import kernels
from lamina.activation import activation
from lamina.attention.rotary import rotate, rotate_neighbours
from lamina.attention.window import Full
from lamina.cache.backend import AttendOptions, Backend
from lamina.cache.layers.base import Key
from lamina.cache.spec import Cross, Shared, SharedIndex
from lamina.errors import InputError
from lamina.recurrence import SSD, Rule
from lamina.recurrence.conv import causal_convolution
from lamina.runtime.gpu.attend import form_of, sides_of
from lamina.runtime.gpu.backend import TableEntry, kernels_for_prompts
from lamina.runtime.gpu.logged import prepared, recur_prompt
from lamina.runtime.gpu.recall import recall
from lamina.runtime.gpu.select import select_for_prompt
from lamina.runtime.prefill.backend import PROMPT, kernel_of

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable
    from lamina.nn.norm import RMSNorm
    from lamina.recurrence.rule import Tensors
    from lamina.runtime.prompts.captured_prompt import CapturedPrompt

# Kernel modules import Triton at their top, so the methods below import them when they first launch.


class PromptTableBackend:
    """Has no state: all that belongs to a pass is in the pass and its entries."""

    def attend(
        self, one: CapturedPrompt, key: Key, entry: TableEntry, q: Tensor, k: Tensor | None, v: Tensor | None,
        **how: Unpack[AttendOptions],
    ) -> Tensor:  # fmt: skip
        """Norms and rotates q and k, stores k and v, and attends over all that is visible."""
        norms, gate = how["norms"], how["gate"]
        rope: dict[str, Any] = {name: how[name] for name in ("rope", "neighbours", "norms_last")}
        q = PROMPT.norm_and_rotate(one, q, norm=norms and norms[0], factor=how["factor"], **rope)
        scoring = {name: how[name] for name in ("scale", "softcap", "sinks")} | {"bias": form_of(how["bias"])}
        if isinstance(entry.spec, Cross):
            out = _attend_over(entry, q, None, scoring)
        elif isinstance(entry.spec, Shared):
            layer, name = entry.spec.reads_from
            source = one.entries[layer][name]
            out = _attend_over(source, q, source.new, scoring)
        elif k is None or v is None:
            raise InputError("attend without keys and values is for layers that read another layer's or a source's")
        else:
            k = PROMPT.norm_and_rotate(one, k, norm=norms and norms[1], **rope)
            out = _attend_own(entry, q, k, v, scoring)
        return out if gate is None else out * gate.sigmoid()

    def attend_latent(
        self, one: CapturedPrompt, key: Key, entry: TableEntry, q: Tensor, kv: Tensor,
        *, norm: RMSNorm, rope: RopeTable, neighbours: bool, up: Tensor, scale: float,
        restrict: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.attention.prompt.latent import attend_latents
        from lamina.kernels.attention.prompt.selected import attend_selected
        from lamina.kernels.attention.prompt.store import store_tokens
        from lamina.kernels.quant.encode import encode
        from lamina.kernels.quant.field import Side

        spec, table, page, form = entry.spec, entry.table, entry.page, entry.coding.formats.get("latent")
        rotated, nope = rotate_neighbours if neighbours else rotate, q.shape[-1] - spec.rope_dim
        latent, k_rope = kv.split([spec.rank, spec.rope_dim], dim=-1)
        new: Any = torch.cat([norm(latent), rotated(k_rope[:, None], rope)[:, 0]], dim=-1)
        if form is None:
            store_tokens(new[:, None], None, table, page)
        else:
            head = new[:, None]
            new = encode(head, head, None, table, Side.of(form, new.shape[-1]), write=True, page=page)
        q = torch.cat([q[..., :nope] @ up[:, :nope], rotated(q[..., nope:], rope)], dim=-1)
        how: dict[str, Any] = dict(rank=spec.rank, scale=scale, page=page)
        if restrict is None:
            mean = attend_latents(q, new, table, **how)
        else:
            mean = attend_selected(q, new, table, restrict, **how)
        return mean @ up[:, nope:].transpose(1, 2)

    def convolve(
        self, one: CapturedPrompt, key: Key, entry: TableEntry, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, act: str | None, gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.attention.prompt.store import store_tokens
        from lamina.kernels.recurrent.prompt.carried import load_inputs

        x = x if gates is None else gates[0] * x
        past = load_inputs(entry.table, x, weight.shape[1])
        if kernels.fuses(x):
            from lamina.kernels.recurrent.prompt.conv import conv_prompt

            y = conv_prompt(past, x, weight, bias, act, one.counts)
        else:
            y = causal_convolution(past, x, weight, bias)
            y = y if act is None else activation(act)(y)
        store_tokens(x[:, None], None, entry.table)
        return y if gates is None else gates[1] * y

    def convolve_product(self, *args: Any) -> None:
        """Composed of `convolve` and the product."""
        return None

    def recur(
        self, one: CapturedPrompt, key: Key, entry: TableEntry, inputs: Tensors, constants: Tensors,
        around: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        from lamina.kernels.recurrent.prompt.carried import load_state, store_state

        rule = entry.spec.rule
        if entry.logs:
            inputs, around = prepared(rule, inputs, around)

        def run(state: Tensor, counts: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor]:
            return _run_rule(rule, state, inputs, constants, around, counts, valid)

        if entry.logs:
            out, state = recur_prompt(one, key, entry, inputs, constants, run)
        else:
            out, state = run(load_state(entry.table, one.rows, rule.state_shape), one.counts, one.valid)
        store_state(state, entry.table)
        return out

    def mix(self, *args: Any, **how: Any) -> None:
        """Composed of the other calls."""
        return None

    def recall(self, one: CapturedPrompt, key: Key, entry: TableEntry, x: Tensor) -> tuple[Tensor, Tensor]:
        return recall(one, entry, x)

    def select(
        self, one: CapturedPrompt, key: Key, entry: TableEntry, q: Tensor | None, k: Tensor | None,
        weights: Tensor | None, *, rope: RopeTable | None, neighbours: bool,
    ) -> Tensor:  # fmt: skip
        """-> positions of the selected tokens, int32 [B, T, top]"""
        if isinstance(entry.spec, SharedIndex):
            layer, name = entry.spec.reads_from
            return one.entries[layer][name].new
        if q is None or k is None or weights is None:
            raise InputError("select without keys is for layers that read another layer's selection")
        before: dict[str, Any] = dict(rope=rope, neighbours=neighbours, norm=None, norms_last=False)
        q, k = PROMPT.norm_and_rotate(one, q, **before), PROMPT.norm_and_rotate(one, k[:, None], **before)[:, 0]
        chosen = select_for_prompt(entry, q, k, weights, one.scored)
        entry.leave(chosen)
        return chosen

    def call(self, one: CapturedPrompt, key: Key, entry: TableEntry, name: str, *args: Any, **how: Any) -> Any:
        if (found := kernels_for_prompts(entry.spec)) is None:
            raise InputError(f"layer {key[0]} entry {key[1]!r}: no kernel for {name} of many tokens")
        return getattr(found, name)(entry, *args, **how)


def _run_rule(
    rule: Rule, state: Tensor, inputs: Tensors, constants: Tensors, around: Mapping[str, Any],
    counts: Tensor | None, valid: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The rule over the first counts [R] tokens of each row, those that are `valid` [R, T]. -> (outputs, new state)"""
    fuses = kernels.fuses(next(iter(inputs.values())))
    if isinstance(rule, SSD) and fuses:
        from lamina.kernels.recurrent.prompt.ssd import ssd_prompt

        return ssd_prompt(rule, state, inputs, constants, counts, **around)
    ready = rule.before(inputs, **around)
    run = kernel_of(rule) if fuses else None
    if run is None:
        out, state = rule.chunk(state, ready, constants, valid)
    else:
        out, state = run(rule, state, ready, constants, counts)
    return rule.after(out, ready, **around), state


def _attend_own(entry: TableEntry, q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Tensor:
    """Over the keys and values that the layer stores itself. A ring still holds tokens that early queries see, so it is
    written at the end of the pass."""
    from lamina.kernels.attention.prompt.store import store_tokens
    from lamina.kernels.quant.encode import append_codes, encode

    table, page, sides = entry.table, entry.page, sides_of(entry)
    waits = entry.spec.window.span is not None
    new: Any = (k, v)
    if sides is not None:
        new = encode(q, k, v, table, *sides, write=not waits, page=page)
        if waits:
            entry.at_commit = partial(append_codes, k, v, table, *sides, page)
    elif waits:
        entry.at_commit = partial(store_tokens, k, v, table, page)
    else:
        store_tokens(k, v, table, page)
    entry.leave(new)
    return _attend_over(entry, q, new, how, prepared=True)


def _attend_over(entry: TableEntry, q: Tensor, new: Any, how: dict[str, Any], prepared: bool = False) -> Tensor:
    """Over the tokens of an entry and the new ones: keys and values, `Coded`, or None for a source.

    prepared   `new` has these queries as codes need them
    """
    from lamina.kernels.attention.prompt.attend import attend_prompt
    from lamina.kernels.attention.quantized import decode_codes
    from lamina.kernels.quant.encode import encode_queries
    from lamina.kernels.quant.field import Coded

    spec, table, sides = entry.spec, entry.table, sides_of(entry)
    window = Full() if new is None else spec.window
    if sides is None:
        return attend_prompt(q, new, table, spec.kv_heads, spec.value_dim, window, page=entry.page, **how)
    coded = new
    if new is None:
        k, v = (side.empty(q, spec.kv_heads, 1) for side in sides)  # of no token: only their dtypes are used
        coded = Coded(q, k.codes, k, v, *sides, stored=True)
    if not prepared:
        coded = replace(coded, q=q) if sides[0].form == "plain" else encode_queries(q, coded, table)
    how = {**how, "page": entry.page, "most_new": q.shape[2]}
    return decode_codes(coded, table, window, q.dtype, new=new is not None, **how)


PROMPT_TABLES = PromptTableBackend()
if TYPE_CHECKING:
    _checked: Backend[CapturedPrompt, TableEntry] = PROMPT_TABLES
