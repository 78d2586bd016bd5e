from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lamina.attention.window import Chunked, Full, Sliding
from lamina.bench.flops import pairs, prefill_flops
from lamina.bench.random_model import random_model
from lamina.cache.step import Step
from tests.bench.small import small

TOKENS = 20  # enough for latents to be expanded


@pytest.mark.parametrize("window", [Full(), Sliding(4, keep=2), Chunked(5)])
def test_pairs_are_those_that_see_each_other(window: Full | Sliding | Chunked) -> None:
    q, kv = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    assert pairs(window, TOKENS) == int((window.sees(q, kv) & (kv <= q)).sum())


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v2-lite"])
def test_a_prefill_counts_what_pytorch_counts_less_the_pairs_that_are_not_visible(name: str) -> None:
    model = random_model(small(name), torch.float32, "cpu")
    ids = torch.arange(TOKENS)[None]
    for _ in range(2):  # the first pass may try several ways of computing the same
        step = Step.alone(model.specs, (1, TOKENS), torch.device("cpu"))
        step.attention = "eager"
        with FlopCounterMode(display=False) as counter:
            model.forward(ids, step, logits=None)
    c = model.config
    numbers = 16 if name == "llama-3.1-8b" else c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
    unseen = 2 * c.num_attention_heads * numbers * len(model.blocks) * (TOKENS**2 - pairs(Full(), TOKENS))
    head = 2 * 67 * 32  # of the last token alone
    assert prefill_flops(model, TOKENS) == pytest.approx(counter.get_total_flops() - unseen + head, rel=1e-6)


def test_rows_multiply_the_work() -> None:
    model = random_model(small("falcon-h1-7b"), torch.float32, "cpu")
    assert prefill_flops(model, TOKENS, rows=3) == 3 * prefill_flops(model, TOKENS)
