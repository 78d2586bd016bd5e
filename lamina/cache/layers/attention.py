"""The layers that attention reads: keys and values, latents, plain token vectors, another layer's keys and values.

These layers store tokens; `lamina.cache.plain_backend` computes attention. A layer for the call `attend` has
`keys_values`, which stores the keys and values of this pass and returns all keys and values that its queries may see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lamina.attention.view import View
from lamina.cache.codec.codec import KEY, LATENT, VALUE, VECTOR
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.tokens import TokenLayer
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.spec import IndexKeys, Latent, Shared, SharedIndex
    from lamina.cache.step import Step

KeysValues = tuple[Tensor, Tensor, View]
"""Keys [B, H, S, D], values [B, H, S, Dv], and which of the S slots each query sees."""


class AttentionLayer(TokenLayer):
    """Keys [B, H, S, D] and values [B, H, S, Dv]."""

    roles = {"k": KEY, "v": VALUE}

    def keys_values(self, step: Step, key: Key, k: Tensor | None, v: Tensor | None) -> KeysValues:
        """Stores k [B, H, T, D] and v [B, H, T, Dv] of this pass, and returns those that its queries may see."""
        if k is None or v is None:
            raise InputError(
                f"layer {key[0]} entry {key[1]!r} stores its own keys and values: attend(q, k, v) needs both"
            )
        tokens, view = self.extend(step, key, {"k": k, "v": v})
        step.share(key, tokens["k"], tokens["v"], view)
        return tokens["k"], tokens["v"], view


class SharedLayer(Layer):
    """Stores nothing: reads the keys and values that another layer returned earlier in the same pass."""

    spec: Shared

    def keys_values(self, step: Step, key: Key, k: Tensor | None, v: Tensor | None) -> KeysValues:
        return step.shared(self.spec.reads_from, key)


class LatentLayer(TokenLayer):
    """One vector [B, S, rank + P] per token, [latent | rotary key], which all heads share."""

    spec: Latent
    roles = {"latent": LATENT}


class TokensLayer(TokenLayer):
    """One vector per token [B, S, D], read back unchanged."""

    roles = {"x": VECTOR}


class IndexLayer(TokensLayer):
    """The keys of an indexer [B, S, D]."""

    spec: IndexKeys


class SharedIndexLayer(Layer):
    """Stores nothing: reads the selection that another layer made earlier in the same pass."""

    spec: SharedIndex
