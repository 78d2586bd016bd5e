"""The layers that attention reads: keys and values, latents, plain token vectors, another layer's keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.attention.core import attention
from lamina.cache.codec.codec import KEY, LATENT, VALUE, VECTOR
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.spec import Latent, Shared
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.step import Step

Bias = Callable[..., Tensor]


class AttentionLayer(TokenLayer):
    """Keys [B, H, S, D] and values."""

    roles = {"k": KEY, "v": VALUE}

    def attend(self, step: Step, key: Key, q: Tensor, k: Tensor | None, v: Tensor | None, **how: object) -> Tensor:
        if k is None or v is None:
            raise InputError(
                f"layer {key[0]} entry {key[1]!r} keeps its own keys and values: attend(q, k, v) needs both"
            )
        tokens, view = self.extend(step, key, {"k": k, "v": v})
        step.share(key, tokens["k"], tokens["v"], view)
        return attention(q, tokens["k"], tokens["v"], view, backend=step.backend_of(key), **how)  # type: ignore[arg-type]


class SharedLayer(Layer):
    """Reads what another layer holds after its part of this pass."""

    spec: Shared

    def attend(self, step: Step, key: Key, q: Tensor, k: Tensor | None, v: Tensor | None, **how: object) -> Tensor:
        keys, values, view = step.shared((self.spec.source, self.spec.name), key)
        return attention(q, keys, values, view, backend=step.backend_of(key), **how)  # type: ignore[arg-type]


class LatentLayer(TokenLayer):
    """One vector a token, [latent | rotary key], that all heads share."""

    spec: Latent
    roles = {"latent": LATENT}

    def attend_latent(
        self,
        step: Step,
        key: Key,
        q_nope: Tensor,  # [B, H, T, N]
        q_rope: Tensor,  # [B, H, T, P]
        latent: Tensor,  # [B, T, rank]
        k_rope: Tensor,  # [B, T, P]
        *,
        up: Tensor,  # [H, N + V, rank]: a latent's way up to each head's key and value
        scale: float,
    ) -> Tensor:
        tokens, view = self.extend(step, key, {"latent": torch.cat([latent, k_rope], dim=-1)})
        kept = tokens["latent"]  # [B, S, rank + P]
        rank, nope = self.spec.rank, q_nope.shape[-1]
        if absorbs(step.T, rank, up.shape[1]):
            # Attend in the latent: the way up is folded into the query, and into the output after the sum.
            q = torch.cat([q_nope @ up[:, :nope], q_rope], dim=-1)
            keys = kept.unsqueeze(1)
            out = attention(q, keys, keys[..., :rank], view, scale=scale, backend=step.backend_of(key))
            return out @ up[:, nope:].transpose(1, 2)
        expanded = kept[:, None, :, :rank] @ up.transpose(1, 2)  # [B, H, S, N + V]
        rope = kept[:, None, :, rank:].expand(-1, q_nope.shape[1], -1, -1)
        k = torch.cat([expanded[..., :nope], rope], dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        return attention(q, k, expanded[..., nope:], view, scale=scale, backend=step.backend_of(key))


def absorbs(tokens: int, rank: int, head: int) -> bool:
    """Whether attending in the latent costs less than expanding it.

    Over S tokens and per head, expanding costs S·rank·head once, and absorbing costs S·(2·rank − head) more for each
    query (`head` = key and value numbers without the rotary part).
    """
    return tokens * (2 * rank - head) < rank * head


class TokensLayer(TokenLayer):
    """Plain vectors, read back as they are."""

    roles = {"x": VECTOR}

    def recall(self, step: Step, key: Key, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> every token's vector [B, S, D] and which of them each query sees [B, T, S]."""
        tokens, view = self.extend(step, key, {"x": x})
        exists = view.kv_positions >= 0
        return tokens["x"].masked_fill(~exists[..., None], 0), view.mask()[:, 0]
