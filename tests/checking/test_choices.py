"""Near-ties of experts and of selected tokens are told from faults: what rounding decides otherwise is left out."""

from __future__ import annotations

import copy

import pytest
import torch

import lamina
from lamina.checking.choices import fingerprint
from lamina.checking.report import Report
from lamina.model import Model
from tests.families.cases import CASES
from tests.families.harness import pair


def in_bfloat16(family: str) -> Model:
    return copy.deepcopy(pair(family, next(iter(CASES[family])))[1]).to(torch.bfloat16)


def chunked(model: Model) -> Report:
    return lamina.verify(model, tries=1, laws=["chunking"], progress=False)


@pytest.mark.parametrize("family", ["flex_olmo", "deepseek_v32"])  # experts; experts and an indexer
def test_laws_are_tried_though_double_precision_chooses_otherwise(family: str) -> None:
    report = chunked(in_bfloat16(family))
    assert report.ok, str(report)
    assert "rounding was measured without" in str(report) and "tokens were left out: a near-tie" in str(report)
    assert report.worst["precision"] < 0.1 and report.tokens > 100


def test_a_fault_in_front_of_the_blocks_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_bfloat16("flex_olmo")
    right = model.embed
    id = torch.randint(0, model.vocab, (24,), generator=torch.Generator().manual_seed(0))[22]  # at the end of row 0

    def embed(ids: torch.Tensor) -> torch.Tensor:
        """One id is embedded wrongly in short passes, which sends it to other experts."""
        wrong = (ids == id) & (ids.shape[1] < 4)
        return torch.where(wrong[..., None], right(ids).roll(5, -1), right(ids))

    monkeypatch.setattr(model, "embed", embed)
    report = chunked(model)
    assert report.first is not None and report.first.where == "model", str(report)


def test_a_fault_in_a_block_is_named_though_experts_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_bfloat16("flex_olmo")
    block = model.blocks[1]
    right = block.forward
    monkeypatch.setattr(block, "forward", lambda x, *rest: right(x * (1 + 0.5 * (x.shape[1] == 1)), *rest))
    report = chunked(model)
    assert report.first is not None and report.first.where == "layer 1", str(report)


def test_a_fingerprint_tells_selections_apart_wherever_tokens_are_stored() -> None:
    selected = torch.zeros(1, 3, 6, dtype=torch.bool)
    selected[0, 0, [0, 3]] = selected[0, 1, [1, 2]] = selected[0, 2, [0, 3]] = True
    positions = torch.tensor([[3, 4, 5]])
    found = fingerprint(selected, positions)[0, :, 0]
    assert found[0] == found[2] != found[1]
    wider = torch.cat([selected, torch.zeros(1, 3, 9, dtype=torch.bool)], dim=-1)
    assert torch.equal(fingerprint(wider, positions)[0, :, 0], found)
    up_to_own = torch.arange(6) <= positions[..., None]
    assert torch.equal(fingerprint(None, positions), fingerprint(up_to_own, positions))
