"""The router kernel against `lamina.nn.Router`, in float64 where numbers are compared."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from lamina import kernels
from lamina.errors import InputError
from lamina.kernels.gemm.router import CHOOSERS, route
from lamina.kernels.workspace import scratch
from lamina.nn import Choice, Router
from tests.kernels.test_product import close, numbers

ROUTERS = {
    "softmax": lambda: Router(10, 12, Choice(3)),
    "softmax, normed, opens": lambda: Router(40, 7, Choice(4, normed=True), opens=True),
    "sigmoid, one expert": lambda: Router(16, 5, Choice(1, "sigmoid")),
    "sigmoid, every expert": lambda: Router(9, 6, Choice(6, "sigmoid", normed=True)),
    "softmax, balanced": lambda: Router(16, 9, Choice(2, factor=0.5), balanced=True),
    "groups": lambda: Router(8, 12, Choice(3, "sigmoid", True, 2.5, groups=4, groups_each=2), balanced=True),
    "groups of five": lambda: Router(24, 15, Choice(4, "sigmoid", groups=3, groups_each=1), balanced=True, opens=True),
    "groups by their best": lambda: Router(8, 12, Choice(3, groups=4, groups_each=2, group_best=1)),
    "logit bias, scales": lambda: Router(8, 6, Choice(3, normed=True), logit_bias=True, scaled=True, opens=True),
    "least sum": lambda: Router(8, 6, Choice(2, normed=True, least=0.9, eps=0.05), balanced=True),
    "sparsemixer": lambda: Router(8, 9, Choice(2, "sparsemixer", jitter=0.3)),
}


def made(name: str, seed: int = 0) -> Router:
    torch.manual_seed(seed)
    router = ROUTERS[name]().requires_grad_(False)
    for one in (router.bias, router.logit_bias, router.scales):
        if one is not None:
            one.normal_()
    return router


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("tokens", [1, 3, CHOOSERS + 1])
def test_tokens_go_where_the_router_sends_them(name: str, tokens: int) -> None:
    router = made(name, tokens)
    x = numbers(tokens, 1, router.weight.shape[1], dtype=torch.float32, seed=tokens)
    with kernels.in_use():
        chosen, weights, opening = router(x)
    plain, exact = router(x), copy.deepcopy(router).double()(x.double())
    assert chosen.shape == weights.shape == plain[0].shape
    assert torch.equal(chosen.long(), exact[0])
    assert close(weights, plain[1], exact[1])
    assert (opening is None) == (plain[2] is None)
    if opening is not None:
        assert opening.shape == plain[2].shape and close(opening, plain[2], exact[2])
    assert not scratch(x.device)[1].any()  # and the next launch finds its counters at zero


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_logits_are_as_exact_as_their_inputs(weight_dtype: torch.dtype) -> None:
    x, weight = numbers(4, 50, dtype=torch.bfloat16), numbers(9, 50, dtype=weight_dtype, seed=1)
    rule = Choice(8, "sigmoid")
    chosen, weights, opening = route(x, weight, rule, opens=True)
    logits = x.double() @ weight.double().T
    expected, scores = rule.of(logits[:, :8])
    assert torch.equal(chosen.long(), expected)
    torch.testing.assert_close(weights.double(), scores, rtol=1e-5, atol=1e-6)
    assert opening is not None
    torch.testing.assert_close(opening.double(), logits[:, 8:].sigmoid(), rtol=1e-5, atol=1e-6)


def chosen_from(logits: Tensor, rule: Choice, bias: Tensor | None = None) -> list[int]:
    """Through a router whose logits are these."""
    return route(torch.eye(1), logits[:, None].float(), rule, bias)[0][0].tolist()


def test_of_equals_the_lower_expert_comes_first() -> None:
    logits = torch.tensor([1.0, 3, 2, 3, 3, -1, -1, 2])
    assert chosen_from(logits, Choice(8)) == [1, 3, 4, 2, 7, 0, 5, 6]
    assert chosen_from(torch.zeros(6), Choice(3, "sigmoid")) == [0, 1, 2]
    assert chosen_from(torch.zeros(6), Choice(3, "sigmoid", groups=3, groups_each=2), torch.zeros(6)) == [0, 1, 2]


def test_logits_beyond_what_a_sigmoid_can_tell_apart_are_told_apart() -> None:
    assert chosen_from(torch.tensor([90.0, -200, 100, 95, -300]), Choice(5, "sigmoid")) == [2, 3, 0, 1, 4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_whatever_the_logits_each_expert_is_chosen_at_most_once(bad: float) -> None:
    for rule in (Choice(4), Choice(4, "sigmoid", groups=2, groups_each=1)):
        chosen = chosen_from(torch.tensor([bad, bad, 0, bad, 1, bad]), rule)
        assert len(set(chosen)) == 4 and all(0 <= one < 6 for one in chosen)


def test_what_cannot_be_chosen_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"Choice\(each=5, .*cannot choose from 4 experts"):
        route(torch.zeros(1, 3), torch.zeros(5, 3), Choice(5), opens=True)
    with pytest.raises(InputError, match=r"groups=3, .*cannot choose from 4 experts"):
        route(torch.zeros(1, 3), torch.zeros(4, 3), Choice(1, groups=3))
    with pytest.raises(InputError, match=r"there is a kernel for group_best=1 and 2 alone"):
        route(torch.zeros(1, 3), torch.zeros(6, 3), Choice(1, groups=2, group_best=3))
    with pytest.raises(InputError, match=r"100000 tokens × 4 logits, but the workspace has room for"):
        route(torch.zeros(100_000, 3), torch.zeros(4, 3), Choice(1))
