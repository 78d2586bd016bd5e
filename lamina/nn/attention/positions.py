"""`Positions`: what the attention layers of a pass know about the positions of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from lamina.attention.reference import Bias
from lamina.attention.rotary import RopeTable


class Positions(NamedTuple):
    """Made once per pass by `Model.prepare`, and given to every block.

    ropes    RoPE tables by name; most models have one, called "default"
    factor   [B, T] multiplies queries (of layers that ask for it)
    bias     added to attention scores: learned relative positions, ALiBi
    """

    ropes: Mapping[str, RopeTable] = MappingProxyType({})
    factor: Tensor | None = None
    bias: Bias | None = None
