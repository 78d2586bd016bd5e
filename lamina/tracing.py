"""What code must know while a program is traced whose sizes vary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_portable = False


def surely(condition: bool) -> bool:
    """The condition itself. While a program is exported: True only if it holds for all sizes that the program takes.

    A plain `if` on such a size would fix the program to the size of the example. Both branches must compute the same.

    >>> surely(2 < 3)
    True
    """
    if not torch.compiler.is_exporting():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # which takes long to import

    return statically_known_true(condition)


def portable() -> bool:
    """True while a program is traced for a runtime that has arithmetic alone: no bits, no float8, no grouped products.

    >>> portable()
    False
    """
    return _portable


@contextmanager
def portable_operations(wanted: bool = True) -> Iterator[None]:
    """Makes `portable` True inside."""
    global _portable
    before, _portable = _portable, wanted
    try:
        yield
    finally:
        _portable = before


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype. Like `x.to(dtype)`, which would be two operations of a traced program even if nothing changes.

    >>> cast(torch.zeros(1, dtype=torch.int32), torch.float32).dtype
    torch.float32
    """
    return x if x.dtype == dtype else x.to(dtype)
