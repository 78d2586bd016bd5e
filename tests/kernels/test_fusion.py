"""The fusion plan: which norms are computed by the launch in front of them, and that such norms stay right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from triton.runtime.interpreter import GridExecutor

from docs.own_model import Mine
from lamina import kernels
from lamina.attention.window import Near
from lamina.kernels.gemm import fusion_trace
from lamina.kernels.gemm.deferred_norm import Unnormed
from lamina.kernels.gemm.fusion import FusionPlan, Fusions
from lamina.kernels.gemm.fusion_trace import trace
from lamina.kernels.workspace import Workspace
from lamina.nn import Choice, GatedMLP, LayerNorm, Linear, Mixture, Positions, RMSNorm
from lamina.runtime.step import CapturedStep
from lamina.sampling.chooser import Chooser
from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.kernels.runs import small
from tests.kernels.test_product import numbers
from tests.laws.toys import Index, Toy

pytestmark = pytest.mark.usefixtures("few_programs")

FAMILIES = dict(FIRST)
Launch = tuple[str, dict[str, Any]]


@contextmanager
def launched(runs: bool = True) -> Iterator[list[Launch]]:
    """The launches inside, each a kernel's name and its named arguments; kernels run or are left out."""
    found: list[Launch] = []
    run = GridExecutor.__call__

    def noted(self: Any, *args: Any, **named: Any) -> None:
        found.append((self.fn.__name__, named))
        if runs:
            run(self, *args, **named)

    GridExecutor.__call__ = noted
    try:
        yield found
    finally:
        GridExecutor.__call__ = run


