"""Passes over a cache on the host: each layer is copied to the device ahead of its use, and new tokens are copied back.

    copies     | fetch 1    | new 0 | fetch 2    | new 1 | fetch 3 …        in order, on a stream of their own
    compute    | layer 0    |       | layer 1    |       | layer 2 …

The device has two *staging buffers*, each with room for one layer of the model. When a pass asks for layer i, it waits
for the buffer of layer i, and the copies of the next layer start into the other buffer, after the computation that read
it last. Of each row only what its new tokens can see is copied: the tokens of a line, those of a ring that are within
reach, a whole state. In its buffer a layer has the same class and the same slots; what a pass writes there (the new
tokens, the new state) is also copied to the host. A layer whose keys and values other layers read in the same pass has
a buffer of its own until the pass ends.

Without streams (on a CPU) the same copies are made at once.
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
"""Part -> runs of slots (row of the pass, first, end)."""

Entry = Mapping[str, Layer]
L = TypeVar("L", bound=Layer)
ALIGNMENT = 256  # bytes


def on_host(layer: Layer) -> bool:
    """True if the layer's tensors reside on the host."""
    return isinstance(layer.storage, HostStorage)


def staging_bytes(layer: Layer, rows: int) -> int:
    """Bytes of a staging buffer for this many rows of a layer."""
    parts = (tensor for tensor in layer.data.values() if tensor.dim() > 1)
    return sum(_aligned(rows * math.prod(tensor.shape[1:]) * tensor.itemsize) for tensor in parts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class StagingBuffer:
    """Device memory for one layer.

    holds   the pass and the number of the layer that is in it
    ready   recorded after the copies of that layer
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.holds: tuple[object, int] | None = None
        self.ready: torch.cuda.Event | None = None
        self._used = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes

    def clear(self) -> None:
        """Makes all of its memory free for another layer."""
        self.holds, self._used = None, 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in the next free bytes."""
        assert self.buffer is not None
        start, nbytes = self._used, math.prod(shape) * dtype.itemsize
        self._used += _aligned(nbytes)
        return self.buffer[start : start + nbytes].view(dtype).view(*shape)


class Prefetcher:
    """The staging buffers of one cache, and the copies into and out of them.

    pair        the two buffers that layers alternate between
    own         layer -> its own buffer, for layers that others read
    current     the buffer of the pair that the pass computes with
    moved_in    bytes copied to the device so far, and `moved_out` to the host
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, copy_stream(device)
        self.pair: list[StagingBuffer] = []
        self.own: dict[int, StagingBuffer] = {}
        self.current: StagingBuffer | None = None
        self.moved_in = self.moved_out = 0

    @property
    def buffers(self) -> list[StagingBuffer]:
        return [*self.pair, *self.own.values()]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def reserve(self, layers: Sequence[Entry], read_by_others: set[int], rows: int) -> None:
        """Makes the buffers large enough for passes over this many rows. Their contents may be lost."""
        sizes = (sum(staging_bytes(layer, rows) for layer in entry.values() if on_host(layer)) for entry in layers)
        needs = {i: nbytes for i, nbytes in enumerate(sizes) if nbytes}
        for i in needs.keys() & read_by_others:
            self._enlarge(self.own.setdefault(i, StagingBuffer()), needs[i])
        # Commit stages one layer after the other in the pair, layers with their own buffer too.
        self.pair += [StagingBuffer() for _ in range(min(2, len(needs)) - len(self.pair))]
        for buffer in self.pair:
            self._enlarge(buffer, max(needs.values(), default=0))

    def _enlarge(self, buffer: StagingBuffer, nbytes: int) -> None:
        if buffer.nbytes >= nbytes:
            return
        buffer.clear()
        buffer.buffer = None  # frees the old memory before the new is allocated
        buffer.buffer = allocate((nbytes,), torch.uint8, self.device, fill=None)
        if self.stream is not None:
            buffer.buffer.record_stream(self.stream)

    def spare(self) -> StagingBuffer:
        """The buffer of the pair that the pass does not compute with."""
        return next((buffer for buffer in self.pair if buffer is not self.current), self.pair[0])

    @contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """Copies made inside run after everything that was queued so far, computation and copies."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark_ready(self, buffer: StagingBuffer) -> None:
        """The buffer is ready when all copies that were queued so far have finished."""
        buffer.ready = None if self.stream is None else self.stream.record_event()

    def wait(self, buffer: StagingBuffer) -> None:
        """Computation that is queued from now on waits for the buffer's copies."""
        if buffer.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.ready)

    def poison(self) -> None:
        """Fills the buffers with bytes 255, which are NaN in every floating-point dtype."""
        for buffer in self.buffers:
            buffer.clear()
            if buffer.buffer is not None:
                buffer.buffer.fill_(255)


