"""The delta rule of Kimi Delta Attention: the gated delta rule with one decay per key channel instead of one per head.

    S = diag(exp(g)) S        u = beta (v - S^T k)        S = S + k u^T        y = S^T q

Many tokens are computed as in `gated_delta.py`. Decays differ by channel, so the products of keys inside a chunk are
sums over channels of k k exp(log decay between the two tokens): never a quotient of two decays. Chunks are short, since
that takes L · key_dim values per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.recurrence.gated_delta import unit_length
from lamina.recurrence.rule import Rule, Tensors, segment_sums, skip_and_gate
from lamina.tracing import cast


@dataclass(frozen=True)
class ChannelDelta(Rule):
    """Inputs `q`, `k` (normalized and scaled by the model), `v`, `g` [heads, key_dim] (log decay, <= 0), `beta`
    [heads]; no constants.

    Options of `around` in `memory.recur`:
    unit   True: q and k are normalized to length one, and q is then divided by √key_dim
    gates  (A [heads], dt_bias [heads, key_dim]): g and beta are raw projections, from which A · softplus(g + dt_bias)
           and sigmoid(beta) are made
    gate   shaped like v: the output is multiplied by silu(gate)

    >>> rule = ChannelDelta(heads=1, key_dim=1, value_dim=2)
    >>> one, beta = torch.ones(1, 1, 1), torch.ones(1, 1)
    >>> token = {"q": one, "k": one, "v": torch.ones(1, 1, 2), "g": 0 * one, "beta": beta}
    >>> out, state = rule.step(rule.zero_state(1), token, {})
    >>> out.tolist()
    [[[1.0, 1.0]]]
    """

    heads: int
    key_dim: int
    value_dim: int

    value: ClassVar[str] = "v"
    exact: ClassVar[tuple[str, ...]] = ("g",)
    longest_chunk: ClassVar[int] = 16
    most_at_once: ClassVar[int] = 16

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.heads, self.key_dim, self.value_dim)

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        key, value = (self.heads, self.key_dim), (self.heads, self.value_dim)
        return {"q": key, "k": key, "v": value, "g": key, "beta": (self.heads,)}

    def before(
        self, inputs: Tensors, unit: bool = False, gates: tuple[Tensor, Tensor] | None = None, **around: Any
    ) -> Tensors:
        inputs = dict(inputs)
        if unit:
            inputs["q"] = unit_length(inputs["q"]) * self.key_dim**-0.5
            inputs["k"] = unit_length(inputs["k"])
        if gates is not None:
            A, dt_bias = gates
            inputs["g"] = A[:, None] * F.softplus(inputs["g"] + dt_bias)  # in float32, as dt_bias is
            inputs["beta"] = inputs["beta"].sigmoid()
        return inputs

    def after(self, out: Tensor, inputs: Tensors, gate: Tensor | None = None, **around: Any) -> Tensor:
        return skip_and_gate(out, inputs["v"], gate=gate)

    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (cast(inputs[name], state.dtype) for name in self.input_shapes)
        state = g.exp()[..., None] * state
        u = beta[..., None, None] * (v[..., None, :] - k[..., None, :] @ state)  # [B, H, 1, Dv]
        state = state + k[..., None] * u
        out = (q[..., None, :] @ state)[..., 0, :]  # [B, H, Dv]
        return cast(out, inputs["v"].dtype), state

    def scratch_per_token(self, length: int) -> int:
        matrices = 4 * length * self.key_dim + 2 * self.key_dim * self.value_dim // length
        return self.heads * (matrices + 4 * self.key_dim + 4 * self.value_dim)

    def chunks(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        q, k, v, g = (inputs[name].transpose(2, 3) for name in ("q", "k", "v", "g"))  # [B, K, H, L, D]
        beta = inputs["beta"].transpose(2, 3)[..., None]  # [B, K, H, L, 1]
        between = segment_sums(g.transpose(-1, -2)).exp()  # [B, K, H, Dk, L, L]
        since_start = g.cumsum(-2).exp()  # [B, K, H, L, Dk]
        decayed = (between * k.transpose(-1, -2)[..., None, :]).transpose(-3, -2)  # [B, K, H, L, Dk, L] earlier keys

        # (1 + strictly lower part of beta k (decayed k)^T) u = beta (v - (since_start k) S_0)
        mixing = beta * (k[..., None, :] @ decayed)[..., 0, :]
        sides = torch.cat([beta * v, beta * since_start * k], -1)
        solved = torch.linalg.solve_triangular(mixing, sides, upper=False, unitriangular=True)
        fresh, seen = solved.split([self.value_dim, self.key_dim], -1)

        until_end = decayed[..., -1, :, :]  # [B, K, H, Dk, L]
        kept = since_start[..., -1, :, None]  # [B, K, H, Dk, 1]
        starts, corrections = [state], []
        for i in range(v.shape[1]):
            u = fresh[:, i] - seen[:, i] @ starts[-1]  # [B, H, L, Dv]
            corrections.append(u)
            starts.append(kept[:, i] * starts[-1] + until_end[:, i] @ u)

        past, u = torch.stack(starts[:-1], 1), torch.stack(corrections, 1)
        scores = (q[..., None, :] @ decayed)[..., 0, :]  # [B, K, H, L, L]
        out = scores @ u + (since_start * q) @ past  # [B, K, H, L, Dv]
        return out.transpose(2, 3), starts[-1]
