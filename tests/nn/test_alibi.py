"""ALiBi's slopes against transformers, and the bias against slopes times key positions."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from lamina.attention import Full, View, reference_attention
from lamina.attention.bias import SlopeForm, kernel_form
from lamina.nn import AlibiBias, alibi_slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 12, 14, 16])
def test_slopes_are_those_of_bloom_and_mpt(heads: int) -> None:
    ours = torch.tensor(alibi_slopes(heads))
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]  # of the key at position 1
    torch.testing.assert_close(ours, bloom)
    mpt = build_mpt_alibi_tensor(heads, 2)[:, 0, 0]  # of the key before the last
    torch.testing.assert_close(-ours, mpt)
    mpt = build_mpt_alibi_tensor(heads, 2, alibi_bias_max=6)[:, 0, 0]
    torch.testing.assert_close(-0.5 * torch.tensor(alibi_slopes(heads, largest=6, scale=2.0)), mpt)


def test_slopes_times_key_positions_give_the_same_probabilities() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 5, 8)
    slopes, view = torch.tensor(alibi_slopes(3)), View(torch.tensor([[3, 4]]), torch.arange(5)[None], Full())
    by_distance = reference_attention(q, k, k, view, scale=0.3, bias=AlibiBias(alibi_slopes(3)))
    by_position = reference_attention(q, k, k, view, scale=0.3, bias=lambda head, q_pos, kv_pos: slopes[head] * kv_pos)
    torch.testing.assert_close(by_distance, by_position)


def test_a_bias_built_without_memory_gets_its_slopes_when_it_is_loaded() -> None:
    with torch.device("meta"):
        bias = AlibiBias(alibi_slopes(4))
    bias.reset_buffers()
    form = kernel_form(bias)
    assert isinstance(form, SlopeForm) and form.slopes.tolist() == alibi_slopes(4)
