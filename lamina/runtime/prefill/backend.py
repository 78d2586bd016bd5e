"""`PromptBackend`: the memory calls of a plain pass on a GPU, with kernels for many tokens.

It stores what `PlainBackend` stores. Where no kernel fits (gradients, compiled blocks, a rule from outside the
package), it does what `PlainBackend` does. Attention is picked by `lamina.attention` (`attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina import kernels
from lamina.attention.core import note
from lamina.attention.rotary import RopeTable
from lamina.attention.view import View
from lamina.attention.window import Full
from lamina.cache.layers.attention import LatentLayer
from lamina.cache.layers.base import Key
from lamina.cache.layers.recurrent import ConvolutionLayer, RecurrentLayer
from lamina.cache.plain_backend import PLAIN, PlainBackend, Rotates, absorbs
from lamina.cache.step import Step
from lamina.kernels.eligibility import MOST_INDEX, why_no_attention
from lamina.nn.norm import RMSNorm
from lamina.recurrence import SSD, GatedDelta, Rule, SelectiveScan
from lamina.runtime.prefill.attention import WIDEST
from lamina.runtime.prefill.selected import as_mask, attend_in_pass, in_order, row_for, select_in_pass


class PromptBackend(PlainBackend):
    """Has no state, as `PlainBackend`."""

    def norm_and_rotate(
        self, one: Rotates, x: Tensor, *, rope: RopeTable | None, neighbours: bool, norm: RMSNorm | None,
        norms_last: bool, factor: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if (rope is None and norm is None and factor is None) or not kernels.fuses(x):
            return super().norm_and_rotate(
                one, x, rope=rope, neighbours=neighbours, norm=norm, norms_last=norms_last, factor=factor
            )
        from lamina.kernels.elementwise import rotate_heads  # imports Triton

        return rotate_heads(x, rope, neighbours=neighbours, norm=norm, norms_last=norms_last, factor=factor)

    def attend_latent(
        self, one: Step, key: Key, entry: LatentLayer, q: Tensor, kv: Tensor,
        *, norm: RMSNorm, rope: RopeTable, neighbours: bool, up: Tensor, scale: float,
        restrict: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Over expanded keys, of which the kernel reads the rotary part where it is stored, once for all heads; in the
        latent space for few tokens, and where an indexer selects."""
        rank, rope_dim = entry.spec.rank, entry.spec.rope_dim
        nope, absorbed = q.shape[-1] - rope_dim, restrict is not None or absorbs(one.T, rank, up.shape[1])
        if restrict is not None:
            fits = is_listed(restrict) and why_no_attention(entry.spec) is None
        elif absorbed:
            whole = isinstance(entry.spec.window, Full) and one.spans is None and one.packing is None
            fits = whole and one.T > 1 and why_no_attention(entry.spec) is None
        else:
            fits = halves_fit(nope, rope_dim, up.shape[1] - nope)
        if not fits or one.attention_of(key) is not None or not kernels.fuses(q):
            return super().attend_latent(
                one, key, entry, q, kv, norm=norm, rope=rope, neighbours=neighbours, up=up, scale=scale,
                restrict=restrict,
            )  # fmt: skip
        from lamina.kernels.elementwise import rotate_heads  # imports Triton

        latent, k_rope = kv.split([rank, rope_dim], dim=-1)  # [B, T, rank], [B, T, P]
        q_rope, k_rope = (rotate_heads(x, rope, neighbours=neighbours) for x in (q[..., nope:], k_rope[:, None]))
        tokens, view = entry.extend(one, key, {"latent": torch.cat([norm(latent), k_rope[:, 0]], dim=-1)})
        kept = tokens["latent"]  # [B, S, rank + P]
        kind = "expanded " if not absorbed else "" if restrict is None else "selected "
        note(f"kernel over {kind}latents", q, view)
        if absorbed and restrict is None:
            return attend_absorbed(one, q[..., :nope], q_rope, kept, up, scale)
        if restrict is not None:
            return attend_in_pass(one, q[..., :nope], q_rope, kept, view, restrict, up, scale)
        return attend_expanded(q[..., :nope], q_rope, kept, view, up, scale)

    def selection(self, one: Step, q: Tensor, keys: Tensor, weights: Tensor, view: View, top: int) -> Tensor:
        """Lists of slots, int32 [B, T, top]"""
        if one.T == 1 or not kernels.fuses(q) or not in_order(view) or keys.shape[-1] > MOST_INDEX:
            return super().selection(one, q, keys, weights, view, top)
        return select_in_pass(one, q, keys, weights, view, top)

    def restricted(self, view: View, restrict: Tensor) -> View:
        return view.restricted(as_mask(restrict, view) if is_listed(restrict) else restrict)

    def opened(self, x: Tensor, gate: Tensor) -> Tensor:
        whole = all(one.stride(3) == 1 and one.stride(1) == one.shape[3] for one in (x, gate))
        if not whole or x.shape != gate.shape or not kernels.fuses(x):
            return super().opened(x, gate)
        from lamina.kernels.norm import sigmoid_gated  # imports Triton

        # Each token as a row of one token: the kernel is built for a number of tokens.
        flat, open_by = (one.transpose(1, 2).flatten(0, 1)[:, :, None] for one in (x, gate))  # [B · T, H, 1, D]
        return sigmoid_gated(flat, open_by).view(x.shape[0], x.shape[2], x.shape[1], -1).transpose(1, 2)

    def recur(
        self, one: Step, key: Key, entry: RecurrentLayer, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor],
        around: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        """With step sizes, skip connection and gate inside the kernel, where nobody needs the inputs it makes."""
        rule = entry.rule
        if not isinstance(rule, SSD) or not entry.needs_state_alone(one) or not self._fits(one, inputs["x"]):
            return super().recur(one, key, entry, inputs, constants, around)
        from lamina.kernels.recurrent.prompt.ssd import ssd_prompt  # imports Triton

        out, state = ssd_prompt(rule, entry.state(one, inputs), inputs, constants, one.counts, **around)
        entry.leave(one, key, inputs, constants, state)
        return out

    def run_rule(
        self, one: Step, key: Key, entry: RecurrentLayer, tokens: Mapping[str, Tensor], constants: Mapping[str, Tensor]
    ) -> Tensor:
        if not self._fits(one, tokens[entry.rule.value]) or (run := kernel_of(entry.rule)) is None:
            return super().run_rule(one, key, entry, tokens, constants)
        out, state = run(entry.rule, entry.state(one, tokens), tokens, constants, one.counts)
        entry.leave(one, key, tokens, constants, state)
        return out

    def convolve(
        self, one: Step, key: Key, entry: ConvolutionLayer, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, act: str | None, gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        if not self._fits(one, x):
            return super().convolve(one, key, entry, x, weight, bias, act=act, gates=gates)
        from lamina.kernels.recurrent.prompt.conv import conv_prompt  # imports Triton

        x = x if gates is None else gates[0] * x
        y = conv_prompt(entry.past(one, key, x), x, weight, bias, act, one.counts)
        return y if gates is None else gates[1] * y

    def _fits(self, one: Step, x: Tensor) -> bool:
        """Whether kernels for many tokens run this pass."""
        return one.T > 1 and one.packing is None and kernels.fuses(x)


def attend_expanded(
    q: Tensor, q_rope: Tensor, kept: Tensor, view: View, up: Tensor, scale: float, **how: Any
) -> Tensor:
    """q [B, H, T, N] and q_rope [B, H, T, P] over the latents kept [B, S, rank + P], expanded by up [H, N + V, rank].
    how: of `attend_many`, if rows are packed"""
    from lamina.kernels.attention.prefill.many import attend_many  # imports Triton

    nope, rank = q.shape[-1], up.shape[-1]
    expanded = F.linear(kept[..., :rank], up.flatten(0, 1)).unflatten(-1, up.shape[:2]).transpose(1, 2)
    k, v = expanded.split([nope, up.shape[1] - nope], dim=-1)  # [B, H, S, N], [B, H, S, V]
    return attend_many(q, k, v, view, scale=scale, rest=(q_rope, kept[..., rank:]), **how)


def attend_absorbed(one: Step, q: Tensor, q_rope: Tensor, kept: Tensor, up: Tensor, scale: float) -> Tensor:
    """The same in the latent space, for few tokens of rows that see all before them."""
    from lamina.kernels.attention.prompt.latent import attend_latents  # imports Triton

    rank, nope, T = up.shape[-1], q.shape[-1], q.shape[2]
    table, kept = row_for(one, kept)
    latent = torch.cat([q @ up[:, :nope], q_rope], dim=-1)  # [B, H, T, rank + P]
    filled = F.pad(latent, (0, 0, 0, next_power(T) - T))  # a kernel is built for a number of tokens
    mean = attend_latents(filled, kept, table, rank=rank, scale=scale)[:, :, :T]
    return mean @ up[:, nope:].transpose(1, 2)


def next_power(n: int) -> int:
    """The smallest power of two that is not less.

    >>> next_power(5), next_power(8)
    (8, 8)
    """
    return 1 << (n - 1).bit_length()


def is_listed(restrict: Tensor) -> bool:
    """Whether a selection is lists of positions, and not a mask."""
    return restrict.dtype == torch.int32


def halves_fit(first: int, rest: int, value: int) -> bool:
    """Whether the attention kernel takes heads in two tensors of these sizes, and values of this one."""
    powers = all(size >= 16 and size & (size - 1) == 0 for size in (first, rest))
    return powers and first + rest <= WIDEST and value <= WIDEST


def kernel_of(rule: Rule) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The kernel that runs a rule over many tokens, if there is one."""
    match rule:
        case SSD():
            from lamina.kernels.recurrent.prompt.ssd import ssd_prompt  # imports Triton

            return ssd_prompt
        case GatedDelta():
            from lamina.kernels.recurrent.prompt.gated_delta import gated_delta_prompt  # imports Triton

            return gated_delta_prompt
        case SelectiveScan():
            from lamina.kernels.recurrent.prompt.selective_scan import selective_scan_prompt  # imports Triton

            return selective_scan_prompt
    return None


PROMPT = PromptBackend()


def backend_for(device: torch.device) -> PlainBackend:
    """The backend of plain passes of a model on this device."""
    return PROMPT if device.type == "cuda" or (device.type == "meta" and kernels.rehearsing()) else PLAIN
