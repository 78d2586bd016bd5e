"""Triton's interpreter with less work per operation: the same values, types and errors in less than half of the time.

Triton 3.6 makes the description of a value (its shape as a tuple of constants, the type of that tuple, its name) anew
for every result of every operation, although few shapes exist. Here each is made once, or when it is first asked for.
It also checks integer sums for overflow where nobody looks at the answer. And it works out the common type and shape of
two operands that have the same one already, or of which one is a plain number; other operands go Triton's own way.
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
_of_shape: dict[int, tuple[Any, int, str]] = {}  # by the id of a shape that `_blocks` has
_types: dict[tuple[str, int], Any] = {}
PLAIN = frozenset({core.tensor, core.dtype, int, bool, float, str, type(None)})
FLOATS = ("fp16", "bf16", "fp32", "fp64")
TAKEN_BY = {int: frozenset({"int32", "int64", *FLOATS}), float: frozenset(FLOATS)}
"""Type of a number -> the tensors whose type it takes, if it is small enough for 32 bits."""
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
    if (found := _of_shape.get(id(shape))) is None:
        sizes = tuple([unwrap(size) for size in shape])
        if (found := _blocks.get(sizes)) is None or not all(type(size) is int for size in sizes):  # 2.0 is no size
            make_type(self, element_ty, shape)
            found = _blocks[sizes] = self.shape, self.numel, str(self.shape)
            _of_shape[id(self.shape)] = found
    self.element_ty = element_ty
    self.shape, self.numel, text = found
    self.name = f"<{text}, {element_ty}>"


def with_element_ty(self: Any, scalar_ty: Any) -> Any:
    if type(scalar_ty) is not core.dtype or id(self.shape) not in _of_shape:
        return core.block_type(scalar_ty, self.shape)
    key = scalar_ty.name, id(self.shape)
    if (found := _types.get(key)) is None:
        found = _types[key] = core.block_type(scalar_ty, self.shape)
    return found


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


def unwrap_one(o: Any) -> Any:
    kind = type(o)
    if kind in PLAIN:
        return o
    return o.value if kind is core.constexpr else unwrap(o)


def check_handle(self: Any) -> None:
    if type(self.dtype) is not core.dtype or self.data.itemsize > self.dtype.primitive_bitwidth + 7 >> 3:
        check(self)


def check_types(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    if not div_or_mod:  # which has rules of its own
        left, right = type(lhs), type(rhs)
        if left is core.tensor and type(one := lhs.dtype) is core.dtype:
            if right is core.tensor:
                if (other := rhs.dtype) is one or (type(other) is core.dtype and other.name == one.name):
                    return self.broadcast_impl_value(lhs, rhs)
            elif arithmetic_check and takes(one, right, rhs):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, one))
        elif (
            right is core.tensor and arithmetic_check and type(rhs.dtype) is core.dtype and takes(rhs.dtype, left, lhs)
        ):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        elif left is right is core.tensor and allow_lhs_ptr and is_offset(lhs.dtype, rhs.dtype):
            return self.broadcast_impl_value(lhs, rhs)
    return common_type(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def takes(dtype: Any, kind: Any, number: Any) -> bool:
    return kind in TAKEN_BY and dtype.name in TAKEN_BY[kind] and -(2**31) <= number < 2**31


def is_offset(address: Any, dtype: Any) -> bool:
    return type(address) is core.pointer_type and type(dtype) is core.dtype and dtype.is_int()


def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    left, right = lhs.type, rhs.type
    if type(left) is core.block_type:
        if type(right) is core.block_type:
            return (lhs, rhs) if left.shape is right.shape else common_shape(self, lhs, rhs)
        return lhs, splat(self, rhs, left)
    if type(right) is core.block_type:
        return splat(self, lhs, right), rhs
    return common_shape(self, lhs, rhs)


def splat(self: Any, one: Any, like: Any) -> Any:
    made = like.with_element_ty(one.type.scalar)
    return self.tensor(self.builder.create_splat(made, one.handle), made)


def patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = TritonSemantic(builder)
    inner = member.__wrapped__ if getattr(member, "__code__", None) is builtin_code else member  # which asks for it

    def new_member(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    scope.set_attr(obj, name, new_member)


builtin_code = core.builtin(lambda: None).__code__
make_type = core.block_type.__init__
check = interpreter.TensorHandle.__post_init__
common_type, common_shape = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
sanitize = TritonSemantic.binary_op_sanitize_overflow_impl


def install() -> None:
    interpreter._get_np_dtype = np_dtype
    core.tuple.__init__, core.tuple.__getattr__ = make_tuple, tuple_attribute
    core.block_type.__init__, core.block_type.with_element_ty = make_block_type, with_element_ty
    core._unwrap_if_constexpr = unwrap_one
    interpreter._patch_attr = patch_attribute
    interpreter.TensorHandle.__post_init__ = check_handle
    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = check_types, broadcast
    assert tl.tensor is core.tensor
    core.tensor.__init__ = make_tensor
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
