"""`Memory`: what a layer of a model is given. Its methods are the calls that remember.

    class Mixer(nn.Module):
        def forward(self, x, memory):
            q, k, v = ...
            return self.out(memory.attend(q, k, v, scale=self.scale))

The same code runs without a cache, in prefill, in decoding, in speculative decoding, compiled and captured. A memory
finds the entry that a call is for, and hands the call to the backend of its pass (backend.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lamina.cache.backend import Entry
from lamina.cache.layers.base import Key
from lamina.errors import InputError
from lamina.recurrence.rule import Rule

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable
    from lamina.cache.passes import Pass
    from lamina.nn.norm import RMSNorm
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm
    from lamina.nn.recurrent.short_conv import ShortConvolution


class Memory:
    """One layer's memory in one pass. `memory[name]` is one entry of a layer that has several."""

    def __init__(self, one: Pass, index: int, entries: Mapping[str, Entry]) -> None:
        self._pass, self._index, self._entries = one, index, entries

    @property
    def positions(self) -> Tensor:
        """[B, T] the true position of each new token in its row."""
        return self._pass.positions

    def __getitem__(self, name: str) -> Memory:
        return Memory(self._pass, self._index, {name: self._entry(name, None)[1]})

    @property
    def layer(self) -> Any:
        """The entry itself, if there is one: a `Layer`, or a row of the table in a captured pass."""
        return self._entry(None, None)[1]

    @property
    def step(self) -> Any:
        """The pass this memory belongs to."""
        return self._pass

    @property
    def key(self) -> Key:
        """(index of the model's layer, name of the entry)"""
        return self._index, self._entry(None, None)[0]

    def attend(
        self,
        q: Tensor,  # [B, Hq, T, D]
        k: Tensor | None = None,  # [B, H, T, D]; None where another layer's or a source's are read
        v: Tensor | None = None,  # [B, H, T, Dv]
        *,
        scale: float,
        rope: RopeTable | None = None,  # (cos, sin), rotates q and k first: see lamina.nn.attention.rotary
        neighbours: bool = False,  # `rope` pairs each dimension with the one beside it, not half a head away
        norms: tuple[RMSNorm, RMSNorm] | None = None,  # of each head of q and of k
        norms_last: bool = False,  # norms come after the rotation, not before
        factor: Tensor | None = None,  # [B, T] multiplies q
        gate: Tensor | None = None,  # [B, Hq, T, Dv]: its sigmoid multiplies the output
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [Hq]
        bias: Callable[..., Tensor] | None = None,  # bias(head, q_pos, kv_pos), added to the scores
        name: str | None = None,
    ) -> Tensor:
        """Stores k and v, and attends from q over all that is visible. -> [B, Hq, T, Dv]"""
        found, entry = self._entry(name, "attend")
        return self._pass.backend.attend(
            self._pass, (self._index, found), entry, q, k, v, scale=scale, rope=rope, neighbours=neighbours,
            norms=norms, norms_last=norms_last, factor=factor, gate=gate, softcap=softcap, sinks=sinks, bias=bias,
        )  # fmt: skip

    def attend_latent(
        self,
        q: Tensor,  # [B, H, T, N + P]
        kv: Tensor,  # [B, T, rank + P]: one latent and one rotary key per token, which all heads share
        *,
        norm: RMSNorm,  # of the latent
        rope: RopeTable,  # rotates the last P dimensions of q and kv
        neighbours: bool,  # in which pairs: see lamina.attention.rotary
        up: Tensor,  # [H, N + V, rank]: projects a latent up to each head's key and value
        scale: float,
        restrict: Any = None,  # attend only over what an indexer selected: the result of `select`
        name: str | None = None,
    ) -> Tensor:
        """Latent attention: stores normed latents and rotated keys, and attends over them. -> [B, H, T, V]"""
        found, entry = self._entry(name, "attend_latent")
        return self._pass.backend.attend_latent(
            self._pass, (self._index, found), entry, q, kv,
            norm=norm, rope=rope, neighbours=neighbours, up=up, scale=scale, restrict=restrict,
        )  # fmt: skip

    def convolve(
        self,
        x: Tensor,  # [B, T, C]
        weight: Tensor,  # [C, K]
        bias: Tensor | None = None,  # [C]
        *,
        act: str | None = None,
        gates: tuple[Tensor, Tensor] | None = None,  # [B, T, C] each: factors on the input and on the output
        name: str | None = None,
    ) -> Tensor:
        """Causal depthwise convolution over the row so far, then `act`. -> [B, T, C]"""
        found, entry = self._entry(name, "convolve")
        return self._pass.backend.convolve(
            self._pass, (self._index, found), entry, x, weight, bias, act=act, gates=gates
        )

    def convolve_product(
        self, x: Tensor, conv: ShortConvolution, product: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`conv` of x [B, T, C], and `product` of that. In a captured step of few rows the two may be one launch."""
        found, entry = self._entry(None, "convolve")
        both = self._pass.backend.convolve_product(self._pass, (self._index, found), entry, x, conv, product)
        if both is not None:
            return both
        y = conv(x, self)
        return y, product(y)

    def recur(
        self,
        rule: Rule,
        inputs: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        *,
        around: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> Tensor:
        """Runs a recurrence on from the row's state. inputs [B, T, ...] each -> outputs [B, T, ...]

        around   what the rule offers to do with inputs and outputs on the way; its class says what there is
        """
        found, entry = self._recurrent(rule, name)
        return self._pass.backend.recur(self._pass, (self._index, found), entry, inputs, constants, around or {})

    def mix(
        self,
        rule: Rule,
        x: Tensor,  # [B, T, C]
        inputs: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        *,
        conv: ShortConvolution,
        gate: Tensor,  # [B, T, W]
        norm: GatedRMSNorm | None = None,
        around: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """A recurrent mixer between its projections: `conv`, then the rule, then `norm` with the gate. -> [B, T, W]

        The convolution's channels are the inputs of the rule that are not given, side by side in the rule's order.
        Without a norm the output is y · silu(gate). A norm of fewer than W channels is over each stretch of that many.
        The output is for a `Linear`: in a captured step the division by the norm may be left to that product.
        """
        found, entry = self._recurrent(rule, None)
        around = around or {}
        mixed = self._pass.backend.mix(
            self._pass, (self._index, found), entry, self._entry(None, "convolve")[1], x, inputs, constants,
            conv=conv, gate=gate, norm=norm, around=around,
        )  # fmt: skip
        if mixed is not None:
            return mixed
        shapes = {name: shape for name, shape in rule.input_shapes.items() if name not in inputs}
        parts = conv(x, self).split([math.prod(shape) for shape in shapes.values()], dim=-1)
        own = {n: part.unflatten(-1, shapes[n]) for n, part in zip(shapes, parts, strict=True)}
        if norm is None:
            around = {**around, "gate": gate.unflatten(-1, rule.input_shapes[rule.value])}
        y = self.recur(rule, {**own, **inputs}, constants, around=around).flatten(2)
        if norm is None:
            return y
        stretches = (-1, norm.weight.shape[0])
        return norm(y.unflatten(-1, stretches), gate.unflatten(-1, stretches)).flatten(2)

    def recall(self, x: Tensor, *, name: str | None = None) -> tuple[Tensor, Tensor]:
        """Stores one vector per token. x [B, T, D] -> all of them [B, S, D], and which each query sees [B, T, S]"""
        found, entry = self._entry(name, "recall")
        return self._pass.backend.recall(self._pass, (self._index, found), entry, x)

    def select(
        self,
        q: Tensor | None = None,  # [B, H, T, D]; None where the selection of another layer is read
        k: Tensor | None = None,  # [B, T, D]
        weights: Tensor | None = None,  # [B, T, H] float32 or better
        *,
        rope: RopeTable | None = None,  # rotates q and k first, as in `attend`
        neighbours: bool = False,
        name: str | None = None,
    ) -> Any:
        """Stores the keys k of an indexer, and selects for each query the tokens with the highest scores, Σ over heads
        of weight · relu(q · k). -> for `restrict` of an attention of this layer

        Among equal scores the earliest tokens are selected. How many are selected is in the spec (`IndexKeys.top`).
        """
        found, entry = self._entry(name, "select")
        return self._pass.backend.select(
            self._pass, (self._index, found), entry, q, k, weights, rope=rope, neighbours=neighbours
        )

    def call(self, call: str, *args: Any, name: str | None = None, **how: Any) -> Any:
        """A call of a kind that is defined outside this package: one that its spec names in `calls`."""
        found, entry = self._entry(name, call)
        return self._pass.backend.call(self._pass, (self._index, found), entry, call, *args, **how)

    def _recurrent(self, rule: Rule, name: str | None) -> tuple[str, Any]:
        """The entry that stores the state of this rule."""
        found, entry = self._entry(name, "recur")
        if entry.spec.rule != rule:
            raise InputError(f"layer {self._index} entry {found!r} keeps the state of {entry.spec.rule}, not of {rule}")
        return found, entry

    def _entry(self, name: str | None, call: str | None) -> tuple[str, Any]:
        """The entry of that name, or the only one that answers to the call."""
        if name is not None:
            if name not in self._entries:
                raise InputError(f"layer {self._index} remembers {sorted(self._entries)}, nothing called {name!r}")
            return name, self._entries[name]
        able = [(n, entry) for n, entry in self._entries.items() if call is None or call in entry.spec.calls]
        if len(able) != 1:
            names = [n for n, _ in able]
            raise InputError(f"layer {self._index} has {len(able)} entries for {call or 'this'} {names}: give name=")
        return able[0]
