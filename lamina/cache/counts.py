"""Integers per row, as callers give them: one for all rows, a list, or a tensor [B].

Lists and CPU tensors are checked immediately. A tensor on another device is not read back: it is clamped there, a flag
on the device records whether a value was out of range, and the host continues with bounds on the values.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.errors import InputError

CountsLike = int | Sequence[int] | Tensor
"""One count for all rows, or one per row."""


def check_int(name: str, value: Any) -> int:
    """Checks an argument and returns it as an int; raises InputError naming it otherwise, for True and 2.0 too.

    >>> check_int("rows", 2)
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


def check_ints(name: str, values: Any) -> list[int]:
    """Checks a sequence or 1-D tensor of integers and returns it as a list."""
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise InputError(f"{name} must be whole numbers, not {values.dtype}")
        if values.dim() != 1:
            raise InputError(f"{name} must have one axis, not shape {tuple(values.shape)}")
        return values.tolist()
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
        raise InputError(f"{name}={values!r}: it must be whole numbers, in a list or a tensor")
    return [n if type(n) is int else check_int(name, n) for n in values]


class Counts:
    """One integer per row: the tensor [B], and the host's bounds on each value.

    out_of_range   for values given on the device: True if one of them was clamped
    """

    def __init__(
        self, tensor: Tensor | torch.device, low: list[int], high: list[int], out_of_range: Tensor | None = None
    ) -> None:
        """tensor: the values [B]; or only the device, if the host knows them (`low`): they are copied at first use"""
        self._tensor, self.low, self.high, self.out_of_range = tensor, low, high, out_of_range

    @property
    def tensor(self) -> Tensor:
        if isinstance(self._tensor, torch.device):
            self._tensor = on_device(self.low, self._tensor)
        return self._tensor

    @property
    def exact(self) -> bool:
        """Whether the host knows the values."""
        return self.low == self.high

    @staticmethod
    def of(
        value: CountsLike,
        rows: int,
        most: int | list[int] | None,
        device: torch.device,
        what: str,
        most_tensor: Tensor | None = None,
    ) -> Counts:
        """Checks `value`, one integer for each of the rows, between 0 and `most`; `what` names it in errors.

        most_tensor   `most` as a tensor on the device, where the host has bounds on it only
        """
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
        numbers = check_ints(what, value) if several else [check_int(what, value)] * rows
        if len(numbers) != rows:
            raise InputError(f"{what} must have one number for each of the {rows} rows, not {len(numbers)}: {numbers}")
        for row, (number, top) in enumerate(zip(numbers, tops, strict=True)):
            if number < 0 or (top is not None and number > top):
                limit = "at least 0" if top is None else f"between 0 and {top}"
                raise InputError(f"{what} of row {row} is {number}; it must be {limit}")
        return Counts(device, numbers, list(numbers))

    @staticmethod
    def known(value: CountsLike, rows: int, device: torch.device, what: str) -> Counts:
        """The same for values that the host needs immediately: a tensor on the device is read back and checked."""
        return Counts.of(value.cpu() if isinstance(value, Tensor) else value, rows, None, device, what)

    def read(self) -> list[int]:
        """The values; read from the device if the host's bounds are not exact."""
        if not self.exact:
            self.low = self.tensor.tolist()
            self.high = list(self.low)
        return self.low


def row_indices(rows: int | Sequence[int] | Tensor, total: int) -> list[int]:
    """Checks and lists row indices: given as one, as several, or as a boolean mask [total]."""
    if isinstance(rows, Tensor) and rows.dtype == torch.bool:
        if rows.shape != (total,):
            raise InputError(f"rows is a mask of shape {tuple(rows.shape)}: it must be one of the {total} rows")
        return rows.nonzero()[:, 0].tolist()
    if isinstance(rows, Tensor):
        rows = rows.reshape(-1)
    several = isinstance(rows, Tensor) or hasattr(rows, "__iter__")
    numbers = check_ints("rows", rows) if several else [check_int("rows", rows)]
    for row in numbers:
        if not 0 <= row < total:
            raise InputError(f"there is no row {row}: the cache has rows 0 to {total - 1}")
    return numbers
