"""`Store`: one Lamina cache, filled by calls that come layer by layer and never say where a pass begins or ends.

A model of transformers calls `update` once for each layer in every pass. The store opens a pass with the first such
call and commits it when every entry has been written. Until the first pass is over nobody knows which entries there
are, nor their shapes: its tokens are kept aside, and the Lamina cache is made when an entry comes for the second time.

    pass 1      extend(0), extend(1), …       kept aside; the new tokens are all there is to see
    pass 2      extend(0)                     makes the cache, commits pass 1, opens pass 2
                extend(1), … the last         commits pass 2

While the past is recorded, a pass stays open until `crop` says how many of its tokens are kept, or the next pass
begins. Rows are rectangular: padding is stored like any token, and the masks of transformers hide it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina.bridge.in_order import extend, joined, runs
from lamina.bridge.kinds import LayerKind
from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codecs, Coding, codecs_of
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.ops.join import join
from lamina.cache.spec import Keeping, Spec
from lamina.cache.step import Step
from lamina.errors import InputError
from lamina.notices import notice

RECORDED = 64  # tokens of one pass that recording makes room for, when the next pass begins without a crop


@dataclass(frozen=True)
class Settings:
    """How the user wants the cache stored: see `lamina.bridge.Cache`."""

    capacity: int | None = None
    codec: Codecs | None = None
    residence: str = "device"
    slack: int = 0


class Store:
    """See the top of the file."""

    def __init__(self, kinds: Sequence[LayerKind], settings: Settings, model: Any = None) -> None:
        self.kinds, self.settings, self.model = kinds, settings, model
        self.slack = settings.slack
        self.recording = False
        self.specs: dict[Key, Spec] = {}
        self._inner: Cache | None = None
        self._known: frozenset[Key] = frozenset()  # every entry, once the first pass is over
        self._first: dict[Key, Fields] = {}  # the first pass: entry -> its tokens as they will be stored
        self._codings: dict[Key, Coding] = {}
        self._rows, self._dtype, self._device = 0, torch.float32, torch.device("cpu")
        self._step: Step | None = None
        self._length = 0  # tokens that are committed, in every row
        self._tail = 0  # committed tokens since the last crop, while recording
        self._alike: list[list[int]] = []  # [B, B] how many leading tokens two rows surely have in common

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def inner(self) -> Cache:
        """The Lamina cache, with all passes committed."""
        self.finish()
        if self._inner is None:
            raise InputError("this cache is empty, and nothing is stored yet: run the model over it first")
        return self._inner

    @property
    def empty(self) -> bool:
        """True if nothing was stored yet, so that not even the shapes are known."""
        return self._inner is None and not self._first

    @property
    def rows(self) -> int:
        """Rows of the cache; 0 before anything is stored."""
        return self._inner.rows if self._inner is not None else self._rows

    @property
    def device(self) -> torch.device | None:
        """Where passes run; None before anything is stored."""
        return None if self.empty else self._device

    @property
    def length(self) -> int:
        """Tokens of each row, those of a complete open pass too."""
        return self._length + self._open_tokens

    @property
    def _open_tokens(self) -> int:
        if self._first:
            return _tokens(next(iter(self._first.values())))
        return self._step.T if self._step is not None and self._complete else 0

    @property
    def _complete(self) -> bool:
        return self._step is not None and len(self._step.written) == len(self._known)

    def length_of(self, key: Key) -> int:
        """Tokens that an entry holds."""
        if key in self._first:
            return _tokens(self._first[key])
        if self._step is not None and key in self._step.written:
            return self._length + self._step.T
        return self._length

    def holds(self, key: Key) -> bool:
        """True if memory was allocated for this entry."""
        return key in self._first or key in self._known

    def layer(self, key: Key) -> TokenLayer:
        """The layer of an entry."""
        assert self._inner is not None
        return self._inner.layers[key[0]][key[1]]  # type: ignore[return-value]

    # -- a pass ----------------------------------------------------------------------------------------------------

    def extend(self, key: Key, spec: Spec, new: Fields) -> Fields:
        """Appends tokens [B, *lead, T, D] to an entry. -> the fields of all tokens that their queries may see"""
        T = _tokens(new)
        if key not in self._known:
            return self._extend_first(key, spec, new)
        step = self._step
        if step is None or key in step.written:
            step = self._begin(T, next(iter(new.values())))
        elif T != step.T:
            raise InputError(
                f"layer {key[0]} was given {T} tokens in a pass of {step.T}: all layers get the same tokens"
            )
        layer: TokenLayer = step.layers[key[0]][key[1]]  # type: ignore[assignment]
        found = extend(layer, step, key, self._length, layer.coding.encode(_detached(new)))
        if len(step.written) == len(self._known) and not self.recording:
            self._commit()
        return layer.coding.decode(found)

    def _extend_first(self, key: Key, spec: Spec, new: Fields) -> Fields:
        """Keeps the tokens of the first pass aside."""
        if self._known and self._length:
            raise InputError(
                f"layer {key[0]} ({key[1]}) is used for the first time after {self._length} tokens: the first pass "
                "over a cache must run through all layers"
            )
        if self._known:  # empty again, and the model has more entries than before
            self._inner, self._known = None, frozenset()
        if key in self._first:
            self._finish_first()
            return self.extend(key, spec, new)
        x = next(iter(new.values()))
        if not self._first:
            self._rows, self._dtype, self._device = x.shape[0], x.dtype, x.device
        self.specs[key] = spec
        coding = self._coding(key, spec)
        self._first[key] = coding.encode(_detached(new))
        return coding.decode(self._first[key]) if coding.formats else new

    def _coding(self, key: Key, spec: Spec) -> Coding:
        if key not in self._codings:
            codec = codecs_of(self.settings.codec, self._listed())[key[0]]
            keeping = Keeping(1, None, 0, self._dtype, self._device, codec)
            self._codings[key] = spec.layer(keeping).coding
        return self._codings[key]

    def _begin(self, T: int, x: Tensor) -> Step:
        """Opens a pass of T tokens; the one that is open is committed."""
        self.finish()
        assert self._inner is not None
        if len(x) != self._inner.rows:
            if self._length:
                raise InputError(
                    f"this cache holds {self._inner.rows} rows of {self._length} tokens, and {len(x)} rows were given: "
                    "repeat or select its rows first, or reset it"
                )
            self._rows, self._dtype, self._device = len(x), x.dtype, x.device
            self._build()
        if self.recording:
            self._make_slack(self._tail + min(T, RECORDED))
        self._step = self._inner.step(T)
        return self._step

    def finish(self) -> None:
        """Commits the pass that is open, if any."""
        if self._first:
            self._finish_first()
        elif self._step is not None:
            if not self._complete:
                missing = sorted(self._known - self._step.written)
                shown = ", ".join(f"{i} ({name})" for i, name in missing[:4])
                raise InputError(
                    f"a pass of {self._step.T} tokens ended before layer {shown} was updated, so it is not stored: "
                    "drop it with cache.abort(), then run it again"
                )
            self._commit()

    def abort(self) -> None:
        """Drops the pass that is open, if any: the cache is as it was before it."""
        if self._step is not None:
            self._step.abort()
        self._step = None
        self._first.clear()

    def _commit(self, accepted: int | None = None) -> None:
        step = self._step
        assert step is not None
        taken = step.T if accepted is None else accepted
        if taken:
            step.commit(None if accepted is None else [taken] * len(step.before))
        else:
            step.abort()
        self._step = None
        self._length += taken
        self._tail = self._tail + min(taken, RECORDED) if self.recording and accepted is None else 0

    # -- the cache -------------------------------------------------------------------------------------------------

    def _listed(self) -> list[dict[str, Spec]]:
        """For each layer of the model, name -> spec."""
        listed: list[dict[str, Spec]] = [{} for _ in self.kinds]
        for (i, name), spec in self.specs.items():
            listed[i][name] = spec
        return listed

    def _build(self) -> None:
        """Makes the Lamina cache for the entries that are known, with nothing in it."""
        settings = self.settings
        self._inner = Cache(
            self._listed(), rows=self._rows, capacity=settings.capacity, slack=self.slack, dtype=self._dtype,
            device=self._device, codec=settings.codec, residence=settings.residence, model=self.model,
        )  # fmt: skip
        self._known = frozenset(self.specs)
        self._alike = [[0] * self._rows for _ in range(self._rows)]

    def prepare(self, specs: Mapping[Key, Spec], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the Lamina cache now, for entries of these specs; nothing may be stored yet."""
        self._rows, self._dtype, self._device = rows, dtype, device
        self.specs |= specs
        self._build()

    def _finish_first(self) -> None:
        """Makes the Lamina cache and commits the first pass to it."""
        first = self._first
        lengths = {key: _tokens(parts) for key, parts in first.items()}
        T = max(lengths.values())
        if len(set(lengths.values())) > 1:
            raise InputError(
                f"the layers of one pass were given different numbers of tokens: {lengths}. lamina.bridge stores "
                "layers that all get the same tokens"
            )
        if self.recording:
            self.slack = max(self.slack, min(T, RECORDED))
        self._build()
        assert self._inner is not None
        if self.settings.capacity is None:
            self._inner.reserve(T + T // 8 + 64)
        step = self._inner.step(T)
        for key in list(first):
            extend(self.layer(key), step, key, 0, first.pop(key))
        self._step = step
        self._commit()

    # -- verbs -----------------------------------------------------------------------------------------------------

    def crop(self, n: int) -> None:
        """Drops the last n tokens of every row."""
        n = min(n, self.length)
        if self._first:
            self._finish_first()
        if self._step is not None and self._complete:
            kept = max(self._step.T - n, 0)
            n -= self._step.T - kept
            self._commit(kept)
        self.finish()
        if n:
            assert self._inner is not None
            if n == self._length:
                self._inner.reset()
            else:
                self._inner.rewind(n)
            self._length -= n
            self._alike = [[min(one, self._length) for one in row] for row in self._alike]
        self._tail = 0

    def _make_slack(self, needed: int) -> None:
        """Enlarges rings so that `needed` tokens can be taken back after they are committed."""
        cache = self._inner
        assert cache is not None
        if needed <= self.slack or all(layer.layout is None or layer.layout.ring is None for layer in self._tokens()):
            return
        self.slack = max(needed, 2 * self.slack)
        self._inner = join([cache], slack=self.slack)

    def _tokens(self) -> list[TokenLayer]:
        assert self._inner is not None
        return [layer for layer in self._inner.every_layer() if isinstance(layer, TokenLayer)]

    def reset(self) -> None:
        """Empties the cache; its memory stays."""
        self.abort()
        if self._inner is not None:
            self._inner.reset()
        self._length = self._tail = 0

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was."""
        if self.empty:
            return
        cache, alike = self.inner, self._alike
        cache.reorder(rows, since=[alike[i][source] for i, source in enumerate(rows)])
        self._alike = [[self._length if a == b else alike[a][b] for b in rows] for a in rows]

    def select(self, rows: Sequence[int]) -> None:
        """Replaces the cache by one of these rows, in this order."""
        if self.empty:
            return
        cache, alike = self.inner, self._alike
        self._inner = cache.select(rows)
        self._alike = [[self._length if a == b else alike[a][b] for b in rows] for a in rows]

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, key: Key, last: int | None = None) -> Fields | None:
        """The last tokens of an entry in order [B, *lead, N, D], all when None; None if nothing is stored."""
        if key in self._first:
            found = self._codings[key].decode(self._first[key])
            return (
                found
                if last is None
                else {name: x[..., -last:, :] if last else x[..., :0, :] for name, x in found.items()}
            )
        if key not in self._known:
            return None
        self.finish()
        assert self._inner is not None
        layer, end = self.layer(key), self._length
        first = 0 if last is None else max(0, end - last)
        step = Step(self._inner.layers, 1, self._inner.clock.lengths, None)
        pieces = runs(layer, step, first, end)
        if not pieces:
            return None
        return layer.coding.decode(joined(pieces))

    def fork(self) -> Store:
        """An independent copy."""
        self.finish()
        new = object.__new__(Store)
        new.__dict__.update(self.__dict__)
        new.specs, new._first, new._codings = dict(self.specs), {}, dict(self._codings)
        new._alike = [list(row) for row in self._alike]
        new._inner = None if self._inner is None else self._inner.fork()
        return new


def _tokens(fields: Fields) -> int:
    return next(iter(fields.values())).shape[-2]


def _detached(fields: Fields) -> Fields:
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in fields.values()):
        return fields
    notice("lamina.bridge stores keys and values without their gradients: a backward pass does not reach the history")
    return {name: x.detach() for name, x in fields.items()}
