"""`verify` holds on every family, and catches faults that are planted on purpose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lamina
from lamina.cache.fetching import InWindow
from lamina.cache.layout import Layout
from lamina.cache.recurrent import RecurrentLayer
from lamina.cache.step import Step
from lamina.checking.laws import LAWS
from lamina.model import Model
from lamina.models.llama import Llama
from tests.families.cases import FIRST
from tests.families.harness import pair


@pytest.fixture(params=FIRST, ids=[family for family, _ in FIRST])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield pair(*request.param)[1]


def test_every_law_holds_on_every_family(model: Model) -> None:
    report = lamina.verify(model, tries=1)
    assert report, str(report)
    assert set(report.worst) == set(LAWS)
    assert "FAILED" not in str(report)


def first(family: str) -> Model:
    return pair(family, dict(FIRST)[family])[1]


def test_every_law_holds_on_the_host() -> None:
    report = lamina.verify(first("falcon_h1"), tries=1, residence="host")
    assert report, str(report)
    assert "kept on the host" in str(report)


def test_a_token_that_does_not_reach_the_host_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InWindow, "_through", lambda *_: None)
    report = lamina.verify(first("llama"), laws=["chunking"], tries=1, residence="host")
    assert report.first is not None and report.first.where == "layer 0"


def test_a_mask_off_by_one_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = first("gemma2")
    right = Layout.positions

    def shifted(self: Layout, slots: int, lengths: Tensor) -> Tensor:
        held = right(self, slots, lengths)
        return torch.where(held >= 0, held - 1, held) if self.ring else held

    monkeypatch.setattr(Layout, "positions", shifted)
    report = lamina.verify(model, tries=1)
    assert not report.ok
    assert report.first is not None
    assert "sliding" in " ".join(report.first.kinds)
    sliding = next(i for i, entry in enumerate(model.specs) if entry["attention"].window.span)
    assert report.first.where == f"layer {sliding}"


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "falcon_h1"])
def test_a_state_not_rewound_is_caught_and_named(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentLayer, "rewind", lambda *_: None)
    report = lamina.verify(first(family), tries=1)
    assert {found.law for found in report.differences} == {"rewind"}
    assert report.first is not None
    assert report.first.where.startswith("layer 0")


def test_padding_that_leaks_into_a_state_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RecurrentLayer.recur

    def careless(self: RecurrentLayer, step: Step, *rest: object) -> Tensor:
        valid, step.valid = step.valid, None
        try:
            return right(self, step, *rest)  # type: ignore[arg-type]
        finally:
            step.valid = valid

    monkeypatch.setattr(RecurrentLayer, "recur", careless)
    report = lamina.verify(first("mamba2"), tries=1)
    broken = {found.law for found in report.differences}
    assert "independence" in broken
    assert "chunking" not in broken
    assert report.first is not None
    assert "SSD" in report.first.kinds


def test_a_wrong_position_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Llama.prepare

    def from_zero(self: Llama, positions: Tensor) -> object:
        return right(self, torch.arange(positions.shape[1]).expand_as(positions))

    monkeypatch.setattr(Llama, "prepare", from_zero)
    report = lamina.verify(first("llama"), tries=1, laws=["chunking"])
    assert report.first is not None
    assert report.first.where == "layer 0"
    assert report.first.position > 0


def test_a_fault_outside_the_blocks_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Llama.unembed
    monkeypatch.setattr(Llama, "unembed", lambda self, x: right(self, x) * (1 + 0.01 * (x.shape[1] == 1)))
    report = lamina.verify(first("llama"), tries=1, laws=["chunking"])
    assert report.first is not None
    assert report.first.where == "model"
    assert "outside blocks" in str(report)


def test_the_report_is_a_table_of_laws_and_kinds() -> None:
    text = str(lamina.verify(first("llama"), tries=1, laws=["chunking", "rewind"], length=8))
    assert text.splitlines()[1].split() == ["law", "attention", "error"]
    assert text.splitlines()[3].split()[:2] == ["chunking", "ok"]
    assert text.splitlines()[-1] == "ok: the cache changes nothing"


def test_an_unknown_law_is_refused_by_name() -> None:
    with pytest.raises(lamina.InputError, match="there is no law 'gravity'; known: chunking"):
        lamina.verify(first("llama"), laws=["gravity"])