class StagedPass:
    """One pass over some rows of a cache that resides on the host.

    rows        their numbers in the cache; `all_rows` if it is all of them in order
    lengths     tokens of each row before the pass
    counts      new tokens of each row in the pass
    taken       tokens of each row that commit accepts
    following   layer -> the next layer on the host
    """

    def __init__(
        self, fetcher: Prefetcher, layers: Sequence[Entry], rows: list[int], all_rows: bool, lengths: list[int],
        counts: list[int],
    ) -> None:  # fmt: skip
        self.fetcher, self.layers = fetcher, layers
        self.rows, self.all_rows, self.lengths, self.counts = rows, all_rows, lengths, counts
        self.taken = counts
        hosted = [i for i, entry in enumerate(layers) if any(on_host(layer) for layer in entry.values())]
        self.following = dict(zip(hosted, [*hosted[1:], None], strict=True))
        self._staged: dict[int, dict[str, Layer]] = {}
        self._me = object()

    def begin(self, step: Step) -> None:
        """Starts the copies of the first layer."""
        for i in self.following:
            self._start_copies(i, step)
            return

    def close(self) -> None:
        self._staged.clear()

    # -- in a pass -------------------------------------------------------------------------------------------------

    def entry(self, i: int, step: Step) -> Entry:
        """Layer i of the model on the device. The copies of the next layer start."""
        if i not in self.following:
            return self.layers[i]
        if torch.compiler.is_compiling():
            raise InputError("the bytes of this cache live on the host: to compile or export a pass, make one without "
                             "residence='host'")  # fmt: skip
        fetcher, buffer = self.fetcher, self._start_copies(i, step)
        fetcher.wait(buffer)
        if buffer in fetcher.pair:
            fetcher.current = buffer
        following = self.following[i]
        if following is not None:
            self._start_copies(following, step)
        return self._staged[i]

    def _start_copies(self, i: int, step: Step) -> StagingBuffer:
        """Starts the copies of layer i, unless they have started. Returns their buffer."""
        fetcher, held = self.fetcher, (self._me, i)
        for buffer in fetcher.buffers:
            if buffer.holds == held:
                return buffer
        buffer = fetcher.own.get(i) or fetcher.spare()
        buffer.clear()
        hosted = {name: layer for name, layer in self.layers[i].items() if on_host(layer)}
        staged = {
            name: self._in_buffer(layer, buffer, step, StagedStorage(self, layer)) for name, layer in hosted.items()
        }
        with fetcher.on_copy_stream():
            for name, layer in hosted.items():
                self._copy(layer, staged[name].data, layer.needed(self.lengths), to_device=True)
        fetcher.mark_ready(buffer)
        buffer.holds, self._staged[i] = held, {**self.layers[i], **staged}
        return buffer

    def _in_buffer(self, layer: L, buffer: StagingBuffer, step: Step, storage: StagedStorage) -> L:
        """The layer with tensors in a buffer: the same slots, for the rows of the pass."""
        host = _host_storage(layer)
        data: Fields = {}
        for name, tensor in layer.data.items():
            if tensor.dim() == 1:
                data[name] = step.take(tensor)
            else:
                shape = (len(self.rows), *host.by_slot(tensor).shape[1:])
                data[name] = host.by_slot(buffer.take(shape, tensor.dtype))
        staged = layer._with(data)
        staged.storage = storage
        return staged

    # -- at commit -------------------------------------------------------------------------------------------------

    def leave(self, key: Key, left: object) -> object:
        """What a layer leaves for commit; its large tensors are copied to the host until then."""
        layer = self.layers[key[0]][key[1]]
        return layer.offload(left, self) if on_host(layer) else left

    def copy_to_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Starts copying a tensor into new host memory."""
        new = host_tensor(tensor.shape, dtype, self.fetcher.device)
        tensor = tensor.to(dtype).contiguous()
        with self.fetcher.on_copy_stream():
            new.copy_(tensor, non_blocking=self.fetcher.stream is not None)
        self._keep_until_copied(tensor)
        self.fetcher.moved_out += tensor.nbytes
        return new

    def stage(self, layer: L, step: Step, reads: SlotRuns) -> L:
        """The layer in a buffer once more, with these runs of slots copied to it."""
        fetcher = self.fetcher
        buffer = fetcher.spare()
        buffer.clear()
        staged = self._in_buffer(layer, buffer, step, StagedStorage())
        with fetcher.on_copy_stream():
            self._copy(layer, staged.data, reads, to_device=True)
        fetcher.mark_ready(buffer)
        fetcher.wait(buffer)
        fetcher.current = buffer
        return staged

    def write_back(self, layer: Layer, staged: Fields, runs: SlotRuns) -> None:
        """Starts copying these runs of slots from the device to the host."""
        with self.fetcher.on_copy_stream():
            self._copy(layer, staged, runs, to_device=False)
        for name in runs:
            self._keep_until_copied(staged[name])

    def _keep_until_copied(self, tensor: Tensor) -> None:
        if self.fetcher.stream is not None:
            tensor.record_stream(self.fetcher.stream)

    def _copy(self, layer: Layer, staged: Fields, parts: SlotRuns, to_device: bool) -> None:
        storage, fetcher = _host_storage(layer), self.fetcher
        for name, runs in parts.items():
            host, device = storage.by_slot(layer.data[name]), storage.by_slot(staged[name])
            if self.all_rows and runs == [(row, 0, host.shape[1]) for row in range(len(host))]:
                pairs = [(host, device)]
            else:
                pairs = [(host[self.rows[row], a:b], device[row, a:b]) for row, a, b in runs if a < b]
            for host_part, device_part in pairs:
                source, target = (host_part, device_part) if to_device else (device_part, host_part)
                target.copy_(source, non_blocking=fetcher.stream is not None)
                if to_device:
                    fetcher.moved_in += host_part.nbytes
                else:
                    fetcher.moved_out += host_part.nbytes


class StagedStorage(Storage):
    """In a staging buffer, for the rows of one pass. In a pass, tokens that a layer writes are also copied to the host.

    staged_pass, layer   the pass, and the layer on the host; None at commit, which copies back itself
    """

    def __init__(self, staged_pass: StagedPass | None = None, layer: Layer | None = None) -> None:
        self.staged_pass, self.layer = staged_pass, layer

    def take(self, step: Step, tensor: Tensor) -> Tensor:
        return tensor

    def put(self, step: Step, tensor: Tensor, new: Tensor) -> None:
        tensor.copy_(new)

    def rows(self, step: Step) -> Tensor:
        return torch.arange(len(step.before), device=step.before.device)

    def read_run(self, data: Fields, step: Step, first: int, end: int) -> Fields:
        return {name: store[..., first:end, :] for name, store in data.items()}

    def write_run(self, data: Fields, step: Step, start: int, new: Fields) -> None:
        for name, store in data.items():
            store[..., start : start + new[name].shape[-2], :].copy_(new[name])
        self._write_through(data)

    def read(self, data: Fields, rows: Tensor, slots: Tensor) -> Fields:
        here = torch.arange(len(slots), device=slots.device)
        return {name: read_slots(store, here, slots) for name, store in data.items()}

    def write(self, data: Fields, rows: Tensor, slots: Tensor, new: Fields) -> None:
        here = torch.arange(len(slots), device=slots.device)
        for name, store in data.items():
            write_slots(store, here, slots, new[name])
        self._write_through(data)

    def _write_through(self, data: Fields) -> None:
        if self.staged_pass is not None and self.layer is not None:
            written = self.layer.written(self.staged_pass.lengths, self.staged_pass.counts)
            self.staged_pass.write_back(self.layer, data, written)


def _host_storage(layer: Layer) -> HostStorage:
    assert isinstance(layer.storage, HostStorage)
    return layer.storage
