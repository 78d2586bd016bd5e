"""`Layer`: the protocol of every kind of layer, and the verbs that all kinds share.

A layer stores one entry that one layer of the model remembers, for every row. Its tensors are all in `data`, by name,
[B, ...] each, so select, repeat, join, fork, move and save are the same few lines for every kind. A kind adds how a
pass reads and writes the tensors, what commit writes, and how far they can be rewound. Layers only store; backends
(`lamina.cache.backend`) compute. A layer without data is *bare*: passes without a cache use it, and it stores nothing.
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
    """New size of a store that has `have` slots and needs `needed`: doubled, but not beyond the `expected` final size.

    >>> grown(512, 513, None), grown(512, 513, 600), grown(512, 601, 600)
    (1024, 600, 1024)
    """
    if expected is not None and needed <= expected:
        return max(needed, min(2 * have, expected))
    return max(needed, 2 * have)


class Layer:
    """The interface of a layer, with defaults for a kind without one slot per token. A method that returns a layer
    shares no memory with it that is ever written, unless it says so."""

    constants: Mapping[str, Tensor] | None = None
    """Tensors of the model that a rewind needs (such as A in Mamba), from the last pass."""

    states: tuple[str, ...] = ()
    """Names in `data` that are recurrent states, which files may round: see io/state_dtype.py."""

    expected: int | None = None
    """Final length of the rows, if known: growth stops there (`Cache.reserve`)."""

    storage: Storage = Storage()
    """Where the tensors are stored; on the device unless a kind chooses otherwise."""

    coding: Coding = Coding()
    """How a codec quantizes the fields; not at all by default."""

    layout: Layout | None = None
    """Position -> slot, for kinds that have one slot per token."""

    grows = False
    """True if `reserve` may still enlarge the store, which has no `limit` then."""

    pageable = False
    """True if a cache with a pool stores the tokens of this layer in pages."""

    slack = 0
    """How many committed tokens the layer can be rewound by."""

    written_by_pass = False
    """True if every pass must store its tokens here (`Step.wrote`, `Step.leave`) before it can be committed."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.data: dict[str, Tensor] = {}

    @property
    def bare(self) -> bool:
        return not self.data

    @property
    def kind(self) -> str:
        """The name of this kind in `print(cache)`."""
        return type(self.spec).__name__.lower()

    @property
    def in_line(self) -> bool:
        """True if contiguous, unpaged and on the device: slot == position."""
        return False

    def columns(self) -> dict[str, int]:
        """Column name (`lamina.kernels.columns`) -> address or size, for this layer's row of a kernel table; by default
        the addresses of the first tensor, as "k", and of the second, as "v"."""
        return {name: x.data_ptr() for name, x in zip(("k", "v"), self.data.values(), strict=False)}

    @property
    def limit(self) -> int | None:
        """The most tokens a row may hold in this layer; None if there is no limit."""
        return None

    @property
    def slots(self) -> int | None:
        """Token slots per row; None for kinds without one slot per token."""
        return None

    @property
    def format(self) -> str:
        """The dtype or codec of the stored values, for `print(cache)`."""
        dtypes = {str(tensor.dtype) for tensor in self.data.values() if tensor.is_floating_point()}
        return ", ".join(sorted(dtype.removeprefix("torch.") for dtype in dtypes))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.data.values())

    @property
    def can_twin(self) -> bool:
        """True while the layer has no memory of its own, so that `twin` may share its empty tensors."""
        return False

    def twin(self) -> Self:
        """A new empty layer like this one, for an entry with an equal spec; faster than `spec.layer`. All attributes
        but `data` are those of this one (`Spec.twins`)."""
        return self._with(dict(self.data))

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` tokens per row. Called on the host, before a pass."""

    def reserve_twins(self, twins: Sequence[Self], tokens: int) -> None:
        """`reserve` of this layer and of its twins, none of which has memory of its own yet."""
        for one in (self, *twins):
            one.reserve(tokens)

    def widen(self, slots: int) -> None:
        """Enlarges the store to `slots` slots per row, if it has fewer."""

    def used(self, longest: int, written: int) -> Self:
        """A view of the layer without slots that no row needs, which shares its memory: what a file stores.

        longest   tokens in the longest row
        written   one past the highest position ever written in any row
        """
        return self

    # Commit, rewind, reset and reorder may be interrupted, and the next use of the cache then finishes them
    # (ops/journal.py). So they must be idempotent: called again with the same arguments, they write the same values.

    def fold(self, step: Step, pending: Any, accepted: Tensor) -> Any:
        """Computes what `commit` writes from `pending`, what the pass left with `Step.leave`, and changes nothing.
        For layers whose commit overwrites its own input, such as a recurrent state; others return `pending` itself."""
        return pending

    def commit(self, step: Step, pending: Any, accepted: Tensor) -> None:
        """Stores each row's first `accepted` tokens. `pending`: what `fold` returned."""

    # For layers whose bytes are stored on the host; never called for a kind that is always on the device.

    def needed(self, lengths: list[int]) -> SlotRuns:
        """Slot ranges that a pass over rows of these lengths reads."""
        return {}

    def written(self, lengths: list[int], new: list[int]) -> SlotRuns:
        """Slot ranges that appending `new[i]` tokens to a row of `lengths[i]` writes."""
        return {}

    def offload(self, pending: Any, staged: StagedPass) -> Any:
        """Starts copying the large tensors of `pending` to the host, and returns it with the copies in their place."""
        return pending

    def fold_from_host(self, staged: StagedPass, step: Step, pending: Any, accepted: Tensor) -> Any:
        """`fold`, which fetches from the host the tensors that it reads."""
        return pending

    def commit_to_host(self, staged: StagedPass, step: Step, pending: Any, accepted: Tensor) -> None:
        """`commit`, which copies only changed slots and states to the host."""

    def rewindable(self, clock: Clock) -> Tensor | None:
        """[B] how many tokens each row can be rewound by; None if this layer sets no limit."""
        return None

    def check_rewind(self, lengths: Sequence[int], kept: Sequence[int]) -> None:
        """Raises RewindError if a row of lengths[i] cannot be rewound to kept[i], although `rewindable` allows it: for
        layers that can be rewound to some lengths only."""

    def rewind(self, clock: Clock, changed: Tensor) -> None:
        """Restores what depends on the lengths, after the clock was rewound for the rows that `changed` [B] marks."""

    def reset(self, index: Tensor) -> None:
        """Empties these rows."""

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        """Fills every slot and state that no later pass may depend on."""

    def fit(self, like: Self, clock: Clock) -> Self:
        """The same contents in the shape and layout of `like`, so that the two can be joined."""
        return self

    def reorder(self, moves: Moves) -> None:
        """Replaces rows by other rows in place. `moves` says which, and how many tokens they have in common; it notes
        the copies of all layers first, and makes them afterwards."""
        self.storage.settle()
        for tensor in self.data.values():
            moves.on(tensor.device).rows(tensor)

    def select(self, index: Tensor) -> Self:
        return self._with({name: self.storage.select(tensor, index) for name, tensor in self.data.items()})

    # -- for files -------------------------------------------------------------------------------------------------

    @property
    def like(self) -> dict[str, Tensor]:
        """Tensors of the shapes that `copied` returns for all rows; their values are not read."""
        return self.data

    def copied(self, index: Tensor) -> Self:
        """A copy of these rows, in contiguous tensors without pages."""
        return self.select(index)

    def part(self, name: str, shape: Sequence[int]) -> Tensor | PagedPart:
        """The part of the store that a tensor of this name and shape, out of `copied.data`, is loaded into."""
        return self.data[name][tuple(slice(size) for size in shape)]

    @classmethod
    def join(cls, layers: list[Self]) -> Self:
        first = layers[0]
        return first._with({name: first.storage.join([one.data[name] for one in layers]) for name in first.data})

    def _with(self, data: dict[str, Tensor]) -> Self:
        new = object.__new__(type(self))  # like `copy.copy` and faster, which matters with many layers
        new.__dict__.update(self.__dict__, data=data)
        return new


class Released(Sequence[Any]):
    """In place of the layers of a released cache: any access raises."""

    def __getitem__(self, index: Any) -> Any:
        raise InputError("this cache was released and holds no memory any more: make a new one with model.new_cache")

    def __len__(self) -> int:
        return self[0]
