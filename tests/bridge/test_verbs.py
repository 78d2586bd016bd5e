"""Random histories of a cache: what is stored is what transformers' DynamicCache holds, after every verb."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina import bridge
from lamina.errors import CapacityError, InputError

LAYERS, HEADS, DIM, WINDOW = 3, 2, 4, 5
KEPT: dict[str, dict[str, Any]] = {
    "grows": {}, "fixed": {"capacity": 64}, "slack": {"slack": 2}, "host": {"residence": "host"},
    "pages": {"pool": True},
}  # fmt: skip
HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 7)),
        st.tuples(st.just("crop"), st.integers(1, 4)),
        st.tuples(st.just("reorder"), st.integers(0, 5)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.integers(0, 5)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    min_size=1, max_size=9,
)  # fmt: skip


def config(sliding: bool) -> Any:
    sizes = dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, hidden_size=8)
    if not sliding:
        return transformers.LlamaConfig(**sizes, head_dim=DIM)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(**sizes, head_dim=DIM, sliding_window=WINDOW, layer_types=types)


def apply(cache: Any, verb: str, n: int, rows: int, new: list[tuple[Tensor, Tensor]]) -> tuple[Any, list[Any]]:
    """Does one verb; -> the cache, and what it returned"""
    if verb == "update":
        # Copies: tokens that were fetched from the host are in memory that the next layers use again.
        return cache, [[x.clone() for x in cache.update(k, v, i)] for i, (k, v) in enumerate(new)]
    if verb == "crop":
        cache.crop(-n)
    if verb == "reorder":
        cache.reorder_cache(torch.tensor([(i * n + n) % rows for i in range(rows)]))
    if verb == "repeat":
        cache.batch_repeat_interleave(n)
    if verb == "select":
        cache.batch_select_indices(torch.tensor([n % rows, 0][: max(1, rows - 1)]))
    if verb == "reset":
        cache.reset()
    return (copy.deepcopy(cache) if verb == "fork" else cache), []


@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("kept", KEPT)
@settings(max_examples=25, deadline=None)
@given(history=HISTORIES, seed=st.integers(0, 99))
def test_any_history_holds_what_a_dynamic_cache_holds(
    kept: str, sliding: bool, history: list[tuple[str, int]], seed: int
) -> None:
    chosen = {"pool": bridge.Pool(tokens=4096, page=4)} if kept == "pages" else KEPT[kept]
    theirs, ours = transformers.DynamicCache(config=config(sliding)), bridge.Cache(config(sliding), **chosen)
    generator, rows, length = torch.Generator().manual_seed(seed), 2, 0
    for verb, n in history:
        if (verb == "crop" and (sliding or n >= length)) or (verb in ("repeat", "select", "reorder") and not length):
            continue
        if length + n > 64 or (verb == "repeat" and rows > 4):
            break
        new = [tuple(torch.randn(2, rows, HEADS, n, DIM, generator=generator)) for _ in range(LAYERS)]
        theirs, expected = apply(theirs, verb, n, rows, new)
        ours, found = apply(ours, verb, n, rows, new)
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), verb
        if verb == "reset":  # a new one of theirs: in transformers 5.17 a DynamicCache keeps its length
            theirs, rows, length = transformers.DynamicCache(config=config(sliding)), 2, 0
            continue
        length += {"update": n, "crop": -n}.get(verb, 0)
        if length:
            rows = ours.layers[1].keys.shape[0]
            for a, b in zip(theirs.layers, ours.layers, strict=True):
                assert a.get_seq_length() == b.get_seq_length() == length
                assert a.get_mask_sizes(3) == b.get_mask_sizes(3)
                held, end = a.keys.shape[2], min(length, b.keys.shape[2])
                assert kept == "fixed" or held == b.keys.shape[2]  # a fixed cache shows its empty slots too
                for one, other in ((a.keys, b.keys), (a.values, b.values)):
                    assert torch.equal(one, other[:, :, end - held : end])


def filled(tokens: int, **kept: Any) -> Any:
    cache = bridge.Cache(config(False), **kept)
    for i in range(LAYERS):
        cache.update(*torch.randn(2, 1, HEADS, tokens, DIM), i)
    return cache


def test_a_positive_crop_is_the_length_that_is_kept() -> None:
    cache = filled(9)
    cache.crop(4)
    assert cache.get_seq_length() == 4
    cache.crop(30)
    assert cache.get_seq_length() == 4


def test_a_pass_that_misses_a_layer_is_not_stored_and_can_be_dropped() -> None:
    cache = filled(4)
    for _ in range(2):  # the second pass is the first on the short way
        for i in range(LAYERS):
            cache.update(*torch.randn(2, 1, HEADS, 1, DIM), i)
    cache.update(*torch.randn(2, 1, HEADS, 1, DIM), 0)
    assert [cache.get_seq_length(i) for i in range(LAYERS)] == [7, 6, 6]
    with pytest.raises(InputError, match=r"layer 1 \(attention\), 2 \(attention\).*cache\.abort"):
        cache.update(*torch.randn(2, 1, HEADS, 1, DIM), 0)
    cache.abort()
    assert cache.get_seq_length() == 6 and cache.inner.lengths.tolist() == [6]


def test_layers_that_are_given_different_numbers_of_tokens_are_refused() -> None:
    cache = filled(4)
    for i in range(LAYERS):
        cache.update(*torch.randn(2, 1, HEADS, 1, DIM), i)
    cache.update(*torch.randn(2, 1, HEADS, 2, DIM), 0)
    with pytest.raises(InputError, match="3 tokens in a pass of 2"):
        cache.update(*torch.randn(2, 1, HEADS, 3, DIM), 1)


def test_a_token_beyond_the_capacity_is_an_index_error_too() -> None:
    cache = filled(4, capacity=5)
    for i in range(LAYERS):
        cache.update(*torch.randn(2, 1, HEADS, 1, DIM), i)
    with pytest.raises(CapacityError, match="capacity is 5") as caught:
        cache.update(*torch.randn(2, 1, HEADS, 1, DIM), 0)
    assert isinstance(caught.value, IndexError)


def test_a_growing_cache_keeps_its_tokens_when_its_stores_grow() -> None:
    cache, all_keys = bridge.Cache(config(False)), []
    for _ in range(150):
        for i in range(LAYERS):
            k, v = torch.randn(2, 1, HEADS, 1, DIM)
            found = cache.update(k, v, i)[0]
            if i == 1:
                all_keys.append(k)
                assert torch.equal(found, torch.cat(all_keys, dim=2))


def test_tokens_are_stored_without_their_gradients() -> None:
    cache = filled(4)
    for learns in (False, False, True):
        for i in range(LAYERS):
            k, v = torch.randn(2, 1, HEADS, 1, DIM)
            cache.update(k, v.requires_grad_(learns), i)
    assert cache.get_seq_length() == 7
    assert not any(x.requires_grad for layer in cache.layers for x in (layer.keys, layer.values))


def test_the_inner_cache_knows_every_pass_when_it_is_asked_for() -> None:
    cache = filled(4)
    for length in (5, 6, 7):
        for i in range(LAYERS):
            cache.update(*torch.randn(2, 1, HEADS, 1, DIM), i)
        if length != 6:
            assert cache.inner.lengths.tolist() == [length]


def test_fixed_and_growing_caches_are_not_compiled_by_generate() -> None:
    assert not bridge.Cache(config(False)).is_compileable
    assert not bridge.Cache(config(False), capacity=8).is_compileable
