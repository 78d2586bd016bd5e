"""`Pool`: memory in pages that many caches of a model share.

    pool = lamina.Pool(model, tokens=100_000)
    cache = model.new_cache(rows=8, pool=pool)
    tries = [cache.fork() for _ in range(50)]        # copies no tokens

Layers of one layout (lines, or rings of one size) form a *layer group*: they have one page table and one list of free
pages, and page p of a group is index p in the tensors [1 + pages, *lead, page, width] of each of its layers. Page 0
belongs to nobody; a table has 0 where a row has no page. `page_allocator.py` counts references, `page_table.py` has the
tables of one cache.

Caches in several threads may share a pool, and any thread may drop them. One lock guards the tables and counts. A pool
that grows replaces its tensors under that lock, and every write into a page of such a pool is made under it too, so a
token is written before the pages are copied or into the new ones, and is never lost. Reads need no lock: a row's tokens
are the same in the old memory and in the new. (On a GPU a read is only queued, so reads take the lock as well, and
streams wait for each other.) In a pool of fixed size pages never move, and the lock guards tables and counts alone.

Before a pool of fixed size raises PagesError, it asks the stores that registered with it, such as a `PrefixStore`, to
drop what they can do without (`reclaim`). Lock order: a store takes its own lock first and the pool's inside it. So a
store is never called with the pool's lock held.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lamina.cache.clock import allocate, on_device
from lamina.cache.codec.codec import Codecs, codecs_of
from lamina.cache.codec.formats import Fields
from lamina.cache.counts import whole
from lamina.cache.layers.base import Key
from lamina.cache.layers.layout import Layout
from lamina.cache.pool.page_allocator import MissingPage, PageAllocator, PageNumbers
from lamina.cache.pool.streams import Streams
from lamina.cache.spec import is_model
from lamina.cache.summary import aligned, size
from lamina.errors import InputError, PagesError

if TYPE_CHECKING:
    from threading import RLock

    from lamina.model import Model


class LayerGroup:
    """The layers of one layout, and their pages.

    lock      the pool's
    steady    a context in which no page moves to other memory: for writes
    reading   the same for reads, on devices where a read is queued and runs later
    """

    def __init__(self, name: str, layout: Layout, page: int, lock: RLock, grows: bool, device: torch.device) -> None:
        self.name, self.layout, self.page, self.lock = name, layout, page, lock
        self.steady: AbstractContextManager[object] = lock if grows else nullcontext()
        self.reading = nullcontext() if device.type == "cpu" else self.steady
        self.allocator = PageAllocator()
        self.data: dict[Key, Fields] = {}
        self.copied = 0  # pages copied because a row was about to write a shared one

    @property
    def parts(self) -> list[Tensor]:
        """The tensors [1 + pages, *lead, page, width] of all layers."""
        return [store for fields in self.data.values() for store in fields.values()]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return sum(store[0].nbytes for store in self.parts)

    def settled(self) -> PageAllocator:
        """The allocator, its counts made right."""
        self.allocator.settle()
        return self.allocator

    def lacks(self, needed: int) -> bool:
        """True if fewer than `needed` pages are free."""
        return needed > len(self.settled().free)

    def grow(self, count: int) -> None:
        """Grows to `count` pages, one tensor at a time, so that the peak is one tensor's copy. An interrupt leaves
        tensors with more pages than the allocator has, which the next call finds grown."""
        for fields in self.data.values():
            for name, old in fields.items():
                if len(old) < 1 + count:
                    new = allocate((1 + count, *old.shape[1:]), old.dtype, old.device)
                    new[: len(old)].copy_(old)
                    fields[name] = new
        self.allocator.add(count - self.allocator.count)

    def copy(self, old: list[int], new: list[int]) -> None:
        """Copies pages old[i] to new[i] in every layer."""
        source, to = (on_device(numbers, self.parts[0].device) for numbers in (old, new))
        for store in self.parts:
            store.index_copy_(0, to, store.index_select(0, source))
        self.copied += len(old)


class EvictableStore(Protocol):
    """Holds pages that it can do without, as a prefix store does."""

    def tables(self) -> list[Mapping[LayerGroup, PageNumbers]]:
        """Copies of the page tables of everything that it could drop."""
        ...

    def drop(self, pages: Mapping[LayerGroup, set[int]]) -> bool:
        """Drops the least recently used thing that holds one of these pages; False if nothing does."""
        ...


class Pool:
    """Pages for the token layers of one model. States, convolutions and sources are stored by each cache itself.

    tokens   how many tokens all rows may hold together, rounded up to whole pages; None grows as needed
    rows     how many rows share them: windows get no more pages than this many rows fill; None: as many pages as full
             attention
    page     tokens of a page
    slack    tokens that windows and states can be rewound after commit
    codec    the formats of keys and values, as in `model.new_cache`

    >>> pool = lamina.Pool(model, tokens=100_000, codec="int8")        # doctest: +SKIP
    >>> cache = model.new_cache(rows=4, pool=pool)                     # doctest: +SKIP
    """

    def __init__(
        self,
        model: Model,
        tokens: int | None = None,
        rows: int | None = None,
        page: int = 64,
        slack: int = 0,
        codec: Codecs | None = None,
    ) -> None:
        if not is_model(model):
            raise InputError(f"model={model!r}: a pool is made for a model, as lamina.load returns one")
        for name, given in (("tokens", tokens), ("rows", rows), ("page", page)):
            if (given is not None or name == "page") and whole(name, given) < 1:
                raise InputError(f"{name}={given}: it must be at least 1")
        if rows is not None and tokens is None:
            raise InputError(f"rows={rows} without tokens: a pool that grows needs no bounds; give both or neither")
        like = model.new_cache(slack=slack, codec=codec)
        self.model, self.tokens, self.page = model, tokens, page
        self.lock = threading.RLock()
        self.steady: AbstractContextManager[object] = self.lock if tokens is None else nullcontext()
        self.streams = Streams(like.device)
        self._stores: list[weakref.ref[EvictableStore]] = []  # asked in this order
        self.slack, self.codec, self.codecs = slack, codec, like.codecs
        self.dtype, self.device = like.dtype, like.device
        self.groups: dict[Layout, LayerGroup] = {}
        for i, entry in enumerate(like.layers):
            for name, layer in entry.items():
                if layer.pageable and layer.layout is not None:
                    group = self.groups.setdefault(
                        layer.layout, LayerGroup(layer.kind, layer.layout, page, self.lock, tokens is None, like.device)
                    )
                    group.data[i, name] = {
                        part: allocate((1, *x.shape[1:-2], page, x.shape[-1]), x.dtype, x.device)
                        for part, x in layer.data.items()
                    }
        if tokens is not None:
            for group in self.groups.values():
                count, most = -(-tokens // page), group.layout.most
                if rows is not None and most is not None:
                    count = min(count, rows * -(-most // page))
                group.grow(count)

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Pages that no row refers to."""
        with self.lock:
            return sum(len(group.settled().free) for group in self.groups.values())

    @property
    def used(self) -> int:
        """Pages that some row refers to; a shared page counts once."""
        with self.lock:
            return sum(group.settled().count - len(group.allocator.free) for group in self.groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, free ones too."""
        return sum(store.nbytes for group in self.groups.values() for store in group.parts)

    @property
    def copied(self) -> int:
        """Pages copied so far because a row was about to write a shared one."""
        return sum(group.copied for group in self.groups.values())

    def __repr__(self) -> str:
        body: list[tuple[str, ...]] = [("kind", "layers", "pages", "used", "free", "shared", "a page", "bytes")]
        with self.lock:
            for group in self.groups.values():
                pages, nbytes = group.settled(), sum(store.nbytes for store in group.parts)
                numbers = (len(group.data), pages.count, pages.count - len(pages.free), len(pages.free))
                shared = int((pages.refs > 1).sum())
                body.append((group.name, *map(str, (*numbers, shared)), size(group.page_bytes), size(nbytes)))
        room = "grows" if self.tokens is None else f"{self.tokens} tokens"
        head = f"Pool of pages of {self.page} tokens, {room}, slack {self.slack}, {size(self.nbytes)}"
        return "\n".join([head, *aligned(body, left=(0,))])

    def check(self) -> Pool:
        """Raises unless every page is free, or has exactly as many references as the tables of its caches hold."""
        with self.lock:
            for group in self.groups.values():
                group.settled().check()
                for store in group.parts:
                    assert len(store) >= 1 + group.allocator.count, f"{group.name} has {len(store)} pages of memory"
        return self

    # -- running out of pages --------------------------------------------------------------------------------------

    def _provide(self, group: LayerGroup, needed: int) -> None:
        """Makes sure that this many pages of a group are free: grows, or raises PagesError in a pool of fixed size."""
        free, count = len(group.settled().free), group.allocator.count
        if needed <= free:
            return
        if self.tokens is not None:
            raise PagesError(
                f"{needed} more page{'s' * (needed != 1)} of {self.page} tokens needed for {group.name}, and of the "
                f"pool's {count} {free} {'is' if free == 1 else 'are'} free. Nothing was changed: release a cache, "
                "take rows back with cache.rewind or cache.reset, or make a pool of more tokens (or None, which grows)."
            )
        self.streams.wait_for_others()
        group.grow(max(count + needed - free, 2 * count))
        self.streams.hold_others()

    def register_store(self, store: EvictableStore) -> None:
        """Has this store asked to drop pages when they run out, as long as the store exists."""
        with self.lock:
            self._stores.append(weakref.ref(store))

    def _living_stores(self) -> list[EvictableStore]:
        with self.lock:
            living = [(one, store) for one in self._stores if (store := one()) is not None]
            self._stores = [one for one, _ in living]
        return [store for _, store in living]

    def reclaim(self, needed: Mapping[LayerGroup, Sequence[MissingPage]]) -> bool:
        """Has a store drop something, because these pages are missing; False if nothing that stores hold helps.

        Nothing is dropped if dropping everything would not be enough. The caller must not hold the pool's lock, and
        must look again afterwards: a page becomes free only when nobody else refers to it, and another thread may drop
        or take pages at the same time.
        """
        stores = self._living_stores()
        tables = [table for store in stores for table in store.tables()]
        wanted: dict[LayerGroup, set[int]] = {}
        with self.lock:
            for group, missing in needed.items():
                if (short := len(missing) - len(group.settled().free)) > 0:
                    held = [one[group] for one in tables if group in one]
                    wanted[group] = group.allocator.gained_without(held, missing)
                    if short > len(wanted[group]):
                        return False
        any(store.drop(wanted) for store in stores)  # the first store that can
        return True


def check_pool(pool: Pool, model: Model, slack: int, codec: Codecs | None) -> tuple[int, Codecs | None]:
    """The slack and codec of a new cache in this pool. Raises InputError if others were asked for, or another model."""
    if not isinstance(pool, Pool):
        raise InputError(f"pool={pool!r}: it must be a lamina.Pool")
    if model is not pool.model:
        raise InputError("this pool was made for another model: make one with lamina.Pool(model)")
    if (model.dtype, model.device) != (pool.dtype, pool.device):
        raise InputError(
            f"this pool was made when the model was in {pool.dtype} on {pool.device}, and it is in {model.dtype} "
            f"on {model.device} now: make another"
        )
    if whole("slack", slack) not in (0, pool.slack):
        raise InputError(f"slack={slack}, but the pool keeps a slack of {pool.slack}: give it to the pool")
    if codec is not None and codecs_of(codec, model.specs) != pool.codecs:
        raise InputError(f"codec={codec!r}, but the pool has a codec of its own, {pool.codec!r}: give it to the pool")
    return pool.slack, pool.codec
