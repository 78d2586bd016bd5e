"""Rotary position embedding: pairs of numbers turned by an angle that grows with the position.

A table (cos, sin), each [B, T, D/2] in float32, is made once a pass from the true positions and used by every layer.
Turning itself is `lamina.attention.rotary`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lamina import kernels
from lamina.attention.rotary import RopeTable, rotate, rotate_neighbours
from lamina.config import Config
from lamina.errors import InputError

NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
}
"""What a rotary type cannot do without."""


def rope_parameters(config: Config, base: float = 10_000.0) -> dict[str, Any]:
    """The rotary settings, whether the file keeps them together or as `rope_theta` and `rope_scaling`."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    for name, default in (("rope_theta", base), ("partial_rotary_factor", 1.0)):
        if found.get(name) is None:
            found[name] = config.get(name, default)
    found["rope_type"] = found.get("rope_type", found.get("type", "default"))
    read = Config(found | {"model_type": "rotary positions"})
    for name in found:  # every value is looked at once, so that it is refused here by name
        read.get(name)
    for name in NEEDED.get(read.rope_type, ()):
        getattr(read, name)
    return found


POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")


def positions_of(config: Config) -> int | None:
    """How many positions a checkpoint was made for, as its configuration says; None where it does not.

    Files of llama3 and longrope name the stretched length themselves. With linear, dynamic and yarn scaling many name
    the length from before: it is `factor` times the original one, or what is named if that is more.

    >>> positions_of(Config({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}))
    16384
    """
    named = next((n for name in POSITIONS if isinstance(n := config.get(name), int) and n > 0), None)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if named is None or rope.get("rope_type", rope.get("type")) not in ("linear", "dynamic", "yarn"):
        return named
    return max(named, round((rope.get("original_max_position_embeddings") or named) * (rope.get("factor") or 1)))


class Rotary(nn.Module):
    """Makes the table for some positions.

    dim         how many numbers of a head are turned
    settings    as `rope_parameters` returns them; types default, linear, llama3 and yarn
    """

    def __init__(self, dim: int, settings: dict[str, Any], max_positions: int | None = None) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise InputError(f"rotary positions turn pairs of numbers, and {dim} of a head cannot be paired")
        self.dim, self.settings, self.max_positions = dim, settings, max_positions
        self.scale = 1.0
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.empty(dim // 2), persistent=False)
        if not self.frequencies.is_meta:
            self.reset_buffers()

    def reset_buffers(self) -> None:
        self.frequencies, self.scale = frequencies(self.dim, self.settings, self.max_positions)

    def forward(self, positions: Tensor) -> RopeTable:
        if kernels.on():
            from lamina.kernels.attention.rope_append import rotary_table  # imports Triton

            return rotary_table(positions, self.frequencies, self.scale)
        angles = positions[..., None].float() * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale


def frequencies(dim: int, parameters: dict[str, Any], max_positions: int | None) -> tuple[Tensor, float]:
    """The angle per position of each pair [dim / 2], and a factor on cos and sin."""
    plain = parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match parameters["rope_type"]:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / parameters["factor"], 1.0
        case "llama3":
            return _llama3(plain, parameters), 1.0
        case "yarn":
            return _yarn(plain, dim, parameters, max_positions)
        case other:
            raise InputError(f"rotary type {other!r} is not supported; known: default, linear, llama3, yarn")


def _llama3(plain: Tensor, p: dict[str, Any]) -> Tensor:
    """Slow pairs are slowed by `factor`, fast ones kept, those between blended by their wavelength."""
    low, high, context = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / plain
    keep = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / p["factor"])


def _yarn(plain: Tensor, dim: int, p: dict[str, Any], max_positions: int | None) -> tuple[Tensor, float]:
    """Pairs that turn often within the trained context are kept, those that turn little are slowed."""
    context = p["original_max_position_embeddings"]
    factor = p.get("factor") or (max_positions or context) / context

    def pair_with_turns(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    first, last = pair_with_turns(p.get("beta_fast") or 32), pair_with_turns(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last + 0.001 if first == last else last
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    scale = p.get("attention_factor")
    if scale is None:
        some, every = p.get("mscale"), p.get("mscale_all_dim")
        scale = yarn_scale(factor, some) / yarn_scale(factor, every) if some and every else yarn_scale(factor)
    return plain * (slowed / factor + 1 - slowed), float(scale)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """How much a context stretched by `factor` sharpens attention."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


__all__ = [
    "RopeTable",
    "Rotary",
    "frequencies",
    "positions_of",
    "rope_parameters",
    "rotate",
    "rotate_neighbours",
    "yarn_scale",
]
