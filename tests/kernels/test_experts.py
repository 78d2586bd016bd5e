"""Experts against `lamina.nn.Mixture` and `lamina.nn.Experts`, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lamina import kernels
from lamina.activation import Gating
from lamina.kernels.gemm import experts as module
from lamina.kernels.gemm import grouped_experts
from lamina.kernels.gemm.deferred_norm import Unnormed
from lamina.kernels.gemm.experts import PIECES, Share, expert_down, expert_gated
from lamina.kernels.gemm.grouped_experts import grouped_tiles
from lamina.kernels.gemm.product import Tiles
from lamina.kernels.launch import launch
from lamina.kernels.limits import CARDS, KIB
from lamina.nn import MLP, Choice, Experts, GatedMLP, Mixture
from tests.kernels.test_product import close, numbers

SHARES = [None, Share(4, 8), Share(2, 4, early=False), Tiles(16, 16)]


def a_choice(tokens: int, experts: int, each: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(experts)[:each] for _ in range(tokens)])
    return chosen, torch.rand(tokens, each).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("share", SHARES)
@torch.no_grad()
def test_chosen_experts_give_what_the_block_gives(dtype: torch.dtype, weigh_input: bool, share: Share | None) -> None:
    for tokens, each, width, inner in ((1, 3, 10, 6), (2, 2, 8, 5)):
        torch.manual_seed(0)
        plain = Experts(6, width, inner, weigh_input=weigh_input).to(dtype)
        exact = copy.deepcopy(plain).double()
        x, (chosen, weights) = numbers(tokens, width, dtype=dtype), a_choice(tokens, 6, each, dtype)
        h = expert_gated(x, plain.gate_up, chosen, weights, plain.act, weigh_input=weigh_input, share=share)
        assert h.shape == (tokens, each * inner)
        got = expert_down(h, plain.down, chosen.int(), share=share)
        assert close(got, plain(x, chosen, weights), exact(x.double(), chosen, weights.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("share", SHARES)
@torch.no_grad()
def test_a_shared_expert_of_any_size_and_the_residual_are_added(
    dtype: torch.dtype, opens: bool, share: Share | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOGETHER", 2)  # three tokens are then one more than a program takes on
    for tokens, inner, size in ((1, 4, 4), (3, 3, 5)):
        torch.manual_seed(tokens)
        plain = Mixture(6, 4, inner, "gelu", Choice(2), shared=size).to(dtype)
        exact = copy.deepcopy(plain).double()
        x, rest = numbers(tokens, 6, dtype=dtype), numbers(tokens, 6, dtype=dtype, seed=1)
        chosen, weights = a_choice(tokens, 4, 2, dtype)
        opening = torch.rand(tokens, 1) if opens else None
        h = expert_gated(
            x, plain.experts.gate_up, chosen, weights, "gelu", shared=plain.shared.gate_up.weight, opening=opening,
            share=share,
        )  # fmt: skip
        assert h.shape == (tokens, 2 * inner + size)
        got = expert_down(h, plain.experts.down, chosen, shared=plain.shared.down.weight, residual=rest, share=share)

        low, high = (
            rest.to(to)
            + block.experts(x.to(to), chosen, weights.to(to))
            + block.shared(x.to(to)) * (1.0 if opening is None else opening.to(to))
            for block, to in ((plain, dtype), (exact, torch.float64))
        )
        assert close(got, low, high)


MIXTURES: dict[str, dict[str, Any]] = {
    "softmax, opens": dict(choice=Choice(3, normed=True), opens=True),
    "sigmoid, groups": dict(choice=Choice(2, "sigmoid", True, 1.5, groups=4, groups_each=2), balanced=True),
    "weighed input": dict(choice=Choice(1, "sigmoid"), weigh_input=True),
    "none shared": dict(choice=Choice(2, normed=True), shared=0),
    "a factor": dict(choice=Choice(2), opens=True, factor=0.3),
    "biases and limits": dict(
        choice=Choice(2, normed=True), shared=0, act=Gating("silu", 0.5, plus=1.0, slope=1.702), bias=True,
        logit_bias=True,
    ),
    "ungated": dict(choice=Choice(2, "sigmoid", True), act="relu2", gated=False, factor=2.0),
    "ungated, biases": dict(choice=Choice(3), shared=0, act="gelu", gated=False, bias=True),
    "identity": dict(choice=Choice(4, factor=1.5), shared=0, identity=6, balanced=True),
    "sparsemixer": dict(choice=Choice(2, "sparsemixer", jitter=0.3), shared=0),
}  # fmt: skip


def a_mixture(name: str) -> Mixture:
    torch.manual_seed(0)
    mixture = Mixture(6, 8, 3, **dict(act="silu", shared=5) | MIXTURES[name]).requires_grad_(False)
    for name, parameter in mixture.named_parameters():
        if "bias" in name:
            parameter.normal_()
    return mixture


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_gives_the_same_with_kernels(name: str) -> None:
    mixture = a_mixture(name)
    for rows, tokens in ((1, 1), (2, 2)):
        x, onto = (numbers(rows, tokens, 6, dtype=torch.float32, seed=seed) for seed in (1, 2))
        with kernels.in_use():
            got = mixture(x, onto)
        assert got.shape == x.shape
        assert close(got, mixture(x, onto), copy.deepcopy(mixture).double()(x.double(), onto.double()))


APART: dict[str, dict[str, Any]] = {
    "latent": dict(act="relu2", gated=False, latent=4, latent_bias=True, shared=MLP(6, 5, "relu2", bias=True)),
    "a shared expert without limits": dict(act=Gating("silu", 0.5), shared=5, opens=True),
    "a shared expert with biases": dict(act="silu", shared=GatedMLP(6, 5, bias=True)),
    "capacity": dict(act="relu", gated=False, choice=Choice(1), capacity=1),
}


@pytest.mark.parametrize("name", APART)
@torch.no_grad()
def test_a_mixture_of_several_parts_gives_the_same_with_kernels(name: str) -> None:
    torch.manual_seed(0)
    mixture = Mixture(6, 8, 3, **dict(choice=Choice(2, normed=True)) | APART[name]).requires_grad_(False)
    x, onto = (numbers(2, 3, 6, dtype=torch.float32, seed=seed) for seed in (1, 2))
    with kernels.in_use():
        got = mixture(x, onto)
    assert close(got, mixture(x, onto), copy.deepcopy(mixture).double()(x.double(), onto.double()))


@torch.no_grad()
def test_identity_experts_divide_their_input_by_a_deferred_norm() -> None:
    torch.manual_seed(0)
    mixture = Mixture(6, 4, 3, "silu", Choice(4), identity=4)
    scaled, squares = torch.randn(1, 1, 6), torch.tensor([2.5, 4.0])
    with kernels.in_use():
        got = mixture(Unnormed(scaled, squares, 0.5))
    torch.testing.assert_close(got, mixture(Unnormed(scaled, squares, 0.5).divided()))


class Launches(TorchDispatchMode):
    """The operations of PyTorch that would be kernels of their own on a GPU, in place of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.overloadpacket.__name__ not in ("empty", "new_empty", "view", "_unsafe_view", "detach", "alias"):
            self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_three_launches_for_one_token_and_four_for_several(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lamina.kernels.gemm import router

    launched: list[str] = []

    class Counted:
        def __init__(self, what: str) -> None:
            self.what = what

        def run(self, *args: Any, **options: Any) -> None:
            launched.append(self.what)

    own = {router: ["_route_kernel"], module: ["_gated_kernel", "_down_kernel"]}
    own[grouped_experts] = ["_grouped_gated", "_grouped_down", "_sum_pairs"]
    for place, names in own.items():
        for kernel in names:
            monkeypatch.setattr(place, kernel, Counted(kernel))
    mixture = a_mixture(name)
    router.scratch(torch.device("cpu"))  # made before, as a step that is captured has run before
    for rows, expected in ((1, own[module]), (4, own[grouped_experts])):
        launched.clear()
        x = torch.zeros(rows, 1, 6)
        with kernels.in_use(), Launches() as others:
            mixture(x, x)
        assert launched == ["_route_kernel", *expected]
        assert others.seen == []


@pytest.mark.parametrize(("tokens", "experts"), [(17, 4), (5, 14)])  # fewer experts than pairs, and more
@torch.no_grad()
def test_tokens_that_chose_the_same_expert_share_it(tokens: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mixture = Mixture(6, experts, 3, "silu", Choice(2), shared=5, identity=2)
    x, onto = (numbers(1, tokens, 6, dtype=torch.float32, seed=seed) for seed in (1, 2))
    mixture.router.weight[3:] *= 0.01  # so that many tokens choose the first three experts
    launched = []
    monkeypatch.setattr(grouped_experts, "launch", lambda *args, **more: (launched.append(more), launch(*args, **more)))
    with kernels.in_use():
        got, again = mixture(x, onto), mixture(x, onto)
    assert [one["BY_PAIR"] for one in launched[:2]] == [2 * tokens < experts] * 2
    assert torch.equal(got, again)
    assert close(got, mixture(x, onto), copy.deepcopy(mixture).double()(x.double(), onto.double()))


def test_few_tokens_of_many_experts_are_not_grouped() -> None:
    for tokens, each, experts, grouped in (
        (1, 8, 8, 0),
        (2, 8, 128, 0),
        (4, 8, 128, 1),
        (16, 10, 72, 1),
        (65, 2, 8, 0),
    ):
        assert (grouped_tiles(tokens, each, experts, 2048, 2, CARDS[90]) is not None) == bool(grouped)
    assert grouped_tiles(16, 10, 72, 4096, 2, CARDS[90]) == Tiles(64, 128, stages=4)
    for limits in CARDS.values():
        for tokens in (2, 64):
            tiles = grouped_tiles(tokens, 8, 64, 4096, 2, limits)
            assert tiles is not None
            assert grouped_experts.shared_bytes(tiles, tokens, 2, False, limits) <= limits.room(2) + KIB


def test_shares_hold_no_more_than_registers_can() -> None:
    for tokens in (1, 8):
        x = torch.empty(tokens, 1, dtype=torch.bfloat16)
        for held in ([512] * 10 + [512], [1408] * 6 + [2816], [2048] * 8 + [2048], [8192, 0], [16384] * 16, [3]):
            share = module._share(1, 512, x, held)
            assert sum(-(-size // share.block) for size in held) <= PIECES
            assert share.block * 2 >= 512 * share.warps or share.warps == 1  # 16 bytes a thread
