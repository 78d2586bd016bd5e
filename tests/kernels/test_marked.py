"""Indexers of passes with packed segments and spans, against PyTorch: what is selected, and attention over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.attention import Full, View, indexer, reference_attention
from lamina.kernels import fuses
from lamina.kernels.attention.indexer import select_in_turns
from lamina.kernels.attention.prompt.selected import attend_selected
from lamina.planning.meta_model import subject_of
from lamina.rehearsal.rehearsal import Fused, as_on_gpu
from lamina.runtime.prefill.backend import PROMPT
from lamina.runtime.prefill.selected import MOST_SCORES, as_mask, marks_of
from tests.families.cases import CASES
from tests.families.harness import pair, relative
from tests.kernels.stores import Held
from tests.largest import Largest

pytestmark = pytest.mark.usefixtures("few_programs")

B, T, S, D, TOP = 3, 37, 80, 12, 9
COUNTS = [37, 0, 20]
SPANS = torch.tensor([-1, 5, 5, 5, -1, 0, 0] + [7] * 15 + [-1] * 3 + [5] * 4 + [2] * 8).expand(B, -1)  # 5: in two parts
SEGMENTS = torch.tensor([0] * 4 + [3] * 13 + [1] * 20).expand(B, -1)


def view_of(kind: str, lengths: Tensor) -> View:
    """Of new tokens behind rows of these lengths; packed sequences are for empty rows."""
    counts, slots, time = torch.tensor(COUNTS)[:, None], torch.arange(S), torch.arange(T)
    at, held = lengths[:, None] + time, torch.where(slots < lengths[:, None] + counts, slots, -1)
    marks: dict[str, Any] = {}

    def of_keys(marks: Tensor) -> Tensor:
        place = slots - lengths[:, None]
        return torch.where((place >= 0) & (place < T), marks.gather(1, place.clamp(0, T - 1)), -1)

    if "segments" in kind:
        first = torch.tensor([0] * 4 + [4] * 13 + [17] * 20).expand(B, -1)
        at, held = time - first, torch.where(held >= 0, slots - of_keys(first), -1)
        marks |= dict(q_segments=SEGMENTS, kv_segments=of_keys(SEGMENTS))
    if "spans" in kind:
        marks |= dict(q_spans=SPANS, kv_spans=of_keys(SPANS))
    return View(at, held, Full(), **marks)


@pytest.mark.parametrize("most", [64, 3])
@pytest.mark.parametrize("kind", ["segments", "spans", "segments and spans"])
def test_the_kernels_select_and_read_what_segments_and_spans_show(kind: str, most: int) -> None:
    torch.manual_seed(most)
    lengths = [0, 6, 30] if kind == "spans" else [0, 0, 0]
    held = Held.random(Full(), lengths, 1, (D,), slots=S, counts=COUNTS)
    real, heads = held.real(T), 5
    q, k = torch.randn(B, T, heads, D).transpose(1, 2), torch.randn(B, T, D)
    weights = torch.randn(B, T, heads).masked_fill(~real[..., None], float("nan"))
    stored = Held(held.after([k[:, None]]), held.layout, Full(), held.lengths, held.counts)
    scores = torch.full((B, min(most, T), S), float("nan"))
    table = stored.row({"k": stored.fields[0]}, scores=scores.data_ptr(), score_room=S)
    keys, view = stored.fields[0][:, 0].nan_to_num(0), view_of(kind, held.lengths)
    marks = marks_of(view, held.lengths, torch.tensor(COUNTS))
    found = select_in_turns(q, weights, k, table, TOP, most, marks=marks)
    mask = view.mask()[:, 0] & real[..., None]
    truth = indexer.select_tokens(q, keys, weights.nan_to_num(0), mask, TOP)
    assert torch.equal(as_mask(found, view), truth)
    assert torch.equal((found >= 0).sum(-1), truth.sum(-1))  # no token is listed twice

    latent = torch.randn(B, T, heads, D).transpose(1, 2)
    expected = reference_attention(
        latent, keys[:, None], keys[:, None, :, :8], view.restricted(truth), scale=0.3, dtype=torch.float64
    )
    for first, end in ((0, T), (5, T)):
        mean = attend_selected(latent[:, :, first:end], k, table, found, rank=8, scale=0.3, first=first, marks=marks)
        ours, theirs = (x.transpose(1, 2)[real[:, first:end]] for x in (mean, expected[:, :, first:end]))
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        assert not mean.transpose(1, 2)[~real[:, first:end]].any()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.kernels.fuses", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr("lamina.runtime.feed.backend_for", lambda device: PROMPT)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
@torch.no_grad()
def test_packed_sequences_and_spans_give_the_logits_of_pytorchs_operations(
    family: str, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair(family, next(iter(CASES[family])))
    ids = torch.randint(3, model.vocab, (2, 14), generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[0] * 5 + [1] * 9, [0] * 8 + [1] * 6])
    spans = torch.tensor([[-1] * 3 + [0] * 6 + [-1] * 2 + [1] * 3, [-1] * 14])

    def logits() -> list[Tensor]:
        found = [model(ids, segments=segments, spans=spans)]
        cache = model.new_cache(2)
        model(ids[:, :6], cache=cache, counts=[6, 2])
        cache.poison()
        behind = model(ids[:, 6:], cache=cache, counts=[8, 5], spans=spans[:, 6:])
        return [*found, behind[0], behind[1, :5]]

    with pytest.MonkeyPatch.context() as watched:
        watched.setattr(View, "mask", refused)
        found = logits()
    monkeypatch.setattr("lamina.kernels.fuses", fuses)
    assert all(relative(*one) < 2e-4 for one in zip(found, logits(), strict=True))


def refused(view: View) -> Tensor:
    raise AssertionError(f"a mask of {view}")


def test_no_flag_for_each_pair_is_made() -> None:
    tokens = 8192
    config = dict(
        model_type="deepseek_v32", vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=64, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, first_k_dense_replace=1, index_n_heads=4, index_head_dim=32, index_topk=64,
        rms_norm_eps=1e-6, tie_word_embeddings=False, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=16, n_shared_experts=1, max_position_embeddings=tokens,
    )  # fmt: skip
    model = subject_of(config, "bfloat16").model
    with torch.device("meta"), torch.no_grad(), as_on_gpu(), Fused():
        cache = model.new_cache(1).reserve(tokens)
        with Largest() as made:
            model(
                torch.zeros(1, tokens, dtype=torch.int64), cache=cache, spans=torch.zeros(1, tokens, dtype=torch.int64)
            )
    assert made.most_of(torch.bool) <= 8 * tokens
    assert made.most_of(torch.float32) == 4 * MOST_SCORES
