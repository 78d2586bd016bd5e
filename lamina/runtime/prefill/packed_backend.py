"""`PackedPromptBackend`: the memory calls of packed passes on a GPU, by kernels that find rows on the one token axis.

Nothing is spread over rows with padding, so memory and time are those of the real tokens. Where no kernel fits, or a
layer must keep inputs for a rewind, `PackedBackend` spreads the call as on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.bias import kernel_form
from lamina.attention.core import note
from lamina.attention.view import View
from lamina.attention.window import Chunked, Full, Near, Sliding
from lamina.cache.backend import AttendOptions
from lamina.cache.layers.base import Key
from lamina.cache.layers.recurrent import ConvolutionLayer, RecurrentLayer
from lamina.cache.packed import PackedBackend, PackedStep
from lamina.cache.plain_backend import absorbs
from lamina.recurrence import SSD
from lamina.runtime.prefill.attention import WIDEST, biases
from lamina.runtime.prefill.backend import PromptBackend, attend_expanded, halves_fit, kernel_of

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable


class PackedPromptBackend(PackedBackend):
    """Has no state but the backend of the rows."""

    reads_store = True

    def takes_rows(
        self, one: PackedStep, key: Key, entry: Any, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions
    ) -> bool:
        if not kernels.fuses(q) or max(q.shape[-1], v.shape[-1]) > WIDEST or one.step.attention_of(key) is not None:
            return False
        bias = how["bias"]
        if bias is not None and not biases(kernel_form(bias), one.step.causal):
            return False
        known = isinstance(entry.window, Full | Sliding | Chunked | Near)
        return known and super().takes_rows(one, key, entry, q, k, v, how)

    def attend_rows(
        self, one: PackedStep, key: Key, q: Tensor, k: Tensor, v: Tensor, view: View, how: AttendOptions
    ) -> Tensor:
        """All rows in one launch."""
        from lamina.kernels.attention.prefill.many import attend_many  # imports Triton

        bias = how["bias"]
        note("kernel", q, view, softcap=how["softcap"], sinks=how["sinks"], bias=bias)
        return attend_many(
            q, k, v, view, scale=how["scale"], softcap=how["softcap"], sinks=how["sinks"],
            bias=None if bias is None else kernel_form(bias), packed=one.rows,
            stored=not one.step.empty_before,
        )  # fmt: skip

    def attend_latent(
        self, one: PackedStep, key: Key, entry: Any, q: Tensor, kv: Tensor, *, rope: RopeTable, **how: Any
    ) -> Tensor:
        """Over expanded latents, all rows in one launch."""
        norm, neighbours, up, scale = (how[name] for name in ("norm", "neighbours", "up", "scale"))
        rank, rope_dim, step = entry.spec.rank, entry.spec.rope_dim, one.step
        nope, whole = q.shape[-1] - rope_dim, step.empty_before or entry.layout.ring is None
        fits = halves_fit(nope, rope_dim, up.shape[1] - nope) and not absorbs(step.T, rank, up.shape[1])
        free = how.get("restrict") is None and step.spans is None and step.attention_of(key) is None
        if not (fits and free and whole and entry.packs(step) and kernels.fuses(q)):
            return super().attend_latent(one, key, entry, q, kv, rope=rope, **how)
        from lamina.kernels.elementwise import rotate_heads  # imports Triton

        latent, k_rope = kv.split([rank, rope_dim], dim=-1)  # [1, N, rank], [1, N, P]
        q_rope, k_rope = (rotate_heads(x, rope, neighbours=neighbours) for x in (q[..., nope:], k_rope[:, None]))
        new = {"latent": torch.cat([norm(latent), k_rope[:, 0]], dim=-1)}
        tokens, view = entry.extend_packed(step, key, new, one.rows)
        note("kernel over expanded latents", q, view)
        return attend_expanded(
            q[..., :nope], q_rope, tokens["latent"], view, up, scale, packed=one.rows, stored=not step.empty_before
        )

    def convolve(
        self, one: PackedStep, key: Key, entry: ConvolutionLayer, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, act: str | None, gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        if not entry.packs(one.step) or not kernels.fuses(x):
            return super().convolve(one, key, entry, x, weight, bias, act=act, gates=gates)
        from lamina.kernels.recurrent.prompt.conv import conv_prompt  # imports Triton

        x = x if gates is None else gates[0] * x
        y = conv_prompt(entry.past_of_packed(one.step, key, x, one.rows), x, weight, bias, act, packed=one.rows)
        return y if gates is None else gates[1] * y

    def recur(
        self, one: PackedStep, key: Key, entry: RecurrentLayer, inputs: Mapping[str, Tensor],
        constants: Mapping[str, Tensor], around: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        rule, step = entry.rule, one.step
        run = kernel_of(rule) if kernels.fuses(inputs[rule.value]) and entry.needs_state_alone(step) else None
        if run is None:
            return super().recur(one, key, entry, inputs, constants, around)
        state = entry.state(step, inputs)
        if isinstance(rule, SSD):  # step sizes, skip connection and gate are inside its kernels
            out, state = run(rule, state, inputs, constants, None, packed=one.rows, **around)
        else:
            ready = rule.before(inputs, **around)
            out, state = run(rule, state, ready, constants, None, packed=one.rows)
            out = rule.after(out, ready, **around)
        entry.leave(step, key, {}, constants, state)
        return out


def packed_backend_for(one: PackedStep) -> PackedBackend:
    """The backend of a packed pass, by that of its rows."""
    inner = one.step.backend
    return PackedPromptBackend(inner) if isinstance(inner, PromptBackend) else PackedBackend(inner)
