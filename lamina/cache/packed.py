"""Packed passes: ragged rows side by side on one token axis, so that nothing is computed for padding.

    rows of 3, 1 and 2 tokens         a a a        a packed pass         a a a b c c
                                      b · ·
                                      c c ·

`PackedStep` is a `Pass` of one row to model code: products, norms and MLPs run over the real tokens alone. Attention of
rows that were empty runs row by row over parts of this axis, and tokens go from it into the store. For other calls the
backend spreads the inputs over the rows of the `Step` inside, which knows the layers, and packs the result. So every
kind of layer works as in any other pass, and the `Step` is committed as usual. On a GPU kernels take the rows where
they are (`lamina.runtime.prefill.packed_backend`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from lamina.attention.core import attention
from lamina.attention.view import View
from lamina.cache.backend import AttendOptions, Backend
from lamina.cache.layers.attention import AttentionLayer
from lamina.cache.layers.base import Key
from lamina.cache.memory import Memory
from lamina.cache.packed_rows import PackedRows
from lamina.cache.plain_backend import PlainBackend
from lamina.cache.spec import (
    Attention,
    Convolution,
    Cross,
    IndexKeys,
    Latent,
    LayerSpecs,
    Recurrent,
    Shared,
    SharedIndex,
)
from lamina.cache.step import Step

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable

KINDS = (Attention, Latent, Shared, Cross, Convolution, Recurrent, IndexKeys, SharedIndex)  # that can be spread
LEAST_PADDING, LEAST_SHARE = 64, 1 / 8  # tokens of padding, in all and of all tokens, from which on packing pays


class PackedStep:
    """The real tokens of an open pass with padding, as one row."""

    valid: Tensor | None = None

    def __init__(self, step: Step, ids: Tensor | None, counts: Sequence[int]) -> None:
        self.step, self.given_ids = step, ids
        device = step.before.device
        self.rows = rows = PackedRows(counts, device)
        last = (step.all_counts - 1).clamp(min=0)
        self.T = rows.tokens
        # [R, T] where each token of the rows is in this pass; padding repeats the row's last token, or any other's.
        self.place = (rows.starts[:, None] + torch.minimum(torch.arange(step.T, device=device), last[:, None])).clamp(
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
    """The memory calls of packed passes, by way of the backend of the rows.

    reads_store   whether `attend_rows` also takes keys and values in the rows of a store
    """

    reads_store = False

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
        if k is not None and v is not None and self.takes_rows(one, key, entry, q, k, v, how):
            tokens, view = entry.extend_packed(one.step, key, {"k": k, "v": v}, one.rows)
            out = self.attend_rows(one, key, q, tokens["k"], tokens["v"], view, how)
            return out if gate is None else self.inner.opened(out, gate)
        keys, values = (None if x is None else one.spread_heads(x) for x in (k, v))
        out = one.pack_heads(self.inner.attend(one.step, key, entry, one.spread_heads(q), keys, values, **how))
        return out if gate is None else self.inner.opened(out, gate)

    def takes_rows(
        self, one: PackedStep, key: Key, entry: Any, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions
    ) -> bool:
        """Whether `attend_rows` runs this call: keys are seen by position alone, they are those of this pass or in a
        line that it may read, and no other layer reads them."""
        step = one.step
        if step.spans is not None or not isinstance(entry, AttentionLayer) or not entry.packs(step):
            return False
        if not step.empty_before and not (self.reads_store and entry.layout.ring is None):
            return False
        return step.cache is not None and key not in step.cache.shared

    def attend_rows(
        self, one: PackedStep, key: Key, q: Tensor, k: Tensor, v: Tensor, view: View, how: AttendOptions
    ) -> Tensor:
        """Attention of each row over itself, one after the other: q [1, Hq, N, D], k and v [1, Hk, N, …], or rows of a
        store if there was something in it."""
        out = q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
        for row, part in enumerate(one.rows.slices()):
            if part.start == part.stop:
                continue
            at = view.q_positions[row : row + 1, : part.stop - part.start]
            out[:, :, part] = attention(
                q[:, :, part], k[:, :, part], v[:, :, part], View(at, at, view.window, exact=True),
                scale=how["scale"], softcap=how["softcap"], sinks=how["sinks"], bias=how["bias"],
                backend=one.step.attention_of(key),
            )  # fmt: skip
        return out

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
        raise NotImplementedError("a packed pass has no recall: `why_not_spread` says so")

    def select(
        self, one: PackedStep, key: Key, entry: Any, q: Tensor | None, k: Tensor | None, weights: Tensor | None,
        *, rope: RopeTable | None, neighbours: bool,
    ) -> Any:  # fmt: skip
        """A selection of the rows, as `attend_latent` hands it to them."""
        q = None if q is None else one.spread_heads(q)
        k, weights = (None if x is None else one.spread(x) for x in (k, weights))
        spread = None if rope is None else (one.spread(rope[0]), one.spread(rope[1]))
        return self.inner.select(one.step, key, entry, q, k, weights, rope=spread, neighbours=neighbours)

    def call(self, *args: Any, **how: Any) -> Any:
        raise NotImplementedError("a packed pass knows no calls from outside: `why_not_spread` says so")


_checked: Backend[PackedStep, Any] = PackedBackend(PlainBackend())


def why_not_spread(specs: Sequence[LayerSpecs]) -> str | None:
    """Why packed passes cannot spread the calls of layers of these specs; None if they can.

    `recall` returns the vectors of whole rows to model code, and a call from outside may expect rows.
    """
    for i, entry in enumerate(specs):
        for name, spec in entry.items():
            if type(spec) not in KINDS:
                return f"layer {i} entry {name!r} is {type(spec).__name__}, whose calls work on rows"
    return None


def pays(step: Step) -> bool:
    """Whether there is enough padding for packing to pay; False if the host does not know the counts."""
    counts, all_tokens = step.given.high, len(step.given.high) * step.T
    padding = all_tokens - sum(counts)
    if step.counts is None or step.given.low != counts or padding == all_tokens or step.T == 1:
        return False
    return padding >= LEAST_PADDING and padding >= LEAST_SHARE * all_tokens and not torch.compiler.is_compiling()


def packed(step: Step, ids: Tensor | None) -> PackedStep | None:
    """The same pass without its padding; None if packing does not pay."""
    return PackedStep(step, ids, step.given.high) if pays(step) else None
