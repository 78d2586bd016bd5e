"""Passes of other shapes: spans, packed sequences, embeddings in place of ids, and fewer logits."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from tests.laws.toys import KINDS, EncoderDecoder, assert_close, random_ids, toy, truth

ATTENDING = ["full", "sliding", "sliding, keep", "sliding and full", "chunked", "latent", "shared"]
WITHOUT_SOURCE = [kind for kind in KINDS if not isinstance(toy(kind), EncoderDecoder)]


def spans_of(lengths: list[tuple[int, bool]]) -> Tensor:
    """[1, T]: pieces that are spans get a number each, the others -1."""
    return torch.cat([torch.full((1, n), i if span else -1) for i, (n, span) in enumerate(lengths)], dim=1)


@pytest.mark.parametrize("kind", ATTENDING)
def test_spans_fed_whole_equal_the_uncached_pass(kind: str) -> None:
    model = toy(kind)
    spans = spans_of([(3, False), (5, True), (1, False), (6, True), (2, True), (4, False), (7, True), (3, False)])
    ids = random_ids(1, spans.shape[1], seed=2)
    whole = model(ids, spans=spans)
    plain = model(ids)
    assert whole is not None and plain is not None
    assert not torch.allclose(whole, plain)
    between = [at for at in range(1, ids.shape[1]) if spans[0, at] < 0 or spans[0, at] != spans[0, at - 1]]
    for seed in range(8):
        rng = random.Random(seed)
        cache = model.new_cache(capacity=rng.choice([None, 60]), slack=rng.choice([0, 2]))
        cuts = [0, *sorted(rng.sample(between, rng.randint(0, len(between)))), ids.shape[1]]
        outs = []
        for start, end in itertools.pairwise(cuts):
            cache.poison()
            outs.append(model(ids[:, start:end], cache=cache, spans=spans[:, start:end]))
        assert_close(torch.cat(outs, dim=1), whole, f"{kind}, {cuts}")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ATTENDING)
def test_spans_in_ragged_rows_equal_each_row_alone(kind: str) -> None:
    model = toy(kind)
    ids = random_ids(2, 9, seed=4)
    first, second = torch.tensor([[-1, 0, 0, 0, -1, 1, 1]]), torch.tensor([[2, 2, -1, 3, 3]])
    alone = [model(ids[:1, :7], spans=first), model(ids[1:, :5], spans=second)]
    cache = model.new_cache(rows=2)
    found: list[list[Tensor]] = [[], []]
    for bounds in ([(0, 4), (0, 2)], [(4, 5), (2, 2)], [(5, 7), (2, 5)]):
        T = max(end - start for start, end in bounds)
        given, spans = torch.zeros(2, T, dtype=torch.int64), torch.full((2, T), 9)  # padding may claim a span
        for r, (start, end) in enumerate(bounds):
            given[r, : end - start] = ids[r, start:end]
            spans[r, : end - start] = (first, second)[r][0, start:end]
        cache.poison()
        out = model(given, cache=cache, counts=[end - start for start, end in bounds], spans=spans)
        assert out is not None
        for r, (start, end) in enumerate(bounds):
            found[r].append(out[r, : end - start])
    for r in range(2):
        expected = alone[r]
        assert expected is not None
        assert_close(torch.cat(found[r]), expected[0], kind)


@pytest.mark.parametrize("kind", WITHOUT_SOURCE)
def test_packed_sequences_equal_each_of_them_alone(kind: str) -> None:
    model = toy(kind)
    ids = random_ids(2, 20, seed=6)
    lengths = [[4, 1, 9, 6], [20]]
    names = torch.tensor([5, 0, 5, 1])
    segments = torch.stack([names[: len(n)].repeat_interleave(torch.tensor(n)) for n in lengths])
    found = model(ids, segments=segments)
    assert found is not None
    for r, sizes in enumerate(lengths):
        parts = [truth(kind, tuple(part.tolist())) for part in ids[r].split(sizes)]
        assert_close(found[r], torch.cat(parts), kind)


@pytest.mark.parametrize("kind", WITHOUT_SOURCE)
def test_padding_without_a_cache_changes_no_real_token(kind: str) -> None:
    ids = random_ids(3, 9, seed=8)
    counts = [9, 4, 0]
    embeds = toy(kind).embed(ids)
    for r, count in enumerate(counts):
        embeds[r, count:] = float("nan")
    for found in (toy(kind)(ids, counts=counts), toy(kind)(embeds=embeds, counts=counts)):
        assert found is not None
        for r, count in enumerate(counts[:2]):
            assert_close(found[r, :count], truth(kind, tuple(ids[r, :count].tolist())), kind)


@pytest.mark.parametrize("kind", WITHOUT_SOURCE)
def test_embeddings_in_place_of_ids_give_the_same_logits(kind: str) -> None:
    model, ids = toy(kind), random_ids(2, 10)
    cache = model.new_cache(rows=2)
    outs = [model(embeds=model.embed(piece), cache=cache) for piece in ids.split([3, 1, 6], dim=1)]
    expected = torch.stack([truth(kind, tuple(row)) for row in ids.tolist()])
    assert_close(torch.cat(outs, dim=1), expected, kind)  # type: ignore[arg-type]
    assert cache.tokens == [[-1] * 10] * 2


def test_last_logits_are_those_of_each_rows_last_real_token() -> None:
    model, ids = toy("hybrid"), random_ids(3, 5)
    cache = model.new_cache(rows=3)
    every = model(ids, counts=[5, 2, 1])
    last = model(ids, counts=[5, 2, 1], logits="last")
    cached = model(ids, cache=cache, counts=[5, 2, 1], logits="last")
    assert every is not None and last is not None and cached is not None
    assert last.shape == cached.shape == (3, 13)
    expected = torch.stack([every[0, 4], every[1, 1], every[2, 0]])
    assert_close(last, expected)
    assert_close(cached, expected)


def test_a_pass_without_logits_still_remembers() -> None:
    model, ids = toy("hybrid"), random_ids(1, 8)
    cache = model.new_cache()
    assert model(ids[:, :7], cache=cache, logits=None) is None
    assert cache.logits is None
    found = model(ids[:, 7:], cache=cache, logits="last")
    assert found is not None
    assert_close(found[0], truth("hybrid", tuple(ids[0].tolist()))[-1])


def test_one_source_serves_every_row_and_rows_may_have_their_own() -> None:
    model = toy("cross")
    one, two = model.encode([[1, 2, 3]]), model.encode([[4, 5, 6, 7], [8, 9, 0, 0]], counts=[4, 2])
    ids = random_ids(3, 4)
    cache = model.new_cache(rows=3, source=one)
    cache.attach(two, rows=[2, 0])
    found = model(ids, cache=cache)
    assert found is not None
    for r, source in enumerate([(8, 9), (1, 2, 3), (4, 5, 6, 7)]):
        assert_close(found[r], truth("cross", tuple(ids[r].tolist()), source))
