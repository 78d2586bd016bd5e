"""The modules that are exported: a model together with a cache of fixed capacity, whose tensors are buffers.

`Advance` is a whole pass: it opens a `Step` over the layers of the cache, runs the model, and commits all given tokens,
the clock included. So an exported program holds the same code as an eager pass, and its rows go on by calling it again.
"""

from __future__ import annotations

from torch import Tensor, nn

from lamina.cache.cache import Cache
from lamina.cache.clock import MARKS
from lamina.cache.layers.attention import IndexLayer
from lamina.cache.layers.cross import CrossLayer, Source
from lamina.cache.ops.commit import commit_exported
from lamina.cache.step import Step
from lamina.model import Model


def cache_tensors(cache: Cache) -> dict[str, Tensor]:
    """Every tensor of a cache that a program reads or writes, by the name that its buffer has."""
    found = {f"clock_{name}": getattr(cache.clock, name) for name in MARKS}
    for i, entry in enumerate(cache.layers):
        for name, layer in entry.items():
            found |= {f"cache_{i}_{name}_{part}".replace(".", "_"): tensor for part, tensor in layer.data.items()}
    return found


class CacheModule(nn.Module):
    """A model and a cache. The tensors of the cache are buffers that are not saved."""

    def __init__(self, model: Model, cache: Cache) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        for name, tensor in cache_tensors(cache).items():
            self.register_buffer(name, tensor, persistent=False)


class Advance(CacheModule):
    """Feeds `counts` [B] of the ids [B, T] to each row. -> the most likely next ids [B], and logits [B, vocab]

    slots   [S], of which only the size is used: full attention reads the first S slots. None: it reads `capacity`
            slots, under a mask. S must be at least the longest row after the pass, and `least`

    The lines of the cache have one slot more than `capacity`, which is never read: padding is written there.
    """

    def __init__(self, model: Model, cache: Cache, capacity: int, bounded: bool) -> None:
        super().__init__(model, cache)
        lines = [layer for layer in cache.every_layer() if layer.layout is not None and layer.layout.ring is None]
        # Compilers treat a size of 1 apart, so S is 2 or more. An indexer selects `top` of more tokens than that, or of
        # the whole capacity if that is not more.
        tops = [layer.spec.top for layer in cache.every_layer() if isinstance(layer, IndexLayer)]
        self.capacity = capacity
        self.least = max([2, *(top + 1 for top in tops if top < capacity)])
        self.bounded = bounded and bool(lines) and self.least < capacity

    def forward(self, ids: Tensor, counts: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        cache, clock = self.cache, self.cache.clock
        before, bound = clock.lengths.clone(), self.capacity if slots is None else slots.shape[0]
        step = Step(cache.layers, ids.shape[1], before, counts, cache=cache, bound=bound)
        step.exported, step.moves_base, step.base = True, cache.slack > 0, clock.base.clone()
        logits = self.model.forward(ids, step, "last")
        assert logits is not None
        commit_exported(cache, step)
        return logits.argmax(dim=-1), logits


class Rewind(CacheModule):
    """Drops the last n [B] tokens of each row."""

    def forward(self, n: Tensor) -> Tensor:
        clock = self.cache.clock
        lengths = clock.lengths - n
        clock.lengths.copy_(lengths)
        for layer in self.cache.every_layer():
            layer.rewind(clock, n > 0)
        return lengths


class Reset(CacheModule):
    """Empties the rows [B] that are True: fills what the cache holds of them with zeros. -> lengths [B]"""

    def forward(self, rows: Tensor) -> Tensor:
        for tensor in cache_tensors(self.cache).values():
            tensor.masked_fill_(rows.reshape(-1, *(1,) * (tensor.dim() - 1)), 0)
        return self.cache.clock.lengths.clone()


class Encode(CacheModule):
    """Runs the encoder over ids [B, S] or features [B, mels, frames], of which each row has counts [B], and attaches
    its output. Rows with a count of 0 keep what they have. -> lengths of the sources [B]"""

    def forward(self, given: Tensor, counts: Tensor) -> Tensor:
        source: Source = self.model.trace_source(given, counts)  # type: ignore[operator]
        for (i, name), (k, v) in self.model.cross_states(source).items():
            layer = self.cache.layers[i][name]
            assert isinstance(layer, CrossLayer)
            layer.attach_exported(k, v, source.lengths)
        return source.lengths.clone()
