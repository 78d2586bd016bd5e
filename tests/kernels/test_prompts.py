"""Plain passes as they run on a GPU, with kernels between products and for attention, against PyTorch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina import kernels
from lamina.attention import View, torch_backends
from lamina.bench.random_model import random_model
from lamina.kernels import fuses
from lamina.kernels.attention.prefill import many
from lamina.rehearsal.explain import attention_lines
from lamina.runtime.prefill.backend import PROMPT
from tests.bench.small import small
from tests.families.cases import CASES
from tests.families.encoder_decoder_cases import FIRST_CASES, pair_of
from tests.families.harness import pair, relative

FAMILIES = [
    "llama", "qwen3", "gemma2", "gpt_oss", "bloom", "deepseek_v3", "longcat_flash", "llama4", "starcoder2", "mamba2",
    "mamba", "qwen3_next", "falcon_h1", "lfm2", "bitnet", "glm_moe_dsa", "deepseek_v32",
]  # fmt: skip
NOT_BY_THIS_KERNEL = ("mamba", "mamba2", "deepseek_v3", "longcat_flash", "glm_moe_dsa", "deepseek_v32")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are used as on a GPU, wherever no gradient is wanted."""
    monkeypatch.setattr("lamina.kernels.fuses", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr("lamina.runtime.feed.backend_for", lambda device: PROMPT)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of queries of each call of the kernel."""
    run, calls = many.attend_many, list[int]()

    def note(q: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        calls.append(q.shape[2])
        return run(q, *args, **how)

    monkeypatch.setattr(many, "attend_many", note)
    return calls


@pytest.fixture
def unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """While kernels are used, nothing makes a query × key mask, or scores of all queries and keys."""
    mask, probabilities = View.mask, torch_backends.probabilities

    def few(queries: int) -> None:
        assert queries == 1 or kernels.fuses is fuses

    def noted_mask(view: View) -> torch.Tensor:
        few(view.shape[1])
        return mask(view)

    def noted_scores(q: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        few(q.shape[2])
        return probabilities(q, *args, **how)

    monkeypatch.setattr(View, "mask", noted_mask)
    monkeypatch.setattr(torch_backends, "probabilities", noted_scores)


@pytest.mark.parametrize("neighbours", [False, True])
@torch.no_grad()
def test_latents_are_attended_to_with_heads_in_two_tensors(
    neighbours: bool, on_a_gpu: None, attended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = dict(kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, rope_interleave=neighbours)
    model = random_model(small("deepseek-v2-lite") | sizes, torch.float32, "cpu")
    joined: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, *a, **k: joined.append(parts[0].dim()) or cat(parts, *a, **k))
    ids = torch.randint(3, 67, (2, 60), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(2)
    model(ids[:, :25], cache=cache, counts=[25, 11])
    cache.poison()
    found = model(ids[:, 25:], cache=cache, counts=[20, 35])
    assert attended == [25, 25, 35, 35] and 4 not in joined  # neither queries nor keys are copied together
    monkeypatch.undo()
    assert found is not None
    for row, count in enumerate((20, 35)):
        expected = model(torch.tensor([cache.tokens[row]]))
        assert expected is not None and relative(found[row, :count], expected[0, -count:]) < 2e-4


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_ragged_chunks_give_the_logits_of_pytorchs_operations(
    family: str, on_a_gpu: None, unmasked: None, attended: list[int], monkeypatch: pytest.MonkeyPatch
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
    assert {*attended} == (set() if family in NOT_BY_THIS_KERNEL else {17, 3, 10})
    for row in range(2):
        whole = torch.tensor([cache.tokens[row]])
        expected = model(whole)
        assert expected is not None
        assert relative(torch.cat([part[row] for part in found]), expected[0]) < 2e-4


@pytest.mark.parametrize("family", ["t5", "t5gemma", "bart"])
@torch.no_grad()
def test_encoders_and_their_decoders_make_no_masks(
    family: str, on_a_gpu: None, unmasked: None, attended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair_of(FIRST_CASES[family]())[1]
    source, ids = torch.randint(3, 60, (2, 11)), torch.randint(3, 60, (2, 7))

    def logits() -> list[torch.Tensor]:
        cache = model.new_cache(2, source=model.encode(source, [11, 4]))
        found = [model(ids, cache=cache, counts=[7, 3], logits="last"), model(ids, cache=cache, logits="last")]
        return [one for one in found if one is not None]

    found = logits()
    monkeypatch.setattr("lamina.kernels.fuses", fuses)
    assert 11 in attended and 7 in attended
    assert all(relative(*pair) < 2e-4 for pair in zip(found, logits(), strict=True))


@torch.no_grad()
def test_selections_that_attention_is_recorded_of_become_masks(on_a_gpu: None) -> None:
    _, model = pair("glm_moe_dsa", next(iter(CASES["glm_moe_dsa"])))
    ids = torch.randint(3, model.vocab, (1, 12))
    step = model.new_cache().step(12)
    step.backend = PROMPT
    recorded = step.record_attentions()
    model.forward(ids, step)
    (shares, _), *_ = recorded.values()
    assert bool(((shares > 0).sum(-1) <= 4).all()) and bool((shares[0, :, 3:] > 0).any(-1).all())


@pytest.mark.parametrize(
    ("family", "sizes", "backend"),
    [
        ("deepseek_v3", "deepseek-v2-lite", "kernel over expanded latents"),
        ("glm_moe_dsa", "", "kernel over selected latents"),
        ("llama", "", "kernel"),
    ],
)
@torch.no_grad()
def test_the_kernels_of_all_attention_are_told(family: str, sizes: str, backend: str, on_a_gpu: None) -> None:
    if sizes:
        heads = dict(kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
        model = random_model(small(sizes) | heads, torch.float32, "cpu")
    else:
        _, model = pair(family, next(iter(CASES[family])))
    layers = len(model.blocks)
    lines = attention_lines(model, None)
    assert len(lines) == 1 and f"({layers} layers): {backend}" in lines[0]
    result = model.generate([[5] * 34, [6], [7]], 1, eos_token_id=())
    assert result.prompt_how.endswith(f"attention: {backend}") and "packed" in result.prompt_how
