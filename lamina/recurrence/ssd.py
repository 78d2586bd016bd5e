"""The state-space dual (SSD) of Mamba-2: one decay per head, so matrix products compute a chunk of tokens.

    h = exp(dt A) h + dt x B^T        y = h C

Inside a chunk the rule is attention without softmax: scores C B^T, multiplied by the decay between the two tokens.
Tokens before the chunk contribute through the state at its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.recurrence.rule import Rule, Tensors, segment_sums, skip_and_gate, step_sizes
from lamina.tracing import cast


@dataclass(frozen=True)
class SSD(Rule):
    """Inputs `x`, `dt` (>= 0, after softplus), `B`, `C`; constant `A` [heads], negative.

    Options of `around` in `memory.recur`:
    dt_bias, dt_limit  [heads], (low, high): dt is a raw projection, from which softplus(dt + dt_bias) is made, clamped
    skip               [heads]: skip · x is added to the output
    gate               shaped like x: the output is multiplied by silu(gate)

    Each group's `B` and `C` are shared by heads // groups consecutive heads.

    >>> rule = SSD(heads=1, head_dim=2, state=1, groups=1)
    >>> one = torch.ones(1, 1, 1)
    >>> token = {"x": torch.ones(1, 1, 2), "dt": torch.ones(1, 1), "B": one, "C": one}
    >>> out, state = rule.step(rule.zero_state(1), token, {"A": -torch.ones(1)})
    >>> out.tolist()
    [[[1.0, 1.0]]]
    """

    heads: int
    head_dim: int
    state: int
    groups: int

    value: ClassVar[str] = "x"
    exact: ClassVar[tuple[str, ...]] = ("dt",)
    longest_chunk: ClassVar[int] = 64

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise InputError(f"{self.heads} heads cannot share {self.groups} groups; groups must divide heads")

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.heads, self.head_dim, self.state)

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        shared = (self.groups, self.state)
        return {"x": (self.heads, self.head_dim), "dt": (self.heads,), "B": shared, "C": shared}

    def before(self, inputs: Tensors, **around: Any) -> Tensors:
        return step_sizes(inputs, **around)

    def after(
        self, out: Tensor, inputs: Tensors, skip: Tensor | None = None, gate: Tensor | None = None, **around: Any
    ) -> Tensor:
        return skip_and_gate(out, inputs["x"], None if skip is None else skip[:, None], gate)

    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (cast(inputs[name], state.dtype) for name in self.input_shapes)
        B, C = self._per_head(B), self._per_head(C)  # [B, H, N]
        decay = torch.exp(dt * cast(constants["A"], state.dtype))  # [B, H]
        state = decay[..., None, None] * state + (dt[..., None] * x)[..., None] * B[..., None, :]
        out = (state @ C[..., None])[..., 0]  # [B, H, P]
        return cast(out, inputs["x"].dtype), state

    def scratch_per_token(self, length: int) -> int:
        return self.heads * (3 * length + 3 * self.head_dim + 2 * self.head_dim * self.state // length)

    def chunks(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (inputs[name] for name in self.input_shapes)
        logs = (dt * cast(constants["A"], state.dtype)).transpose(-1, -2)  # [B, K, H, L]
        between = segment_sums(logs).exp()  # [B, K, H, L, L]
        since_start = logs.cumsum(-1).exp()  # [B, K, H, L]
        x = (x * dt[..., None]).transpose(2, 3)  # [B, K, H, L, P]
        B, C = B.transpose(2, 3), C.transpose(2, 3)  # [B, K, G, L, N]

        gained = (x * between[..., -1, :, None]).transpose(-1, -2) @ self._per_head(B)  # [B, K, H, P, N]
        kept = since_start[..., -1, None, None]  # [B, K, H, 1, 1]
        starts = [state]
        for k in range(x.shape[1]):
            starts.append(torch.addcmul(gained[:, k], kept[:, k], starts[-1]))
        past = torch.stack(starts[:-1], 1)  # [B, K, H, P, N]

        scores = self._per_head(C @ B.transpose(-1, -2)) * between  # [B, K, H, L, L]
        out = scores @ x + since_start[..., None] * (self._per_head(C) @ past.transpose(-1, -2))  # [B, K, H, L, P]
        return out.transpose(2, 3), starts[-1]

    def _per_head(self, x: Tensor) -> Tensor:
        """[B, G, N] or [B, K, G, ...] -> the same with H in place of G."""
        dim = 1 if x.dim() == 3 else 2
        return x.repeat_interleave(self.heads // self.groups, dim) if self.groups < self.heads else x
