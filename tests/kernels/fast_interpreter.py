"""Triton's interpreter with less work per operation: the same values, types and errors in less than half of the time.

Triton 3.6 makes the description of a value (its shape as a tuple of constants, the type of that tuple, its name) anew
for every result of every operation, although few shapes exist. Here each is made once, or when it is first asked for.
It also checks integer sums for overflow where nobody looks at the answer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

get_np_dtype = interpreter._get_np_dtype
unwrap = core._unwrap_if_constexpr
_np_dtypes: dict[str, np.dtype] = {}
_blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_NO_SHAPE = (core.constexpr(1), core.tuple([]))


def np_dtype(dtype: Any) -> np.dtype:
    """As the interpreter's own, which makes a dictionary of all dtypes in each call."""
    element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
    if (found := _np_dtypes.get(element.name)) is None:
        found = _np_dtypes[element.name] = get_np_dtype(element)
    return found


def make_tuple(self: Any, args: Any, type: Any = None) -> None:
    self.values = [*args]
    if type is not None:
        self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)


def tuple_attribute(self: Any, name: str) -> Any:
    if name == "type":
        self.type = core._type_for_tuple_values(self.values)
        return self.type
    return self.values[self.type.fields.index(name)]


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([unwrap(size) for size in shape])
    if (found := _blocks.get(sizes)) is None or not all(type(size) is int for size in sizes):  # 2.0 is no size
        make_type(self, element_ty, shape)
        found = _blocks[sizes] = self.shape, self.numel, str(self.shape)
    self.element_ty = element_ty
    self.shape, self.numel, text = found
    self.name = f"<{text}, {element_ty}>"


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if not type.is_block():
        self.numel, self.shape = _NO_SHAPE
        return
    sizes = tuple(type.shape.values)
    if (found := _shapes.get(sizes)) is None:
        found = core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])
        _shapes[sizes] = found
    self.numel, self.shape = found


def check_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """Without `debug` the check computes every integer sum a second time and forgets the answer."""
    if self.builder.options.debug:
        sanitize(self, lhs, rhs, binary_op)


make_type = core.block_type.__init__
sanitize = TritonSemantic.binary_op_sanitize_overflow_impl


def install() -> None:
    interpreter._get_np_dtype = np_dtype
    core.tuple.__init__, core.tuple.__getattr__ = make_tuple, tuple_attribute
    core.block_type.__init__ = make_block_type
    assert tl.tensor is core.tensor
    core.tensor.__init__ = make_tensor
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
