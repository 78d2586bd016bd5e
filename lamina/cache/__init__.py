"""The layered cache: what a model remembers, where each token is stored, and the verbs on it."""

from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codec
from lamina.cache.codec.formats import Field, FieldFormat
from lamina.cache.codec.registry import register_format, unregister_format
from lamina.cache.layers.base import Layer
from lamina.cache.layers.cross import Source
from lamina.cache.memory import Memory
from lamina.cache.pool.pool import Pool
from lamina.cache.spec import (
    Attention,
    Convolution,
    Cross,
    IndexKeys,
    Keeping,
    Latent,
    Recurrent,
    Shared,
    SharedIndex,
    Spec,
    Tokens,
)
from lamina.cache.step import Step

__all__ = [
    "Attention", "Cache", "Codec", "Convolution", "Cross", "Field", "FieldFormat", "IndexKeys", "Keeping", "Latent",
    "Layer", "Memory", "Pool", "Recurrent", "Shared", "SharedIndex", "Source", "Spec", "Step", "Tokens",
    "register_format", "unregister_format",
]  # fmt: skip
