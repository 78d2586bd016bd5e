"""The gated delta rule of Qwen3-Next: a state that maps keys to values; each token corrects the value of its key.

    S = exp(g) S        u = beta (v - S^T k)        S = S + k u^T        y = S^T q

Inside a chunk each correction u depends linearly on the earlier ones, through a triangular matrix of key products, so
one triangular solve gives all of them (the WY, or UT, transform). The state S_0 at the start of the chunk enters
linearly too: u = fresh - seen S_0. Both `fresh` and `seen` are solved for all chunks at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.errors import InputError
from lamina.recurrence.rule import Rule, Tensors, segment_sums, skip_and_gate
from lamina.tracing import cast


@dataclass(frozen=True)
class GatedDelta(Rule):
    """Inputs `q`, `k` (normalized and scaled by the model), `v`, `g` (log decay, <= 0), `beta`; no constants.

    Options of `around` in `memory.recur`:
    unit     True: q and k are normalized to length one, and q is then divided by √key_dim
    gates    (A, dt_bias): g and beta are raw projections, of which A · softplus(g + dt_bias) and sigmoid(beta) are made
    doubled  True: beta is then doubled, so that a key's value can change its sign
    gate     shaped like v: the output is multiplied by silu(gate)

    Value head h reads key head h // (value_heads // key_heads).

    >>> rule = GatedDelta(key_heads=1, value_heads=1, key_dim=1, value_dim=2)
    >>> one, beta = torch.ones(1, 1, 1), torch.ones(1, 1)
    >>> token = {"q": one, "k": one, "v": torch.ones(1, 1, 2), "g": 0 * beta, "beta": beta}
    >>> out, state = rule.step(rule.zero_state(1), token, {})
    >>> out.tolist()
    [[[1.0, 1.0]]]
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    value: ClassVar[str] = "v"
    exact: ClassVar[tuple[str, ...]] = ("g",)
    longest_chunk: ClassVar[int] = 64

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise InputError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads; "
                "key_heads must divide value_heads"
            )

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.value_heads, self.key_dim, self.value_dim)

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        key, value = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return {"q": key, "k": key, "v": value, "g": (self.value_heads,), "beta": (self.value_heads,)}

    def before(
        self,
        inputs: Tensors,
        unit: bool = False,
        gates: tuple[Tensor, Tensor] | None = None,
        doubled: bool = False,
        **around: Any,
    ) -> Tensors:
        inputs = dict(inputs)
        if unit:
            inputs["q"] = unit_length(inputs["q"]) * self.key_dim**-0.5
            inputs["k"] = unit_length(inputs["k"])
        if gates is not None:
            A, dt_bias = gates
            inputs["g"] = A * F.softplus(inputs["g"] + dt_bias)  # in float32, as dt_bias is
            inputs["beta"] = inputs["beta"].sigmoid()
        if doubled:
            inputs["beta"] = 2 * inputs["beta"]
        return inputs

    def after(self, out: Tensor, inputs: Tensors, gate: Tensor | None = None, **around: Any) -> Tensor:
        return skip_and_gate(out, inputs["v"], gate=gate)

    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (cast(inputs[name], state.dtype) for name in self.input_shapes)
        q, k = (
            self._per_value_head(q, 1)[..., None, :],
            self._per_value_head(k, 1)[..., None, :],
        )  # [B, H, 1, Dk]
        state = torch.exp(g)[..., None, None] * state
        u = beta[..., None, None] * (v[..., None, :] - k @ state)  # [B, H, 1, Dv]
        state = state + k.transpose(-1, -2) * u
        out = (q @ state)[..., 0, :]  # [B, H, Dv]
        return cast(out, inputs["v"].dtype), state

    def scratch_per_token(self, length: int) -> int:
        matrices = 5 * length + 2 * self.key_dim * self.value_dim // length
        return self.value_heads * (matrices + 3 * self.key_dim + 4 * self.value_dim)

    def chunks(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        q, k, v = (inputs[name].transpose(2, 3) for name in ("q", "k", "v"))  # [B, K, H, L, D]
        g, beta = (inputs[name].transpose(2, 3) for name in ("g", "beta"))  # [B, K, H, L]
        between = segment_sums(g).exp()  # [B, K, H, L, L]
        since_start = g.cumsum(-1).exp()[..., None]  # [B, K, H, L, 1]
        beta = beta[..., None]

        # (1 + strictly lower part of beta (k k^T) between) u = beta (v - since_start k S_0)
        keys = self._per_value_head(k, 2)
        mixing = self._per_value_head(k @ k.transpose(-1, -2), 2) * between * beta
        sides = torch.cat([beta * v, (beta * since_start) * keys], -1)
        solved = torch.linalg.solve_triangular(mixing, sides, upper=False, unitriangular=True)
        fresh, seen = solved.split([self.value_dim, self.key_dim], -1)  # [B, K, H, L, Dv], [B, K, H, L, Dk]

        until_end = (keys * between[..., -1, :, None]).transpose(-1, -2)  # [B, K, H, Dk, L]
        kept = since_start[..., -1:, :]  # [B, K, H, 1, 1]
        starts, corrections = [state], []
        for i in range(v.shape[1]):
            u = fresh[:, i] - seen[:, i] @ starts[-1]  # [B, H, L, Dv]
            corrections.append(u)
            starts.append(kept[:, i] * starts[-1] + until_end[:, i] @ u)

        past, u = torch.stack(starts[:-1], 1), torch.stack(corrections, 1)
        scores = self._per_value_head(q @ k.transpose(-1, -2), 2) * between  # [B, K, H, L, L]
        out = scores @ u + (since_start * self._per_value_head(q, 2)) @ past  # [B, K, H, L, Dv]
        return out.transpose(2, 3), starts[-1]

    def _per_value_head(self, x: Tensor, dim: int) -> Tensor:
        repeats = self.value_heads // self.key_heads
        return x.repeat_interleave(repeats, dim) if repeats > 1 else x


def unit_length(x: Tensor) -> Tensor:
    """Normalizes vectors to length one, in float32 or better."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
