"""`Kept`: a Lamina cache whose rows all have the same length, and the verbs of transformers on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lamina.bridge.layers.in_order import joined, runs
from lamina.bridge.layers.kinds import LayerKind
from lamina.bridge.layers.specs import State, stand_in
from lamina.bridge.lines import Lines
from lamina.cache import spec
from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codecs, codecs_of
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.cross import CrossLayer
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.ops.join import join
from lamina.cache.spec import Spec
from lamina.cache.step import Step
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.bridge.model_facts import ModelFacts
    from lamina.bridge.pool import Pool


@dataclass(frozen=True)
class Settings:
    """How the user wants the cache stored: see `lamina.bridge.Cache`."""

    capacity: int | None = None
    codec: Codecs | None = None
    residence: str = "device"
    slack: int = 0
    pool: Pool | None = None


class Kept:
    """The cache, once its shapes are known, and everything about it that does not need a pass.

    codecs    that of each layer
    specs     entry -> what it remembers
    rows      of the cache; 0 before anything is stored
    device    where passes run; None before anything is stored
    slack     of the cache; it grows while the past is recorded
    """

    def __init__(self, kinds: Sequence[LayerKind], settings: Settings, model: ModelFacts) -> None:
        self.kinds, self.settings, self.model = kinds, settings, model
        self.codecs = codecs_of(settings.codec, [stand_in(kind) for kind in kinds])
        self.specs: dict[Key, Spec] = {}
        self.rows, self.slack = 0, settings.slack
        self.device: torch.device | None = None
        self._inner: Cache | None = None
        self._known: frozenset[Key] = frozenset()  # every entry that a pass writes, once the first pass is over
        self._step: Step | None = None
        self._length = 0  # tokens of each row that are committed
        self.lines: Lines | None = None  # passes that the cache has not been told of
        self._flat = False  # True if all entries are plain lines, so that passes may go through `lines`
        self._flat_by_one = False  # True if passes of one token may, as long as the past is not recorded
        self._recording = False
        self._alike: list[list[int]] = []  # [B, B] how many leading tokens two rows certainly have in common

    def _build(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the Lamina cache for the entries that are known, with nothing in it."""
        settings, listed = self.settings, self.model.listed(self.specs)
        if settings.pool is not None and self.slack > settings.pool.slack:
            raise InputError(
                f"while the past is recorded, {self.slack} tokens must be droppable, and the pool was made with "
                f"slack={settings.pool.slack}: make it with lamina.bridge.Pool(slack={self.slack})"
            )
        pool = None if settings.pool is None else settings.pool.made(self.model, listed, dtype, device)
        if settings.pool is not None:
            self.model = settings.pool.model
        lines = [one for one in self.specs.values() if isinstance(one, spec.Attention | spec.Tokens)]
        endless = bool(lines) and all(one.window.span is not None for one in lines)  # rings of a fixed size, no lines
        self.adopt(
            Cache(
                listed, rows=rows, capacity=None if endless else settings.capacity, slack=self.slack, dtype=dtype,
                device=device,
                codec={i: codec for i, codec in enumerate(self.codecs) if self.kinds[i].attends},
                residence=settings.residence, pool=pool,
                model=self.model,  # type: ignore[arg-type]  # what a cache asks of its model
            )
        )  # fmt: skip

    def prepare(self, specs: Mapping[Key, Spec], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the Lamina cache now, for entries of these specs; nothing may be stored yet."""
        self.specs |= specs
        self._build(rows, dtype, device)

    def adopt(self, cache: Cache) -> None:
        """Makes this the cache, whose specs are known."""
        self._inner, self.rows, self.device = cache, cache.rows, cache.device
        self._known = frozenset(key for key, one in self.specs.items() if not one.reads_source)
        self._flat = Lines.fit(cache, self._known)
        self._flat_by_one = Lines.fit_by_one(cache, self._known)
        self._length = cache.clock.sync()[0]
        self._alike = [[0] * cache.rows for _ in range(cache.rows)]

    def finish(self) -> None:
        """Commits the pass that is open, if any."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drops states that were handed out since the last pass."""
        raise NotImplementedError

    # -- passes over plain lines -----------------------------------------------------------------------------------

    def _use_lines(self) -> None:
        """Has the next passes stored by `lines`, if entries are plain enough."""
        if self._flat or (self._flat_by_one and not self.recording):
            assert self._inner is not None
            self.lines = Lines(self._inner, self._known, self._length)

    def _leave_lines(self) -> None:
        """Tells the Lamina cache of the passes that `lines` has stored; one that is open becomes a `Step`."""
        lines = self.lines
        if lines is None:
            return
        lines.restore()
        self.lines = None
        assert self._inner is not None
        length = lines.length - (lines.T if lines.ended_early else 0)
        if new := length - self._length:
            step = self._inner.step(new)
            step.written |= self._known
            step.commit()
            self._length = length
        if written := lines.written:
            self._step = self._inner.step(lines.T)
            self._step.written |= written

    @property
    def recording(self) -> bool:
        """True if the tokens of each pass can be dropped, whatever the slack."""
        return self._recording

    @recording.setter
    def recording(self, record: bool) -> None:
        if record and not self._flat:  # passes that go through `lines` make no slack in rings
            self._leave_lines()
            if self._step is None:
                self._forget()
        self._recording = record

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def inner(self) -> Cache:
        """The Lamina cache, with all passes committed."""
        self.finish()
        if self._inner is None:
            raise InputError("nothing is stored in this cache yet: run the model over it first")
        return self._inner

    @property
    def has_states(self) -> bool:
        """True if some layer has a state that the model computes; unknown before the first pass has ended."""
        return any(isinstance(one, State) for one in self.specs.values())

    def layer(self, key: Key) -> Layer:
        """The layer of an entry; that on the device, if a pass is open over a cache on the host."""
        assert self._inner is not None
        step = self._step
        entry = self._inner.layers[key[0]] if step is None or step.staged is None else step.staged.entry(key[0], step)
        return entry[key[1]]

    def length_of(self, key: Key) -> int:
        """Tokens that an entry holds, for passes outside `lines`; `Store.length_of` asks `lines` first."""
        if self._step is not None and key in self._step.written:
            return self._length + self._step.T
        return self._length

    def read(self, key: Key, last: int | None = None) -> Fields | None:
        """The last tokens of an entry in order [B, *lead, N, D], all when None; None if nothing is stored."""
        self._leave_lines()
        if key not in self._known:
            return None
        assert self._inner is not None
        step, end = self._step, self.length_of(key)
        first = 0 if last is None else max(0, end - last)
        layer = self._inner.layers[key[0]][key[1]]
        assert isinstance(layer, TokenLayer)
        if step is None:
            step = Step(self._inner.layers, 1, self._inner.clock.lengths, None)
        pending = step._pending.get(key)  # tokens of the open pass that a ring stores at commit
        pieces = runs(layer, step, first, end if pending is None else self._length)
        pieces = [{name: layer.storage.to_device(x) for name, x in piece.items()} for piece in pieces]
        if pending is not None:
            behind = max(0, first - self._length)
            pieces.append({name: x[..., behind:, :] for name, x in pending.items()})
        elif not pieces:
            pieces = [layer.storage.read_run(layer.data, step, 0, 0)]
        return layer.coding.decode(joined(pieces))

    def source(self, key: Key) -> Fields | None:
        """Keys and values [B, H, S, D] of an encoder's output; None if there is none."""
        if self._inner is None or key not in self.specs or not self._inner.clock.sourced[0]:
            return None
        layer = self.layer(key)
        assert isinstance(layer, CrossLayer)
        return layer.coding.decode({name: layer.storage.to_device(x) for name, x in layer.parts.items()})

    # -- verbs -----------------------------------------------------------------------------------------------------

    def rewind(self, n: int) -> None:
        """Drops the last n tokens of every row, which are committed."""
        if not n:
            return
        assert self._inner is not None
        self.note_rewritten()
        if n == self._length:
            self._clear()
        else:
            self._inner.rewind(n)
        self._length -= n
        self._alike = [[min(one, self._length) for one in row] for row in self._alike]

    def note_rewritten(self) -> None:
        """Tells autograd that slots will be written again, which earlier passes have read. It is not told of tokens
        that are stored behind the others, so that gradients can go through several passes."""
        if self._inner is not None:
            increment_version([x for layer in self._inner.every_layer() for x in layer.data.values()])

    def _clear(self) -> None:
        """Drops every token; sources stay attached."""
        assert self._inner is not None
        cache = self._inner
        cross = [layer for layer in cache.every_layer() if isinstance(layer, CrossLayer)]
        lengths = [layer.data["lengths"].clone() for layer in cross]
        cache.reset()
        for layer, held in zip(cross, lengths, strict=True):
            layer.data["lengths"].copy_(held)
        if cross:
            cache.clock.note_sources(range(cache.rows))

    def make_slack(self, needed: int) -> None:
        """Enlarges rings so that `needed` tokens can be dropped after they are committed."""
        cache = self._inner
        assert cache is not None
        if needed > self.slack and any(layer.layout is not None and layer.layout.ring for layer in cache.every_layer()):
            self.slack = max(needed, 2 * self.slack)
            self._inner = join([cache], slack=self.slack)

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was."""
        cache, alike = self.inner, self._alike
        if len(rows) != cache.rows:  # transformers allows it
            return self.select(rows)
        cache.reorder(rows, since=[alike[i][source] for i, source in enumerate(rows)])
        self._alike = [[self._length if a == b else alike[a][b] for b in rows] for a in rows]

    def select(self, rows: Sequence[int]) -> None:
        """Replaces the cache by one of these rows, in this order."""
        cache, alike = self.inner, self._alike
        self._inner, self.rows = cache.select(rows), len(rows)
        self._alike = [[self._length if a == b else alike[a][b] for b in rows] for a in rows]

    def fork(self) -> Self:
        """An independent copy."""
        self.finish()
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.specs, new._alike = dict(self.specs), [list(row) for row in self._alike]
        new._inner = None if self._inner is None else self._inner.fork()
        return new

    def attach(self, key: Key, source: Fields) -> None:
        """Stores keys and values [B, H, S, D] of an encoder's output."""
        assert self._inner is not None
        layer = self._inner.layers[key[0]][key[1]]
        assert isinstance(layer, CrossLayer)
        rows, S = source["k"].shape[0], source["k"].shape[-2]
        lengths = torch.full((rows,), S, device=self.device)
        layer.attach(source["k"], source["v"], lengths, torch.arange(rows, device=self.device))
        self._inner.clock.note_sources(range(rows))


F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Runs a function as it is, with all that it calls, inside of models that `torch.compile` compiles too: it would
    trace views and lengths that change with every token."""
    made: F = torch.compiler.disable(function)
    return made


def detached(fields: Fields) -> Fields:
    """The fields without their gradients."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in fields.values()):
        return fields
    return {name: x.detach() for name, x in fields.items()}


def rows_of(given: Tensor | Sequence[int]) -> list[int]:
    """Numbers of rows: given as such, or as a bool for each row."""
    if not isinstance(given, Tensor):
        return [int(row) for row in given]
    return (given.nonzero().flatten() if given.dtype == torch.bool else given).tolist()
