"""Passes over a cache whose bytes live on the host: what a pass needs comes to it, what is new goes back.

    copies     | fetch 1    | new 0 | fetch 2    | new 1 | fetch 3 …        in order, on a stream of their own
    computing  | layer 0    |       | layer 1    |       | layer 2 …

There are two *windows* on the device, each with room for one layer of the model. When a layer is asked for, its window
is waited for, and the copies for the next layer start into the other one, behind the computation that read it last. Of
a row only what its new tokens can see is copied: the tokens of a line, of a ring those within reach, a state whole. In
a window a layer is the same layer with the same slots; what a pass writes there is also written to the host, and that
alone: the new tokens, the new state. A layer whose keys and values others read in the same pass keeps a window of its
own until the pass is over.

Where there are no streams (on a CPU) the same copies are made at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from lamina.cache.clock import allocate
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key, Layer
from lamina.cache.storage.device import Storage, read_slots, write_slots
from lamina.cache.storage.host import HostStorage, copy_stream, host_tensor
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.step import Step

SlotRuns = dict[str, list[tuple[int, int, int]]]
"""Name of a part -> (row of the pass, from slot, up to slot) of each piece of it."""

Entry = Mapping[str, Layer]
L = TypeVar("L", bound=Layer)
ALIGNED = 256  # bytes


def is_far(layer: Layer) -> bool:
    """Whether its bytes live on the host."""
    return isinstance(layer.storage, HostStorage)


def room_for(layer: Layer, rows: int) -> int:
    """Bytes of a window that holds so many rows of a layer."""
    parts = (tensor for tensor in layer.data.values() if tensor.dim() > 1)
    return sum(_aligned(rows * math.prod(tensor.shape[1:]) * tensor.itemsize) for tensor in parts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


class StagingBuffer:
    """Memory on the device with room for one layer; `holds` says for whom, and which layer of the model."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.holds: tuple[object, int] | None = None
        self.ready: torch.cuda.Event | None = None
        self._used = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes

    def clear(self) -> None:
        self.holds, self._used = None, 0

    def part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next piece of its memory."""
        assert self.buffer is not None
        start, nbytes = self._used, math.prod(shape) * dtype.itemsize
        self._used += _aligned(nbytes)
        return self.buffer[start : start + nbytes].view(dtype).view(*shape)


class Fetcher:
    """The windows of one cache, and the copies into and out of them. `moved_in` and `moved_out` count their bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, copy_stream(device)
        self.pair: list[StagingBuffer] = []
        self.own: dict[int, StagingBuffer] = {}  # of layers that others read
        self.current: StagingBuffer | None = None  # the one of the pair that is computed with
        self.moved_in = self.moved_out = 0

    @property
    def windows(self) -> list[StagingBuffer]:
        return [*self.pair, *self.own.values()]

    @property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self.windows)

    def reserve(self, layers: Sequence[Entry], read_by_others: set[int], rows: int) -> None:
        """Makes windows for passes over so many rows. What they held is not needed any more."""
        rooms = (sum(room_for(layer, rows) for layer in entry.values() if is_far(layer)) for entry in layers)
        needs = {i: nbytes for i, nbytes in enumerate(rooms) if nbytes}
        for i in needs.keys() & read_by_others:
            self._enlarge(self.own.setdefault(i, StagingBuffer()), needs[i])
        # One layer after the other is taken in at commit, those with a window of their own too.
        self.pair += [StagingBuffer() for _ in range(min(2, len(needs)) - len(self.pair))]
        for window in self.pair:
            self._enlarge(window, max(needs.values(), default=0))

    def _enlarge(self, window: StagingBuffer, nbytes: int) -> None:
        if window.nbytes >= nbytes:
            return
        window.clear()
        window.buffer = None  # the old memory goes before there is new
        window.buffer = allocate((nbytes,), torch.uint8, self.device, fill=None)
        if self.stream is not None:
            window.buffer.record_stream(self.stream)

    def other(self) -> StagingBuffer:
        """The window of the pair that is not computed with."""
        return next((window for window in self.pair if window is not self.current), self.pair[0])

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies inside are made behind all that was computed so far, and all that was copied."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def copied(self, window: StagingBuffer) -> None:
        """All copies so far belong to what the window holds."""
        window.ready = None if self.stream is None else self.stream.record_event()

    def wait(self, window: StagingBuffer) -> None:
        """What is computed from now on finds the window's copies done."""
        if window.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(window.ready)

    def poison(self) -> None:
        """Fills windows with bytes that are no number in any format."""
        for window in self.windows:
            window.clear()
            if window.buffer is not None:
                window.buffer.fill_(255)


