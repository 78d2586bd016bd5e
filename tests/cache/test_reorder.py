"""Reordering rows in place: how much is copied, and what is refused. That it equals `select` is in tests/laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.cache import Cache
from lamina.errors import InputError
from tests.laws.toys import VOCAB, assert_close, random_ids, toy

PROMPT, NEW = 30, 3
EACH = 8  # bytes of a number: everything here is float64 or int64


class Writes(TorchDispatchMode):
    """Counts the bytes that are written into rows and slots of existing tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if op in (torch.ops.aten.index_put_.default, torch.ops.aten.index_copy_.default):
            new = args[2] if op is torch.ops.aten.index_put_.default else args[3]
            self.bytes += new.numel() * new.element_size()
        return op(*args, **(kwargs or {}))


def beams(kind: str, slack: int = 0) -> Cache:
    """Three rows of one prompt that went apart, and one of another prompt."""
    model = toy(kind)
    cache = model.new_cache(2, slack=slack)
    model(random_ids(2, PROMPT), cache=cache)
    cache = cache.repeat([3, 1])
    for t in range(NEW):
        model(random_ids(4, 1, seed=1 + t), cache=cache)
    return cache


def copied(cache: Cache, rows: list[int], since: int) -> int:
    """Bytes that reordering writes, the last logits apart."""
    with Writes() as writes:
        cache.reorder(rows, since)
    return writes.bytes - sum(i != r for i, r in enumerate(rows)) * VOCAB * EACH


def a_slot(cache: Cache) -> int:
    """Bytes of one token of one row in all layers, and in the record."""
    return EACH + sum(
        tensor[0, ..., 0, :].numel() * EACH for entry in cache.layers for layer in entry.values()
        for tensor in layer.data.values()
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["full", "latent", "sliding, keep", "sliding and full", "chunked", "shared", "tokens"])
def test_only_tokens_past_what_is_shared_are_copied_and_only_of_rows_that_change(kind: str) -> None:
    assert copied(beams(kind), [0, 0, 2, 3], PROMPT) == NEW * a_slot(beams(kind))
    assert copied(beams(kind), [2, 1, 0, 3], PROMPT) == 2 * NEW * a_slot(beams(kind))
    assert copied(beams(kind), [0, 1, 2, 3], PROMPT) == 0


def test_states_are_copied_whole_and_only_of_rows_that_change() -> None:
    for slack in (0, 2):
        cache = beams("gated delta", slack)
        a_row = cache.nbytes // cache.rows
        assert copied(cache, [0, 0, 1, 3], PROMPT) == 2 * (a_row + NEW * EACH)


def test_rows_that_have_not_gone_apart_yet_are_not_copied() -> None:
    model = toy("hybrid")
    cache = model.new_cache()
    model(random_ids(1, PROMPT), cache=cache)
    assert copied(cache.repeat(3), [0, 0, 0], PROMPT) == 0


def test_a_source_is_copied_between_rows_that_share_nothing_and_only_there() -> None:
    model = toy("cross")
    cache = model.new_cache(2, source=model.encode(random_ids(2, 5)))
    model(random_ids(2, 3), cache=cache)
    expected = cache.select([1, 1])
    cache.reorder([1, 1])
    ids = random_ids(2, 4, seed=3)
    assert_close(model(ids, cache=cache), model(ids, cache=expected))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.cache.layers.cross.CrossLayer.reorder", lambda layer, moves: None)
        without = copied(cache.fork(), [0, 0], 5), copied(cache.fork(), [0, 0], 0)
    source = sum(tensor[0].nbytes for entry in cache.layers for tensor in entry["cross"].data.values())
    assert copied(cache.fork(), [0, 0], 5) == without[0]
    assert copied(cache.fork(), [0, 0], 0) == without[1] + source


def test_a_row_without_a_token_takes_over_the_source_of_another_one() -> None:
    model = toy("cross")
    cache = model.new_cache(2, source=model.encode(random_ids(2, 5)))
    expected = cache.select([1, 1])
    cache.reorder([1, 1])
    ids = random_ids(2, 4, seed=3)
    assert_close(model(ids, cache=cache), model(ids, cache=expected))  # type: ignore[arg-type]


def test_reordering_on_a_row_of_another_length_takes_its_length_over() -> None:
    model = toy("sliding and full")
    cache = model.new_cache(2)
    model(random_ids(2, 12), cache=cache, counts=[12, 7])
    cache.reorder([1, 1])
    assert cache.lengths.tolist() == [7, 7]
    found = model(random_ids(2, 1, seed=5)[:1].expand(2, 1), cache=cache)
    assert found is not None
    assert_close(found[0], found[1])


def test_what_cannot_be_shared_is_refused_and_nothing_is_changed() -> None:
    cache = beams("full")
    tokens = cache.tokens
    with pytest.raises(InputError, match=r"since=34 for row 1: rows 1 and 0 hold 33 and 33 tokens, .* 0 to 33"):
        cache.reorder([0, 0, 2, 3], 34)
    with pytest.raises(InputError, match=r"one source row for each of the 4 rows, not 2: \[0, 1\]"):
        cache.reorder([0, 1])
    with pytest.raises(InputError, match="there is no row 4"):
        cache.reorder([0, 1, 2, 4])
    assert cache.tokens == tokens
