"""The limits of a GPU that kernel configurations depend on: shared memory, SMs and compute capability.

Configurations were measured on an H200. On other devices a configuration is reduced until its shared memory fits what
the device gives one program: first fewer pipeline stages, then smaller blocks (`fitted`). Registers need no such care:
every device from sm_80 on has 64 Ki per SM and 255 per thread.

    limits_of(x.device)                     queried from the driver once per device
    with assumed(CARDS[86]): …              builds for a device that is not present
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

from lamina.errors import InputError
from lamina.kernels import INTERPRETED

KIB = 1024
RESERVED = KIB  # bytes of an SM's shared memory that CUDA reserves for each program
AShape = TypeVar("AShape", bound=Any)  # a dataclass with `block` and `stages`


@dataclass(frozen=True)
class Limits:
    """The limits of one device.

    shared            bytes of shared memory that one program may use
    multiprocessors   number of SMs
    """

    capability: tuple[int, int]
    shared: int
    multiprocessors: int

    @property
    def pdl(self) -> bool:
        """Whether the device supports programmatic dependent launch (see `launch.py`)."""
        return self.capability >= (9, 0)

    @property
    def tiles_of_64(self) -> bool:
        """Whether matrix units read tiles of 64 rows from shared memory (wgmma of sm_90, tcgen05 of sm_100)."""
        return self.capability[0] in (9, 10)

    def buffers(self, stages: int, rows: int) -> int:
        """The most blocks of each load of a loop that are in shared memory at once, for products of `rows` rows.

        A loaded block is copied to registers before it is used, which frees its buffer. Products of 64 rows read it
        from shared memory instead, on devices that can, so one more buffer is in use.
        """
        return max(stages if self.tiles_of_64 and rows >= 64 else stages - 1, 1)

    def room(self, programs: int) -> int:
        """Bytes of shared memory for each of `programs` programs that share an SM.

        >>> CARDS[86].room(1) // KIB, CARDS[86].room(2) // KIB
        (99, 49)
        """
        return (self.shared + RESERVED) // programs - RESERVED


CARDS = {
    80: Limits((8, 0), 163 * KIB, 108),  # A100
    86: Limits((8, 6), 99 * KIB, 82),  # RTX 3090
    89: Limits((8, 9), 99 * KIB, 128),  # RTX 4090
    90: Limits((9, 0), 227 * KIB, 132),  # H100, H200
    100: Limits((10, 0), 227 * KIB, 148),  # B200
    120: Limits((12, 0), 99 * KIB, 170),  # RTX 5090
}
INTERPRETER = Limits((8, 0), CARDS[90].shared, CARDS[90].multiprocessors)  # without PDL

_assumed: ContextVar[Limits | None] = ContextVar("limits", default=None)


def limits_of(device: torch.device) -> Limits:
    """The limits of the device that kernels on tensors of `device` run on; those that are `assumed`, if any.

    Kernels on tensors of the meta device are not run: they are built for the current device.
    """
    assumed_limits = _assumed.get()
    if assumed_limits is not None:
        return assumed_limits
    if INTERPRETED:
        return INTERPRETER
    return _queried(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _queried(index: int) -> Limits:
    has = torch.cuda.get_device_properties(index)
    known = CARDS.get(10 * has.major + has.minor)  # for builds of PyTorch that do not report shared memory
    shared = getattr(has, "shared_memory_per_block_optin", known.shared if known else has.shared_memory_per_block)
    return Limits((has.major, has.minor), shared, has.multi_processor_count)


@contextmanager
def assumed(limits: Limits) -> Iterator[Limits]:
    """Inside, in this thread only, every device has these limits.

    >>> with assumed(CARDS[120]):
    ...     limits_of(torch.device("cuda", 3)).shared // KIB
    99
    """
    before = _assumed.set(limits)
    try:
        yield limits
    finally:
        _assumed.reset(before)


def smaller(shape: AShape, least: int = 16) -> Iterator[AShape]:
    """The shape, then variants that need less shared memory, best first, with blocks of `least` or more.

    Three stages keep one load in flight while another is used, so a smaller block is tried before fewer than three.

    >>> from lamina.kernels.attention.tiling import Tiling
    >>> [(one.block, one.stages) for one in smaller(Tiling(64, warps=4, stages=4), least=32)]
    [(64, 4), (64, 3), (32, 4), (32, 3), (64, 2), (32, 2)]
    """
    blocks = [shape.block >> i for i in range(shape.block.bit_length()) if shape.block >> i >= min(least, shape.block)]
    pairs = [(block, stages) for block in blocks for stages in range(shape.stages, min(3, shape.stages) - 1, -1)]
    if shape.stages > 2:
        pairs += [(block, 2) for block in blocks]
    return (replace(shape, block=block, stages=stages) for block, stages in pairs)


def first_fit(shapes: Iterable[AShape], need: Callable[[AShape], int], room: int) -> AShape | None:
    """The first of the shapes whose `need(shape)` bytes fit `room`; None if none does.

    >>> from lamina.kernels.attention.tiling import Tiling
    >>> first_fit(smaller(Tiling(128, warps=8, stages=4)), lambda one: one.block * one.stages * 512, 99 * KIB)
    Tiling(block=64, warps=8, stages=3)
    """
    return next((shape for shape in shapes if need(shape) <= room), None)


def fitted(shapes: Iterable[AShape], need: Callable[[AShape], int], room: int) -> AShape:
    """As `first_fit`, but raises InputError if none fits."""
    tried = list(shapes)
    found = first_fit(tried, need, room)
    if found is None:
        raise InputError(
            f"a kernel needs {min(map(need, tried))} bytes of shared memory or more, as {tried[-1]}, and the device "
            f"has {room}; decode without captured steps"
        )
    return found
