"""Products y = x Wᵀ with packed weights on the CPU: the interface of `src/products.h` for Python.

`Product` describes one product, `declare` types the functions of a loaded library, and `multiply` computes a product of
tensors with threads of its own: for tests and measurements. The recorded step calls the same functions without Python.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

from lamina.errors import InputError
from lamina.native.build import load

FORMATS: dict[str, int] = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "fp8": 3,
    "int8": 4,
    "int4": 5,
    **{name: 10 + i for i, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))},
    **{name: 15 + i for i, name in enumerate(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"))},
    **{name: 20 + i for i, name in enumerate(("IQ4_NL", "IQ4_XS", "MXFP4"))},
}
"""`enum Format` of products.h."""

SCALE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""`enum ScaleType` of products.h."""


class Product(ctypes.Structure):
    """`struct Product` of products.h. Pointers are not owned: the tensors behind them must outlive every call."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("format", "activations")),
        *((name, ctypes.c_int64) for name in ("out", "in_", "rows", "group")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "x")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("qx", "qx_scales", "qx_sums", "y")),
        ("y_stride", ctypes.c_int64),
        ("scale_type", ctypes.c_int32),
        ("scale_out", ctypes.c_int64),
    ]


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Sets the argument and result types of the functions of products.h."""
    int64, pointer, text = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("lamina_product", None, [pointer, int64, int64]),
        ("lamina_product_check", text, [pointer]),
        ("lamina_dequantize", None, [pointer, int64, int64, pointer]),
        ("lamina_quantize_rows", None, [pointer, int64, int64, int64, pointer, pointer, pointer, int64, int64]),
        ("lamina_row_bytes", int64, [ctypes.c_int32, int64]),
        ("lamina_read", ctypes.c_uint64, [pointer, int64]),
        ("lamina_isa", text, []),
        ("lamina_set_isa", ctypes.c_int, [text]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def products() -> ctypes.CDLL:
    """The native library, built if necessary, with the functions of products.h declared."""
    return declare(load())


def describe(
    format: str,
    shape: tuple[int, int],
    codes: torch.Tensor,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    group: int = 0,
    scale_out: int = 0,
) -> Product:
    """The weight's fields of a `Product`; `group` and `scale_out` as in products.h."""
    return Product(
        format=FORMATS[format],
        out=shape[0],
        in_=shape[1],
        group=group,
        codes=codes.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        zeros=None if zeros is None else zeros.data_ptr(),
        scale_type=0 if scales is None else SCALE_TYPES[scales.dtype],
        scale_out=scale_out,
    )


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 codes [rows, in], scales [rows, in/32] and sums [rows, in/16] of float32 activations x [rows, in].

    >>> import torch
    >>> from lamina.native.products import quantize
    >>> quantize(torch.ones(1, 32))[0].unique().tolist()
    [127]
    """
    rows, inputs = x.shape
    codes = torch.empty(rows, inputs, dtype=torch.int8)
    scales, sums = torch.empty(rows, inputs // 32), torch.empty(rows, inputs // 16, dtype=torch.int32)
    pointers = (codes.data_ptr(), scales.data_ptr(), sums.data_ptr())
    products().lamina_quantize_rows(x.data_ptr(), rows, inputs, x.stride(0), *pointers, 0, rows * (inputs // 32))
    return codes, scales, sums


def multiply(weight: Product, x: torch.Tensor, activations: str = "int8", threads: int = 1) -> torch.Tensor:
    """y = x Wᵀ [rows, out] for float32 activations x [rows, in], computed in int8 or float32."""
    library = products()
    x = x.contiguous()
    y = torch.empty(x.shape[0], weight.out)
    product = Product.from_buffer_copy(weight)
    product.rows, product.y, product.y_stride = x.shape[0], y.data_ptr(), weight.out
    product.x, product.x_stride = x.data_ptr(), x.stride(0)
    product.activations = int(activations == "int8")
    if product.activations:
        codes, scales, sums = quantize(x)
        product.qx, product.qx_scales, product.qx_sums = codes.data_ptr(), scales.data_ptr(), sums.data_ptr()
    if wrong := library.lamina_product_check(ctypes.byref(product)):
        raise InputError(wrong.decode())
    if threads == 1:
        library.lamina_product(ctypes.byref(product), 0, weight.out)
        return y
    bounds = [weight.out * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for begin, end in pairwise(bounds):
            pool.submit(library.lamina_product, ctypes.byref(product), begin, end)
    return y


def dequantize(weight: Product) -> torch.Tensor:
    """The weight as float32 [out, in], by the reference."""
    values = torch.empty(weight.out, weight.in_)
    products().lamina_dequantize(ctypes.byref(weight), 0, weight.out, values.data_ptr())
    return values
