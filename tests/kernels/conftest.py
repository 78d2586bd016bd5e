"""Kernels run on the CPU, through Triton's interpreter (TRITON_INTERPRET=1, see tests/conftest.py).

What the interpreter of Triton 3.6 gets wrong is put right here: loops over a number that a kernel was given (NumPy 2.4
turns only arrays of no dimension into an int), bfloat16 rounded towards zero, and products of bfloat16 matrices. And it
prepares the language in every call of a function inside a kernel; here it is done once, which saves half of all time
(`fast_interpreter.py` saves more than half of the rest).
Kernels are guarded: an address that is in no tensor is an error (`guard.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from lamina.kernels.limits import INTERPRETER
from lamina.runtime.eligibility import why_not_read
from tests.kernels import fast_interpreter, guard

patch_tensor = interpreter._patch_lang_tensor
convert = interpreter._convert_float
dot = interpreter.InterpreterBuilder.create_dot


def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def convert_to_nearest(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """bfloat16 is the upper half of a float32; halfway cases go to the even neighbour."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return x.astype(np.uint32) << 16
    if (source, target) == (tl.float32, tl.bfloat16):
        bits = x.view(np.uint32)
        rounded = bits + 0x7FFF + (bits >> 16 & 1)
        return (np.where(np.isnan(x), bits | 0x400000, rounded) >> 16).astype(np.uint16)
    return convert(x, source, target, rounding)


def dot_in_float32(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    return dot(self, in_float32(a), in_float32(b), d, *options)


def in_float32(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    wide = convert_to_nearest(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


prepare = interpreter._patch_lang


def prepare_once(fn: Any) -> Any:
    """A launch prepares `tl` and puts it back; `tl.core`, which only functions of Triton's own name, stays prepared."""
    langs = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    return prepare(fn) if any(tl.core.is_builtin(lang.load) for lang in langs) else interpreter._LangPatchScope()


interpreter._patch_lang = prepare_once
interpreter._patch_lang_tensor = patch_tensor_with_index
interpreter._convert_float = convert_to_nearest
interpreter.InterpreterBuilder.create_dot = dot_in_float32
guard.watch()
fast_interpreter.install()


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a small device: a program more is a long wait in the interpreter."""
    monkeypatch.setattr("lamina.kernels.limits.INTERPRETER", replace(INTERPRETER, multiprocessors=4))


@pytest.fixture
def passes_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of several tokens are captured ones wherever kernels could do them, as if the model were on a GPU."""
    monkeypatch.setattr("lamina.generation.feed.why_no_passes", lambda model, cache: why_not_read(cache))
