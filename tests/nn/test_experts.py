"""The ways of running experts agree with their definition, and read only what they must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.activation import Gating
from lamina.nn import Experts


def a_choice(tokens: int, experts: int, each: int) -> tuple[Tensor, Tensor]:
    return torch.stack([torch.randperm(experts)[:each] for _ in range(tokens)]), torch.rand(tokens, each)


def one_by_one(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for token, its, factors in zip(x, chosen, weights, strict=True):
        total = torch.zeros_like(token)
        for e, factor in zip(its.tolist(), factors, strict=True):
            if e >= len(experts.down):
                total += token * factor
                continue
            h = experts.first[e] @ (token * factor if experts.weigh_input else token)
            h = h if experts.first_bias is None else h + experts.first_bias[e]
            out = experts.down[e] @ inside(experts, h)
            out = out if experts.down_bias is None else out + experts.down_bias[e]
            total += out if experts.weigh_input else out * factor
        rows.append(total)
    return torch.stack(rows)


def inside(experts: Experts, h: Tensor) -> Tensor:
    if not experts.gated:
        return F.relu(h).square()
    gate, up = h.chunk(2)
    if experts.gating.limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighed input": dict(weigh_input=True),
    "ungated": dict(act="relu2", gated=False),
    "biases and limits": dict(act=Gating("silu", 0.5, plus=1.0, slope=1.702), bias=True),
    "identity": dict(identity=5),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("tokens", "each"), [(1, 1), (1, 3), (2, 2), (30, 4)])
def test_every_way_gives_each_token_its_experts_one_by_one(tokens: int, each: int, name: str) -> None:
    torch.manual_seed(tokens)
    experts = Experts(12, width=10, inner=7, **OPTIONS[name]).requires_grad_(False)
    for bias in (experts.first_bias, experts.down_bias):
        if bias is not None:
            bias.normal_()
    x, (chosen, weights) = torch.randn(tokens, 10), a_choice(tokens, 12 + experts.identity, each)
    expected = one_by_one(experts, x, chosen, weights)
    for way in (experts, experts.by_expert, experts.gathered, experts.all_experts):
        torch.testing.assert_close(way(x, chosen, weights), expected, rtol=1e-5, atol=1e-5)


def test_experts_that_nobody_chose_are_not_read() -> None:
    experts = Experts(12, width=10, inner=7).requires_grad_(False)
    x, (chosen, weights) = torch.randn(3, 2, 10), (torch.randint(0, 5, (3, 2, 2)), torch.rand(3, 2, 2))
    experts.gate_up[5:], experts.down[5:] = float("nan"), float("nan")
    assert experts(x, chosen, weights).isfinite().all()


@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_a_compiled_run_has_no_shape_that_depends_on_the_choice(tokens: int) -> None:
    torch.manual_seed(0)
    experts = Experts(12, width=10, inner=7).requires_grad_(False)
    compiled = torch.compile(experts.forward, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x, (chosen, weights) = torch.randn(1, tokens, 10), a_choice(tokens, 12, 2)
        found = compiled(x, chosen[None], weights[None])
        torch.testing.assert_close(found, experts(x, chosen[None], weights[None]), rtol=1e-5, atol=1e-5)
