"""The real-gated linear recurrent unit (RG-LRU) of RecurrentGemma: one value per channel, decayed and added to.

    h = exp(g) h + x        y = h

Every channel has its own decay, so many tokens run as a two-level scan, as in `selective_scan.py`: what each chunk adds
to a zero state, the states at the chunk starts, then the outputs from those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lamina.activation import activation
from lamina.recurrence.rule import Rule, Tensors, scan_by_doubling
from lamina.tracing import cast


class Gates(NamedTuple):
    """How the gates of RG-LRU follow from its input x: products with block-diagonal matrices, one block per head.

    The channels are `heads` blocks of `block` channels; row c of a weight is the part of channel c in its own block.
    """

    open_weight: Tensor  # [C, block], of the gate on the input
    open_bias: Tensor  # [C]
    decay_weight: Tensor  # [C, block], of the gate on the log decay
    decay_bias: Tensor  # [C]
    rate: Tensor  # [C] float32: the log decay where the gate is fully open, negative

    def inputs(self, x: Tensor, first: Tensor) -> dict[str, Tensor]:
        """x [B, T, C], first [B, T] (True: nothing comes before this token) -> the inputs of the rule."""
        opened = self._product(x, self.open_weight, self.open_bias).sigmoid()
        g = self.rate * self._product(x, self.decay_weight, self.decay_bias).sigmoid()  # [B, T, C] float32
        # The input is scaled so that a state of variance one keeps it. A first token has no state to make room for.
        room = torch.where(first[..., None], 1.0, torch.sqrt(-torch.expm1(2 * g)))
        return {"x": (x * opened * room).to(x.dtype), "g": g}

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        block = weight.shape[1]
        blocks = x.unflatten(-1, (-1, block)).flatten(0, 1).transpose(0, 1)  # [heads, B · T, block]
        y = blocks @ weight.unflatten(0, (-1, block)).transpose(1, 2)
        return y.transpose(0, 1).reshape(x.shape) + bias


@dataclass(frozen=True)
class RGLRU(Rule):
    """Inputs `x` (scaled), `g` (log decay, <= 0); no constants.

    Options of `around` in `memory.recur`:
    gates, positions  `Gates` and [B, T]: only x is given; both inputs are made of it
    gate, act         shaped like x, and a name: the output is multiplied by act(gate)

    >>> rule = RGLRU(channels=2)
    >>> out, state = rule.step(torch.ones(1, 2), {"x": torch.ones(1, 2), "g": torch.zeros(1, 2)}, {})
    >>> out.tolist()
    [[2.0, 2.0]]
    """

    channels: int

    value: ClassVar[str] = "x"
    exact: ClassVar[tuple[str, ...]] = ("g",)
    longest_chunk: ClassVar[int] = 32

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.channels,)

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.channels,), "g": (self.channels,)}

    def before(
        self, inputs: Tensors, gates: Gates | None = None, positions: Tensor | None = None, **around: Any
    ) -> Tensors:
        if gates is None:
            return inputs
        assert positions is not None
        return gates.inputs(inputs["x"], positions == 0)

    def after(
        self, out: Tensor, inputs: Tensors, gate: Tensor | None = None, act: str = "silu", **around: Any
    ) -> Tensor:
        return out if gate is None else (out * activation(act)(gate)).to(gate.dtype)

    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        x, g = (cast(inputs[name], state.dtype) for name in self.input_shapes)
        state = torch.addcmul(x, g.exp(), state)
        return cast(state, inputs["x"].dtype), state

    def scratch_per_token(self, length: int) -> int:
        return 4 * self.channels

    def chunks(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        x, g = (inputs[name].movedim(2, 0) for name in self.input_shapes)  # [L, B, K, C]
        decay, added = g.exp().unbind(0), x.unbind(0)
        starts = [state]
        chunks = x.shape[2]
        if chunks > 1:
            gained = added[0]
            for a, b in zip(decay[1:], added[1:], strict=True):
                gained = torch.addcmul(b, a, gained)
            kept = g.sum(0).exp()  # [B, K, C]
            for k in range(chunks - 1):
                starts.append(torch.addcmul(gained[:, k], kept[:, k], starts[-1]))
        h = torch.stack(starts, 1)
        outs = []
        for a, b in zip(decay, added, strict=True):
            h = torch.addcmul(b, a, h)
            outs.append(h)
        return torch.stack(outs, 2), h[:, -1].clone()  # a view would keep all of h alive

    def at_once(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        h = scan_by_doubling(inputs["g"].exp(), inputs["x"], state, self.most_at_once)
        return h, h[:, -1]
