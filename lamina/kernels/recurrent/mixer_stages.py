"""What both mixer kernels do around their rule: the convolution of one token before it; gate, norm and stores after it.

A norm needs values of several programs. Each program stores its values to a scratch tensor and increments a counter;
the last program of a norm's group to arrive normalizes the group (see `gemm/epilogue.py`). A single row whose norm
covers all of it need not wait for the last program: programs store their values undivided, each with its sum of
squares, and the product that follows divides (`Unnormed`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.gemm.deferred_norm import Unnormed
from lamina.kernels.gemm.epilogue import act_kind, activate, arrive
from lamina.kernels.norm import open_gate
from lamina.kernels.recurrent.state import Tile, bandwidth_bound
from lamina.kernels.workspace import COUNTERS, scratch
from lamina.recurrence import SSD, ChannelDelta, GatedDelta, Rule

if TYPE_CHECKING:
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm
    from lamina.nn.recurrent.short_conv import ShortConvolution

TILES: dict[type[Rule], Tile] = {SSD: Tile(2048, 4), GatedDelta: Tile(4096, 4), ChannelDelta: Tile(4096, 4)}
MOST_PER_THREAD = 64  # values of a norm's group that one thread holds


# -- before the rule -------------------------------------------------------------------------------------------------


@triton.jit
def convolve_history(ring, size, length, weight, bias, c, c_mask, C: tl.constexpr, K: tl.constexpr):
    """The part of the convolution of channels c that needs no new input.

    ring [S, C] are the row's inputs, weight [C, K], bias [C] or None -> (bias + taps · earlier inputs, the tap of the
    new input), float32 each.
    """
    y = tl.zeros(c.shape, tl.float32)
    if bias is not None:
        y += tl.load(bias + c, mask=c_mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(K - 1):
        position = length - (K - 1) + tap
        x = tl.load(ring + tl.maximum(position, 0) % size * C + c, mask=c_mask & (position >= 0), other=0.0)
        y += x.to(tl.float32) * tl.load(weight + c * K + tap, mask=c_mask, other=0.0).to(tl.float32)
    return y, tl.load(weight + c * K + K - 1, mask=c_mask, other=0.0).to(tl.float32)


@triton.jit
def convolve_new(y, tap, new, c_mask, ACT: tl.constexpr):
    """Adds the new input to `convolve_history` and applies the activation; zero where there is no channel, which the
    activation of zero need not be."""
    y += new.to(tl.float32) * tap
    return y if ACT is None else tl.where(c_mask, activate(y, ACT), 0.0)


# -- after the rule --------------------------------------------------------------------------------------------------


@triton.jit
def store_cache(
    state, new_state, tile_mask,  # pointers to the tile of the state, its new values
    ring,  # the slot of the new token in the row's ring, [C]
    own, new_own, own_mask,  # channels of the head and their new inputs
    shared, new_shared, more, new_more, shared_mask,  # two sets of channels that the heads of a group share
    real, first,  # whether the row has a token; whether this program is the first of its group
):  # fmt: skip
    """Stores a tile of the state and the new inputs; the shared channels are stored by the first program of a group."""
    tl.store(state, new_state, mask=tile_mask & real)
    tl.store(ring + own, new_own, mask=own_mask & real)
    tl.store(ring + shared, new_shared, mask=shared_mask & real & first)
    tl.store(ring + more, new_more, mask=shared_mask & real & first)


@triton.jit
def store_output(
    y, z, scale, real, row, group,  # outputs and gate of channels c, the norm's weight, its group in the row
    c, c_mask, out, sums, arrived,  # out [B, W]; sums [B, W]; arrived [B · groups]
    W: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, GATE_FIRST: tl.constexpr, UNNORMED: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """Gates y, the values c of a row of W, and stores it: to `sums` where a norm follows, else to `out`.

    -> (the values that enter the norm, whether this program is the last of the norm's group)
    """
    opening = open_gate(z, SIGMOID)
    if GATE_FIRST:
        y *= opening
    last = False
    if UNNORMED:
        undivided = y * scale if GATE_FIRST else y * scale * opening
        tl.store(out + c, tl.where(real, undivided, 0.0), mask=c_mask)
        y = tl.where(c_mask & real, y, 0.0)
    elif PROGRAMS:
        tl.store(sums + row * W + c, y, mask=c_mask)
        last = arrive(arrived, row * (W // GROUP) + group, PROGRAMS)
    else:
        tl.store(out + row * W + c, tl.where(real, y, 0.0), mask=c_mask)
    return y, last


@triton.jit
def normalize_group(
    row, group, real, out, sums, gate, gate_row, weight, eps,  # out and sums [B, W], gate [B, W], weight [DIM]
    W: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """RMS norm of one group of a row, all of whose values are in `sums`; gated here unless GATE_FIRST."""
    k = tl.arange(0, GROUP_BLOCK)
    k_mask = k < GROUP
    k += group * GROUP
    # Other programs of this launch wrote the sums: read them from L2, past the L1 cache.
    y = tl.load(sums + row * W + k, mask=k_mask, other=0.0, cache_modifier=".cg")
    scale = tl.load(weight + k % DIM, mask=k_mask, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        z = tl.load(gate + row * gate_row + k, mask=k_mask, other=0.0).to(tl.float32)
        scale *= open_gate(z, SIGMOID)
    y *= tl.rsqrt(tl.sum(y * y, axis=0) / GROUP + eps) * scale
    tl.store(out + row * W + k, tl.where(real, y, 0.0), mask=k_mask)


# -- on the host -----------------------------------------------------------------------------------------------------


class NormArguments(NamedTuple):
    """How a mixer kernel ends: four of its arguments, then seven of its constants, in their order."""

    weight: Tensor | None  # [DIM]
    eps: float
    sums: Tensor | None  # [B, W], where the values of a group meet; [programs] sums of squares if UNNORMED
    arrived: Tensor | None  # [COUNTERS] int32
    GROUP: int  # values that are normalized together; 0: no norm
    GROUP_BLOCK: int
    DIM: int  # of the norm's weight, which is repeated W // DIM times
    PROGRAMS: int  # programs per group, the last of which normalizes it; 0: no program waits for others
    GATE_FIRST: bool
    UNNORMED: bool  # the output is not divided by its root mean square
    SIGMOID: bool  # of the gate; False: silu

    def result(self, out: Tensor) -> Tensor:
        """What the launch returns: `out`, or `out` with its sums of squares."""
        if not self.UNNORMED:
            return out
        assert self.sums is not None
        return Unnormed(out, self.sums, self.eps)


def norm_arguments(norm: GatedRMSNorm | None, gate: Tensor, heads: int, dim: int, blocks: int) -> NormArguments:
    """For heads of `dim` values, each computed by `blocks` programs; gate [B, 1, heads · dim]."""
    if norm is None:
        return NormArguments(None, 0.0, None, None, 0, 1, 1, 0, True, False, False)
    rows, device = gate.shape[0], gate.device
    width, weights = heads * dim, norm.weight.shape[0]
    group = weights // norm.groups
    if group % dim or width % weights:
        raise InputError(f"a norm of {norm.groups} groups over {weights} values does not fit {heads} heads of {dim}")
    if rows == 1 and group == width and gate.dtype != torch.float16:  # undivided values may exceed float16's range
        squares = torch.empty(heads * blocks, device=device)
        return NormArguments(
            norm.weight, norm.eps, squares, None, group, 1, weights, 0, norm.gate_first, True, norm.sigmoid
        )
    if rows * width // group > COUNTERS:
        raise InputError(f"{rows} rows with {width // group} norms each; at most {COUNTERS} in all: use fewer rows")
    sums = torch.empty(rows, width, device=device)
    block, programs = triton.next_power_of_2(group), group // dim * blocks
    arrived, gate_first = scratch(device)[1], norm.gate_first
    return NormArguments(
        norm.weight, norm.eps, sums, arrived, group, block, weights, programs, gate_first, False, norm.sigmoid
    )


def tile_for(rule: Rule, rows: int, tile: Tile | None) -> tuple[Tile, bool]:
    """-> (the tile of a program, LIVE_ONLY as in `state.tile_for`)."""
    return tile or TILES[type(rule)], bandwidth_bound(rows * torch.Size(rule.state_shape).numel())


def warps_for(tile: Tile, norm: NormArguments) -> int:
    """As many warps as the tile has, or as the norm of a whole group needs."""
    return max(tile.warps, norm.GROUP_BLOCK // (32 * MOST_PER_THREAD))


def act_of(conv: ShortConvolution) -> str | None:
    return None if conv.act is None else act_kind(conv.act)


def contiguous_rows(x: Tensor) -> Tensor:
    """x [B, 1, N] with each row's values contiguous."""
    return x if x.stride(2) == 1 else x.contiguous()
