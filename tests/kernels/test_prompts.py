"""Plain passes as they run on a GPU, with kernels between products and for attention, against PyTorch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.kernels import fuses
from lamina.kernels.attention import prefill
from lamina.runtime.prompt_backend import PROMPT
from tests.families.cases import CASES
from tests.families.harness import pair, relative

FAMILIES = [
    "llama", "qwen3", "gemma2", "gpt_oss", "bloom", "deepseek_v3", "longcat_flash", "llama4", "starcoder2", "mamba2",
    "mamba", "qwen3_next", "falcon_h1", "lfm2",
]  # fmt: skip


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are used as on a GPU, wherever no gradient is wanted."""
    monkeypatch.setattr("lamina.kernels.fuses", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr("lamina.runtime.feed.backend_for", lambda device: PROMPT)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of queries of each call of the kernel."""
    run, calls = prefill.attend_many, list[int]()

    def note(q: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        calls.append(q.shape[2])
        return run(q, *args, **how)

    monkeypatch.setattr(prefill, "attend_many", note)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_ragged_chunks_give_the_logits_of_pytorchs_operations(
    family: str, on_a_gpu: None, attended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair(family, next(iter(CASES[family])))
    ids = torch.randint(3, model.vocab, (2, 30), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(2)
    found = []
    for start, end, counts in ((0, 17, [17, 9]), (17, 20, None), (20, 30, [10, 4])):
        logits = model(ids[:, start:end], cache=cache, counts=counts)
        assert logits is not None
        found.append([row[:count] for row, count in zip(logits, counts or [end - start] * 2, strict=True)])
        cache.poison()
    monkeypatch.setattr("lamina.kernels.fuses", fuses)
    assert {*attended} == (set() if family in ("mamba", "mamba2") else {17, 3, 10})
    for row in range(2):
        whole = torch.tensor([cache.tokens[row]])
        expected = model(whole)
        assert expected is not None
        assert relative(torch.cat([part[row] for part in found]), expected[0]) < 2e-4
