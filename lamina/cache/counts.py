"""Numbers per row given from outside: one, a list, or a tensor.

Lists and CPU tensors are checked at once. A tensor on another device is not read: it is clamped, a flag on the device
says whether that changed anything, and the host goes on with bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.errors import InputError

Numbers = int | Sequence[int] | Tensor


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
            if value.shape != (rows,):
                raise InputError(
                    f"{what} must have one number for each of the {rows} rows, not shape {tuple(value.shape)}"
                )
            highest = [2**62 if top is None else top for top in tops]
            ceiling = on_device(highest, device) if most_tensor is None else most_tensor
            clamped = torch.minimum(value.to(device, torch.int64).clamp(min=0), ceiling)
            return Counts(clamped, [0] * rows, highest, (clamped != value).any())
        numbers = [value] * rows if isinstance(value, int) else [int(n) for n in value]
        if len(numbers) != rows:
            raise InputError(f"{what} must have one number for each of the {rows} rows, not {len(numbers)}: {numbers}")
        for row, (number, top) in enumerate(zip(numbers, tops, strict=True)):
            if number < 0 or (top is not None and number > top):
                limit = "at least 0" if top is None else f"between 0 and {top}"
                raise InputError(f"{what} of row {row} is {number}; it must be {limit}")
        return Counts(on_device(numbers, device), numbers, list(numbers))

    def read(self) -> list[int]:
        """The numbers themselves; asks the device when the host is not sure."""
        if self.low != self.high:
            self.low = self.tensor.tolist()
            self.high = list(self.low)
        return self.low


def row_numbers(rows: int | Sequence[int] | Tensor, total: int) -> list[int]:
    """Checked row numbers."""
    if isinstance(rows, Tensor):
        rows = rows.nonzero()[:, 0].tolist() if rows.dtype == torch.bool else rows.reshape(-1).tolist()
    numbers = [rows] if isinstance(rows, int) else [int(row) for row in rows]
    for row in numbers:
        if not 0 <= row < total:
            raise InputError(f"there is no row {row}: the cache has rows 0 to {total - 1}")
    return numbers