class Fetched:
    """One pass over some rows of a cache, with all that the host must know of them: how long each is, and how many
    tokens it is given and, at commit, takes."""

    def __init__(
        self, fetcher: Fetcher, layers: Sequence[Entry], rows: list[int], all_rows: bool, lengths: list[int],
        counts: list[int],
    ) -> None:  # fmt: skip
        self.fetcher, self.layers = fetcher, layers
        self.rows, self.all_rows, self.lengths, self.counts = rows, all_rows, lengths, counts
        self.taken = counts
        far = [i for i, entry in enumerate(layers) if any(is_far(layer) for layer in entry.values())]
        self.following = dict(zip(far, [*far[1:], None], strict=True))
        self._near: dict[int, dict[str, Layer]] = {}
        self._me = object()

    def begin(self, step: Step) -> None:
        """Starts the copies for the first layer."""
        for i in self.following:
            self._bring(i, step)
            return

    def close(self) -> None:
        self._near.clear()

    # -- in a pass -------------------------------------------------------------------------------------------------

    def entry(self, i: int, step: Step) -> Entry:
        """Layer i of the model on the device; the copies for the next one start."""
        if i not in self.following:
            return self.layers[i]
        if torch.compiler.is_compiling():
            raise InputError("the bytes of this cache live on the host: to compile or export a pass, make one without "
                             "residence='host'")  # fmt: skip
        fetcher, window = self.fetcher, self._bring(i, step)
        fetcher.wait(window)
        if window in fetcher.pair:
            fetcher.current = window
        following = self.following[i]
        if following is not None:
            self._bring(following, step)
        return self._near[i]

    def _bring(self, i: int, step: Step) -> StagingBuffer:
        """Starts the copies for layer i, if they have not started; -> their window."""
        fetcher, held = self.fetcher, (self._me, i)
        for window in fetcher.windows:
            if window.holds == held:
                return window
        window = fetcher.own.get(i) or fetcher.other()
        window.clear()
        far = {name: layer for name, layer in self.layers[i].items() if is_far(layer)}
        near = {name: self._laid_out(layer, window, step, StagedStorage(self, layer)) for name, layer in far.items()}
        with fetcher.copying():
            for name, layer in far.items():
                self._copy(layer, near[name].data, layer.needed(self.lengths), into=True)
        fetcher.copied(window)
        window.holds, self._near[i] = held, {**self.layers[i], **near}
        return window

    def _laid_out(self, layer: L, window: StagingBuffer, step: Step, inside: StagedStorage) -> L:
        """The layer in a window: the same slots, of the rows of the pass."""
        place = _host(layer)
        data: Fields = {}
        for name, tensor in layer.data.items():
            if tensor.dim() == 1:
                data[name] = step.take(tensor)
            else:
                shape = (len(self.rows), *place.by_slot(tensor).shape[1:])
                data[name] = place.by_slot(window.part(shape, tensor.dtype))
        near = layer._with(data)
        near.storage = inside
        return near

    # -- at commit -------------------------------------------------------------------------------------------------

    def leave(self, key: Key, left: object) -> object:
        """What a layer leaves for commit, as it is kept until then."""
        layer = self.layers[key[0]][key[1]]
        return layer.offload(left, self) if is_far(layer) else left

    def sent(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor, on its way into host memory of its own."""
        new = host_tensor(tensor.shape, dtype, self.fetcher.device)
        tensor = tensor.to(dtype).contiguous()
        with self.fetcher.copying():
            new.copy_(tensor, non_blocking=self.fetcher.stream is not None)
        self._keep_until_copied(tensor)
        self.fetcher.moved_out += tensor.nbytes
        return new

    def window(self, layer: L, step: Step, reads: SlotRuns) -> L:
        """The layer in a window once more, with these pieces of it."""
        fetcher = self.fetcher
        window = fetcher.other()
        window.clear()
        near = self._laid_out(layer, window, step, StagedStorage())
        with fetcher.copying():
            self._copy(layer, near.data, reads, into=True)
        fetcher.copied(window)
        fetcher.wait(window)
        fetcher.current = window
        return near

    def back(self, layer: Layer, near: Fields, pieces: SlotRuns) -> None:
        """Starts writing these pieces of what is on the device to the host."""
        with self.fetcher.copying():
            self._copy(layer, near, pieces, into=False)
        for name in pieces:
            self._keep_until_copied(near[name])

    def _keep_until_copied(self, tensor: Tensor) -> None:
        if self.fetcher.stream is not None:
            tensor.record_stream(self.fetcher.stream)

    def _copy(self, layer: Layer, near: Fields, pieces: SlotRuns, into: bool) -> None:
        place, fetcher = _host(layer), self.fetcher
        for name, runs in pieces.items():
            host, device = place.by_slot(layer.data[name]), place.by_slot(near[name])
            if self.all_rows and runs == [(row, 0, host.shape[1]) for row in range(len(host))]:
                both = [(host, device)]
            else:
                both = [(host[self.rows[row], a:b], device[row, a:b]) for row, a, b in runs if a < b]
            for far, close in both:
                source, target = (far, close) if into else (close, far)
                target.copy_(source, non_blocking=fetcher.stream is not None)
                if into:
                    fetcher.moved_in += far.nbytes
                else:
                    fetcher.moved_out += far.nbytes


class StagedStorage(Storage):
    """In a window: of the pass's rows alone. In a pass, what a token layer writes goes through to the host."""

    def __init__(self, far: Fetched | None = None, layer: Layer | None = None) -> None:
        self.far, self.layer = far, layer

    def take(self, step: Step, tensor: Tensor) -> Tensor:
        return tensor

    def put(self, step: Step, tensor: Tensor, new: Tensor) -> None:
        tensor.copy_(new)

    def rows(self, step: Step) -> Tensor:
        return torch.arange(len(step.before), device=step.before.device)

    def run(self, data: Fields, step: Step, first: int, end: int) -> Fields:
        return {name: store[..., first:end, :] for name, store in data.items()}

    def put_run(self, data: Fields, step: Step, start: int, new: Fields) -> None:
        for name, store in data.items():
            store[..., start : start + new[name].shape[-2], :].copy_(new[name])
        self._through(data)

    def read(self, data: Fields, rows: Tensor, slots: Tensor) -> Fields:
        here = torch.arange(len(slots), device=slots.device)
        return {name: read_slots(store, here, slots) for name, store in data.items()}

    def write(self, data: Fields, rows: Tensor, slots: Tensor, new: Fields) -> None:
        here = torch.arange(len(slots), device=slots.device)
        for name, store in data.items():
            write_slots(store, here, slots, new[name])
        self._through(data)

    def _through(self, data: Fields) -> None:
        if self.far is not None and self.layer is not None:
            self.far.back(self.layer, data, self.layer.written(self.far.lengths, self.far.counts))


def _host(layer: Layer) -> HostStorage:
    assert isinstance(layer.storage, HostStorage)
    return layer.storage
