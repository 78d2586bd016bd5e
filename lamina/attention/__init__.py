"""Attention: which keys a query may see (`Window`, `View`), and the computation (`attention`).

A `View` states visibility once per pass, as a rule over positions. Each backend lowers it as late as possible: to
nothing, to `is_causal`, to a boolean mask or to a FlexAttention block mask. `reference_attention` is the slow, readable
form that every backend is compared with.
"""

from __future__ import annotations

from lamina.attention import query_blocks as query_blocks  # offers its backend
from lamina.attention.core import BACKENDS, attention
from lamina.attention.reference import reference_attention
from lamina.attention.torch_backends import probabilities
from lamina.attention.view import View, both, either
from lamina.attention.window import Chunked, Full, Near, Sliding, Window

__all__ = [
    "BACKENDS",
    "Chunked",
    "Full",
    "Near",
    "Sliding",
    "View",
    "Window",
    "attention",
    "both",
    "either",
    "probabilities",
    "reference_attention",
]
