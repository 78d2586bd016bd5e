"""Recurrent states in files and prefix stores, which may be rounded to fewer bits.

A state that a pass computes with is exact (float32 or wider). A state in a file or a snapshot can be rounded to
bfloat16, which halves its bytes; it is converted back when the row continues. Only tensors that summarize a row's whole
past are rounded (`Layer.states`). Tokens, logs of inputs and everything else stay exact.
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


def state_dtype(states: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of that name; None: states stay exact."""
    name = str(states).removeprefix("torch.")
    if states is None or name in DTYPES:
        return None if states is None else DTYPES[name]
    near = difflib.get_close_matches(name, DTYPES, n=1, cutoff=0.0)
    raise InputError(
        f"states={states!r}: there is no such dtype of states; the nearest is {near[0]!r}. States may be rounded to "
        f"{', '.join(DTYPES)}; None keeps them exact"
    )


def round_states(layer: L, dtype: torch.dtype | None) -> L:
    """The layer with its states in this dtype, if that is smaller than theirs."""
    if dtype is None or not layer.states:
        return layer
    return layer._with({name: x.to(stored_dtype(layer, name, x, dtype)) for name, x in layer.data.items()})


def stored_dtype(layer: Layer, name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of one tensor of `round_states(layer, dtype)`."""
    smaller = dtype is not None and name in layer.states and dtype.itemsize < tensor.itemsize
    return dtype if smaller and dtype is not None else tensor.dtype


def rounded_bytes(layer: Layer, dtype: torch.dtype | None) -> int:
    """Bytes of `round_states(layer, dtype)`."""
    return sum(x.numel() * stored_dtype(layer, name, x, dtype).itemsize for name, x in layer.data.items())
