from __future__ import annotations

import pytest
import torch

from lamina.attention import Full, Sliding, View, attention, reference_attention
from lamina.attention.core import best_backend
from lamina.attention.query_blocks import fits, query_blocks


@pytest.mark.parametrize(("heads", "dims"), [((6, 2), (16, 16)), ((3, 3), (16, 24))])
@pytest.mark.parametrize(("T", "S"), [(130, 130), (150, 300)])
@torch.no_grad()
def test_blocks_of_queries_equal_the_reference(T: int, S: int, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, T, heads[0], dims[0]).transpose(1, 2)
    k, v = torch.randn(2, heads[1], S, dims[0]), torch.randn(2, S, heads[1], dims[1]).transpose(1, 2)
    at = torch.arange(S).expand(2, -1)
    view = View(at[:, S - T :], at, Full(), exact=True)
    assert best_backend(q, k, v, view, None, None, None) == "query blocks"
    found = attention(q, k, v, view, scale=0.3)
    torch.testing.assert_close(found, reference_attention(q, k, v, view, scale=0.3).float(), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_other_calls_keep_other_backends() -> None:
    at = torch.arange(200)[None]
    q, view = torch.randn(1, 2, 200, 8), View(at, at, Full(), exact=True)
    assert fits(q, q, q, view, None, None, None)
    assert fits(q, q, q, View(at, at, Sliding(200), exact=True), None, None, None)
    assert not fits(q, q, q, View(at, at, Sliding(199), exact=True), None, None, None)
    assert not fits(q, q, q, View(at, at, Full()), None, None, None)
    assert not fits(q, q, q, view, 30.0, None, None) and not fits(q, q, q, view, None, torch.zeros(2), None)
    assert not fits(q.double(), q.double(), q.double(), view, None, None, None)
    with torch.enable_grad():
        assert not fits(q, q, q, view, None, None, None)
    few = View(at[:, :100], at[:, :100], Full(), exact=True)
    assert not fits(q[:, :, :100], q[:, :, :100], q[:, :, :100], few, None, None, None)
    assert query_blocks(q, q, q, view, scale=1.0).shape == q.shape
