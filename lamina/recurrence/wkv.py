"""The WKV of RWKV-4: a weighted mean of values, whose weights exp(k) decay by a factor per token and channel.

    y = (num + exp(k + first) v) / (den + exp(k + first))
    num = exp(w) num + exp(k) v        den = exp(w) den + exp(k)        w < 0

exp(k) may overflow, so sums are stored divided by exp(top), where `top` is the largest exponent that entered them:
three values per channel. den >= 1 after any token, so den = 0 means that there was none yet, and a zero state is empty.

Two such sums are merged by dividing both by the larger exp(top). Many tokens run as a two-level scan of merges, as in
`selective_scan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lamina.recurrence.rule import Rule, Tensors, shifted
from lamina.tracing import cast


class _Sums(NamedTuple):
    """num and den, both divided by exp(top); top = -inf: empty."""

    num: Tensor
    den: Tensor
    top: Tensor

    def merge(self, num: Tensor, den: Tensor | float, top: Tensor) -> _Sums:
        highest = torch.maximum(self.top, top)
        shift = highest.masked_fill(highest == -torch.inf, 0.0)  # -inf - -inf would be NaN
        a, b = torch.exp(self.top - shift), torch.exp(top - shift)
        return _Sums(a * self.num + b * num, a * self.den + b * den, highest)

    @property
    def mean(self) -> Tensor:
        return self.num / self.den.masked_fill(self.den == 0, 1.0)


@dataclass(frozen=True)
class WKV(Rule):
    """Inputs `k`, `v`, and `token` (1 for a token; where it is 0, there is none); constants `w` (log decay, < 0) and
    `first` (added to the exponent of a token's own value), [channels] each.

    Options of `around` in `memory.recur`, which may leave `token` out:
    gate   shaped like v: the output is multiplied by sigmoid(gate)

    >>> rule = WKV(channels=2)
    >>> token = {"k": torch.zeros(1, 2), "v": torch.ones(1, 2), "token": torch.ones(1)}
    >>> out, state = rule.step(rule.zero_state(1), token, {"w": -torch.ones(2), "first": torch.zeros(2)})
    >>> out.tolist()
    [[1.0, 1.0]]
    """

    channels: int

    value: ClassVar[str] = "v"
    longest_chunk: ClassVar[int] = 32

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (3, self.channels)  # num, den, top

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"k": (self.channels,), "v": (self.channels,), "token": ()}

    def before(self, inputs: Tensors, **around: Any) -> Tensors:
        return {**inputs, "token": inputs["v"].new_ones(inputs["v"].shape[:2])}

    def after(self, out: Tensor, inputs: Tensors, gate: Tensor | None = None, **around: Any) -> Tensor:
        return out if gate is None else out * gate.sigmoid()

    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        k, v, token = (cast(inputs[name], state.dtype) for name in self.input_shapes)
        w, first = (cast(constants[name], state.dtype) for name in ("w", "first"))
        token = token[..., None]
        k = k.masked_fill(token == 0, -torch.inf)
        sums = _sums(state)
        out = sums.merge(v, 1.0, k + first).mean
        return cast(out, inputs["v"].dtype), _packed(_decayed(sums, w * token).merge(v, 1.0, k))

    def scratch_per_token(self, length: int) -> int:
        return 4 * self.channels

    def chunks(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        k, v, token = (inputs[name].movedim(2, 0) for name in self.input_shapes)  # [L, B, K, C], token [L, B, K]
        w, first = (cast(constants[name], state.dtype) for name in ("w", "first"))
        k = k.masked_fill((token == 0)[..., None], -torch.inf)
        starts = [_sums(state)]
        chunks = v.shape[2]
        if chunks > 1:
            empty = torch.zeros_like(v[0])
            gained = _Sums(empty, empty, torch.full_like(empty, -torch.inf))
            for one_k, one_v, one in zip(k, v, token, strict=True):
                gained = _decayed(gained, w * one[..., None]).merge(one_v, 1.0, one_k)
            passed = token.sum(0)[..., None]  # [B, K, 1] tokens of each chunk
            for i in range(chunks - 1):
                kept = _decayed(starts[-1], w * passed[:, i])
                starts.append(kept.merge(*(part[:, i] for part in gained)))
        sums = _Sums(*(torch.stack(parts, 1) for parts in zip(*starts, strict=True)))
        outs = []
        for one_k, one_v, one in zip(k, v, token, strict=True):
            outs.append(sums.merge(one_v, 1.0, one_k + first).mean)
            sums = _decayed(sums, w * one[..., None]).merge(one_v, 1.0, one_k)
        return torch.stack(outs, 2), _packed(_Sums(*(part[:, -1] for part in sums)))

    def at_once(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        k, v, token = (inputs[name] for name in self.input_shapes)  # [B, T, C], token [B, T]
        w, first = (cast(constants[name], state.dtype) for name in ("w", "first"))
        k = k.masked_fill((token == 0)[..., None], -torch.inf)
        log = w * token[..., None]  # [B, T, C] log decay over the tokens in `sums`
        sums, distance = _Sums(v, torch.ones_like(v), k), 1  # of the tokens up to each one, as in `scan_by_doubling`
        while distance < self.most_at_once:
            earlier = _Sums(*(shifted(part, distance, fill) for part, fill in zip(sums, EMPTY, strict=True)))
            sums, log = _decayed(earlier, log).merge(*sums), log + shifted(log, distance, 0.0)
            distance *= 2
        start = _sums(state)
        sums = _decayed(_Sums(*(part[:, None] for part in start)), log).merge(*sums)
        begins = (torch.arange(v.shape[1], device=v.device) == 0)[:, None]  # [T, 1]
        before = (torch.where(begins, s[:, None], shifted(part, 1, 0.0)) for s, part in zip(start, sums, strict=True))
        out = _Sums(*before).merge(v, 1.0, k + first).mean
        return out, _packed(_Sums(*(part[:, -1] for part in sums)))


EMPTY = 0.0, 0.0, -torch.inf  # num, den and top of no token


def _decayed(sums: _Sums, log: Tensor) -> _Sums:
    return sums._replace(top=sums.top + log)


def _sums(state: Tensor) -> _Sums:
    """state [B, 3, C] -> its parts; an empty one gets top = -inf, as it has no exponent."""
    num, den, top = state.unbind(1)
    return _Sums(num, den, top.masked_fill(den == 0, -torch.inf))


def _packed(sums: _Sums) -> Tensor:
    return torch.stack([sums.num, sums.den, sums.top.masked_fill(sums.den == 0, 0.0)], 1)
