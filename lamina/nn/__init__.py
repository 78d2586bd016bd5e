"""The blocks that families are built from."""

from lamina.nn.activation import activation
from lamina.nn.attention import SelfAttention
from lamina.nn.mlp import GatedMLP
from lamina.nn.norm import RMSNorm
from lamina.nn.rotary import Rotary, rope_parameters, rotate, rotate_neighbours

__all__ = [
    "GatedMLP", "RMSNorm", "Rotary", "SelfAttention", "activation", "rope_parameters", "rotate", "rotate_neighbours",
]  # fmt: skip
