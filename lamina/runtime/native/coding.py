"""How a codec quantizes a field of an entry, as native kernels take it (`Coding` in src/coded.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from lamina.cache.codec.formats import FieldFormat
from lamina.native.arguments import CodingArgs, pointer

LAYOUTS = {8: 8, 6: 6, 5: 5, 4: 4, "fp8": 9}
"""Layouts of codes (`FieldFormat.kernel_layout`) by the number that kernels know them by."""


class FieldCoding:
    """The struct of one field, or none where the field is not quantized.

    address   of the struct, or None
    kept      what the kernel reads there
    """

    def __init__(self, form: FieldFormat | None, dim: int) -> None:
        self.address: int | None = None
        self.kept: tuple[Any, ...] = ()
        if form is not None:
            mean = None if form.key_mean is None else form.key_mean.float().contiguous()
            layout = LAYOUTS[form.kernel_layout]
            struct = CodingArgs(mean=pointer(mean), layout=layout, rotate=form.rotation is not None, dim=dim)
            self.address, self.kept = ctypes.addressof(struct), (struct, mean)


def why_no_coding(formats: Mapping[str, FieldFormat]) -> str | None:
    """Why no native kernel reads and writes fields in these formats."""
    for form in formats.values():
        if form.kernel_layout not in LAYOUTS:
            return f"no kernel reads the format {form.name!r}; there are kernels for 8, 6, 5 and 4 bits, fp8 and plain"
    return None
