"""What fast_interpreter.py makes in another way is what Triton makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.kernels import fast_interpreter as fast

TYPES = [tl.float32, tl.bfloat16, tl.int1, tl.uint8, tl.int64, tl.pointer_type(tl.float16)]


@pytest.mark.parametrize("element", TYPES, ids=str)
def test_types_and_tensors_are_those_of_triton(element: Any) -> None:
    assert interpreter._get_np_dtype is fast.np_dtype
    assert fast.np_dtype(element) == fast.get_np_dtype(element)
    for shape in ([1], [4, 8], [tl.constexpr(2), tl.constexpr(16), 1], core.tuple([8, 2])):
        theirs = object.__new__(core.block_type)
        fast.make_type(theirs, element, shape)
        for _ in range(2):  # made, and found
            ours = core.block_type(element, shape)
            assert ours == theirs and str(ours) == str(theirs) and ours.numel == theirs.numel
            assert fast.np_dtype(ours) == fast.get_np_dtype(theirs)
            tensor = core.tensor(None, ours)
            assert [size.value for size in tensor.shape] == list(theirs.shape)
            assert tensor.numel.value == theirs.numel and tensor.dtype == element and tensor.type is ours
            assert str(tensor.shape.type) == str(core._type_for_tuple_values(tensor.shape.values))
    scalar = core.tensor(None, element)
    assert len(scalar.shape) == 0 and scalar.numel.value == 1 and scalar.dtype == element


def test_what_triton_refuses_is_refused() -> None:
    for shape, problem in (([], TypeError), ([3], ValueError), ([2.0], TypeError), ([2**20, 2**10], ValueError)):
        with pytest.raises(problem):
            core.block_type(tl.float32, shape)


def test_tuples_know_their_fields() -> None:
    pair = core.tuple([tl.constexpr(1), 2], core.tuple_type([tl.int32, tl.int32], ["first", "second"]))
    assert pair.second == 2 and pair.type.fields == ["first", "second"]
    assert core.tuple([1, 2]).type == core._type_for_tuple_values([1, 2])


class Plain(TritonSemantic):
    """With Triton's own ways to a common type and shape."""

    binary_op_type_checking_impl, broadcast_impl_value = fast.common_type, fast.common_shape


SIZES: list[tuple[int, ...]] = [(), (8,), (1, 8), (4, 1), (4, 8)]
OPERANDS = [tl.int1, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64]
NUMBERS: list[Any] = [0, 3, -3, 2**31, 2**40, 0.0, 2.5, 1e300, float("nan"), True]


def operand(element: Any, sizes: tuple[int, ...], first: int) -> Any:
    data = (
        np.arange(first, first + int(np.prod(sizes, dtype=int))).astype(fast.np_dtype(element)).reshape(sizes or (1,))
    )
    return core.tensor(
        interpreter.TensorHandle(data, element), core.block_type(element, list(sizes)) if sizes else element
    )


def outcome(semantic: TritonSemantic, given: tuple[Any, Any], **how: bool) -> Any:
    try:
        found = semantic.binary_op_type_checking_impl(*given, **how)
    except Exception as error:
        return type(error), str(error)
    return [(str(one.type), one.handle.data.dtype, one.handle.dtype.name, str(one.handle.data)) for one in found]


@pytest.mark.parametrize("element", [*OPERANDS, tl.pointer_type(tl.float16)], ids=str)
def test_operands_get_the_types_shapes_and_errors_of_triton(element: Any) -> None:
    plain, quick = Plain(interpreter.interpreter_builder), TritonSemantic(interpreter.interpreter_builder)
    ways: list[dict[str, bool]] = [
        {"allow_lhs_ptr": True}, {"allow_rhs_ptr": True}, {"div_or_mod": True}, {"arithmetic_check": False},
    ]  # fmt: skip
    with np.errstate(all="ignore"):
        for sizes in SIZES:
            one = operand(element, sizes, 1)
            others = [operand(other, shape, 7) for other in OPERANDS for shape in [(), (4, 8), (2, 1)]]
            for other in [*others, *NUMBERS]:
                for how in ways:
                    for given in ((one, other), (other, one)):
                        assert outcome(quick, given, **how) == outcome(plain, given, **how), (given, how)
