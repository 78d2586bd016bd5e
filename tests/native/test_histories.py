"""Native steps between passes, rewinds and forks leave a cache as plain passes would, for every kind of layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import lamina
from lamina.model import Model
from lamina.native.library import set_threads
from lamina.recurrence import SSD, Rule
from lamina.recurrence.rule import Tensors
from lamina.runtime.native.eligibility import why_not_native
from lamina.sampling.chooser import Chooser
from tests.families.cases import CASES
from tests.families.harness import pair
from tests.laws.toys import CODECS, KINDS, Attend, Recur, Toy, codec_for, toy
from tests.native.histories import compare

FAMILIES = ["llama", "mistral", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
RECURRENT = ["mamba", "mamba2", "qwen3_next", "kimi_linear", "recurrent_gemma", "rwkv", "falcon_h1"]
REFUSED = {"from outside", "from outside, among others"}
"""Kinds whose layers no native kernel reads."""

QUANTIZED = ["wide heads", "latent", "latent, sliding", "latent, selected", "tokens", "cross", "shared"]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(None)


def keeping(model: Model, kept: str, slack: int = 3, **more: Any) -> dict[str, Any]:
    if kept == "pages":
        return {"pool": lamina.Pool(model, page=16, slack=slack, **more)}
    return {"slack": slack, **({"capacity": 90} if kept == "fixed" else {}), **more}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", ["growing", "fixed", "pages"])
def test_families_after_random_histories(family: str, kept: str) -> None:
    model = pair(family, next(iter(CASES[family])))[1]
    assert compare(model, family + kept, **keeping(model, kept)).captures == 1


@pytest.mark.parametrize("family", RECURRENT)
def test_states_with_slack_after_random_histories(family: str) -> None:
    model = pair(family, next(iter(CASES[family])))[1]
    for slack in (1, 4):
        compare(model, f"{family} {slack}", slack=slack)


@dataclass(frozen=True)
class Fading(Rule):
    """A rule from outside the package: h = h / 2 + x, y = tanh(h) + A."""

    value: ClassVar[str] = "x"
    longest_chunk: ClassVar[int] = 8
    state_shape: ClassVar[tuple[int, ...]] = (2, 3)  # type: ignore[assignment]
    input_shapes: ClassVar[dict[str, tuple[int, ...]]] = {"x": (2, 3)}  # type: ignore[assignment]

    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        state = state / 2 + inputs["x"]
        return state.tanh() + constants["A"], state

    def chunks(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def chunk(
        self, state: Tensor, inputs: Tensors, constants: Tensors, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.scan(state, inputs, constants, valid)

    def scratch_per_token(self, length: int) -> int:
        return 6


class FadingTwice(SSD):
    """Another rule than the one it inherits from."""

    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        return super().step(state / 2, inputs, constants)

    def chunk(
        self, state: Tensor, inputs: Tensors, constants: Tensors, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.scan(state, inputs, constants, valid)


@pytest.mark.parametrize(
    "rule", [Fading(), FadingTwice(heads=2, head_dim=3, state=2, groups=1)], ids=lambda rule: type(rule).__name__
)
def test_rules_from_outside_the_package(rule: Rule) -> None:
    model = Toy(Recur(rule), Attend(), Recur(rule)).to(torch.float32)
    compare(model, "rules")
    reason = why_not_native(model, model.new_cache(1, slack=2))
    assert reason is not None and reason.startswith("layer 0 entry 'state': its slack is 2; a native step keeps no log")


@torch.no_grad()
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_states_that_fold_a_bfloat16_log_are_as_exact_as_those_of_plain_passes(family: str) -> None:
    rounded = copy.deepcopy(pair(family, next(iter(CASES[family])))[1]).to(torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    models = {"exact": exact, "plain": rounded, "native": rounded}
    caches = {kind: model.new_cache(1, slack=3) for kind, model in models.items()}
    ids = torch.randint(0, rounded.vocab, (1, 20), generator=torch.Generator().manual_seed(1))
    for kind, model in models.items():
        model(ids[:, :5], cache=caches[kind])
    with rounded.graphs.step(1, Chooser(), caches["native"], native=True) as step:
        for token in ids[0, 5:]:
            step.begin(caches["native"], token[None], [1], ())
            step.run(1)
            for kind in ("exact", "plain"):
                models[kind](token[None, None], cache=caches[kind])
    found = {}
    for kind, model in models.items():
        caches[kind].rewind([3])
        found[kind] = model(ids[:, :2], cache=caches[kind]).float()
    assert (found["native"] - found["exact"]).abs().max() <= 2 * (found["plain"] - found["exact"]).abs().max()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
@pytest.mark.parametrize("kept", ["growing", "fixed", "pages"])
def test_kinds_after_random_histories(kind: str, kept: str) -> None:
    model = toy(kind, torch.float32)
    for slack in (3, 0) if kept == "growing" else (3,):
        assert compare(model, f"{kind} {kept} {slack}", **keeping(model, kept, slack)).captures == 1


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("codec", CODECS)
def test_quantized_kinds_after_random_histories(kind: str, codec: str) -> None:
    model = toy(kind, torch.float32)
    assert codec_for(kind, codec) == codec
    for kept in ("growing", "pages"):  # a value between two codes may be rounded to either
        compare(model, kind + codec + kept, 2e-2, **keeping(model, kept, codec=CODECS[codec]))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("rows", [1, 16])
def test_selections_of_one_and_of_many_rows(family: str, rows: int) -> None:
    for which in CASES[family]:
        compare(pair(family, which)[1], which, rows=rows, slack=3)
