"""`PlainBackend`: the memory calls of a pass as PyTorch operations over the layers of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import torch
from torch import Tensor

from lamina.activation import activation
from lamina.attention.core import attention
from lamina.attention.indexer import select_tokens
from lamina.attention.rotary import RopeTable, rotate, rotate_neighbours
from lamina.attention.view import View
from lamina.cache.backend import AttendOptions, Backend
from lamina.cache.layers.attention import (
    AttentionLayer,
    IndexLayer,
    LatentLayer,
    SharedIndexLayer,
    SharedLayer,
    TokensLayer,
)
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.cross import CrossLayer
from lamina.cache.layers.recurrent import ConvolutionLayer, RecurrentLayer
from lamina.errors import InputError
from lamina.recurrence.conv import causal_convolution
from lamina.tracing import surely

if TYPE_CHECKING:
    from lamina.cache.step import Step
    from lamina.nn.norm import RMSNorm


class Rotates(Protocol):
    """A pass that rotates by RoPE."""

    def rotated(self, x: Tensor, rope: RopeTable) -> Tensor: ...


class PlainBackend:
    """Has no state: all that belongs to a pass is in the pass."""

    def attend(
        self, one: Step, key: Key, entry: AttentionLayer | SharedLayer | CrossLayer,
        q: Tensor, k: Tensor | None, v: Tensor | None, **how: Unpack[AttendOptions],
    ) -> Tensor:  # fmt: skip
        """Norms and rotates q and k, stores k and v, and attends over all that is visible."""
        norms, factor, gate = how["norms"], how["factor"], how["gate"]
        rope: dict[str, Any] = {name: how[name] for name in ("rope", "neighbours", "norms_last")}
        q = self.norm_and_rotate(one, q, norm=norms and norms[0], factor=factor, **rope)
        k = None if k is None else self.norm_and_rotate(one, k, norm=norms and norms[1], **rope)
        keys, values, view = entry.keys_values(one, key, k, v)
        out = attention(
            q, keys, values, view, scale=how["scale"], softcap=how["softcap"], sinks=how["sinks"], bias=how["bias"],
            backend=one.attention_of(key),
        )  # fmt: skip
        return out if gate is None else self.opened(out, gate)

    def opened(self, x: Tensor, gate: Tensor) -> Tensor:
        """x · sigmoid(gate), both [B, H, T, D]"""
        return x * gate.sigmoid()

    def norm_and_rotate(
        self, one: Rotates, x: Tensor, *, rope: RopeTable | None, neighbours: bool, norm: RMSNorm | None,
        norms_last: bool, factor: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Queries or keys x [B, H, T, D], each head normed and rotated, times factor [B, T]."""
        if norm is not None and not norms_last:
            x = norm(x)
        if rope is not None:
            x = rotate_neighbours(x, rope) if neighbours else one.rotated(x, rope)
        x = norm(x) if norm is not None and norms_last else x
        return x if factor is None else (x * factor[:, None, :, None]).to(x.dtype)

    def attend_latent(
        self, one: Step, key: Key, entry: LatentLayer, q: Tensor, kv: Tensor,
        *, norm: RMSNorm, rope: RopeTable, neighbours: bool, up: Tensor, scale: float,
        restrict: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Stores normed latents and rotated keys, and attends in the latent or over expanded keys: the cheaper one."""
        turn, rank, rope_dim = rotate_neighbours if neighbours else rotate, entry.spec.rank, entry.spec.rope_dim
        q_nope, q_rope = q.split([q.shape[-1] - rope_dim, rope_dim], dim=-1)  # [B, H, T, N], [B, H, T, P]
        latent, k_rope = kv.split([rank, rope_dim], dim=-1)  # [B, T, rank], [B, T, P]
        q_rope, k_rope = turn(q_rope, rope), turn(k_rope[:, None], rope)[:, 0]
        tokens, view = entry.extend(one, key, {"latent": torch.cat([norm(latent), k_rope], dim=-1)})
        kept = tokens["latent"]  # [B, S, rank + P]
        view = view if restrict is None else self.restricted(view, restrict)
        nope, backend = q_nope.shape[-1], one.attention_of(key)
        if surely(absorbs(one.T, rank, up.shape[1])):
            # Attend in the latent: the projection up is folded into the query, and into the output after the sum.
            q = torch.cat([q_nope @ up[:, :nope], q_rope], dim=-1)
            keys = kept.unsqueeze(1)
            out = attention(q, keys, keys[..., :rank], view, scale=scale, backend=backend)
            return out @ up[:, nope:].transpose(1, 2)
        expanded = kept[:, None, :, :rank] @ up.transpose(1, 2)  # [B, H, S, N + V]
        shared_rope = kept[:, None, :, rank:].expand(-1, q_nope.shape[1], -1, -1)
        k = torch.cat([expanded[..., :nope], shared_rope], dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        return attention(q, k, expanded[..., nope:], view, scale=scale, backend=backend)

    def restricted(self, view: View, restrict: Tensor) -> View:
        """The View of the tokens that `select` returned."""
        return view.restricted(restrict)

    def convolve(
        self, one: Step, key: Key, entry: ConvolutionLayer, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, act: str | None, gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        x = one.unpacked(x if gates is None else gates[0] * x)
        past = entry.past(one, key, x)  # [B, K - 1, C]
        y = one.packed(causal_convolution(past, x, weight, bias))
        y = y if act is None else activation(act)(y)
        return y if gates is None else gates[1] * y

    def convolve_product(self, *args: Any) -> None:
        """Composed of `convolve` and the product."""
        return None

    def recur(
        self, one: Step, key: Key, entry: RecurrentLayer, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor],
        around: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        rule = entry.rule
        ready = rule.before(inputs, **around)
        tokens = {name: one.unpacked(x) for name, x in ready.items()}
        out = self.run_rule(one, key, entry, tokens, constants)
        return rule.after(one.packed(out), ready, **around)

    def run_rule(
        self, one: Step, key: Key, entry: RecurrentLayer, tokens: Mapping[str, Tensor], constants: Mapping[str, Tensor]
    ) -> Tensor:
        """Runs the rule on from the rows' states and leaves the new ones. tokens [R, T, ...] -> [R, T, ...]"""
        out, state = entry.rule.chunk(entry.state(one, tokens), tokens, constants, one.unpacked_valid)
        entry.leave(one, key, tokens, constants, state)
        return out

    def mix(self, one: Step, key: Key, entry: RecurrentLayer, ring: Layer, *args: Any, **how: Any) -> None:
        """Composed of the other calls."""
        return None

    def recall(self, one: Step, key: Key, entry: TokensLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> every token's vector [B, S, D], and which of them each query sees [B, T, S]"""
        tokens, view = entry.extend(one, key, {"x": x})
        exists = view.kv_positions >= 0
        return tokens["x"].masked_fill(~exists[..., None], 0), view.mask()[:, 0]

    def select(
        self, one: Step, key: Key, entry: IndexLayer | SharedIndexLayer, q: Tensor | None, k: Tensor | None,
        weights: Tensor | None, *, rope: RopeTable | None, neighbours: bool,
    ) -> Tensor | None:  # fmt: skip
        """-> which of the slots that `attend_latent` reads are selected [B, T, S]; None: all that a query sees"""
        if isinstance(entry, SharedIndexLayer):
            return one.shared_selection(entry.spec.reads_from, key)
        if q is None or k is None or weights is None:
            raise InputError(f"layer {key[0]} entry {key[1]!r} stores keys: select(q, k, weights) needs all three")
        before: dict[str, Any] = dict(rope=rope, neighbours=neighbours, norm=None, norms_last=False)
        q, k = self.norm_and_rotate(one, q, **before), self.norm_and_rotate(one, k[:, None], **before)[:, 0]
        tokens, view = entry.extend(one, key, {"x": k})
        keys, top = tokens["x"], entry.spec.top
        chosen = None if top >= keys.shape[-2] else self.selection(one, q, keys, weights, view, top)
        one.share_selection(key, chosen)
        return chosen

    def selection(self, one: Step, q: Tensor, keys: Tensor, weights: Tensor, view: View, top: int) -> Tensor:
        """The `top` of the tokens with these keys [B, S, D] that each query selects, as `attend_latent` takes it."""
        if not view.clean:
            keys = keys.masked_fill(~view.exists()[:, 0], 0)  # unused slots may hold NaN
        return select_tokens(q, keys, weights, view.mask()[:, 0], top)

    def call(self, one: Step, key: Key, entry: Layer, name: str, *args: Any, **how: Any) -> Any:
        """The layer's method of that name, given the pass and the key first."""
        return getattr(entry, name)(one, key, *args, **how)


def absorbs(tokens: int, rank: int, head: int) -> bool:
    """True if attending in the latent costs less than expanding it.

    Over S tokens and per head, expanding costs S·rank·head once, and absorbing costs S·(2·rank − head) more for each
    query (`head` = key and value dimensions without the rotary part).
    """
    return tokens * (2 * rank - head) < rank * head


PLAIN = PlainBackend()
_checked: Backend[Step, Any] = PLAIN
