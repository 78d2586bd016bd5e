"""Codes of quantized checkpoints, put into the order of `IntGroups`: two codes of 4 bits share a byte, 16 apart.

The functions here are the reference, in PyTorch, and what runs without a C++ compiler. `use_kernel` registers a faster
one: `lamina/native/codes.py` reads the file's memory map with all threads and writes each code once, into memory where
the weights of a joined matrix follow each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.weights.nibbles import LANES, halves_of_neighbours

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LOW = 0x0F0F0F0F  # the low half of each byte of a word
AT_ONCE = 1 << 15  # values put into order together: they stay in the CPU's cache, and PyTorch starts no threads


@dataclass(frozen=True)
class StoredCodes:
    """Codes of a matrix [out, in] as a file has them.

    words   int32 [out, in · bits / 32], of each word the lowest bits first, with any strides; awq: [in, out / 8], of
            each word the outputs in `AWQ_ORDER`
    bits    8 or 4
    width   in
    order   int32 [in]: column j of the result is column order[j] of the matrix; None: as they are stored
    signed  8 bits alone: the result is signed, that is codes minus 128
    """

    words: Tensor
    bits: int
    width: int
    order: Tensor | None = None
    awq: bool = False
    signed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result: [out, bytes of a row]."""
        return self.words.shape[1] * 8 if self.awq else self.words.shape[0], self.width * self.bits // 8


Room = Callable[[int, int], Tensor]
"""(rows, bytes of a row) -> uint8 memory of this shape, to be filled"""

Kernel = Callable[[StoredCodes, Room], Tensor | None]
"""(codes, where to put them) -> uint8 [out, in · bits / 8]; None if it does not serve them"""

_kernel: Kernel | None = None


def use_kernel(kernel: Kernel | None) -> Kernel | None:
    """Codes are put into order by `kernel` from now on, where it does not return None; -> the one before.

    >>> before = use_kernel(None)                        # PyTorch alone
    >>> use_kernel(before)
    """
    global _kernel
    before, _kernel = _kernel, kernel
    return before


def empty_codes(rows: int, width: int) -> Tensor:
    return torch.empty(rows, width, dtype=torch.uint8)


def in_order(codes: StoredCodes, room: Room | None = None) -> Tensor:
    """uint8 [out, in · bits / 8], as `IntGroups` has them. room: memory that a kernel puts them into

    >>> words = torch.tensor([[0x76543210, 0, 0x0000BA98, 0]], dtype=torch.int32)
    >>> [hex(byte) for byte in in_order(StoredCodes(words, 4, 32))[0, :4].tolist()]
    ['0x80', '0x91', '0xa2', '0xb3']
    """
    if _kernel is not None and (done := _kernel(codes, room or empty_codes)) is not None:
        return done
    return in_order_by_torch(codes)


def in_order_by_torch(codes: StoredCodes) -> Tensor:
    if codes.awq:
        return codes_of_awq(codes.words)
    if codes.order is not None:
        found = codes_in_order(codes.words.T, codes.bits, codes.order)
    else:
        found = codes_along_inputs(codes.words, codes.bits)[:, : codes.shape[1]]
    return other_sign(found) if codes.signed else found


def codes_along_inputs(words: Tensor, bits: int) -> Tensor:
    """int32 [out, in · bits / 32], of each word the lowest bits first -> codes uint8 [out, in · bits / 8]"""
    values = words.contiguous().view(torch.uint8)
    return halves_of_neighbours(values) if bits == 4 else values


def other_sign(codes: Tensor) -> Tensor:
    """Bytes plus 128 as signed ones, and the reverse."""
    return codes if codes.is_meta else codes ^ 128


def codes_in_order(words: Tensor, bits: int, order: Tensor) -> Tensor:
    """The same of words [in · bits / 32, out]; column j of the codes is column order[j] of the weight."""
    each, width = 32 // bits, len(order)
    codes = words.new_empty(width * bits // 8, words.shape[1], dtype=torch.uint8)
    if words.is_meta:
        return codes.T.contiguous()
    columns = AT_ONCE // LANES
    for some, into in zip(order.split(LANES), codes.split(LANES * bits // 8), strict=True):
        place, shift = some // each, (some % each * bits)[:, None]
        for start in range(0, words.shape[1], columns):
            values = words[:, start : start + columns].index_select(0, place).bitwise_right_shift_(shift)
            rows = values.bitwise_and_((1 << bits) - 1).to(torch.uint8)  # [32, columns]
            if bits == 4:
                rows = rows[: LANES // 2] | rows[LANES // 2 :] << 4
            into[:, start : start + columns] = rows
    return codes.T.contiguous()


def codes_of_awq(words: Tensor) -> Tensor:
    """int32 [in, out / 8], of each word the outputs in `AWQ_ORDER` -> codes uint8 [out, in / 2]"""
    width, eighth = words.shape
    halves = words.new_empty(2, width // 2, eighth)  # of each word half bytes 2k in byte k, and half bytes 2k + 1
    codes = words.new_empty(eighth, 8, width // 2, dtype=torch.uint8)
    if words.is_meta:
        return codes.flatten(0, 1)
    pairs = words.unflatten(0, (-1, 2, LANES // 2))  # [in / 32, inputs that share bytes, 16, out / 8]
    each = max(AT_ONCE // (LANES * eighth), 1)
    for some, into in zip(pairs.split(each), halves.unflatten(1, (-1, LANES // 2)).split(each, 1), strict=True):
        first, second = some.unbind(1)
        into[0] = (second & LOW).bitwise_left_shift_(4).bitwise_or_(first & LOW)
        into[1] = (first >> 4).bitwise_and_(LOW).bitwise_or_(second & ~LOW)
    each = max(AT_ONCE // width, 1)
    for i, half in enumerate(halves):
        across = half.T.contiguous()  # [out / 8, in / 2]; PyTorch transposes whole words fastest
        for words_, into in zip(across.split(each), codes.split(each), strict=True):
            for k in range(4):
                into[:, AWQ_ORDER[2 * k + i]] = words_ >> 8 * k
    return codes.flatten(0, 1)
