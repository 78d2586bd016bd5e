"""What the recurrent decode kernels share: access to the state, the step size of SSMs, and tile sizes.

A decode step of a recurrent layer takes the time of moving its states. No rule mixes two rows of its state matrix (two
columns for the gated delta rule), so one program loads a tile of one head's state into registers, applies the T new
tokens to it in order, and stores it back: every state is read once and written once, in place.

    order in a kernel    1. state, counts and parameters are loaded
                         2. `begin`: waits for the launch before
                         3. the tokens' inputs are loaded, up to four tokens together, so T tokens do not wait T times
                         4. the rule is applied token by token; outputs, then the state, are stored

Step 1 comes before `begin` because it hides latency. So the launch just before must not write state, counts or
parameters: in a layer it is the mixer's convolution or a matrix product.

Row b applies its first counts[b] tokens. With count 0 its state is not touched at all. Outputs past the count are
zero. Inputs past the count are loaded and not used, because masking them would wait for the counts.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.entry import STORE
from lamina.recurrence import SSD, WKV, ChannelDelta, GatedDelta, Rule, SelectiveScan


class Tile(NamedTuple):
    """The part of one head's state that one program holds, in values, and the warps of that program."""

    values: int
    warps: int


LARGE = 2**22  # state values of a launch from which bandwidth limits it; below, latency does
TILES = {  # (rule, bandwidth-bound)
    (SSD, False): Tile(1024, 4),
    (SSD, True): Tile(4096, 4),
    (SelectiveScan, False): Tile(256, 2),
    (SelectiveScan, True): Tile(1024, 4),
    (GatedDelta, False): Tile(2048, 4),
    (GatedDelta, True): Tile(4096, 4),
    (ChannelDelta, False): Tile(2048, 4),
    (ChannelDelta, True): Tile(4096, 4),
    (WKV, False): Tile(128, 2),
    (WKV, True): Tile(512, 4),
}


# -- inside kernels --------------------------------------------------------------------------------------------------


@triton.jit
def state_of(table, COLUMN: tl.constexpr = STORE):
    """Pointer to the entry's states, float32 [B, *state_shape], or with COLUMN BASE to their base states. A pointer
    that is read from memory carries no alignment by itself; with it, four values move at a time."""
    return tl.multiple_of(tl.load(table + COLUMN).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def softplus(x):
    """log(1 + exp(x))."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log(u) · e / (u - 1) keeps the digits of a small e that 1 + e drops.
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def step_size(dt, bias, low, high):
    """softplus(dt + bias) where there is a bias, else dt; clamped to the bounds that are not None."""
    if bias is not None:
        dt = softplus(dt + bias)
    if low is not None:
        dt = tl.maximum(dt, low)
    if high is not None:
        dt = tl.minimum(dt, high)
    return dt


# -- on the host -----------------------------------------------------------------------------------------------------


def bandwidth_bound(values: int) -> bool:
    """Whether a launch over this many state values is limited by bandwidth, not by latency."""
    return values >= LARGE


def tile_for(rule: type[Rule], values: int, tile: Tile | None) -> tuple[Tile, bool]:
    """-> (the tile of a program, LIVE_ONLY: whether it skips the state of rows without tokens).

    Skipping has to wait for the counts first. That pays when bandwidth limits the launch, not when latency does.
    """
    bound = bandwidth_bound(values)
    return tile or TILES[rule, bound], bound


def tokens_together(tokens: int) -> int:
    """How many tokens' inputs are loaded together."""
    return min(4, triton.next_power_of_2(tokens))


def contiguous_tokens(x: Tensor) -> Tensor:
    """x [B, T, *shape] of any strides -> the same with each token's values contiguous."""
    return x if x[0, 0].is_contiguous() else x.contiguous()


def row_and_token_strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def output_dtype(x: Tensor, skip: Tensor | None, gate: Tensor | None) -> torch.dtype:
    """The dtype that PyTorch gives y + D x, then y · silu(z)."""
    if gate is not None:
        return gate.dtype
    return x.dtype if skip is None else torch.promote_types(x.dtype, skip.dtype)


def bounds(limit: tuple[float, float] | None) -> tuple[float | None, float | None]:
    """The bounds of a step size; None for 0 and infinity, which bind no step size: they are positive and finite."""
    low, high = limit or (0.0, float("inf"))
    return None if low == 0 else low, None if high == float("inf") else high
