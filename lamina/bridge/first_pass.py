"""`FirstPass`: what the layers of a model gave in the first pass over a cache, until it is known that it has ended.

A model calls its layers one by one, and nothing says beforehand which of them store what, nor in which shapes. So the
first pass is kept aside, as it will be stored. In an empty cache its tokens see only each other: nothing must be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.bridge.layers.kinds import LayerKind
from lamina.bridge.layers.specs import Columns, State
from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codec, Coding
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key
from lamina.cache.spec import Keeping, Spec
from lamina.errors import InputError


def tokens_of(fields: Fields) -> int:
    """T of fields [B, *lead, T, D]."""
    return next(iter(fields.values())).shape[-2]


def as_tokens(columns: Tensor) -> Tensor:
    """[B, *lead, T] -> [B, T, C], one vector for each token"""
    return columns.reshape(len(columns), -1, columns.shape[-1]).transpose(1, 2)


def as_columns(tokens: Tensor, lead: tuple[int, ...]) -> Tensor:
    """[B, T, C] -> [B, *lead, T]"""
    return tokens.transpose(1, 2).reshape(len(tokens), *lead, tokens.shape[1])


@dataclass
class FirstPass:
    """The tokens, convolution inputs, states and sources of one pass over an empty cache.

    specs     of the entries
    tokens    entry -> parts [B, *lead, T, width], as its codec stores them
    columns   entry -> inputs of a convolution [B, *lead, T], and the number of them that is kept
    states    entry -> state [B, …]
    sources   entry -> keys and values [B, H, S, D] of an encoder's output
    """

    specs: dict[Key, Spec] = field(default_factory=dict)
    tokens: dict[Key, Fields] = field(default_factory=dict)
    columns: dict[Key, tuple[Tensor, int]] = field(default_factory=dict)
    states: dict[Key, Tensor] = field(default_factory=dict)
    sources: dict[Key, Fields] = field(default_factory=dict)
    codings: dict[Key, Coding] = field(default_factory=dict)
    like: Tensor | None = None  # the first tensor that was given: rows, dtype and device of the cache

    def __bool__(self) -> bool:
        return bool(self.tokens or self.columns or self.states or self.sources)

    def __contains__(self, key: Key) -> bool:
        return key in self.tokens or key in self.columns or key in self.states or key in self.sources

    @property
    def layers(self) -> set[int]:
        """Layers of the model that gave something."""
        return {i for part in (self.tokens, self.columns, self.states) for i, _ in part}

    def is_whole(self, kinds: Sequence[LayerKind]) -> bool:
        """Whether all layers, of these kinds, gave what they remember, of the same tokens. Whether layers with states
        have recurrent ones is not known beforehand: it is assumed of all if one gave some."""
        recurrent = {name for _, name in self.states if name.startswith("recurrent")}
        wanted = {(i, "attention") for i, kind in enumerate(kinds) if kind.attends}
        for i, kind in enumerate(kinds):
            if kind.states:
                wanted |= {(i, name) for name in recurrent | {f"conv{kind.states - 1}"}}
        return all(key in self for key in wanted) and len({tokens_of(parts) for parts in self.tokens.values()}) <= 1

    @property
    def T(self) -> int:
        """Tokens of the pass. If no layer attends, convolutions say it; without any, a pass counts as one token."""
        if self.tokens:
            return tokens_of(next(iter(self.tokens.values())))
        return max((x.shape[-1] for x, _ in self.columns.values()), default=1)

    def add_tokens(self, key: Key, spec: Spec, codec: Codec, new: Fields) -> Fields:
        """Keeps tokens [B, *lead, T, D]; -> the same as attention sees them"""
        coding = self._coding(key, spec, codec, next(iter(new.values())))
        self.tokens[key] = coding.encode(new)
        return coding.decode(self.tokens[key])

    def add_source(self, key: Key, spec: Spec, codec: Codec, new: Fields) -> Fields:
        """Keeps the keys and values [B, H, S, D] of an encoder's output; -> the same as attention sees them"""
        self._coding(key, spec, codec, new["k"])
        self.sources[key] = new
        return self.source(key)

    def source(self, key: Key) -> Fields:
        """Keys and values of an encoder's output, as attention will see them once they are stored."""
        coding = self.codings[key]
        return coding.decode(coding.encode(self.sources[key]))

    def _coding(self, key: Key, spec: Spec, codec: Codec, x: Tensor) -> Coding:
        self._note(x)
        self.specs[key] = spec
        coding = self.codings[key] = spec.layer(Keeping(1, None, 0, x.dtype, x.device, codec)).coding
        return coding

    def read(self, key: Key, last: int | None) -> Fields | None:
        """The last tokens of an entry, all when None."""
        if key not in self.tokens:
            return None
        found = self.codings[key].decode(self.tokens[key])
        first = 0 if last is None else max(0, tokens_of(found) - last)
        return {name: x[..., first:, :] for name, x in found.items()}

    def add_columns(self, key: Key, new: Tensor, kernel: int) -> Tensor:
        self._note(new)
        self.columns[key] = new, kernel
        return new

    def add_state(self, key: Key, new: Tensor) -> Tensor:
        self._note(new)
        self.states[key] = new
        return new

    def _note(self, tensor: Tensor) -> None:
        if self.like is None or not self.like.is_floating_point():
            self.like = tensor

    def settle(self, droppable: bool) -> int:
        """Decides how convolution inputs are stored, and checks that all layers were given the same tokens. -> T

        Most models give a convolution one column for each token: those are stored like tokens, so that single ones can
        be dropped. A model that pads or cuts its inputs gives a state. So does a hybrid whose tokens need not be
        `droppable`, in layers that have a recurrent state too: the model then changes both in place, which is faster.
        """
        attends = bool(self.tokens)
        T = self.T
        for key, (x, kernel) in self.columns.items():
            lead = tuple(x.shape[1:-1])
            in_place = attends and not droppable and (key[0], key[1].replace("conv", "recurrent")) in self.states
            if x.shape[-1] == T and not in_place:
                self.specs[key] = Columns(lead, kernel, x.dtype)
                self.tokens[key], self.codings[key] = {"x": as_tokens(x)}, Coding()
            else:
                self.states[key] = last_columns(x, kernel)
        for key, x in self.states.items():
            self.specs[key] = State(tuple(x.shape[1:]), x.dtype)
        lengths = {key: tokens_of(parts) for key, parts in self.tokens.items()}
        if any(length != T for length in lengths.values()):
            raise InputError(
                f"the layers of one pass were given different numbers of tokens: {lengths}. lamina.bridge stores "
                "layers that all get the same tokens"
            )
        self.columns.clear()
        return T

    def move_to_lines(self, cache: Cache, room: int) -> set[Key]:
        """Stores the tokens in plain lines with room for `room` tokens. -> the entries. One layer after the other, so
        that only the tokens of one layer are in memory twice."""
        keys = set(self.tokens)
        for i, name in keys:
            layer = cache.layers[i][name]
            layer.reserve(room)
            for part, x in self.tokens.pop((i, name)).items():
                layer.data[part][..., : x.shape[-2], :].copy_(x)
        return keys


def last_columns(x: Tensor, kernel: int) -> Tensor:
    """The last `kernel` columns of x [B, *lead, T], with zeros before them if there are fewer."""
    missing = kernel - x.shape[-1]
    return torch.nn.functional.pad(x, (missing, 0)) if missing > 0 else x[..., x.shape[-1] - kernel :]
