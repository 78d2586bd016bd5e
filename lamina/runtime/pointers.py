"""The tables through which kernels find a cache: a row of addresses and sizes for each entry, and a header.

`lamina.kernels.columns` declares the columns of a row for host and kernels; `Layer.columns` returns the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codec, Coding
from lamina.cache.layers.attention import IndexLayer
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.kernels.columns import entry_row, header_row
from lamina.runtime.gpu.backend import TableEntry

if TYPE_CHECKING:
    from lamina.model import Model

PLAIN = Coding()


def tables_of(cache: Cache, counts: Tensor, scores: Tensor | None = None) -> list[int]:
    """[entries, columns], flattened: a row for each entry of a cache, in the order of its layers.

    scores   [rows, tokens, room]: scratch for the scores of indexers, if there are any
    """
    clock, values = cache.clock, list[int]()
    common = entry_row(
        {"lengths": clock.lengths.data_ptr(), "counts": counts.data_ptr(), "bases": clock.base.data_ptr()}
    )
    for layer in cache.every_layer():
        row = layer.columns()
        if scores is not None and isinstance(layer, IndexLayer):
            row |= {"scores": scores.data_ptr(), "score_room": scores.shape[-1]}
        values += entry_row(row, common)
    return values


def score_room(cache: Cache) -> int:
    """The most tokens of a row that an indexer of this cache may have to score; 0 without indexers."""
    return max([layer.slots for layer in cache.every_layer() if isinstance(layer, IndexLayer)], default=0)


@dataclass(frozen=True)
class CacheFormat:
    """How a cache is stored. A captured program is for one format; caches of another format need another program.

    codecs    the codec of each entry, in the order of the tables; empty if nothing is quantized
    page      slots per page; 0 if the cache is not in a pool
    logs      whether recurrences log their inputs: there are some, and the cache has slack
    codings   the `Coding` of each entry, with what kernels need to know of its codec
    """

    codecs: tuple[Codec, ...] = ()
    page: int = 0
    logs: bool = False
    codings: tuple[Coding, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, cache: Cache | None) -> CacheFormat:
        """The format of this cache; the plain format if None."""
        if cache is None:
            return cls()
        codings = tuple([layer.coding for layer in cache.every_layer()])
        codecs = tuple([one.codec for one in codings]) if any([one.formats for one in codings]) else ()
        logs = cache.slack > 0 and any(isinstance(layer, RecurrentLayer) for layer in cache.every_layer())
        return cls(codecs, 0 if cache.pool is None else cache.pool.page, logs, codings)

    def difference(self, other: CacheFormat) -> str:
        """How the other format, which is not this one, differs, in words."""
        if self.logs == other.logs:
            return "other codecs or another page size"
        return f"recurrences {'with' if other.logs else 'without'} slack"


PLAIN_FORMAT = CacheFormat()


def stores_of(cache: Cache) -> list[tuple[int, int]]:
    """(data_ptr, numel) of every tensor that the tables refer to, to detect reallocation."""
    stores = [store for layer in cache.every_layer() for store in layer.data.values()]
    pages = () if cache.pages is None else cache.pages.tables.values()
    return [(store.data_ptr(), store.numel()) for store in (*stores, *(table.tensor for table in pages))]


def header_of(cache: Cache) -> list[int]:
    """The row of `lamina.kernels.columns.HEADER` for this cache."""
    assert cache._logits is not None
    clock, record = cache.clock, cache.record
    pointers = {"lengths": clock.lengths, "written": clock.written, "base": clock.base, "record": record}
    row = {name: tensor.data_ptr() for name, tensor in pointers.items()}
    row |= {"record_width": record.shape[1], "logits": cache._logits.data_ptr(), "slack": cache.slack}
    return header_row(row)


def entries_of(
    model: Model, tables: Tensor, later: Tensor | None = None, cache_format: CacheFormat = PLAIN_FORMAT
) -> list[dict[str, TableEntry]]:
    """For each layer of the model, name of the entry -> its row of the table.

    tables    [entries, columns]
    later     the same with the accepted counts, if a second graph commits
    """
    none = [None] * len(tables)
    rows = zip(tables, none if later is None else later, cache_format.codings or [PLAIN] * len(tables), strict=True)
    read = {spec.reads_from for entry in model.specs for spec in entry.values()}
    logs, page = cache_format.logs, cache_format.page
    return [
        {name: TableEntry(spec, *next(rows), page, logs, (i, name) in read) for name, spec in entry.items()}
        for i, entry in enumerate(model.specs)
    ]
