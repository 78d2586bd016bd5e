"""The selective scan of Mamba-1: every channel has its own state vector with its own decays.

    h = exp(dt A) h + dt B x        y = C h

There is no matrix form (each channel and state entry has a decay of its own), so many tokens run as a two-level scan.
First all chunks are scanned in parallel from a zero state. From what each chunk adds and how much it decays follow the
states at the chunk starts, and a second scan from those gives the outputs. Nothing is ever divided by a decay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.recurrence.rule import Rule, Tensors, scan_by_doubling, skip_and_gate, step_sizes
from lamina.tracing import cast

Norms = tuple[float, Tensor | None, Tensor | None]
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SelectiveScan(Rule):
    """Inputs `x`, `dt` (>= 0, after softplus), `B`, `C`; constant `A` [channels, state], negative.

    Options of `around` in `memory.recur`:
    norms       (eps, weight of B [state] or None, weight of C [state] or None): B and C are RMS-normed first
    dt_product  module [rank] -> [channels]: the input `dt` is [rank], and its product is meant
    dt_norm     module: the norm of the input `dt` before that product
    dt_bias     [channels]: dt is a raw projection, from which softplus(dt + dt_bias) is made
    skip        [channels]: skip · x is added to the output
    gate        shaped like x: the output is multiplied by silu(gate)

    >>> rule = SelectiveScan(channels=2, state=1)
    >>> token = {"x": torch.ones(1, 2), "dt": torch.ones(1, 2), "B": torch.ones(1, 1), "C": torch.ones(1, 1)}
    >>> out, state = rule.step(rule.zero_state(1), token, {"A": -torch.ones(2, 1)})
    >>> out.tolist()
    [[1.0, 1.0]]
    """

    channels: int
    state: int

    value: ClassVar[str] = "x"
    exact: ClassVar[tuple[str, ...]] = ("dt",)
    longest_chunk: ClassVar[int] = 16

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.channels, self.state)

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.channels,), "dt": (self.channels,), "B": (self.state,), "C": (self.state,)}

    def before(
        self, inputs: Tensors, norms: Norms | None = None, dt_product: Map | None = None, dt_norm: Map | None = None,
        **around: Any,
    ) -> Tensors:  # fmt: skip
        if norms is not None:
            eps, *weights = norms
            inputs = {**inputs, **{n: _normed(inputs[n], w, eps) for n, w in zip(("B", "C"), weights, strict=True)}}
        if dt_product is not None:
            low = inputs["dt"]
            inputs = {**inputs, "dt": dt_product(low if dt_norm is None else dt_norm(low))}
        return step_sizes(inputs, **around)

    def after(
        self, out: Tensor, inputs: Tensors, skip: Tensor | None = None, gate: Tensor | None = None, **around: Any
    ) -> Tensor:
        return skip_and_gate(out, inputs["x"], skip, gate)

    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (cast(inputs[name], state.dtype) for name in self.input_shapes)
        decay = torch.exp(dt[..., None] * cast(constants["A"], state.dtype))  # [B, C, N]
        state = decay * state + (dt * x)[..., None] * B[..., None, :]
        out = (state @ C[..., None])[..., 0]  # [B, C]
        return cast(out, inputs["x"].dtype), state

    def scratch_per_token(self, length: int) -> int:
        return 2 * self.channels * self.state

    def chunks(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        # [L, B, K, ...]: the position in the chunk is the first axis, so one position of all chunks is contiguous.
        x, dt, B, C = (inputs[name].movedim(2, 0).contiguous() for name in self.input_shapes)
        A = cast(constants["A"], state.dtype)
        decay = torch.exp(dt[..., None] * A).unbind(0)  # L of [B, K, C, N]
        added = ((dt * x)[..., None] * B[..., None, :]).unbind(0)

        starts = [state]
        chunks = x.shape[2]
        if chunks > 1:
            gained = added[0]
            for a, b in zip(decay[1:], added[1:], strict=True):
                gained = torch.addcmul(b, a, gained)
            kept = torch.exp(dt.sum(0)[..., None] * A)  # [B, K, C, N]
            for k in range(chunks - 1):
                starts.append(torch.addcmul(gained[:, k], kept[:, k], starts[-1]))

        h = torch.stack(starts, 1)
        outs = []
        for a, b, c in zip(decay, added, C.unbind(0), strict=True):
            h = torch.addcmul(b, a, h)
            outs.append((h @ c[..., None])[..., 0])  # [B, K, C]
        return torch.stack(outs, 2), h[:, -1].clone()  # a view would keep all of h alive

    def at_once(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (inputs[name] for name in self.input_shapes)
        decay = torch.exp(dt[..., None] * cast(constants["A"], state.dtype))  # [B, T, C, N]
        h = scan_by_doubling(decay, (dt * x)[..., None] * B[..., None, :], state, self.most_at_once)
        return (h @ C[..., None])[..., 0], h[:, -1]


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    exact = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(exact), x.shape[-1:], None if weight is None else weight.to(exact), eps).to(x.dtype)
