"""Recurrent states at rest: while nobody continues a row, its states may be kept in fewer bits.

A state that computes is exact (at least float32). One that waits, in a file or in a prefix store, can be rounded to
bfloat16, which halves it; it is taken back into the exact dtype when the row goes on. Only what a whole past is folded
into is rounded (`Layer.states`): tokens, logs of inputs and all else stay as they are.
"""

from __future__ import annotations

import difflib
from typing import TypeVar

import torch
from torch import Tensor

from lamina.cache.layers.base import Layer
from lamina.errors import InputError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
L = TypeVar("L", bound=Layer)


def idle_dtype(states: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of that name; None keeps states exact."""
    name = str(states).removeprefix("torch.")
    if states is None or name in DTYPES:
        return None if states is None else DTYPES[name]
    near = difflib.get_close_matches(name, DTYPES, n=1, cutoff=0.0)
    raise InputError(
        f"states={states!r}: the nearest that there is is {near[0]!r}. States at rest are kept in "
        f"{', '.join(DTYPES)}, or exactly with None"
    )


def idle(layer: L, dtype: torch.dtype | None) -> L:
    """The layer with its states in this dtype, where that is smaller."""
    if dtype is None or not layer.states:
        return layer
    return layer._with({name: tensor.to(as_kept(layer, name, tensor, dtype)) for name, tensor in layer.data.items()})


def as_kept(layer: Layer, name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor of a layer is kept at rest."""
    smaller = dtype is not None and name in layer.states and dtype.itemsize < tensor.itemsize
    return dtype if smaller and dtype is not None else tensor.dtype


def idle_bytes(layer: Layer, dtype: torch.dtype | None) -> int:
    """Bytes of `idle(layer, dtype)`."""
    return sum(x.numel() * as_kept(layer, name, x, dtype).itemsize for name, x in layer.data.items())
