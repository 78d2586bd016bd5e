"""Random inputs for the recurrence tests: rules of several shapes, plausible decays, masks with holes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.recurrence import RGLRU, SSD, WKV, ChannelDelta, GatedDelta, Rule, SelectiveScan

RULES: list[Rule] = [
    SelectiveScan(channels=6, state=4),
    SelectiveScan(channels=5, state=1),
    SSD(heads=4, head_dim=3, state=5, groups=1),
    SSD(heads=6, head_dim=2, state=3, groups=3),
    SSD(heads=2, head_dim=4, state=4, groups=2),
    GatedDelta(key_heads=2, value_heads=4, key_dim=6, value_dim=3),
    GatedDelta(key_heads=3, value_heads=3, key_dim=4, value_dim=4),
    ChannelDelta(heads=2, key_dim=5, value_dim=3),
    RGLRU(channels=6),
    WKV(channels=6),
]
ONE_OF_EACH = [RULES[0], RULES[3], RULES[5], *RULES[7:]]


class Case:
    """A start state, inputs and constants for one rule; everything float64 unless asked otherwise."""

    def __init__(self, rule: Rule, rows: int, tokens: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        inputs = {name: normal(rows, tokens, *shape) for name, shape in rule.input_shapes.items()}
        constants: dict[str, Tensor] = {}
        match rule:
            case SelectiveScan() | SSD():
                inputs["dt"] = F.softplus(2 * inputs["dt"] - 2)
                shape = rule.state_shape if isinstance(rule, SelectiveScan) else (rule.heads,)
                constants["A"] = -normal(*shape).exp()
            case GatedDelta() | ChannelDelta():
                inputs["q"] = F.normalize(inputs["q"], dim=-1) * rule.key_dim**-0.5
                inputs["k"] = F.normalize(inputs["k"], dim=-1)
                inputs["g"] = -F.softplus(2 * inputs["g"] - 2)
                inputs["beta"] = inputs["beta"].sigmoid()
            case RGLRU():
                inputs["g"] = -F.softplus(2 * inputs["g"] - 2)
            case WKV():
                inputs["k"] *= 3
                inputs["token"] = torch.ones_like(inputs["token"])
                constants = {"w": -normal(rule.channels).exp(), "first": normal(rule.channels)}
        self.rule, self.inputs, self.constants = rule, inputs, constants
        self.state = normal(rows, *rule.state_shape)
        if isinstance(rule, WKV):
            self.state[:, 1] = 1 + self.state[:, 1].abs()  # a denominator
        self._draw = draw

    def to(self, dtype: torch.dtype, inputs: torch.dtype | None = None) -> Case:
        """The same case with state and constants in `dtype` and inputs in `inputs`."""
        other = object.__new__(Case)
        other.rule, other._draw = self.rule, self._draw
        other.state = self.state.to(dtype)
        other.constants = {name: x.to(dtype) for name, x in self.constants.items()}
        other.inputs = {name: x.to(inputs or dtype) for name, x in self.inputs.items()}
        return other

    def cut(self, first: int, last: int) -> dict[str, Tensor]:
        return {name: x[:, first:last] for name, x in self.inputs.items()}

    def poisoned(self, valid: Tensor, poison: float = torch.nan) -> dict[str, Tensor]:
        """The inputs with `poison` wherever there is no token."""
        return {
            name: torch.where(valid.reshape(*valid.shape, *[1] * (x.dim() - 2)), x, poison)
            for name, x in self.inputs.items()
        }

    def mask(self, kind: str) -> Tensor:
        """valid [B, T]: 'prefix' (right padding), 'holes' (any pattern), 'none' (no token at all)."""
        rows, tokens = self.inputs[self.rule.value].shape[:2]
        if kind == "prefix":
            counts = torch.randint(0, tokens + 1, (rows, 1), generator=self._draw)
            return torch.arange(tokens) < counts
        if kind == "holes":
            return torch.rand(rows, tokens, generator=self._draw) < 0.6
        return torch.zeros(rows, tokens, dtype=torch.bool)


def error(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|, infinite when a is not finite."""
    if not b.numel():
        return 0.0
    if not a.isfinite().all():
        return float("inf")
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
