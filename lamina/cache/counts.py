"""Numbers per row given from outside: one, a list, or a tensor.

Lists and CPU tensors are checked at once. A tensor on another device is not read: it is clamped, a flag on the device
says whether that changed anything, and the host goes on with bounds.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.errors import InputError

Numbers = int | Sequence[int] | Tensor


def whole(name: str, value: Any) -> int:
    """A whole number from outside as an int; anything else, True and 2.0 included, is refused by its name.

    >>> whole("rows", 2)
    2
    """
    if type(value) is int:
        return value
    truth = isinstance(value, bool) or getattr(value, "dtype", None) in (bool, torch.bool)
    try:
        if truth:
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name}={value!r}: it must be a whole number") from None


def listed(name: str, values: Any) -> list[int]:
    """Whole numbers from outside as a list: those of a sequence or of a tensor with one axis."""
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise InputError(f"{name} must be whole numbers, not {values.dtype}")
        if values.dim() != 1:
            raise InputError(f"{name} must have one axis, not shape {tuple(values.shape)}")
        return values.tolist()
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
        raise InputError(f"{name}={values!r}: it must be whole numbers, in a list or a tensor")
    return [n if type(n) is int else whole(name, n) for n in values]


@dataclass
class Counts:
    """One number a row: the tensor, what the host knows of it, and (device tensors) whether it was out of range."""

    tensor: Tensor
    low: list[int]
    high: list[int]
    out_of_range: Tensor | None = None

    @staticmethod
    def of(
        value: Numbers,
        rows: int,
        most: int | list[int] | None,
        device: torch.device,
        what: str,
        most_tensor: Tensor | None = None,
    ) -> Counts:
        """Reads `value` for that many rows, each between 0 and `most`."""
        tops = most if isinstance(most, list) else [most] * rows
        if isinstance(value, Tensor) and value.dim() == 0:
            value = value.expand(rows)
        if isinstance(value, Tensor) and value.device.type != "cpu":
            if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
                raise InputError(f"{what} must be whole numbers, not {value.dtype}")
            if value.shape != (rows,):
                raise InputError(
                    f"{what} must have one number for each of the {rows} rows, not shape {tuple(value.shape)}"
                )
            highest = [2**62 if top is None else top for top in tops]
            ceiling = on_device(highest, device) if most_tensor is None else most_tensor
            clamped = torch.minimum(value.to(device, torch.int64).clamp(min=0), ceiling)
            return Counts(clamped, [0] * rows, highest, (clamped != value).any())
        several = isinstance(value, Sequence | Tensor) or hasattr(value, "__iter__")
        numbers = listed(what, value) if several else [whole(what, value)] * rows
        if len(numbers) != rows:
            raise InputError(f"{what} must have one number for each of the {rows} rows, not {len(numbers)}: {numbers}")
        for row, (number, top) in enumerate(zip(numbers, tops, strict=True)):
            if number < 0 or (top is not None and number > top):
                limit = "at least 0" if top is None else f"between 0 and {top}"
                raise InputError(f"{what} of row {row} is {number}; it must be {limit}")
        return Counts(on_device(numbers, device), numbers, list(numbers))

    @staticmethod
    def known(value: Numbers, rows: int, device: torch.device, what: str) -> Counts:
        """The same for numbers that the host needs at once: those on a device are read, and checked like any."""
        return Counts.of(value.cpu() if isinstance(value, Tensor) else value, rows, None, device, what)

    def read(self) -> list[int]:
        """The numbers themselves; asks the device when the host is not sure."""
        if self.low != self.high:
            self.low = self.tensor.tolist()
            self.high = list(self.low)
        return self.low


def row_numbers(rows: int | Sequence[int] | Tensor, total: int) -> list[int]:
    """Checked row numbers: one, several, or a tensor that is True for the rows that are meant."""
    if isinstance(rows, Tensor) and rows.dtype == torch.bool:
        if rows.shape != (total,):
            raise InputError(f"rows is a mask of shape {tuple(rows.shape)}: it must be one of the {total} rows")
        return rows.nonzero()[:, 0].tolist()
    if isinstance(rows, Tensor):
        rows = rows.reshape(-1)
    several = isinstance(rows, Tensor) or hasattr(rows, "__iter__")
    numbers = listed("rows", rows) if several else [whole("rows", rows)]
    for row in numbers:
        if not 0 <= row < total:
            raise InputError(f"there is no row {row}: the cache has rows 0 to {total - 1}")
    return numbers
