"""The dtypes a model can have, and the names by which users give them."""

from __future__ import annotations

import torch

from lamina.errors import InputError

FLOATS = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
SHORT = {
    "double": "float64", "fp64": "float64", "f64": "float64",
    "float": "float32", "fp32": "float32", "f32": "float32",
    "half": "float16", "fp16": "float16", "f16": "float16",
    "bf16": "bfloat16",
}  # fmt: skip


def float_dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that `dtype=` asks for; None for None and "auto", which are the checkpoint's own.

    >>> float_dtype("bf16"), float_dtype("torch.float32"), float_dtype(torch.float16), float_dtype("auto")
    (torch.bfloat16, torch.float32, torch.float16, None)
    """
    if given is None or (isinstance(given, str) and given.lower() == "auto"):
        return None
    if isinstance(given, str | torch.dtype):
        name = str(given).lower().removeprefix("torch.")
        if (found := FLOATS.get(SHORT.get(name, name))) is not None:
            return found
    raise InputError(
        f"dtype={given!r}: a model computes in one of {', '.join(FLOATS)} (or bf16, fp16, fp32); "
        "'auto' or None is the checkpoint's own"
    )
