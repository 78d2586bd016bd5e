"""What a captured step and a captured pass have in common: they stand where a `Step` stands in model code, and find
whatever cache they are given through tables of pointers that are copied in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.memory import Memory
from lamina.runtime.recording import copy_in
from lamina.runtime.tables import WIDTH, Written, layers_of, stores_of, tables_of

if TYPE_CHECKING:
    from lamina.model import Model


class Captured:
    """T tokens a row of any cache of the model with so many rows, written as `written` says.

    tables   the cache's entries, once for each kind of counts
    """

    valid = None
    backend = None
    forgets = False

    def __init__(self, model: Model, rows: int, T: int, written: Written, counts: int) -> None:
        from lamina.kernels.step import HEADER

        entries = sum(len(entry) for entry in model.specs)
        self.model, self.rows, self.T, self.written = model, rows, T, written
        self.tables, self.header = self._numbers(counts, entries, WIDTH), self._numbers(len(HEADER))
        self.positions, self.ids = self._numbers(rows, T), self._numbers(rows, T)
        self.counts = self.all_counts = self._numbers(rows)
        self.layers = layers_of(model, self.tables[0], self.tables[1] if counts > 1 else None, written)
        self._stores: list[tuple[int, int]] = []

    def memory(self, i: int) -> Memory:
        return Memory(self, i, self.layers[i])  # type: ignore[arg-type]

    def _numbers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.model.device)

    def _point_at(self, cache: Cache, *others: Tensor) -> None:
        """Copies the cache's tables in, with `counts` and with others, where something lies elsewhere than it did."""
        stores = stores_of(cache)
        if stores != self._stores:
            tables: Sequence[Any] = [tables_of(cache, counts) for counts in (self.counts, *others)]
            copy_in(self.tables, tables)
            self._stores = stores
