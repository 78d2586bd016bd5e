"""Rotary position embedding (RoPE): the cos/sin table for rotating pairs of dimensions by position · frequency.

The table (cos, sin), each [B, T, D/2] in float32, is made once per pass from the true positions and used by every
layer. `lamina.attention.rotary` rotates queries and keys by it.
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
from lamina.nn.attention.rope_settings import ORIGINAL, USED, rope_parameters


class Rotary(nn.Module):
    """Makes the cos/sin table for given positions [B, T].

    dim         how many dimensions of a head are rotated
    settings    as `rope_parameters` returns them; types default, linear, dynamic, yarn, longrope, llama3, proportional

    The frequencies of dynamic and longrope scaling depend on how long a row gets. Keys are stored rotated, so one
    length holds for all rows: the trained one, or the `context` given to `lamina.load`.
    """

    def __init__(self, dim: int, settings: dict[str, Any], max_positions: int | None = None) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            part = settings.get("partial_rotary_factor", 1.0)
            raise InputError(
                f"rotary positions rotate pairs of dimensions, and {dim} of a head cannot be paired (head_dim × "
                f"partial_rotary_factor={part})"
            )
        self.dim, self.settings, self.max_positions = dim, settings, max_positions
        self.scale = 1.0
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.empty(dim // 2), persistent=False)
        if not self.frequencies.is_meta:
            self.reset_buffers()

    @classmethod
    def of(cls, c: Config, head_dim: int, base: float = 10_000.0, **options: Any) -> Rotary:
        """The table for heads of this width; the arguments after it as in `rope_parameters`."""
        settings = rope_parameters(c, base, **options)
        proportional = settings["rope_type"] == "proportional"  # rotates all dimensions, some by zero
        dim = head_dim if proportional else int(head_dim * settings["partial_rotary_factor"])
        return cls(dim, settings, c.get("max_position_embeddings"))

    def reset_buffers(self) -> None:
        self.frequencies, self.scale = frequencies(self.dim, self.settings, self.max_positions)

    def forward(self, positions: Tensor) -> RopeTable:
        if kernels.on():
            if (native := kernels.recorder()) is not None:
                return native.rotary_table(positions, self.frequencies, self.scale)
            from lamina.kernels.attention.rope_append import rotary_table  # imports Triton

            return rotary_table(positions, self.frequencies, self.scale)
        angles = positions[..., None].float() * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale


def frequencies(dim: int, parameters: dict[str, Any], max_positions: int | None) -> tuple[Tensor, float]:
    """The frequency (angle per position) of each pair [dim / 2], and a factor on cos and sin."""
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
        case "dynamic":
            return _dynamic(dim, parameters), 1.0
        case "longrope":
            return _longrope(plain, parameters, max_positions)
        case "proportional":
            rotated = torch.arange(dim // 2) < int(parameters["partial_rotary_factor"] * dim // 2)
            return plain * rotated / (parameters.get("factor") or 1.0), 1.0
        case other:
            raise InputError(f"rope_type={other!r} is not supported; known: {', '.join(map(repr, USED))}")


def _llama3(plain: Tensor, p: dict[str, Any]) -> Tensor:
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between them by wavelength."""
    low, high, context = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / plain
    keep = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / p["factor"])


def _yarn(plain: Tensor, dim: int, p: dict[str, Any], max_positions: int | None) -> tuple[Tensor, float]:
    """Keeps the frequency of pairs that rotate many times within the trained context, divides that of others by
    `factor`, and interpolates between them."""
    context = p["original_max_position_embeddings"]
    factor = p.get("factor") or (max_positions or context) / context

    def pair_with_rotations(rotations: float) -> float:
        """The (fractional) index of the pair that makes this many full rotations within the context."""
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    first, last = pair_with_rotations(p.get("beta_fast") or 32), pair_with_rotations(p.get("beta_slow") or 1)
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


def _dynamic(dim: int, p: dict[str, Any]) -> Tensor:
    """Rows longer than the trained context rotate by a larger base, so that no frequency is new to the model."""
    trained = p[ORIGINAL]
    longest = max(p.get("longest") or trained, trained)
    growth = p["factor"] * longest / trained - (p["factor"] - 1)
    base = p["rope_theta"] * growth ** (dim / (dim - 2))
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _longrope(plain: Tensor, p: dict[str, Any], max_positions: int | None) -> tuple[Tensor, float]:
    """Divides each frequency by its own factor: one list for rows within the trained context, one for longer rows."""
    trained = p["original_max_position_embeddings"]
    name = "long_factor" if (p.get("longest") or trained) > trained else "short_factor"
    divisors = torch.tensor(p[name], dtype=torch.float32)
    if divisors.shape != plain.shape:
        raise InputError(f"{name} in the configuration has {len(divisors)} entries, and {len(plain)} pairs are rotated")
    scale = p.get("attention_factor")
    if scale is None:
        factor = p.get("factor") or (max_positions or trained) / trained
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return plain / divisors, float(scale)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention factor (mscale) for a context scaled by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


__all__ = [
    "RopeTable",
    "Rotary",
    "frequencies",
    "rotate",
    "rotate_neighbours",
    "yarn_scale",
]
