"""Recurrent states at rest in fewer bits: in files and in prefix stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import lamina
from lamina import Cache, InputError, PrefixStore
from lamina.cache.io.state_dtype import round_states, rounded_bytes
from lamina.cache.ops.snapshot import snapshot_size, take_snapshot
from tests.laws.toys import random_ids, toy
from tests.planning.models import model as family

# A state rounded to bfloat16 is off by 2**-9 of each number, to float16 by 2**-12; what comes of it is of that order.
WITHIN = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
KINDS = ["selective scan", "ssd", "gated delta", "hybrid"]


def continued(cache: Cache) -> Tensor:
    assert cache.model is not None
    out = cache.model(random_ids(cache.rows, 9, seed=5), cache=cache)
    assert out is not None
    return out


def off(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("residence", ["device", "host"])
@pytest.mark.parametrize("states", WITHIN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_rounded_states_goes_on_within_the_tolerance(
    kind: str, states: str, residence: str, tmp_path: Path
) -> None:
    model = toy(kind)
    cache = model.new_cache(2, slack=2, residence=residence)
    model(random_ids(2, 12), cache=cache)
    cache.save(tmp_path / "exact").save(tmp_path / "rounded", states=states)
    exact, rounded = (lamina.load_cache(tmp_path / name, model, residence=residence) for name in ("exact", "rounded"))
    assert (tmp_path / "rounded").stat().st_size < (tmp_path / "exact").stat().st_size
    for one, two in zip(exact.every_layer(), rounded.every_layer(), strict=True):
        assert {n: x.dtype for n, x in one.data.items()} == {n: x.dtype for n, x in two.data.items()}
        for name, x in one.data.items():
            assert name in one.states or torch.equal(x, two.data[name])
    back = exact.rewindable.clamp(max=2).tolist()
    expected = continued(cache.rewind(back))
    assert torch.equal(continued(exact.rewind(back)), expected)
    assert 0 < off(continued(rounded.rewind(back)), expected) < WITHIN[states]


def test_where_there_is_no_state_nothing_is_rounded(tmp_path: Path) -> None:
    model = toy("sliding and full")
    cache = model.new_cache(2)
    model(random_ids(2, 12), cache=cache)
    loaded = lamina.load_cache(tmp_path / "cache" if cache.save(tmp_path / "cache", "bfloat16") else "", model)
    assert torch.equal(continued(loaded), continued(cache))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_what_is_trimmed_are_known_before(kind: str) -> None:
    cache = toy(kind).new_cache(3, slack=1)
    toy(kind)(random_ids(3, 7), cache=cache)
    for states in (None, torch.bfloat16):
        own = take_snapshot(cache, 1, states=states)
        assert snapshot_size(cache, 1, states).nbytes == own.nbytes + own.record.nbytes + own.logits.nbytes  # type: ignore[union-attr]
    assert all(
        round_states(layer, torch.bfloat16).nbytes == rounded_bytes(layer, torch.bfloat16)
        for layer in cache.every_layer()
    )


def test_a_prefix_store_keeps_states_in_half_of_the_bytes_and_goes_on_within_the_tolerance() -> None:
    model = family("mamba2", torch.float32)
    prompt = random_ids(1, 13)[0].tolist()
    exact, rounded = (PrefixStore(model, bytes=2**20, states=states) for states in (None, "bfloat16"))
    logits = []
    for store in (exact, rounded):
        model.generate([prompt], 1, prefixes=store, eos_token_id=())
        cache, _ = store._start([np.array([*prompt, 1])])
        assert cache.tokens == [prompt]
        states = [layer.data[name] for layer in cache.every_layer() for name in layer.states if name in layer.data]
        assert states and all(state.dtype == torch.float32 for state in states)
        logits.append(continued(cache))
    assert 0 < off(logits[1], logits[0]) < WITHIN["bfloat16"]
    less = exact.nbytes - rounded.nbytes
    sizes = [
        sum(layer.data["head"].nbytes for layer in one.cache.every_layer() if layer.states) for one in rounded._kept
    ]
    assert less == sum(sizes) > 0  # what went is as much as what is left of them
    assert all(
        one.size.nbytes == one.cache.nbytes + one.cache.record.nbytes + one.cache.logits.nbytes for one in rounded._kept
    )  # type: ignore[union-attr]


def test_an_unknown_dtype_is_refused_with_the_nearest(tmp_path: Path) -> None:
    cache = toy("ssd").new_cache()
    with pytest.raises(InputError, match=r"states='bfloat61': there is no such .*; the nearest is 'bfloat16'"):
        cache.save(tmp_path / "cache", states="bfloat61")
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="states='int8'"):
        PrefixStore(family("mamba2", torch.float32), bytes=100, states="int8")
