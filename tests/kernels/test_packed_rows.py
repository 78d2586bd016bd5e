"""Kernels over rows side by side on one token axis, and packed passes that use them, against each row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.bench.random_model import random_model
from lamina.cache import packed
from lamina.cache.packed_rows import PackedRows
from lamina.kernels import fuses
from lamina.kernels.recurrent.prompt.conv import conv_prompt
from lamina.recurrence import SSD, GatedDelta, SelectiveScan
from lamina.recurrence.rule import Rule
from lamina.runtime.prefill.backend import PROMPT, kernel_of
from lamina.runtime.prefill.packed_backend import PackedPromptBackend
from tests.bench.small import small
from tests.families.cases import CASES
from tests.families.harness import pair, relative

COUNTS = [70, 1, 0, 37]
RULES: list[tuple[Rule, dict[str, tuple[int, ...]]]] = [
    (SSD(heads=4, head_dim=8, state=16, groups=2), {"A": (4,)}),
    (GatedDelta(key_heads=2, value_heads=4, key_dim=16, value_dim=16), {}),
    (SelectiveScan(channels=12, state=4), {"A": (12, 4)}),
]


@pytest.mark.parametrize(("rule", "shapes"), RULES, ids=lambda one: type(one).__name__)
def test_recurrences_of_rows_side_by_side_are_those_of_each_row(rule: Rule, shapes: dict[str, tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    rows, run = PackedRows(COUNTS, torch.device("cpu")), kernel_of(rule)
    assert run is not None
    wide = {name: torch.randn(1, rows.tokens + 3, *shape)[:, 2:-1] for name, shape in rule.input_shapes.items()}
    inputs = {
        name: -x.abs() if name == "g" else x.sigmoid() if name in ("dt", "beta") else x for name, x in wide.items()
    }
    inputs = {name: x / x.norm(dim=-1, keepdim=True) if name in ("q", "k") else x for name, x in inputs.items()}
    constants = {name: -torch.rand(shape) for name, shape in shapes.items()}
    state = torch.randn(len(COUNTS), *rule.state_shape)
    more: dict[str, Tensor] = {}
    if isinstance(rule, SSD):
        more = {"gate": torch.randn(1, rows.tokens, 4, 8), "skip": torch.randn(4)}
    out, new = run(rule, state, inputs, constants, None, packed=rows, **more)
    for row, part in enumerate(rows.slices()):
        alone = {name: x[:, part] for name, x in more.items() if name == "gate"} | {
            name: x for name, x in more.items() if name != "gate"
        }
        mine = {name: x[:, part] for name, x in inputs.items()}
        expected, after = run(rule, state[row : row + 1], mine, constants, None, **alone)
        torch.testing.assert_close(out[:, part], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(new[row : row + 1], after, rtol=1e-5, atol=1e-5)


def test_convolutions_of_rows_side_by_side_are_those_of_each_row() -> None:
    torch.manual_seed(0)
    rows = PackedRows(COUNTS, torch.device("cpu"))
    x, past = torch.randn(1, rows.tokens, 30)[..., 3:23], torch.randn(len(COUNTS), 3, 20)
    weight, bias = torch.randn(20, 4), torch.randn(20)
    found = conv_prompt(past, x, weight, bias, "silu", packed=rows)
    assert found.shape == (1, rows.tokens, 20)
    for row, part in enumerate(rows.slices()):
        expected = conv_prompt(past[row : row + 1], x[:, part], weight, bias, "silu")
        torch.testing.assert_close(found[:, part], expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packed passes run as on a GPU; -> the calls that were spread over rows with padding."""
    monkeypatch.setattr("lamina.kernels.fuses", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr("lamina.runtime.feed.backend_for", lambda device: PROMPT)
    monkeypatch.setattr(packed, "LEAST_PADDING", 1)
    monkeypatch.setattr(packed, "LEAST_SHARE", 0.0)
    spread: list[str] = []
    for name in ("spread", "pack_heads"):
        original: Callable[..., Tensor] = getattr(packed.PackedStep, name)

        def note(self: Any, x: Tensor, run: Callable[..., Tensor] = original, name: str = name) -> Tensor:
            spread.append(name)
            return run(self, x)

        monkeypatch.setattr(packed.PackedStep, name, note)
    return spread


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom", "mamba", "falcon_h1", "qwen3_next"])
@torch.no_grad()
def test_packed_prompts_are_not_spread_and_give_the_logits_of_each_row(
    family: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair(family, next(iter(CASES[family])))
    ids = torch.randint(3, model.vocab, (3, 40), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(3)
    model(ids[:, :21], cache=cache, counts=[21, 1, 9], logits="last")
    assert calls == []
    cache.poison()
    logits = model(ids[:, 21:], cache=cache, counts=[2, 19, 5], logits="last")
    assert bool(calls) == (family == "gemma2")  # a ring with tokens in it is read in rows
    cache.poison()
    assert logits is not None
    monkeypatch.setattr("lamina.kernels.fuses", fuses)
    for row, tokens in enumerate(cache.tokens):
        alone = model(torch.tensor([tokens]), logits="last")
        assert alone is not None and relative(logits[row], alone[0]) < 2e-4


def test_calls_that_kernels_do_not_take_are_spread(calls: list[str]) -> None:
    _, model = pair("mamba2", next(iter(CASES["mamba2"])))
    with torch.no_grad():
        model(torch.ones(2, 9, dtype=torch.int64), cache=model.new_cache(2, slack=3), counts=[9, 2], logits="last")
    assert "spread" in calls  # a recurrence that can be taken back keeps its inputs
    assert PackedPromptBackend(PROMPT).inner is PROMPT


@pytest.mark.parametrize("neighbours", [False, True])
@torch.no_grad()
def test_packed_latents_are_expanded_where_they_are_and_not_spread(
    neighbours: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = dict(kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, rope_interleave=neighbours)
    model = random_model(small("deepseek-v2-lite") | sizes, torch.float32, "cpu")
    ids = torch.randint(3, 67, (3, 55), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(3)
    model(ids[:, :25], cache=cache, counts=[25, 1, 9], logits="last")
    cache.poison()
    logits = model(ids[:, 25:], cache=cache, counts=[2, 30, 0], logits="last")
    assert calls == [] and cache.lengths.tolist() == [27, 31, 9]
    cache.poison()
    again = model(ids[:, :3], cache=cache, counts=[3, 1, 2], logits="last")  # few: in the latent space, in rows
    assert calls != [] and logits is not None and again is not None
    monkeypatch.setattr("lamina.kernels.fuses", fuses)
    for row, tokens in enumerate(cache.tokens):
        alone = model(torch.tensor([tokens]))
        assert alone is not None and relative(again[row], alone[0, -1]) < 2e-4
        before = [27, 31, 9][row] - 1
        assert row == 2 or relative(logits[row], alone[0, before]) < 2e-4
