"""The law of codecs: what is kept of a token differs from the token by no more than its form says; plain is exact."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.cache.codec.codec import Coding
from lamina.cache.layers.tokens import TokenLayer
from tests.laws.budget import examples
from tests.laws.test_laws import LENGTH, capacities, cuts, kinds, new_cache, residences, run, seeds, slacks
from tests.laws.toys import CODECS, codec_for, random_ids


def assert_within_bound(coding: Coding, kept: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    """kept, given: [N, D] each, tokens as they are kept and as they were given."""
    for name, x in given.items():
        if name in coding.formats:
            assert ((kept[name] - x).norm(dim=-1) <= coding.formats[name].bound(x) * (1 + 1e-9) + 1e-12).all(), name
        else:
            torch.testing.assert_close(kept[name], x, rtol=1e-9, atol=1e-9)


@given(
    kind=kinds, codec=st.sampled_from(list(CODECS)), capacity=capacities, slack=slacks, residence=residences, seed=seeds
)
@examples(0.05)
def test_codec_a_kept_token_is_within_the_stated_bound_of_the_token_that_was_given(
    kind: str, codec: str, capacity: int | None, slack: int, residence: str | int, seed: int
) -> None:
    chosen, rng, ids = codec_for(kind, codec), random.Random(seed), random_ids(2, LENGTH, seed)
    caches = [new_cache(kind, 2, capacity, slack, codec=which, residence=residence)[0] for which in (None, chosen)]
    for cache in caches:
        run(kind, ids, cache, cuts(LENGTH, rng))
        cache.rewind(min(2, int(cache.rewindable.min())))
    plain, coded = (cache.layers[0] for cache in caches)  # what the first layer is given is the same in both
    for name, layer in coded.items():
        if not isinstance(layer, TokenLayer):
            continue
        other = plain[name]
        assert isinstance(other, TokenLayer) and layer.slots == other.slots
        clock = caches[1].clock
        held = layer.layout.positions(layer.slots, clock.lengths)  # [B, S]
        there = held >= 0
        if layer.layout.ring is not None:  # else overwritten by what was taken back
            there &= (held < layer.layout.keep) | (held + layer.layout.ring >= clock.written[:, None])
        every = torch.arange(2)
        kept, given = layer.coding.decode(layer.copied(every).data), other.copied(every).data
        for row in range(2):
            at = there[row].nonzero()[:, 0]
            parts = [{n: x[row].index_select(-2, at) for n, x in fields.items()} for fields in (kept, given)]
            assert_within_bound(layer.coding, *parts)