# -- of models -------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_llama_and_of_a_gemma_is_a_table_of_module_paths() -> None:
    assert str(pair("llama", FAMILIES["llama"])[1].fusion_plan) == (
        "blocks.0.attention.out → blocks.0.mlp_norm        deferred\n"
        "blocks.0.mlp.down      → blocks.1.attention_norm  deferred\n"
        "blocks.1.attention.out → blocks.1.mlp_norm        deferred"
    )
    assert str(small("gemma2").fusion_plan) == (
        "blocks.0.attention_post_norm → blocks.0.mlp_norm        twice\n"
        "blocks.0.mlp_post_norm       → blocks.1.attention_norm  twice\n"
        "blocks.1.attention_post_norm → blocks.1.mlp_norm        twice"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_a_family_is_what_its_step_launches(family: str) -> None:
    model = pair(family, FAMILIES[family])[1]
    kinds = [one.kind for one in model.fusion_plan.fusions]
    step, cache, called = CapturedStep(model, 1, Chooser()), model.new_cache(rows=1, capacity=32), []
    step.begin(cache, torch.zeros(1, dtype=torch.int64), [4], ())
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    hooks = [norm.register_forward_hook(lambda *_: called.append(1)) for norm in norms]
    with launched(runs=False) as launches:
        step.run(1)
    for hook in hooks:
        hook.remove()
    plain = [named for name, named in launches if name == "_norm_kernel"]
    assert len(called) - len(kinds) == len(plain) and kinds
    assert sum(named["TWICE"] for named in plain) == kinds.count("twice")
    assert sum(named.get("NEXT_NORM", False) for _, named in launches) == kinds.count("deferred")


def test_a_trace_launches_nothing_and_leaves_the_model_as_it_was() -> None:
    model = small("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.graphs._plans.clear()
    with launched() as launches:
        assert model.fusion_plan.fusions
    assert not launches
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_plan_is_made_once_and_again_when_weights_were_replaced() -> None:
    model = Mine(vocab=20, width=16, heads=2, layers=1).requires_grad_(False)
    plan = model.fusion_plan
    assert model.fusion_plan is plan
    model.head = Linear(16, 20)
    assert model.fusion_plan is not plan


def test_models_without_such_norms_and_those_without_kernels_have_empty_plans() -> None:
    assert str(Mine(vocab=20, width=16, heads=2, layers=1).fusion_plan) == "no fused norms"
    plan = Toy(Index(Near(2)), dtype=torch.float32).fusion_plan
    assert plan.reason is not None and str(plan) == f"no fused norms: {plan.reason}"


class Twice(Mine):
    """The first block's modules of `lamina.nn`, in both layers: every product and norm runs twice in a step."""

    def __init__(self) -> None:
        super().__init__(vocab=10, width=16, heads=2, layers=1)
        block = small("llama").blocks[0]
        self.ropes = small("llama").ropes
        self.blocks = nn.ModuleList([block, block])
        self.norm, self.head = RMSNorm(16), Linear(16, 10)

    def prepare(self, positions: Tensor) -> Any:
        return Positions({"default": self.ropes["default"](positions)})


def test_a_block_that_runs_twice_in_a_step_is_right() -> None:
    torch.manual_seed(0)
    model = Twice().requires_grad_(False).eval()
    assert str(model.fusion_plan) == (
        "blocks.0.attention.out → blocks.0.mlp_norm        deferred\n"
        "blocks.0.mlp.down      → blocks.0.attention_norm  deferred"
    )
    captured, plain = model.new_cache(capacity=8), model.new_cache(capacity=8)
    step = CapturedStep(model, 1, Chooser())
    step.begin(captured, torch.tensor([3]), [2], ())
    step.run(2)
    logits = model([[3]], cache=plain, logits="last")
    logits = model(logits.argmax(-1, keepdim=True), cache=plain, logits="last")
    assert captured.tokens == plain.tokens
    torch.testing.assert_close(captured.logits, logits, rtol=1e-4, atol=1e-4)


# -- of modules ------------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """What the runs below are made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Linear(16, 8, bias=False), Linear(16, 8, bias=False)
        self.norm, self.other, self.shifted = RMSNorm(8), RMSNorm(8, eps=0.1), RMSNorm(8, plus_one=True)
        self.centred, self.inline = LayerNorm(8), LayerNorm(16)
        self.wide = Linear(16, 16)
        self.mlp = GatedMLP(8, 4)
        self.mixture = Mixture(8, experts=2, inner=4, act="silu", choice=Choice(each=1), shared=4)
        self.requires_grad_(False)
        for module in (self.norm, self.other, self.shifted):
            nn.init.normal_(module.weight)  # type: ignore[arg-type]


X = numbers(1, 1, 16, dtype=torch.float32)
Run = Callable[[Parts], Tensor]


def plan_of(parts: Parts, run: Run) -> FusionPlan:
    return trace(lambda: run(parts), parts, Workspace(X.device))


def right(parts: Parts, plan: FusionPlan, run: Run) -> int:
    """Runs with the plan and compares with PyTorch; -> how many norms were launched."""
    want, workspace = run(parts), Workspace(X.device)
    workspace.fusions = plan.bind(parts)
    with kernels.in_use(workspace), launched() as launches, torch.no_grad():
        assert torch.allclose(run(parts), want, atol=1e-5)
    return sum(name == "_norm_kernel" for name, _ in launches)


def pairs(plan: FusionPlan) -> list[tuple[str, str]]:
    return [(one.first, one.norm) for one in plan.fusions]


CASES: dict[str, tuple[Run, list[tuple[str, str]], int]] = {
    "a norm between two products": (lambda p: p.mlp(p.norm(p.first(X))), [("first", "norm")], 0),
    "a norm that two products read": (
        lambda p: p.mlp(y := p.norm(p.first(X))) + p.mlp(y),
        [("first", "norm")],
        0,
    ),
    "a result that is also read as it is": (
        lambda p: p.mlp(p.norm(y := p.first(X)), onto=y),
        [("first", "norm")],
        0,
    ),
    "a norm between experts, and one in front of a router": (
        lambda p: p.mlp(p.other(p.mixture(p.norm(p.first(X))))),
        [("first", "norm"), ("mixture.experts", "other")],
        0,
    ),
    "two norms of one result": (
        lambda p: p.mlp(p.norm(y := p.first(X))) + p.mlp(p.other(y)),
        [("first", "norm")],
        1,
    ),
    "one norm of two results": (
        lambda p: p.mlp(p.norm(p.first(X))) + p.mlp(p.norm(p.second(X))),
        [("first", "norm"), ("second", "norm")],
        0,
    ),
    "one norm of two results that were made before it": (
        lambda p: (lambda a, b: p.mlp(p.norm(a)) + p.mlp(p.norm(b)))(p.first(X), p.second(X)),
        [("first", "norm"), ("second", "norm")],
        0,
    ),
    "a product that runs twice, with a norm behind each": (
        lambda p: p.mlp(p.norm(p.first(X))) + p.mlp(p.other(p.first(X + 1))),
        [("first", "norm")],
        1,
    ),
    "a product that runs twice before the norm reads the first result": (
        lambda p: (lambda a, b: p.mlp(p.norm(a), onto=b))(p.first(X), p.first(X + 1)),
        [("first", "norm")],
        0,
    ),
    "a norm that something else reads": (lambda p: p.norm(p.first(X)) * 2, [], 1),
    "a norm that a product and something else read": (lambda p: p.mlp(y := p.norm(p.first(X)), onto=y * 2), [], 1),
    "a result that is changed in place": (lambda p: p.mlp(p.norm(p.first(X).mul_(2))), [], 1),
    "a view of a result": (lambda p: p.mlp(p.norm(p.first(X)[:, 0])), [], 1),
    "a norm onto a residual": (lambda p: p.mlp(p.norm(y := p.first(X), onto=y)), [], 1),
    "a norm of a sum that a norm makes": (
        lambda p: (lambda y: p.mlp(p.other(p.norm(p.first(X), onto=y)), onto=y))(p.second(X)),
        [("norm", "other")],
        1,
    ),
    "such a norm that something else reads": (
        lambda p: (lambda y: p.other(p.norm(p.first(X), onto=y)) * 2)(p.second(X)),
        [("norm", "other")],
        1,
    ),
    "a sum that is changed in place": (
        lambda p: (lambda y: p.other(p.norm(p.first(X), onto=y).mul_(2)))(p.second(X)),
        [],
        2,
    ),
    "norms whose weights mean different things": (
        lambda p: (lambda y: p.shifted(p.norm(p.first(X), onto=y)))(p.second(X)),
        [],
        2,
    ),
    "a layer norm in front of a gated product": (lambda p: p.mlp(p.centred(p.first(X))), [], 0),
    "a layer norm in front of two products": (
        lambda p: p.wide(y := p.inline(p.wide(X))) + p.wide(y),
        [("", "inline")],
        0,
    ),
    "a layer norm that a product and something else read": (lambda p: p.wide(y := p.inline(X), onto=y * 2), [], 0),
    "a layer norm whose input is changed before a product reads its result": (
        lambda p: (lambda x: (lambda y: p.wide(y, onto=x.mul_(2)))(p.inline(x)))(p.wide(X)),
        [],
        0,
    ),
    "a layer norm that runs twice, once in front of something else": (
        lambda p: p.wide(p.inline(X)) + p.inline(X + 1),
        [],
        0,
    ),
    "a layer norm of an RMS norm": (lambda p: p.mlp(p.centred(p.norm(p.first(X)))), [], 1),
    "an RMS norm of a sum that a layer norm makes": (
        lambda p: (lambda y: p.mlp(p.norm(p.centred(p.first(X), onto=y))))(p.second(X)),
        [],
        1,
    ),
    "a layer norm of a sum that an RMS norm makes": (
        lambda p: (lambda y: p.mlp(p.centred(p.norm(p.first(X), onto=y))))(p.second(X)),
        [],
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_fused_and_that_it_is_right(case: str) -> None:
    run, fused, norms = CASES[case]
    parts = Parts()
    plan = plan_of(parts, run)
    assert pairs(plan) == fused
    assert right(parts, plan, run) == norms


def between(p: Parts) -> Tensor:
    return p.mlp(p.norm(p.first(X)))


def test_a_large_product_and_modules_that_have_no_path_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    alien, parts = RMSNorm(8), Parts()
    assert not plan_of(parts, lambda p: p.mlp(alien(p.first(X)))).fusions
    monkeypatch.setattr(fusion_trace, "MOST_BYTES", 8 * 16 * 4 - 1)
    assert not plan_of(parts, between).fusions


def test_several_vectors_are_normed_by_a_launch() -> None:
    parts = Parts()
    plan, several = plan_of(parts, between), numbers(1, 2, 16, dtype=torch.float32)
    assert right(parts, plan, lambda p: p.mlp(p.norm(p.first(several)))) == 1


HOOKS: dict[str, Callable[..., Tensor | None]] = {
    "that looks": lambda module, given, y: None,
    "that replaces the result": lambda module, given, y: y * 2,
    "that changes the result in place": lambda module, given, y: y.mul_(2),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("run", [between, CASES["a norm of a sum that a norm makes"][0]], ids=["deferred", "twice"])
def test_hooks_that_come_after_the_plan_was_made(hook: str, run: Run) -> None:
    parts = Parts()
    plan = plan_of(parts, run)
    parts.first.register_forward_hook(HOOKS[hook])
    parts.norm.register_forward_hook(HOOKS[hook])
    assert right(parts, plan, run) >= 0


def test_a_plan_leaves_out_modules_that_are_gone_or_are_no_norms_any_more() -> None:
    parts = Parts()
    plan = plan_of(parts, between)
    parts.norm = nn.LayerNorm(8)  # type: ignore[assignment]
    assert plan.bind(parts).norm_after(parts.first) is None
    del parts.first
    plan.bind(parts)


def test_what_no_norm_took_is_gone_when_the_next_step_begins() -> None:
    parts, workspace = Parts(), Workspace(X.device)
    workspace.fusions = fusions = plan_of(parts, between).bind(parts)
    with kernels.in_use(workspace), torch.no_grad():
        y = parts.first(X)
        assert isinstance(parts.norm(y), Unnormed) and not isinstance(parts.norm(y), Unnormed)
        parts.first(X)
        assert len(fusions._ready) == 1
        fusions.begin()
        assert not fusions._ready


def test_outside_a_captured_program_nothing_is_fused() -> None:
    parts = Parts()
    with kernels.in_use(), torch.no_grad():
        assert not isinstance(parts.norm(parts.first(X)), Unnormed)
    assert Fusions().norm_after(parts.first) is None
