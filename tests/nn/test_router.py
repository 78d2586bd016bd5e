"""The rules by which routers choose, against the same written out for one token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

from lamina.bench.flops import _weights_a_token
from lamina.nn import Choice, Mixture, RMSNorm, Router
from lamina.planning.bytes import _read_of

RULES = {
    "softmax": Choice(3),
    "softmax, normed": Choice(2, normed=True),
    "sigmoid": Choice(1, "sigmoid"),
    "sigmoid, normed, with a factor": Choice(4, "sigmoid", normed=True, factor=2.5),
    "groups": Choice(3, "sigmoid", normed=True, groups=4, groups_each=2),
    "groups by their best": Choice(3, groups=4, groups_each=2, group_best=1),
    "normed, with a least sum": Choice(3, normed=True, least=0.9, eps=0.05),
}


def one_by_one(rule: Choice, logits: list[float], bias: list[float] | None) -> tuple[list[int], list[float]]:
    total = sum(math.exp(logit) for logit in logits)
    scores = [math.exp(z) / total if rule.score == "softmax" else 1 / (1 + math.exp(-z)) for z in logits]
    merit = logits if bias is None else [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(logits) // rule.groups
    groups = [sorted(merit[g * size : (g + 1) * size], reverse=True)[: rule.group_best] for g in range(rule.groups)]
    best = sorted(range(rule.groups), key=lambda g: -sum(groups[g]))[: rule.groups_each]
    members = [e for e in range(len(logits)) if e // size in best]
    chosen = sorted(members, key=lambda e: -merit[e])[: rule.each]
    weights = [scores[e] for e in chosen]
    norm = max(sum(weights), rule.least) + rule.eps if rule.normed else 1.0
    return chosen, [rule.factor * weight / norm for weight in weights]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_choice_is_what_it_says_for_each_token(name: str, biased: bool) -> None:
    torch.manual_seed(0)
    logits, bias = 2 * torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    chosen, weights = RULES[name].of(logits, bias if biased else None)
    for row, its, factors in zip(logits.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1), strict=True):
        expected = one_by_one(RULES[name], row.tolist(), bias.tolist() if biased else None)
        assert its.tolist() == expected[0]
        assert factors.tolist() == pytest.approx(expected[1])


def test_sparsemixer_leaves_out_experts_far_from_the_best_of_those_not_chosen_yet() -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 8, dtype=torch.float64)
    chosen, weights = Choice(2, "sparsemixer", jitter=0.3).of(logits)
    for row, its, factors in zip(logits.tolist(), chosen.tolist(), weights.tolist(), strict=True):
        assert its == sorted(range(8), key=lambda e: -row[e])[:2]
        for taken, expert, factor in zip((set(), {its[0]}), its, factors, strict=True):
            left = [z for e, z in enumerate(row) if e not in taken]
            near = [z for z in left if (row[expert] - z) / max(abs(z), row[expert]) <= 0.6]
            assert factor == pytest.approx(math.exp(row[expert]) / sum(math.exp(z) for z in near))


def test_a_bias_of_the_logits_has_a_say_in_the_weights_and_scales_multiply_them() -> None:
    router, x = Router(6, 5, Choice(2), logit_bias=True, scaled=True).requires_grad_(False), torch.randn(3, 4, 6)
    assert router.logit_bias is not None and router.scales is not None
    router.logit_bias.normal_(), router.scales.uniform_()
    chosen, weights, _ = router(x)
    expected = router.choice.of(linear_logits(router, x) + router.logit_bias)
    assert torch.equal(chosen, expected[0])
    torch.testing.assert_close(weights, expected[1] * router.scales[chosen])


def test_scores_are_computed_in_float32_and_rounded_to_the_dtype_of_the_logits() -> None:
    logits = torch.randn(4, 64).to(torch.bfloat16)
    chosen, weights = Choice(8, normed=True).of(logits)
    exact = Choice(8, normed=True).of(logits.float())
    assert torch.equal(chosen, exact[0]) and torch.equal(weights, exact[1].to(torch.bfloat16))


def linear_logits(router: Router, x: Tensor) -> Tensor:
    return x.to(router.weight.dtype) @ router.weight.T


def test_the_last_row_of_a_router_that_opens_is_the_gate_of_the_shared_expert() -> None:
    router, x = Router(6, 5, Choice(2), opens=True).requires_grad_(False), torch.randn(3, 1, 6)
    chosen, weights, opening = router(x)
    logits = linear_logits(router, x)
    expected = router.choice.of(logits[..., :5])
    assert torch.equal(chosen, expected[0])
    torch.testing.assert_close(weights, expected[1])
    torch.testing.assert_close(opening, logits[..., 5:].sigmoid())


def test_an_exact_router_computes_in_float32_for_a_model_of_less() -> None:
    router, x = Router(6, 5, Choice(2), exact=True).requires_grad_(False), torch.randn(3, 1, 6).to(torch.bfloat16)
    _, weights, opening = router(x)
    assert {"weight", "bias"} <= set(router.keep_float32) and weights.dtype == torch.float32 and opening is None
    torch.testing.assert_close(weights, router.choice.of(linear_logits(router, x))[1])


def test_a_step_reads_the_experts_that_the_router_chooses_of_those_with_matrices() -> None:
    mixture = Mixture(6, 8, 3, "silu", Choice(4), identity=8)
    experts, down = mixture.experts, mixture.experts.down
    assert _read_of(down, [experts], {id(experts): 4}, rows=1, experts=None) == down.nbytes / 8 * 2
    assert _weights_a_token(experts, 4) == mixture.experts.first.numel() / 4 + down.numel() / 4


def test_gemma_4_scales_the_input_of_its_router_by_a_norm_and_the_weights_by_expert() -> None:
    torch.manual_seed(0)
    config = Gemma4TextConfig(hidden_size=6, num_experts=8, top_k_experts=3, moe_intermediate_size=4)
    theirs = Gemma4TextRouter(config).requires_grad_(False)
    for tensor in theirs.state_dict().values():
        tensor.normal_()
    norm, ours = RMSNorm(6, config.rms_norm_eps), Router(6, 8, Choice(3, normed=True), scaled=True)
    values = {"weight": theirs.proj.weight, "scales": theirs.per_expert_scale}
    ours.load_state_dict(values)
    norm.load_state_dict({"weight": theirs.scale * 6**-0.5})
    x = torch.randn(5, 6)
    _, expected, indices = theirs(x)
    chosen, weights, _ = ours(norm(x))
    assert torch.equal(chosen, indices)
    torch.testing.assert_close(weights, expected)
