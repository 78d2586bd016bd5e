"""Captured decode steps of encoder–decoder families: what their decoders do besides attention is captured too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lamina
from lamina.config import Config
from lamina.model import Model
from lamina.models import family_of
from lamina.runtime import Graphs
from lamina.sampling.chooser import Chooser
from tests.kernels.passes import compared

pytestmark = pytest.mark.usefixtures("few_programs")

T5: dict[str, Any] = dict(
    vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=2,
    relative_attention_num_buckets=4, relative_attention_max_distance=5,
)  # fmt: skip
GEMMA: dict[str, Any] = dict(
    vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, sliding_window=3, query_pre_attn_scalar=5,
)  # fmt: skip
BERT: dict[str, Any] = dict(
    vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=32,
)  # fmt: skip
DECODER = dict(is_decoder=True, add_cross_attention=True)

CASES: dict[str, dict[str, Any]] = {
    "switch_transformers": T5 | dict(num_experts=2, expert_capacity=4, decoder_sparse_step=1, encoder_sparse_step=1),
    "umt5": T5,
    "t5gemma": dict(encoder=GEMMA, decoder=GEMMA),
    "encoder-decoder": dict(
        encoder=BERT | dict(model_type="bert", hidden_size=24),
        decoder=BERT | DECODER | dict(model_type="electra", embedding_size=8),
    ),
}


@torch.no_grad()
def built(family: str) -> tuple[Model, lamina.Cache, lamina.Cache]:
    """A model, and two caches of two rows with a source."""
    torch.manual_seed(0)
    config = Config({"model_type": family} | CASES[family])
    model = family_of(config).build(config)
    for parameter in model.parameters():
        parameter.normal_(std=0.4)
    captured, plain = (model.new_cache(rows=2, source=model.encode([[5, 6, 7], [8, 9, 1]])) for _ in range(2))
    return model, captured, plain


@torch.no_grad()
@pytest.mark.parametrize("family", CASES)
def test_captured_steps_are_plain_ones(family: str) -> None:
    model, captured, plain = built(family)
    for cache in (captured, plain):
        model(torch.tensor([[0, 4, 8, 2, 1, 9, 3]]).expand(2, -1), cache=cache, logits="last")
    first = torch.tensor([3, 11])
    with Graphs(model).step(2, Chooser(), captured) as step:
        step.begin(captured, first, [2, 2], ())
        step.run(2)
    for _ in range(2):
        expected = model(first[:, None], cache=plain, logits="last")
        first = expected.argmax(-1)
    torch.testing.assert_close(captured.logits, expected, rtol=1e-4, atol=1e-4)
    assert captured.tokens == plain.tokens


@torch.no_grad()
@pytest.mark.parametrize("family", CASES)
def test_captured_passes_are_plain_ones(family: str) -> None:
    model, captured, plain = built(family)
    compared(model, captured, plain, (3, 8, 1, 2), vocab=30)
