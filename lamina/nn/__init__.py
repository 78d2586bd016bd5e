"""The blocks that families are built from."""

from lamina.activation import activation
from lamina.nn.attention import SelfAttention
from lamina.nn.conv import ShortConvolution
from lamina.nn.cross import CrossAttention
from lamina.nn.embedding import Embedding
from lamina.nn.experts import Experts
from lamina.nn.gated_delta import GatedDeltaMixer
from lamina.nn.gated_norm import GatedRMSNorm
from lamina.nn.linear import Linear
from lamina.nn.mamba2 import Mamba2Mixer, mamba2_names
from lamina.nn.mixture import Mixture
from lamina.nn.mlp import MLP, GatedMLP
from lamina.nn.norm import RMSNorm
from lamina.nn.relative import RelativeBias
from lamina.nn.rotary import Rotary, rope_parameters, rotate, rotate_neighbours
from lamina.nn.router import Choice, Router

__all__ = [
    "MLP", "Choice", "CrossAttention", "Embedding", "Experts", "GatedDeltaMixer", "GatedMLP", "GatedRMSNorm", "Linear",
    "Mamba2Mixer", "Mixture", "RMSNorm", "RelativeBias", "Rotary", "Router", "SelfAttention", "ShortConvolution",
    "activation", "mamba2_names", "rope_parameters", "rotate", "rotate_neighbours",
]  # fmt: skip
