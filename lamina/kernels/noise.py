"""The random numbers of `sampling/noise.py` inside kernels: the same bits for the same (seed, row, position, stream,
id)."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.sampling import noise

FIRST, SECOND = tl.constexpr(noise.FIRST), tl.constexpr(noise.SECOND)
LEFT, RIGHT = tl.constexpr(noise.LEFT), tl.constexpr(noise.RIGHT)
STEP, BELOW_ONE = tl.constexpr(noise.STEP), tl.constexpr(noise.BELOW_ONE)


@triton.jit
def uniform(seed, row, position, stream, ids):
    """Uniform float32 values in (0, 1), in the shape that the five integers broadcast to."""
    seed = tl.cast(seed, tl.int64)
    left = mix(LEFT + seed.to(tl.uint32))
    right = mix(RIGHT + seed.to(tl.uint32))
    high = (seed >> 32).to(tl.uint32)
    left, right = mix(left + high), mix(right + high)
    low = tl.cast(row, tl.uint32)
    left, right = mix(left + low), mix(right + low)
    low = tl.cast(position, tl.uint32)
    left, right = mix(left + low), mix(right + low)
    low = tl.cast(stream, tl.uint32)
    left, right = mix(left + low), mix(right + low)
    mixed = mix(mix(tl.cast(ids, tl.uint32) + left) + right)
    return tl.minimum(mixed.to(tl.float32) * STEP + STEP / 2, BELOW_ONE)


@triton.jit
def mix(x):
    """`_mix` of sampling/noise.py, on uint32."""
    x = x ^ (x >> 16)
    x = x * FIRST
    x = x ^ (x >> 15)
    x = x * SECOND
    return x ^ (x >> 15)


@triton.jit
def gumbel(u):
    """Uniform values u to Gumbel noise, -log(-log(1 - u)). 1 - u is rounded; its logarithm is corrected for that."""
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(exponential)
