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

NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""Rotary type -> the settings that it requires."""


def rope_parameters(
    config: Config, base: float = 10_000.0, *, partial: float = 1.0, kind: str | None = None
) -> dict[str, Any]:
    """The rotary settings, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`.

    base, partial   defaults of `rope_theta` and `partial_rotary_factor`
    kind            a layer type ("sliding_attention" …), if the configuration has settings for each
    """
    config.ignore("rope_scaling", "rope_theta", "partial_rotary_factor")  # `rope_parameters` wins, as in transformers
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if kind is not None and any(isinstance(value, dict) for value in found.values()):
        found = dict(found.get(kind) or {})
    for name, default in (("rope_theta", base), ("partial_rotary_factor", partial)):
        if found.get(name) is None:
            found[name] = config.get(name, default)
    found["rope_type"] = found.get("rope_type", found.get("type", "default"))
    if found["rope_type"] in ("su", "longrope"):  # "su" is an old name
        found["rope_type"] = "longrope"
    if found.get("original_max_position_embeddings") is None and found["rope_type"] in ("longrope", "yarn"):
        original = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        if original is not None:
            found["original_max_position_embeddings"] = original
    read = Config(found | {"model_type": "rotary positions"})
    for name in found:  # checks every value, so that an error names it
        read.get(name)
    for name in NEEDED.get(read.rope_type, ()):
        getattr(read, name)
    found["longest"] = config.get("context")
    return found


POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")


def positions_of(config: Config) -> int | None:
    """The context length of a checkpoint according to its configuration; None if that has none.

    Configurations with llama3 scaling give the scaled length. With linear and yarn scaling many give the length before
    scaling, so the result is the larger of the given length and `factor` times the original one. With longrope and
    dynamic scaling it is the length that the frequencies are for.

    >>> positions_of(Config({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}))
    16384
    """
    config.ignore(*POSITIONS)  # a file may have several of them, with the same value
    named = next((n for name in POSITIONS if isinstance(n := config.get(name), int) and n > 0), None)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in ("longrope", "su", "dynamic"):  # see `Rotary`
        trained = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        return config.get("context") or trained or named
    if named is None or rope.get("rope_type", rope.get("type")) not in ("linear", "yarn"):
        return named
    return max(named, round((rope.get("original_max_position_embeddings") or named) * (rope.get("factor") or 1)))


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
            raise InputError(f"rotary positions rotate pairs of dimensions, and {dim} of a head cannot be paired")
        self.dim, self.settings, self.max_positions = dim, settings, max_positions
        self.scale = 1.0
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.empty(dim // 2), persistent=False)
        if not self.frequencies.is_meta:
            self.reset_buffers()

    @classmethod
    def of(
        cls, c: Config, head_dim: int, base: float = 10_000.0, *, partial: float = 1.0, kind: str | None = None
    ) -> Rotary:
        """The table for heads of this width; the arguments after it as in `rope_parameters`."""
        settings = rope_parameters(c, base, partial=partial, kind=kind)
        proportional = settings["rope_type"] == "proportional"  # rotates all dimensions, some by zero
        dim = head_dim if proportional else int(head_dim * settings["partial_rotary_factor"])
        return cls(dim, settings, c.get("max_position_embeddings"))

    def reset_buffers(self) -> None:
        self.frequencies, self.scale = frequencies(self.dim, self.settings, self.max_positions)

    def forward(self, positions: Tensor) -> RopeTable:
        if kernels.on():
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
            return _dynamic(dim, parameters, max_positions), 1.0
        case "longrope":
            return _longrope(plain, parameters, max_positions)
        case "proportional":
            rotated = torch.arange(dim // 2) < int(parameters["partial_rotary_factor"] * dim // 2)
            return plain * rotated / (parameters.get("factor") or 1.0), 1.0
        case other:
            known = "default, linear, dynamic, yarn, longrope, llama3, proportional"
            raise InputError(f"rotary type {other!r} is not supported; known: {known}")


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


def _dynamic(dim: int, p: dict[str, Any], max_positions: int | None) -> Tensor:
    """Rows longer than the trained context rotate by a larger base, so that no frequency is new to the model."""
    trained = p.get("original_max_position_embeddings") or max_positions
    if trained is None:
        raise InputError("dynamic rotary scaling needs max_position_embeddings in the configuration")
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
    "positions_of",
    "rope_parameters",
    "rotate",
    "rotate_neighbours",
    "yarn_scale",
]
