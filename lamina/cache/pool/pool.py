"""`Pool`: memory in pages that many caches of a model share.

    pool = lamina.Pool(model, tokens=100_000)
    cache = model.new_cache(rows=8, pool=pool)
    tries = [cache.fork() for _ in range(50)]        # copies no tokens

Layers of one layout (lines, or rings of one size) are a *kind*: they have one table of pages and one count of what is
free, and page p of a kind is index p in the tensors [1 + pages, *lead, page, width] of each of its layers. Page 0 is
nobody's: what tables say where a row has no page. `page_allocator.py` keeps the books, `page_table.py` is a cache's
side of it.

Caches in several threads may share a pool, and may be dropped by any thread. One lock guards the books. A pool that
grows replaces its tensors under that lock, and every write into a page of such a pool is made under it too: a token is
written before the pages are copied, or into the new ones, and never lost between them. Reads need no lock: what a row
holds is the same in the old memory and in the new. (On a GPU, where a read is only queued, they take it, and streams
wait for each other.) In a pool of fixed size pages never move, and nothing is locked but the books.

A pool of a fixed size that runs out asks its keepers, such as a `PrefixStore`, to drop what they can do without
(`reclaim`), before it raises PagesError. Lock order: a keeper takes its own lock first and the pool's inside it. So
keepers are never called with the pool's lock held.
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
from lamina.cache.pool.page_allocator import Missing, Numbers, Pages
from lamina.cache.pool.streams import Streams
from lamina.cache.spec import is_model
from lamina.cache.summary import aligned, size
from lamina.errors import InputError, PagesError

if TYPE_CHECKING:
    from threading import RLock

    from lamina.model import Model


class Kind:
    """Layers of one layout, and their pages.

    lock      the pool's
    steady    while it is entered, no page moves: for writes
    reading   the same for reads, where the device reads later than it is told to
    """

    def __init__(self, name: str, layout: Layout, page: int, lock: RLock, grows: bool, device: torch.device) -> None:
        self.name, self.layout, self.page, self.lock = name, layout, page, lock
        self.steady: AbstractContextManager[object] = lock if grows else nullcontext()
        self.reading = nullcontext() if device.type == "cpu" else self.steady
        self.pages = Pages()
        self.data: dict[Key, Fields] = {}
        self.copied = 0  # pages that were copied since someone wanted to write them alone

    @property
    def parts(self) -> list[Tensor]:
        return [store for fields in self.data.values() for store in fields.values()]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return sum(store[0].nbytes for store in self.parts)

    def grow(self, count: int) -> None:
        """Makes it `count` pages, one part at a time: the peak is one part's copy. An interrupt leaves parts with
        more pages than the books know of, which the next growth finds done."""
        for fields in self.data.values():
            for name, old in fields.items():
                if len(old) < 1 + count:
                    new = allocate((1 + count, *old.shape[1:]), old.dtype, old.device)
                    new[: len(old)].copy_(old)
                    fields[name] = new
        self.pages.add(count - self.pages.count)

    def copy(self, old: list[int], new: list[int]) -> None:
        """Copies pages of every layer."""
        source, to = (on_device(numbers, self.parts[0].device) for numbers in (old, new))
        for store in self.parts:
            store.index_copy_(0, to, store.index_select(0, source))
        self.copied += len(old)


class Keeper(Protocol):
    """Holds pages that it can do without."""

    def tables(self) -> list[Mapping[Kind, Numbers]]:
        """Copies of the page tables of everything it could drop."""
        ...

    def drop(self, pages: Mapping[Kind, set[int]]) -> bool:
        """Drops the least recently used thing that holds one of these pages; False if nothing does."""
        ...


class Pool:
    """Pages for the token layers of one model. States, convolutions and sources are kept by each cache as ever.

    tokens   how many all rows may hold together, in whole pages; None grows as needed
    rows     how many rows that is meant for: then windows get no more pages than so many rows fill; None: as many as
             full attention gets
    page     tokens of a page
    slack    how far windows and states can be taken back after commit
    codec    how keys and values are written, as in `model.new_cache`

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
            raise InputError(f"model={model!r}: a pool is made for a model, as lamina.load gives one")
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
        self.keepers: list[weakref.ref[Keeper]] = []  # asked in this order
        self.slack, self.codec, self.codecs = slack, codec, like.codecs
        self.dtype, self.device = like.dtype, like.device
        self.kinds: dict[Layout, Kind] = {}
        for i, entry in enumerate(like.layers):
            for name, layer in entry.items():
                if layer.pageable and layer.layout is not None:
                    kind = self.kinds.setdefault(
                        layer.layout, Kind(layer.kind, layer.layout, page, self.lock, tokens is None, like.device)
                    )
                    kind.data[i, name] = {
                        part: allocate((1, *x.shape[1:-2], page, x.shape[-1]), x.dtype, x.device)
                        for part, x in layer.data.items()
                    }
        if tokens is not None:
            for kind in self.kinds.values():
                count, most = -(-tokens // page), kind.layout.most
                if rows is not None and most is not None:
                    count = min(count, rows * -(-most // page))
                kind.grow(count)

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        with self.lock:
            return sum(len(self._settled(kind).free) for kind in self.kinds.values())

    @property
    def used(self) -> int:
        """Pages that some row holds; one that is shared counts once."""
        with self.lock:
            return sum(self._settled(kind).count - len(kind.pages.free) for kind in self.kinds.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, free ones too."""
        return sum(store.nbytes for kind in self.kinds.values() for store in kind.parts)

    @property
    def copied(self) -> int:
        """Pages copied so far, since a row was about to write what it shared."""
        return sum(kind.copied for kind in self.kinds.values())

    def __repr__(self) -> str:
        body: list[tuple[str, ...]] = [("kind", "layers", "pages", "used", "free", "shared", "a page", "bytes")]
        with self.lock:
            for kind in self.kinds.values():
                pages, nbytes = self._settled(kind), sum(store.nbytes for store in kind.parts)
                numbers = (len(kind.data), pages.count, pages.count - len(pages.free), len(pages.free))
                shared = int((pages.refs > 1).sum())
                body.append((kind.name, *map(str, (*numbers, shared)), size(kind.page_bytes), size(nbytes)))
        room = "grows" if self.tokens is None else f"{self.tokens} tokens"
        head = f"Pool of pages of {self.page} tokens, {room}, slack {self.slack}, {size(self.nbytes)}"
        return "\n".join([head, *aligned(body, left=(0,))])

    def check(self) -> Pool:
        """Raises unless every page is either free or held by just as many rows as is written down."""
        with self.lock:
            for kind in self.kinds.values():
                self._settled(kind).check()
                for store in kind.parts:
                    assert len(store) >= 1 + kind.pages.count, f"{kind.name} has {len(store)} pages of memory"
        return self

    # -- for caches ------------------------------------------------------------------------------------------------

    def terms(self, model: Model, slack: int, codec: Codecs | None) -> tuple[int, Codecs | None]:
        """Slack and codec of a cache of this pool; others than the pool's are refused."""
        if model is not self.model:
            raise InputError("this pool was made for another model: make one with lamina.Pool(model)")
        if (model.dtype, model.device) != (self.dtype, self.device):
            raise InputError(
                f"this pool was made when the model was in {self.dtype} on {self.device}, and it is in {model.dtype} "
                f"on {model.device} now: make another"
            )
        if whole("slack", slack) not in (0, self.slack):
            raise InputError(f"slack={slack}, but the pool keeps a slack of {self.slack}: give it to the pool")
        if codec is not None and codecs_of(codec, model.specs) != self.codecs:
            raise InputError(
                f"codec={codec!r}, but the pool has a codec of its own, {self.codec!r}: give it to the pool"
            )
        return self.slack, self.codec

    def lacks(self, kind: Kind, needed: int) -> bool:
        return needed > len(self._settled(kind).free)

    def provide(self, kind: Kind, needed: int) -> None:
        """Sees to so many free pages of a kind, or raises."""
        free, count = len(self._settled(kind).free), kind.pages.count
        if needed <= free:
            return
        if self.tokens is not None:
            raise PagesError(
                f"{needed} more page{'s' * (needed != 1)} of {self.page} tokens needed for {kind.name}, and of the "
                f"pool's {count} {free} {'is' if free == 1 else 'are'} free. Nothing was changed: release a cache, "
                "take rows back with cache.rewind or cache.reset, or make a pool of more tokens (or None, which grows)."
            )
        self.streams.wait_for_others()
        kind.grow(max(count + needed - free, 2 * count))
        self.streams.hold_others()

    def ask(self, keeper: Keeper) -> None:
        """Has this keeper asked, too, when pages run out, as long as it is there."""
        with self.lock:
            self.keepers.append(weakref.ref(keeper))

    def _living_keepers(self) -> list[Keeper]:
        with self.lock:
            living = [(one, keeper) for one in self.keepers if (keeper := one()) is not None]
            self.keepers = [one for one, _ in living]
        return [keeper for _, keeper in living]

    def reclaim(self, needed: Mapping[Kind, Sequence[Missing]]) -> bool:
        """Has a keeper drop something, since pages are missing; False if nothing that keepers hold helps.

        Nothing is dropped where all of it together would not be enough. The caller must not hold the pool's lock, and
        looks again afterwards: pages come free only when nobody else refers to what was dropped, and another thread may
        have been faster, at dropping or at taking.
        """
        keepers = self._living_keepers()
        tables = [table for keeper in keepers for table in keeper.tables()]
        wanted: dict[Kind, set[int]] = {}
        with self.lock:
            for kind, missing in needed.items():
                if (short := len(missing) - len(self._settled(kind).free)) > 0:
                    wanted[kind] = kind.pages.gained_without([one[kind] for one in tables if kind in one], missing)
                    if short > len(wanted[kind]):
                        return False
        any(keeper.drop(wanted) for keeper in keepers)  # the first one that can
        return True

    def _settled(self, kind: Kind) -> Pages:
        kind.pages.settle()
        return kind.pages


def checked_pool(pool: Pool) -> Pool:
    """The pool itself, if it is one."""
    if not isinstance(pool, Pool):
        raise InputError(f"pool={pool!r}: it must be a lamina.Pool")
    return pool
