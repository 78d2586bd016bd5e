"""Memory of a cache: allocated one tensor after the other, zeroed together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import lamina.cache.clock as clock
from lamina.cache import spec
from lamina.cache.cache import Cache
from lamina.cache.clock import allocate, allocate_several, zeroed_together
from lamina.cache.layers.attention import AttentionLayer
from lamina.cache.layers.base import Layer
from lamina.rehearsal.meter import AllocationMeter
from tests.laws.toys import toy

CPU = torch.device("cpu")


def test_tensors_are_zeroed_together_at_the_end_also_after_an_error() -> None:
    kept: list[torch.Tensor] = []
    with pytest.raises(KeyError), torch.inference_mode(), zeroed_together():
        for shape in ((2, 3), (4, 0)):
            kept.append(allocate(shape, torch.float32, torch.device("cpu"), later=True))
            kept[-1].fill_(7)  # what is written before the end is lost
        kept.append(allocate((2,), torch.float32, torch.device("cpu"), 3))
        raise KeyError
    assert [one.flatten().tolist() for one in kept] == [[0.0] * 6, [], [3.0, 3.0]]
    kept[0].add_(1)  # outside of inference mode, too


def test_small_tensors_share_blocks_and_large_ones_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "BLOCK", 100)
    for elements, most in ((2, 6), (6, 2), (13, 1), (3, 1)):  # of 8 bytes; the last would not be aligned
        with torch.inference_mode(), zeroed_together():
            found = allocate_several(7, (elements,), torch.int64, CPU)
        blocks = [one.untyped_storage().data_ptr() for one in found]
        assert max(map(blocks.count, blocks)) == most
        for i, one in enumerate(found):
            one.copy_(torch.full((elements,), float(i + 1), requires_grad=True))  # no view made without gradients
        assert [one.tolist() for one in found] == [[i + 1] * elements for i in range(7)]


def test_equal_layers_are_made_and_grow_as_if_each_were_made_alone() -> None:
    for kind in ("full", "sliding and full"):
        model = toy(kind)
        with AllocationMeter() as held, torch.no_grad():
            cache = model.new_cache(2)
            assert cache.nbytes == 0
            stores = [store for layer in cache.every_layer() for store in layer.data.values()]
            cache.reserve(5)
            alone = model.new_cache(2)
            for layer, other in zip(cache.every_layer(), alone.every_layer(), strict=True):
                other.reserve(5)
                assert {name: one.shape for name, one in layer.data.items()} == {
                    name: one.shape for name, one in other.data.items()
                }
                assert (layer.grows, layer.limit, layer.spec) == (other.grows, other.limit, other.spec)
            del alone, other
            for number, layer in enumerate(cache.every_layer(), 1):
                for store in layer.data.values():
                    assert not store.any()
                    store.fill_(number)
            cache.reserve(70)
            for number, layer in enumerate(cache.every_layer(), 1):
                assert all((store[..., :2, :] == number).all() for store in layer.data.values())
            assert all(store.numel() == 0 for store in stores)
            rest = sum(
                one.nbytes for one in (cache.record, *vars(cache.clock).values()) if isinstance(one, torch.Tensor)
            )
            del layer, store, stores
            assert held.now == cache.nbytes + rest, "blocks are freed when all layers have grown"


class Counted(AttentionLayer):
    """Keeps a list of its own, and has room for a multiple of 64 tokens."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: list[int] = []

    def reserve(self, tokens: int) -> None:
        super().reserve(-(-tokens // 64) * 64)


@dataclass(frozen=True)
class Sloped(spec.Attention):
    """Its fields cannot be compared."""

    slopes: torch.Tensor = field(default_factory=lambda: torch.ones(2))

    def layer(self, keeping: spec.Keeping | None) -> Layer:
        return Counted(self, {"k": (2, 4), "v": (2, 4)}, self.window, keeping)


def test_layers_of_a_spec_from_outside_are_made_one_by_one() -> None:
    cache = Cache([{"attention": Sloped(2, 4, 4)} for _ in range(3)])
    layers = cache.every_layer()
    assert all(isinstance(layer, Counted) and layer.seen == [] for layer in layers)
    assert len({id(layer.seen) for layer in layers if isinstance(layer, Counted)}) == 3
    cache.reserve(10)
    assert [layer.slots for layer in layers] == [64, 64, 64]
