"""The modules that model families are built from."""

from lamina.activation import activation
from lamina.nn.attention.alibi import AlibiBias, alibi_slopes
from lamina.nn.attention.cross import CrossAttention
from lamina.nn.attention.indexer import Indexer
from lamina.nn.attention.latent import LatentAttention
from lamina.nn.attention.positions import Positions
from lamina.nn.attention.relative import RelativeBias
from lamina.nn.attention.rope_settings import rope_parameters
from lamina.nn.attention.rotary import Rotary, rotate, rotate_neighbours
from lamina.nn.attention.self_attention import SelfAttention
from lamina.nn.block import Block, Mixer, ParallelBlock, PostNormBlock
from lamina.nn.embedding import Embedding
from lamina.nn.linear import Linear
from lamina.nn.mlp import MLP, GatedMLP
from lamina.nn.moe.experts import Experts
from lamina.nn.moe.mixture import Mixture
from lamina.nn.moe.router import Choice, Router
from lamina.nn.norm import LayerNorm, Norm, RMSNorm
from lamina.nn.recurrent.channel_delta import ChannelDeltaMixer, channel_delta_names
from lamina.nn.recurrent.gated_delta import GatedDeltaMixer
from lamina.nn.recurrent.gated_norm import GatedRMSNorm
from lamina.nn.recurrent.lightning import LightningMixer
from lamina.nn.recurrent.mamba import MambaMixer, mamba_names
from lamina.nn.recurrent.mamba2 import Mamba2Mixer, mamba2_names
from lamina.nn.recurrent.rg_lru import RGLRUMixer, rg_lru_names
from lamina.nn.recurrent.rwkv import ChannelMixer, TimeMixer, rwkv_names
from lamina.nn.recurrent.short_conv import ShortConvolution
from lamina.nn.recurrent.zamba import ZambaMixer, zamba_names
from lamina.nn.sinusoids import Sinusoids

__all__ = [
    "MLP", "AlibiBias", "Block", "ChannelDeltaMixer", "ChannelMixer", "Choice", "CrossAttention", "Embedding",
    "Experts", "GatedDeltaMixer", "GatedMLP", "GatedRMSNorm", "Indexer", "LatentAttention", "LayerNorm",
    "LightningMixer", "Linear", "Mamba2Mixer", "MambaMixer", "Mixer", "Mixture", "Norm", "ParallelBlock", "Positions",
    "PostNormBlock", "RGLRUMixer", "RMSNorm", "RelativeBias", "Rotary", "Router", "SelfAttention", "ShortConvolution",
    "Sinusoids", "TimeMixer", "ZambaMixer", "activation", "alibi_slopes", "channel_delta_names", "mamba2_names",
    "mamba_names", "rg_lru_names", "rope_parameters", "rotate", "rotate_neighbours", "rwkv_names", "zamba_names",
]  # fmt: skip
