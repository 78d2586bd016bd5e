"""Packed passes: ragged rows side by side on one token axis, so that nothing is computed for padding.

    rows of 3, 1 and 2 tokens         a a a        a packed pass         a a a b c c
                                      b · ·
                                      c c ·

`PackedStep` is a `Pass` of one row to model code: products, norms and MLPs run over the real tokens alone. Its backend
spreads the inputs of a memory call over the rows of the `Step` inside, which knows the layers, and packs the result. So
every kind of layer works as in any other pass, and the `Step` is committed as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from lamina.cache.backend import AttendOptions, Backend
from lamina.cache.clock import on_device
from lamina.cache.layers.base import Key
from lamina.cache.memory import Memory
from lamina.cache.plain_backend import PlainBackend
from lamina.cache.spec import Attention, Convolution, Cross, Latent, LayerSpecs, Recurrent, Shared
from lamina.cache.step import Step

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable

KINDS = (Attention, Latent, Shared, Cross, Convolution, Recurrent)  # that a packed pass can spread
LEAST_PADDING, LEAST_SHARE = 64, 1 / 8  # tokens of padding, in all and of all tokens, from which on packing pays


class PackedStep:
    """The real tokens of an open pass with padding, as one row."""

    valid: Tensor | None = None

    def __init__(self, step: Step, ids: Tensor | None, counts: Sequence[int]) -> None:
        self.step, self.given_ids = step, ids
        device, ends = step.before.device, list(torch.tensor(counts).cumsum(0).tolist())
        starts = on_device([end - count for end, count in zip(ends, counts, strict=True)], device)
        last = (step.all_counts - 1).clamp(min=0)
        self.T = ends[-1]
        # [R, T] where each token of the rows is in this pass; padding repeats the row's last token, or any other's.
        self.place = (starts[:, None] + torch.minimum(torch.arange(step.T, device=device), last[:, None])).clamp(
            max=self.T - 1
        )
        real = torch.cat([torch.arange(count) + row * step.T for row, count in enumerate(counts)])
        self.token = real.to(device)  # [N] where each token of this pass is in the rows
        self.last_place = self.place[:, -1]
        self.positions = self.pack(step.positions)
        self.all_counts = step.all_counts.new_tensor([self.T])
        self.logits: Tensor | None = None
        self.hidden: dict[int, Tensor] = {}
        self.backend = PackedBackend(step.backend)

    def memory(self, i: int) -> Memory:
        return Memory(self, i, self.step.entries(i))

    def last(self, x: Tensor) -> Tensor:
        """[1, N, W] -> [R, W] of each row's last real token"""
        return x[0, self.last_place]

    def has_run(self, ids: Tensor | None) -> None:
        self.step.has_run(self.given_ids)

    def pack(self, x: Tensor) -> Tensor:
        """[R, T, ...] -> [1, N, ...]"""
        return x.flatten(0, 1)[self.token][None]

    def spread(self, x: Tensor) -> Tensor:
        """[1, N, ...] -> [R, T, ...]"""
        return x[0][self.place]

    def pack_heads(self, x: Tensor) -> Tensor:
        """[R, H, T, D] -> [1, H, N, D]"""
        return self.pack(x.transpose(1, 2)).transpose(1, 2)

    def spread_heads(self, x: Tensor) -> Tensor:
        """[1, H, N, D] -> [R, H, T, D]"""
        return self.spread(x.transpose(1, 2)).transpose(1, 2)


class PackedBackend:
    """The memory calls of packed passes, by way of the backend of the rows."""

    def __init__(self, inner: PlainBackend) -> None:
        self.inner = inner

    def attend(
        self, one: PackedStep, key: Key, entry: Any, q: Tensor, k: Tensor | None, v: Tensor | None,
        **how: Unpack[AttendOptions],
    ) -> Tensor:  # fmt: skip
        """Norms and rotations come before the spreading, the gate after it."""
        norms, gate, before = how["norms"], how["gate"], self.inner.norm_and_rotate
        rope: dict[str, Any] = {name: how[name] for name in ("rope", "neighbours", "norms_last")}
        q = before(one.step, q, norm=norms and norms[0], factor=how["factor"], **rope)
        k = None if k is None else before(one.step, k, norm=norms and norms[1], **rope)
        how = {**how, "rope": None, "norms": None, "factor": None, "gate": None}
        keys, values = (None if x is None else one.spread_heads(x) for x in (k, v))
        out = one.pack_heads(self.inner.attend(one.step, key, entry, one.spread_heads(q), keys, values, **how))
        return out if gate is None else out * gate.sigmoid()

    def attend_latent(
        self, one: PackedStep, key: Key, entry: Any, q: Tensor, kv: Tensor, *, rope: RopeTable, **how: Any
    ) -> Tensor:
        spread = one.spread(rope[0]), one.spread(rope[1])
        q, kv = one.spread_heads(q), one.spread(kv)
        return one.pack_heads(self.inner.attend_latent(one.step, key, entry, q, kv, rope=spread, **how))

    def convolve(
        self, one: PackedStep, key: Key, entry: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, act: str | None, gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        x = one.spread(x if gates is None else gates[0] * x)
        y = one.pack(self.inner.convolve(one.step, key, entry, x, weight, bias, act=act, gates=None))
        return y if gates is None else gates[1] * y

    def recur(
        self, one: PackedStep, key: Key, entry: Any, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor],
        around: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        ready = entry.rule.before(inputs, **around)
        tokens = {name: one.spread(x) for name, x in ready.items()}
        out = self.inner.run_rule(one.step, key, entry, tokens, constants)
        return entry.rule.after(one.pack(out), ready, **around)

    def convolve_product(self, *args: Any) -> None:
        """Composed of `convolve` and the product."""
        return None

    def mix(self, *args: Any, **how: Any) -> None:
        """Composed of the other calls."""
        return None

    def recall(self, one: PackedStep, key: Key, entry: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a packed pass has no recall: `spreads` says so")

    def select(self, *args: Any, **how: Any) -> Any:
        raise NotImplementedError("a packed pass has no select: `spreads` says so")

    def call(self, *args: Any, **how: Any) -> Any:
        raise NotImplementedError("a packed pass knows no calls from outside: `spreads` says so")


_checked: Backend[PackedStep, Any] = PackedBackend(PlainBackend())


def spreads(specs: Sequence[LayerSpecs]) -> bool:
    """Whether a packed pass can spread the calls of layers of these specs: none is from outside or returns rows."""
    return all(type(spec) in KINDS for entry in specs for spec in entry.values())


def packed(step: Step, ids: Tensor | None) -> PackedStep | None:
    """The same pass without its padding; None if there is too little of it, or if the host does not know the counts."""
    counts, all_tokens = step.given.high, len(step.given.high) * step.T
    padding = all_tokens - sum(counts)
    if step.counts is None or step.given.low != counts or padding == all_tokens or step.T == 1:
        return None
    if padding < LEAST_PADDING or padding < LEAST_SHARE * all_tokens or torch.compiler.is_compiling():
        return None
    return PackedStep(step, ids, counts)
