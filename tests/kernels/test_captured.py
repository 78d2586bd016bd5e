"""A captured decode step gives what plain passes give, for any cache that it takes up.

Without a GPU a replay runs the kernels again in the interpreter, so this tests all of it but the capture itself.
"""

from __future__ import annotations

import pytest
import torch
from lamina.generation.greedy import captured, plainly

import lamina
from lamina.generation.run import Chooser
from lamina.runtime import Graphs, why_not_captured
from lamina.runtime.capture import MOST_GRAPHS
from tests.families.cases import FIRST
from tests.families.harness import pair

MORE = [("falcon_h1", "norm before gate, biases, own head dim"), ("gemma2", "untied, biases, one key head")]
PROMPTS = [[5, 9, 12, 3, 44, 8, 21, 2, 2, 6, 13], [7]]


def start(model: lamina.Model, capacity: int | None = None) -> tuple[lamina.Cache, torch.Tensor]:
    """A cache that holds the prompts, and the logits after them."""
    cache = model.new_cache(rows=2, capacity=capacity)
    ids = torch.zeros(2, 11, dtype=torch.int64)
    for r, prompt in enumerate(PROMPTS):
        ids[r, : len(prompt)] = torch.tensor(prompt)
    logits = model(ids, cache=cache, counts=[len(prompt) for prompt in PROMPTS], logits="last")
    assert logits is not None
    return cache.reserve(30), logits


@pytest.mark.parametrize(("family", "name"), FIRST + MORE)
def test_captured_and_plain_steps_give_the_same(family: str, name: str) -> None:
    model = pair(family, name)[1]
    (plain, logits), (replayed, _) = start(model), start(model)
    expected = plainly(model, plain, logits, 4, set(), None)
    assert captured(model, replayed, logits, 4, set(), None) == expected
    assert replayed.tokens == plain.tokens
    assert torch.equal(replayed.rewindable, plain.rewindable)
    assert plain.logits is not None and replayed.logits is not None
    torch.testing.assert_close(replayed.logits, plain.logits, rtol=1e-4, atol=1e-4)
    more = torch.tensor([[1, 2], [3, 4]])  # and plain passes go on from it
    torch.testing.assert_close(model(more, cache=replayed), model(more, cache=plain), rtol=1e-4, atol=1e-4)


def test_rows_end_on_the_device_and_are_told_in_order() -> None:
    model = pair("llama", "grouped")[1]
    cache, logits = start(model)
    free = plainly(model, cache, logits, 4, set(), None)
    ends = {free[1][1]}
    cache, logits = start(model)
    expected = plainly(model, cache, logits, 4, ends, None)
    told: list[tuple[int, int, bool]] = []
    cache, logits = start(model)
    assert captured(model, cache, logits, 4, ends, lambda *one: told.append(one)) == expected
    assert [[token for row, token, _ in told if row == r] for r in range(2)] == expected
    assert [[last for row, _, last in told if row == r][-1] for r in range(2)] == [True, True]
    assert cache.lengths.tolist() == [len(p) + len(t) for p, t in zip(PROMPTS, expected, strict=True)]


def test_one_step_serves_two_live_caches_and_growth() -> None:
    model = pair("llama", "grouped")[1]
    graphs = Graphs(model)
    step = graphs.step(2, Chooser())
    (a, logits), (b, _) = start(model), start(model)
    first = logits.argmax(-1)
    expected = plainly(model, start(model)[0], logits, 4, set(), None)
    rows = []
    for cache in (a, b):
        step.take_up(cache, first, [9, 9], ())
        step.run(2)
        cache.reserve(2 * cache.layers[0]["attention"].slots + 1)  # new memory, elsewhere
        rows.append(step.ids[:, 0].clone())
    for cache, ids in zip((a, b), rows, strict=True):
        assert graphs.step(2, Chooser()) is step
        step.take_up(cache, ids, [9, 9], ())
        step.run(2)
    assert graphs.captures == 1
    assert a.tokens == b.tokens == [p + t for p, t in zip(PROMPTS, expected, strict=True)]


def test_the_least_recently_used_step_is_dropped() -> None:
    graphs = Graphs(pair("llama", "grouped")[1])
    first = graphs.step(1, Chooser())
    for rows in range(2, MOST_GRAPHS + 1):
        graphs.step(rows, Chooser())
    assert graphs.step(1, Chooser()) is first
    graphs.step(MOST_GRAPHS + 1, Chooser())
    assert (1, Chooser()) in graphs.kept and (2, Chooser()) not in graphs.kept


def test_what_is_not_captured_says_why() -> None:
    model = pair("llama", "grouped")[1]
    assert model.explain() == ("decoding: plain passes, since the model is on cpu; decode steps are captured on a GPU")
    assert why_not_captured(model) is not None
