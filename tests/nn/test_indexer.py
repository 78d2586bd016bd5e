"""The indexer of sparse attention: which tokens it selects, and what follows for caches, plans and captured steps."""

from __future__ import annotations

import pytest
import torch

import lamina
from lamina.attention.indexer import MOST, best, index_scores, select_tokens
from lamina.config import Config
from lamina.errors import InputError
from lamina.models import family
from lamina.models.deepseek_sparse import indexer_types
from lamina.planning.bytes import decode_bytes, fetched_bytes
from tests.families.cases.indexer import make


def built(**changes: object) -> lamina.Model:
    config = make(first_k_dense_replace=2, **changes).to_dict()
    model = family("glm_moe_dsa").build(Config(config))
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
    return model


def test_equal_scores_do_not_depend_on_how_a_row_is_cut() -> None:
    model = built(index_n_heads=1, index_topk=5)  # about half of all scores are zero
    ids = torch.randint(0, 67, (1, 30))
    whole = model(ids)
    for pieces in ([1] * 30, [7, 1, 22]):
        cache = model.new_cache()
        found = torch.cat([model(piece, cache=cache) for piece in ids.split(pieces, dim=1)], dim=1)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_many_queries_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, weights = torch.randn(2, 3, 7, 4), torch.randn(2, 9, 4), torch.randn(2, 7, 3)
    seen = torch.rand(2, 7, 9) < 0.7
    whole = best(index_scores(q, k, weights), seen, 3)
    monkeypatch.setattr("lamina.attention.indexer.MOST", 2 * 2 * 3 * 9)
    assert MOST > 2 * 2 * 3 * 9 and torch.equal(select_tokens(q, k, weights, seen, 3), whole)
    assert torch.equal(whole.sum(-1), seen.sum(-1).clamp(max=3))


def test_a_step_moves_all_keys_of_the_indexer_and_the_selected_latents() -> None:
    model = built(indexer_types=["full", "shared"], index_topk=5)
    token = 4 * (16 + 4)  # bytes of a latent with its key
    keys = 4 * 8
    assert decode_bytes(model, 1, 100).tokens == 100 * keys + 2 * 5 * token
    assert fetched_bytes(model, 1, 100) == 101 * keys + 2 * 101 * token


def test_types_of_indexers_that_cannot_be_are_named() -> None:
    for types in (["shared", "full"], ["full"], ["full", "half"]):
        with pytest.raises(InputError, match=r"indexer_types=.* must say full or shared for each of 2 layers"):
            indexer_types(Config(dict(num_hidden_layers=2, indexer_types=types)))
    with pytest.raises(InputError, match="indexer_rope_interleave=False"):
        built(indexer_rope_interleave=False)
    with pytest.raises(InputError, match="q_lora_rank=null"):
        family("glm_moe_dsa").build(Config(make().to_dict() | {"q_lora_rank": None}))
    with pytest.raises(InputError, match=r"an indexer selects at least one of all tokens, window Full\(\)"):
        lamina.IndexKeys(8, lamina.Sliding(4))
