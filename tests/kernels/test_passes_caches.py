"""What a captured pass does with caches: any of them, growth, capacity, rewinding, and what it refuses."""

from __future__ import annotations

import random

import pytest
import torch

from lamina.errors import CapacityError, InputError
from lamina.runtime import Graphs
from tests.kernels.passes import plainly, random_pass, same
from tests.kernels.runs import small, start

pytestmark = pytest.mark.usefixtures("few_programs")


def test_one_pass_serves_two_live_caches_and_growth() -> None:
    model = small("falcon_h1")
    graphs = Graphs(model)
    caches, plain = [start(model)[0] for _ in range(2)], [start(model)[0] for _ in range(2)]
    for round in range(2):
        for number, (cache, other) in enumerate(zip(caches, plain, strict=True)):
            ids = torch.full((2, 3), 7 * round + number)
            with graphs.pass_of(2, 3) as one:
                logits = one.read(cache, ids).clone()
                torch.testing.assert_close(logits, plainly(model, other, ids, [3, 3], [2, 3]), rtol=1e-4, atol=1e-4)
                one.commit([2, 3])
            if round == number:
                cache.reserve(100)  # new memory, elsewhere
    assert graphs.captures == 1
    for cache, other in zip(caches, plain, strict=True):
        same(cache, other)


def test_passes_grow_a_cache_and_refuse_what_has_no_room_before_anything_is_written() -> None:
    model = small("llama")
    growing, fixed = model.new_cache(1), model.new_cache(1, capacity=5)
    one, ids = Graphs(model).pass_of(1, 4), torch.tensor([[1, 2, 3, 4]])
    for _ in range(5):
        one.read(growing, ids)
        one.commit()
    assert growing.tokens == [[1, 2, 3, 4] * 5]
    one.read(fixed, ids)
    one.commit([3])
    with pytest.raises(CapacityError, match="row 0 holds 3 tokens and 4 more were given, but the capacity is 5"):
        one.read(fixed, ids)
    assert fixed.tokens == [[1, 2, 3]]
    one.read(fixed, ids, counts=[2])
    one.commit()
    assert fixed.tokens == [[1, 2, 3, 1, 2]]


def test_rewinding_between_passes_is_as_if_never_read() -> None:
    model = small("gemma2")
    captured, plain = (model.new_cache(2, slack=2) for _ in range(2))
    ids, rng = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(0)), random.Random(4)
    for cache in (captured, plain):
        model(ids, cache=cache)
    one = Graphs(model).pass_of(2, 4)
    for _ in range(3):
        more, counts, accepted = random_pass(rng, 2, 4, 60)
        one.read(captured, more, counts)
        one.commit(accepted)
        plainly(model, plain, more, counts, accepted)
        assert torch.equal(captured.rewindable, plain.rewindable)
        back = [rng.randint(0, most) for most in plain.rewindable.tolist()]
        captured.rewind(back)
        plain.rewind(back)
    more = torch.tensor([[1, 2], [3, 4]])
    torch.testing.assert_close(one.read(captured, more), model(more, cache=plain), rtol=1e-4, atol=1e-4)


def test_a_pass_that_is_over_or_does_not_fit_is_refused_in_words() -> None:
    model = small("mamba2")
    cache, graphs, ids = start(model)[0], Graphs(model), torch.tensor([[1], [2]])
    one = graphs.pass_of(2, 1)
    over = "this pass is closed"
    for end in (one.abort, one.commit, lambda: cache.reset([1]), lambda: cache.step(1), cache._abort_open_pass):
        one.read(cache, ids)
        end()
        with pytest.raises(InputError, match=over):
            one.commit()
    other = start(model)[0]
    one.read(other, ids)
    one.read(cache, ids)
    other.reset()  # is none of this pass any more
    with pytest.raises(InputError, match="accepted of row 0 is 2; it must be between 0 and 1"):
        one.commit([2, 0])
    with pytest.raises(InputError, match="id 67 at row 1, token 0 is not in the vocabulary"):
        one.read(cache, torch.tensor([[1], [67]]))
    one.read(cache, torch.tensor([[1], [-1]]), counts=[1, 0])  # padding
    with pytest.raises(InputError, match="65 rows of 1 tokens: captured passes have 1 to 16 tokens"):
        graphs.pass_of(65, 1)
    with pytest.raises(InputError, match="2 rows of 17 tokens"):
        graphs.pass_of(2, 17)
    with pytest.raises(InputError, match="of 2 rows and up to 1 tokens was given 2 tokens for a cache of 1 rows that"):
        one.read(small("llama").new_cache(), torch.tensor([[1, 2]]))
    coded = small("llama").new_cache(codec="int8")
    with pytest.raises(InputError, match="no captured passes: this pass is for other codecs or another page size"):
        Graphs(small("llama")).pass_of(1, 1).read(coded, ids[:1])
