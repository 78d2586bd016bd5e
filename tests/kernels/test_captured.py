"""A captured decode step gives what plain passes give, for every family and any cache that it takes up.

Without a GPU a replay runs the kernels again in the interpreter, so this tests all of it but the capture itself.
"""

from __future__ import annotations

import pytest
import torch

from lamina.audio.timestamps import TimestampRules
from lamina.errors import CapacityError
from lamina.generation.strategies.plain import decode_plain
from lamina.runtime import Graphs, why_not_captured
from lamina.runtime.graphs import MOST_SHAPES
from lamina.sampling.chooser import Chooser
from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.kernels.runs import PROMPTS, begin, both, start, tiny

MORE = [
    ("falcon_h1", "norm before gate, biases, own head dim"),
    ("gemma2", "untied, biases, one key head"),
    ("gemma3n_text", "last layers share, wide inputs"),
    ("gemma4_text", "inputs of layers, last layers share"),
    ("diffllama", "grouped"),
]
pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.mark.parametrize(("family", "name"), FIRST + MORE)
def test_captured_and_plain_steps_give_the_same(family: str, name: str) -> None:
    model = pair(family, name)[1]
    captured, plain = (made.cache for made in both(model, max_new_tokens=2))
    assert torch.equal(captured.rewindable, plain.rewindable)
    assert captured.logits is not None and plain.logits is not None
    torch.testing.assert_close(captured.logits, plain.logits, rtol=1e-4, atol=1e-4)
    more = torch.tensor([[1, 2], [3, 4]])  # and plain passes go on from it
    torch.testing.assert_close(model(more, cache=captured), model(more, cache=plain), rtol=1e-4, atol=1e-4)


def test_one_step_serves_two_live_caches_and_growth() -> None:
    model = tiny()
    graphs = Graphs(model)
    step = graphs.step(2, Chooser())
    (a, logits), (b, _) = start(model), start(model)
    first = logits.argmax(-1)
    expected = decode_plain(begin(model, max_new_tokens=4)).tokens
    rows = []
    for cache in (a, b):
        step.begin(cache, first, [9, 9], ())
        step.run(2)
        cache.reserve(2 * cache.layers[0]["attention"].slots + 1)  # new memory, elsewhere
        rows.append(step.ids[:, 0].clone())
    step.release()
    for cache, ids in zip((a, b), rows, strict=True):
        with graphs.step(2, Chooser()) as again:
            assert again is step
            step.begin(cache, ids, [9, 9], ())
            step.run(2)
    assert graphs.captures == 1
    assert a.tokens == b.tokens == [p + t for p, t in zip(PROMPTS, expected, strict=True)]


def test_a_step_has_room_for_what_it_may_make_or_says_that_there_is_none() -> None:
    model = tiny()
    cache = model.new_cache(2, capacity=6)
    model(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), cache=cache, logits="last")
    step, ids = Graphs(model).step(2, Chooser()), torch.tensor([9, 9])
    with pytest.raises(CapacityError, match="7 tokens per row were requested, and the cache has room for 6"):
        step.begin(cache, ids, [3, 3], ())
    assert cache.tokens == [[1, 2, 3, 4], [5, 6, 7, 8]]
    step.begin(cache, ids, [2, 2], ())
    step.run(2)
    assert cache.record.shape[1] >= 6 and [len(row) for row in cache.tokens] == [6, 6]


def test_the_least_recently_used_step_is_dropped() -> None:
    graphs = Graphs(pair("llama", "grouped")[1])
    for rows in [*range(1, MOST_SHAPES + 1), 1, MOST_SHAPES + 1]:
        with graphs.step(rows, Chooser()):
            pass
    assert [key[0] for key in graphs.kept] == [*range(3, MOST_SHAPES + 1), 1, MOST_SHAPES + 1]
    assert graphs.captures == MOST_SHAPES + 1


def test_what_is_not_captured_says_why() -> None:
    model = pair("llama", "grouped")[1]
    assert why_not_captured(model) == "the model is on cpu; decode steps are captured on a GPU"


def test_rules_about_the_last_two_tokens_are_part_of_a_captured_step() -> None:
    """Timestamps from id 40 on, end token 30: which ids may come next depends on the last two and on the largest."""
    rules = TimestampRules(first=40, end=30, latest=2)
    captured, _ = both(tiny(), logits_processor=[rules], max_new_tokens=8)
    free = decode_plain(begin(tiny(), max_new_tokens=8)).tokens
    assert captured.tokens != free and captured.how == "one captured graph a step"
    for row in captured.tokens:
        times = [token for token in row if token >= 40]
        assert row[0] in (40, 41, 42) and len(times) > 2 and times == sorted(times)


def test_the_run_before_a_capture_changes_no_more_than_capture_puts_back() -> None:
    cache, logits = start(tiny())
    with Graphs(tiny()).step(2, Chooser((lambda scores, history: scores - history.seen(scores.shape[1]),))) as step:
        step.begin(cache, logits.argmax(-1), [3, 3], ())
        kept = {id(one) for one in step.changed_by_a_run}
        owned = {name: one for name, one in vars(step).items() if isinstance(one, torch.Tensor) and id(one) not in kept}
        step.counts.zero_()
        before = {name: one.clone() for name, one in owned.items() if name not in ("_inputs", "positions")}
        step.program()
        assert {name for name, one in before.items() if not torch.equal(one, owned[name])} == set()
        assert before.keys() >= {"ids", "remaining", "seen", "seen_in_prompt", "tables"}
