"""A model of one's own, from plain PyTorch layers, decodes and speculates by captured steps as the families do."""

from __future__ import annotations

import functools

import pytest
import torch

from docs.own_model import Mine
from lamina.generation.strategies.plain import decode_plain
from lamina.generation.strategies.speculation import speculate
from lamina.runtime import Graphs
from lamina.sampling.chooser import Chooser
from tests.generation.drafted import Oracle, again, begin, same
from tests.kernels.runs import both

pytestmark = pytest.mark.usefixtures("few_programs", "passes_by_kernels")


@functools.cache
def mine() -> Mine:
    torch.manual_seed(0)
    return Mine(vocab=80, width=32, heads=2, layers=1).requires_grad_(False).eval()


def test_captured_steps_and_plain_passes_make_the_same() -> None:
    captured, plain = both(mine())
    torch.testing.assert_close(captured.cache.logits, plain.cache.logits, rtol=1e-4, atol=1e-4)


def test_captured_speculation_makes_the_greedy_tokens() -> None:
    run = begin(mine(), [[5, 9, 12, 3], [7]], 4)
    truth = decode_plain(again(run))
    found = speculate(again(run, num_assistant_tokens=3), Oracle(run, truth, 0.7, 0))
    same(found, truth, run)
    assert found.how == "captured passes of several tokens"


def test_a_row_that_ended_at_the_last_learned_position_stays_in_the_step() -> None:
    torch.manual_seed(0)
    model = Mine(vocab=60, width=32, heads=2, layers=1)
    model.max_positions, model.position = 6, torch.nn.Embedding(6, 32)
    model.requires_grad_(False).eval()
    cache = model.new_cache(2)
    model([[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0]], cache=cache, counts=[6, 2], logits="last")
    step = Graphs(model).step(2, Chooser())
    step.begin(cache, torch.tensor([9, 9]), [0, 3], ())
    step.run(3)
    assert [len(row) for row in cache.tokens] == [6, 5]
