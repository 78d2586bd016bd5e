"""What a layer of a model is given: the calls that remember.

    class Mixer(nn.Module):
        def forward(self, x, memory):
            q, k, v = ...
            return self.out(memory.attend(q, k, v, scale=self.scale))

The same code runs without a cache, in prefill, in decoding, in speculation, compiled and exported: which of these it
is, where the tokens lie and what may be seen is the memory's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lamina.activation import activation
from lamina.attention.rotary import RopeTable, rotate, rotate_neighbours
from lamina.cache.layers.base import Key, Layer
from lamina.errors import InputError
from lamina.recurrence.rule import Rule

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable
    from lamina.cache.step import Step
    from lamina.nn.norm import RMSNorm
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm
    from lamina.nn.recurrent.short_conv import ShortConvolution


class Memory:
    """One layer's memory in one pass. `memory[name]` is one entry of a layer that has several."""

    def __init__(self, step: Step, index: int, layers: Mapping[str, Layer]) -> None:
        self._step, self._index, self._layers = step, index, layers

    @property
    def positions(self) -> Tensor:
        """[B, T] the true position of each new token in its row."""
        return self._step.positions

    def __getitem__(self, name: str) -> Memory:
        return Memory(self._step, self._index, {name: self._entry(name, None)[1]})

    @property
    def layer(self) -> Layer:
        """The store itself, for kinds of memory that are defined outside this package; `step` and `key` go with it."""
        return self._entry(None, None)[1]

    @property
    def step(self) -> Step:
        """The pass this memory belongs to."""
        return self._step

    @property
    def key(self) -> Key:
        """Under which the layer leaves what it needs at commit."""
        return self._index, self._entry(None, None)[0]

    def attend(
        self,
        q: Tensor,  # [B, Hq, T, D]
        k: Tensor | None = None,  # [B, H, T, D]; None where another layer's or a source's are read
        v: Tensor | None = None,  # [B, H, T, Dv]
        *,
        scale: float,
        rope: RopeTable | None = None,  # turns q and k first: (cos, sin), see lamina.nn.attention.rotary
        neighbours: bool = False,  # `rope` pairs each number with the one beside it, not half a head away
        norms: tuple[RMSNorm, RMSNorm] | None = None,  # of each head of q and of k
        norms_last: bool = False,  # norms come after turning, not before
        factor: Tensor | None = None,  # [B, T] on q
        gate: Tensor | None = None,  # [B, Hq, T, Dv]: what comes out is multiplied by its sigmoid
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [Hq]
        bias: Callable[..., Tensor] | None = None,  # bias(head, q_pos, kv_pos), added to the scores
        name: str | None = None,
    ) -> Tensor:
        """Remembers k and v, and attends from q over all that is visible. -> [B, Hq, T, Dv]"""
        entry, layer = self._entry(name, "attend")
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "bias": bias}
        turn: dict[str, Any] = {"rope": rope, "neighbours": neighbours, "norms_last": norms_last}
        key = (self._index, entry)
        if getattr(layer, "fuses", False):
            return layer.attend(self._step, key, q, k, v, **how, **turn, norms=norms, factor=factor, gate=gate)
        q = self._step.ready(q, norm=norms and norms[0], **turn)
        k = None if k is None else self._step.ready(k, norm=norms and norms[1], **turn)
        if factor is not None:
            q = (q * factor[:, None, :, None]).to(q.dtype)
        out = layer.attend(self._step, key, q, k, v, **how)
        return out if gate is None else out * gate.sigmoid()

    def attend_latent(
        self,
        q: Tensor,  # [B, H, T, N + P]
        kv: Tensor,  # [B, T, rank + P]: one latent and one rotary key a token, which all heads share
        *,
        norm: RMSNorm,  # of the latent
        rope: RopeTable,  # turns the last P numbers of q and kv
        neighbours: bool,  # in which pairs: see lamina.attention.rotary
        up: Tensor,  # [H, N + V, rank]: a latent's way up to each head's key and value
        scale: float,
        name: str | None = None,
    ) -> Tensor:
        """Latent attention: remembers normed latents and turned keys, and attends over them. -> [B, H, T, V]"""
        entry, layer = self._entry(name, "attend_latent")
        key = (self._index, entry)
        if getattr(layer, "fuses", False):
            around: dict[str, Any] = {"norm": norm, "rope": rope, "neighbours": neighbours}
            return layer.attend_latent(self._step, key, q, kv, up=up, scale=scale, **around)
        turn = rotate_neighbours if neighbours else rotate
        q_nope, q_rope = q.split([q.shape[-1] - layer.spec.rope_dim, layer.spec.rope_dim], dim=-1)
        latent, k_rope = kv.split([layer.spec.rank, layer.spec.rope_dim], dim=-1)
        q_rope, k_rope = turn(q_rope, rope), turn(k_rope[:, None], rope)[:, 0]
        return layer.attend_latent(self._step, key, q_nope, q_rope, norm(latent), k_rope, up=up, scale=scale)

    def convolve(
        self,
        x: Tensor,  # [B, T, C]
        weight: Tensor,  # [C, K]
        bias: Tensor | None = None,
        *,
        act: str | None = None,
        gates: tuple[Tensor, Tensor] | None = None,  # factors as x is, on what goes in and on what comes out
        name: str | None = None,
    ) -> Tensor:
        """Causal depthwise convolution over the row so far, then `act`. -> [B, T, C]"""
        entry, layer = self._entry(name, "convolve")
        key = (self._index, entry)
        if getattr(layer, "fuses", False):
            return layer.convolve(self._step, key, x, weight, bias, act, gates)
        y = layer.convolve(self._step, key, x if gates is None else gates[0] * x, weight, bias)
        y = y if act is None else activation(act)(y)
        return y if gates is None else gates[1] * y

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
        entry, layer = self._recurrent(rule, name)
        key, around = (self._index, entry), around or {}
        if getattr(layer, "fuses", False):
            return layer.recur(self._step, key, inputs, constants, around)
        ready = rule.before(inputs, **around)
        return rule.after(layer.recur(self._step, key, ready, constants), ready, **around)

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
        Without a norm the output is y · silu(gate). A norm of fewer than W numbers is over each stretch of so many.
        What is returned is for a `Linear`: in a captured step it may be left to that one to divide by the norm.
        """
        entry, layer = self._recurrent(rule, None)
        around = around or {}
        if getattr(layer, "fuses", False) and layer.mixes(x):
            _, ring = self._entry(None, "convolve")
            return layer.mix(
                self._step, (self._index, entry), ring, x, inputs, constants, conv=conv, gate=gate, norm=norm, **around
            )
        shapes = {name: shape for name, shape in rule.input_shapes.items() if name not in inputs}
        parts = conv(x, self).split([math.prod(shape) for shape in shapes.values()], dim=-1)
        mixed = {n: part.unflatten(-1, shapes[n]) for n, part in zip(shapes, parts, strict=True)}
        if norm is None:
            around = {**around, "gate": gate.unflatten(-1, rule.input_shapes[rule.value])}
        y = self.recur(rule, {**mixed, **inputs}, constants, around=around).flatten(2)
        if norm is None:
            return y
        stretches = (-1, norm.weight.shape[0])
        return norm(y.unflatten(-1, stretches), gate.unflatten(-1, stretches)).flatten(2)

    def recall(self, x: Tensor, *, name: str | None = None) -> tuple[Tensor, Tensor]:
        """Remembers one vector a token. x [B, T, D] -> all of them [B, S, D], and which each query sees [B, T, S]"""
        entry, layer = self._entry(name, "recall")
        return layer.recall(self._step, (self._index, entry), x)

    def _recurrent(self, rule: Rule, name: str | None) -> tuple[str, Any]:
        """The entry that keeps the state of this rule."""
        entry, layer = self._entry(name, "recur")
        if layer.spec.rule != rule:
            raise InputError(f"layer {self._index} entry {entry!r} keeps the state of {layer.spec.rule}, not of {rule}")
        return entry, layer

    def _entry(self, name: str | None, call: str | None) -> tuple[str, Any]:
        """The entry of that name, or the only one that answers to the call."""
        if name is not None:
            if name not in self._layers:
                raise InputError(f"layer {self._index} remembers {sorted(self._layers)}, nothing called {name!r}")
            return name, self._layers[name]
        able = [(n, layer) for n, layer in self._layers.items() if call is None or hasattr(layer, call)]
        if len(able) != 1:
            names = [n for n, _ in able]
            raise InputError(f"layer {self._index} has {len(able)} entries for {call or 'this'} {names}: give name=")
        return able[0]
