"""`Layer`: the protocol of every kind of layer, and the verbs that all kinds share.

A layer stores one thing that one layer of the model remembers, for every row. All of it is in `data`, named tensors
[B, ...], so select, repeat, join, fork, move and save are the same few lines for every kind. A kind adds how a pass
reads and writes it, what commit writes, and how far it can be rewound. What is computed from it is the business of a
backend (`lamina.cache.backend`). A layer without data is *bare*: it serves a pass without a cache, and stores nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from lamina.cache.clock import Clock
from lamina.cache.codec.codec import Coding
from lamina.cache.layers.layout import Layout
from lamina.cache.storage.device import Storage
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.ops.reorder import Moves
    from lamina.cache.spec import Spec
    from lamina.cache.step import Step
    from lamina.cache.storage.paged import PagedPart
    from lamina.cache.storage.prefetch import SlotRuns, StagedPass

Key = tuple[int, str]  # (index of the model's layer, name of the entry)


def grown(have: int, needed: int, expected: int | None) -> int:
    """Slots of a store that has `have` and needs `needed`: twice as many as before, or those expected in the end.

    >>> grown(512, 513, None), grown(512, 513, 600), grown(512, 601, 600)
    (1024, 600, 1024)
    """
    if expected is not None and needed <= expected:
        return max(needed, min(2 * have, expected))
    return max(needed, 2 * have)


class Layer:
    """The interface of a layer, with the defaults of a kind that stores nothing by token. A verb that returns a layer
    returns one that shares no memory with it that is ever written."""

    constants: Mapping[str, Tensor] | None = None
    """Tensors of the model, as the last pass gave them, that a rewind needs."""

    states: tuple[str, ...] = ()
    """Names of the data that hold recurrent states, which files may round: see io/state_dtype.py."""

    expected: int | None = None
    """Tokens that a row will hold in the end, if known: growth stops there (`Cache.reserve`)."""

    storage: Storage = Storage()
    """Where the tensors are stored; on the device unless a kind chooses otherwise."""

    coding: Coding = Coding()
    """How a codec quantizes its fields; plain by default."""

    layout: Layout | None = None
    """Position -> slot, for kinds that have one slot per token."""

    grows = False
    """True if `reserve` may still enlarge it."""

    pageable = False
    """True if a pool stores its tokens in pages, where a cache has one."""

    slack = 0
    """How many committed tokens it can be rewound by."""

    by_pass = False
    """True if every pass must store its tokens here (`Step.wrote`, `Step.leave`) before it can be committed."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.data: dict[str, Tensor] = {}

    @property
    def bare(self) -> bool:
        return not self.data

    @property
    def kind(self) -> str:
        """The word for this kind in tables."""
        return type(self.spec).__name__.lower()

    @property
    def in_line(self) -> bool:
        """True if contiguous, unpaged and on the device: slot == position."""
        return False

    def columns(self) -> dict[str, int]:
        """Addresses and sizes for the row of a kernel table, by column name (`lamina.kernels.columns`); by default the
        address of the first tensor, as "k", and of the second, as "v"."""
        return {name: x.data_ptr() for name, x in zip(("k", "v"), self.data.values(), strict=False)}

    @property
    def limit(self) -> int | None:
        """The most tokens a row may hold here; None when there is no end."""
        return None

    @property
    def slots(self) -> int | None:
        """Token slots a row has room for; None for what is not kept by token."""
        return None

    @property
    def format(self) -> str:
        """How numbers are kept, for tables."""
        dtypes = {str(tensor.dtype) for tensor in self.data.values() if tensor.is_floating_point()}
        return ", ".join(sorted(dtype.removeprefix("torch.") for dtype in dtypes))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.data.values())

    def reserve(self, tokens: int) -> None:
        """Makes room for rows of this many tokens. Called on the host, before a pass."""

    def widen(self, slots: int) -> None:
        """Makes room for just this many slots, where there are fewer."""

    def used(self, longest: int, written: int) -> Self:
        """The same layer, sharing its memory, without slots that no row needs: what a file keeps.

        longest   tokens in the longest row
        written   one past the highest position ever written in any row
        """
        return self

    # Commit, rewind, reset and reorder may be interrupted, and are then carried on with by whoever uses the cache next
    # (journal.py). So they may be called again with the same arguments, and must then write the same.

    def fold(self, step: Step, left: Any, accepted: Tensor) -> Any:
        """What `commit` is given in place of what the pass left. For layers that overwrite what they compute from: it
        reads what is kept, and changes nothing."""
        return left

    def commit(self, step: Step, left: Any, accepted: Tensor) -> None:
        """Stores what the pass left behind: each row's first `accepted` tokens."""

    # What a layer whose bytes live on the host says; a kind that is always on the device is never asked.

    def needed(self, lengths: list[int]) -> SlotRuns:
        """What a pass over rows of these lengths reads."""
        return {}

    def written(self, lengths: list[int], new: list[int]) -> SlotRuns:
        """What so many new tokens of rows of these lengths are written into, in a pass."""
        return {}

    def unload(self, left: Any, far: StagedPass) -> Any:
        """What the pass leaves, with what is large on its way to the host."""
        return left

    def fold_far(self, far: StagedPass, step: Step, left: Any, accepted: Tensor) -> Any:
        """`fold`, reading from the host what it needs."""
        return left

    def commit_far(self, far: StagedPass, step: Step, left: Any, accepted: Tensor) -> None:
        """`commit`, writing only what changes."""

    def rewindable(self, clock: Clock) -> Tensor | None:
        """How far each row can be taken back; None when nothing here stands in the way."""
        return None

    def rewind(self, clock: Clock, changed: Tensor) -> None:
        """The clock was turned back for the rows that are True in `changed` [B]: restores what depends on it."""

    def reset(self, index: Tensor) -> None:
        """These rows hold nothing any more."""

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        """Fills every number that no later pass may depend on."""

    def fit(self, like: Self, clock: Clock) -> Self:
        """The same contents in the shape of `like`, so that the two can be joined."""
        return self

    def reorder(self, moves: Moves) -> None:
        """Rows become others, in place; the moves say which, and how much they have in common. They note what is to be
        copied, and copy it when all is noted."""
        self.storage.settle()
        for tensor in self.data.values():
            moves.on(tensor.device).rows(tensor)

    def select(self, index: Tensor) -> Self:
        return self._with({name: self.storage.select(tensor, index) for name, tensor in self.data.items()})

    # -- for files -------------------------------------------------------------------------------------------------

    @property
    def like(self) -> dict[str, Tensor]:
        """What `copied` gives of all rows: tensors of those shapes, whose numbers nobody looks at."""
        return self.data

    def copied(self, index: Tensor) -> Self:
        """These rows in memory of their own, whole tensors each."""
        return self.select(index)

    def part(self, name: str, shape: Sequence[int]) -> Tensor | PagedPart:
        """Where a tensor of that name and shape, out of `copied.data`, is copied to."""
        return self.data[name][tuple(slice(size) for size in shape)]

    @classmethod
    def join(cls, layers: list[Self]) -> Self:
        first = layers[0]
        return first._with({name: first.storage.join([one.data[name] for one in layers]) for name in first.data})

    def _with(self, data: dict[str, Tensor]) -> Self:
        new = object.__new__(type(self))  # as `copy.copy` does, in less time, which counts with many layers
        new.__dict__.update(self.__dict__, data=data)
        return new


class Released(Sequence[Any]):
    """Stands for the layers of a cache that was released: whoever wants one is told."""

    def __getitem__(self, index: Any) -> Any:
        raise InputError("this cache was released and holds nothing any more: make another")

    def __len__(self) -> int:
        return self[0]
