"""What fast_interpreter.py makes in another way is what Triton makes."""

from __future__ import annotations

from typing import Any

import pytest
import triton.language as tl
from triton.language import core
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
