"""Kernels run on the CPU, through Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

from triton.runtime import interpreter

patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_for_numpy_2_4(tensor: Any, scope: Any) -> None:
    """Loops over a number that a kernel was given: NumPy 2.4 turns only arrays of no dimension into an int."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_tensor_for_numpy_2_4
