"""Experts against `lamina.nn.Experts`, in float64."""

from __future__ import annotations

import pytest
import torch

from lamina.kernels.experts import Share, expert_down, expert_gated
from lamina.nn import Experts
from tests.kernels.test_product import close, numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("share", [None, Share(4, 8)])
@torch.no_grad()
def test_chosen_experts_give_what_the_block_gives(dtype: torch.dtype, weigh_input: bool, share: Share | None) -> None:
    for tokens, choices, width, inner in ((1, 3, 10, 6), (2, 2, 8, 5)):
        torch.manual_seed(0)
        plain = Experts(6, width, inner, "silu", weigh_input=weigh_input).to(dtype)
        exact = Experts(6, width, inner, "silu", weigh_input=weigh_input).double()
        exact.load_state_dict(plain.state_dict())
        x, rest = numbers(tokens, width, dtype=dtype), numbers(tokens, width, dtype=dtype, seed=1)
        chosen = torch.stack([torch.randperm(6)[:choices] for _ in range(tokens)])
        weights = torch.rand(tokens, choices).to(dtype)
        h = expert_gated(x, plain.gate_up, chosen, plain.act, weights if weigh_input else None, share=share)
        got = expert_down(h, plain.down, chosen, None if weigh_input else weights, rest, share=share)
        want = rest.double() + exact(x.double(), chosen, weights.double())
        assert h.shape == (tokens, choices, inner)
        assert close(got, rest + plain(x, chosen, weights), want)
        alone = expert_down(h, plain.down, chosen.int(), None if weigh_input else weights.float(), share=share)
        assert close(alone, plain(x, chosen, weights), want - rest.double())
