"""`PassCost`: the memory that a pass takes beside weights and cache, as a formula in its tokens and keys.

    bytes = token · T + key · S + pair · T · S          T tokens of a row in the pass, S keys of the row after it

One such formula is for passes into empty rows of one length, which need no mask, and one for all others. The factors
are measured by six small passes of the model itself, over caches of their own, in which every tensor is counted as it
comes and goes (`AllocationMeter`). `pair` is for masks and scores, where attention is no kernel; `key` for keys and
values that cannot be read in place: quantized, in pages, on the host, expanded latents. It takes a tenth of a second,
once per model and kind of cache. A rehearsal on the meta device is exact, but loads PyTorch's compiler, for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codec
from lamina.cache.pool.pool import Pool
from lamina.rehearsal.meter import AllocationMeter
from lamina.runtime.feed import feed

if TYPE_CHECKING:
    from lamina.model import Model

SMALL = {"cuda": 128, "cpu": 64}  # tokens of the smallest pass
MARGIN = 1.25  # larger passes may go another way: cuDNN's attention, other tiles
_known: WeakKeyDictionary[Model, dict[object, PassCost]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Formula:
    """Bytes that a pass holds at once: for each new token, for each key, and for each pair of the two."""

    token: float
    key: float
    pair: float

    def nbytes(self, rows: int, tokens: int, keys: int, real: int | None = None) -> int:
        """Of a pass of up to `tokens` tokens per row, after which a row has up to `keys` keys.

        real   tokens of all rows without padding, if the pass is packed: only memory calls see the padding then

        >>> Formula(token=80.0, key=10.0, pair=0.5).nbytes(rows=2, tokens=8, keys=16)
        2160
        """
        padded = rows * tokens
        counted = padded if real is None else real + (padded - real) / 2
        return round(MARGIN * (self.token * counted + rows * keys * self.key + padded * keys * self.pair))


@dataclass(frozen=True)
class PassCost:
    """The formulas of passes into empty rows, all of one length, and of other passes."""

    empty: Formula
    behind: Formula

    def nbytes(self, rows: int, tokens: int, keys: int, real: int | None = None, even: bool = True) -> int:
        """As `Formula.nbytes`. even: all rows have as many new tokens"""
        first = self.empty.nbytes(rows, tokens, tokens, real)
        return first if even and tokens == keys else max(first, self.behind.nbytes(rows, tokens, keys, real))

    @classmethod
    def through(cls, n: int, held: Mapping[tuple[int, int], int]) -> PassCost:
        """From passes of n or 2n tokens. held: (tokens before, tokens of the pass) -> bytes

        >>> def held(formula, before, tokens):
        ...     return formula.token * tokens + (before + tokens) * (formula.key + formula.pair * tokens)
        >>> empty, behind = Formula(90.0, 0.0, 0.5), Formula(80.0, 10.0, 2.0)
        >>> passes = {(0, 10): 0, (0, 20): 0, (10, 10): 1, (30, 10): 1, (20, 20): 1}
        >>> found = PassCost.through(10, {one: held(behind if old else empty, *one) for one, old in passes.items()})
        >>> found == PassCost(empty, behind)
        True
        """
        first, twice = held[0, n], held[0, 2 * n]
        pair = max((twice - 2 * first) / (2 * n**2), 0.0)
        empty = Formula(max(first / n - pair * n, twice / (2 * n) - 2 * pair * n), 0.0, pair)
        near, far, large = held[n, n], held[3 * n, n], held[2 * n, 2 * n]
        pair = max((large - 2 * near) / (4 * n**2), 0.0)
        key = max((far - near) / (2 * n) - pair * n, 0.0)
        least = (near / n - 2 * key - 2 * pair * n, large / (2 * n) - 2 * key - 4 * pair * n)
        return cls(empty, Formula(max(*least, 0.0), key, pair))


def pass_cost(model: Model, cache: Cache) -> PassCost | None:
    """The cost of passes over such a cache; None where it cannot be measured: the model reads a source, has too few
    positions, or is on a device without a count of its memory."""
    tokens = SMALL.get(model.device.type)
    if tokens is None or cache.reads_source or cache.recomputes:
        return None
    if model.max_positions is not None and model.max_positions < 4 * tokens:
        return None
    page = None if cache.pool is None else cache.pool.page
    key = (model.device, model.dtype, tuple(map(str, cache.codecs)), cache.residence, page)
    known = _known.setdefault(model, {})
    if key not in known:
        held: dict[tuple[int, int], int] = {}
        for size, passes in ((tokens, 4), (2 * tokens, 2)):
            own = _new_like(model, cache, 4 * tokens)
            held |= {(i * size, size): _held(own, size) for i in range(passes)}
        known[key] = PassCost.through(tokens, held)
    return known[key]


def _new_like(model: Model, cache: Cache, tokens: int) -> Cache:
    """An empty cache of one row that keeps tokens as this one does."""
    codec: dict[str | int, str | Codec] = dict(enumerate(cache.codecs))
    if cache.pool is None:
        return model.new_cache(1, codec=codec, residence=cache.residence).reserve(tokens)
    return model.new_cache(1, pool=Pool(model, tokens, 1, cache.pool.page, codec=codec)).reserve(tokens)


@torch.no_grad()
def _held(cache: Cache, tokens: int) -> int:
    """The most bytes that a pass of this many tokens over the cache holds."""
    assert cache.model is not None
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=cache.device)
    with AllocationMeter() as held:
        feed(cache.model, cache, ids)
    return held.most
