"""A recurrent mixer between its two projections, one token a row, in one kernel: convolution, rule, gate, norm.

Apart, these are three launches that move little, and each costs more to reach than to run. Here a program holds a tile
of one head's state, as in `recur.py`, and convolves the channels that the tile needs by itself: the head's own, and
those that the heads of a group share, which every program of the group repeats. The one slot of the ring that a row
writes is none of those that are read, so programs do not wait for each other, and each channel's slot is written by one
of them. (With more tokens the slots meet: `conv.py` and `recur.py` one after the other.)

The norm takes numbers of many programs. Each puts its own into a scratch store and counts itself; the last of a norm's
group to arrive normalises the group (see `epilogue.py`). One row whose norm is over all of it need not wait for the
last: programs give out their numbers undivided, each with its sum of squares, and the product behind divides
(`Unnormed`).

All that the launch just before does not write is asked for before waiting for it: state, ring, taps and parameters.
Rows without a token write nothing but zeros into the output. References: `memory.mix` on plain layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.entry import COUNTS, count_of
from lamina.kernels.gemm.deferred_norm import Unnormed
from lamina.kernels.gemm.epilogue import act_kind, activate, arrive
from lamina.kernels.launch import begin_together, launch
from lamina.kernels.recurrent.conv import ring_of
from lamina.kernels.recurrent.recur import MANY, Tile, bounds, delta_token, ssd_token, state_of, step_size
from lamina.kernels.workspace import COUNTERS, scratch
from lamina.recurrence import SSD, GatedDelta, Rule
from lamina.recurrence.rule import Tensors

if TYPE_CHECKING:
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm
    from lamina.nn.recurrent.short_conv import ShortConvolution

TILES: dict[type[Rule], Tile] = {SSD: Tile(2048, 4), GatedDelta: Tile(4096, 4)}
MOST_OF_A_THREAD = 64  # numbers of a norm's group that one thread holds


def pays(rule: Rule, rows: int, tokens: int) -> bool:
    """Whether `mix_step` can do it, and faster than a kernel for each part.

    Many states of SSD are moved faster by a kernel that does just that: here every program convolves the B and C of its
    group again.
    """
    numbers = rows * torch.Size(rule.state_shape).numel()
    return tokens == 1 and (isinstance(rule, GatedDelta) or (isinstance(rule, SSD) and numbers < MANY))


def mix_step(
    rule: Rule,
    x: Tensor,
    inputs: Tensors,
    constants: Tensors,
    rings: Tensor,
    table: Tensor,
    *,
    conv: ShortConvolution,
    gate: Tensor,
    norm: GatedRMSNorm | None = None,
    **around: Any,
) -> Tensor:
    """What `memory.mix` says, on the ring behind `rings` and the state behind `table`, in place.

    x [B, 1, C] and gate [B, 1, W] with the numbers of a row together, inputs [B, 1, H] -> [B, 1, W] in the gate's
    dtype, or where there is one row and one norm over it, the same before the norm has divided it

    tile   what a program holds, in place of what `TILES` says
    """
    if x.shape[1] != 1:
        raise InputError(f"mix_step takes one token a row, not {x.shape[1]}; use convolve_step and recur_step")
    match rule:
        case SSD():
            return _mix_ssd(rule, x, inputs, constants, rings, table, conv, gate, norm, **around)
        case GatedDelta():
            return _mix_delta(rule, x, inputs, rings, table, conv, gate, norm, **around)
    raise InputError(f"no kernel mixes by the rule {rule}; there is one for SSD and GatedDelta")


# -- what the kernels share ------------------------------------------------------------------------------------------


class Ending(NamedTuple):
    """How a kernel ends: four of its arguments, and then six of its constants, in their order."""

    weight: Tensor | None
    eps: float
    sums: Tensor | None  # [B, W], where the numbers of a group meet; [P] of each program where nobody waits for that
    arrived: Tensor | None
    GROUP: int  # numbers that are normalised together; 0: no norm
    GROUP_BLOCK: int
    DIM: int  # of the norm's weight, which serves W // DIM stretches alike
    PROGRAMS: int  # of a group, the last of which normalises it; 0: nobody waits for the others
    GATE_FIRST: bool
    UNNORMED: bool  # what is given out is not divided

    def of(self, out: Tensor) -> Tensor:
        """What the kernel has given out."""
        if not self.UNNORMED:
            return out
        assert self.sums is not None
        return Unnormed(out, self.sums, self.eps)


@triton.jit
def begun(ring, size, length, weight, bias, c, here, C: tl.constexpr, K: tl.constexpr):
    """Of channels c: what the inputs so far and the bias add to the convolution, and the tap of the new input."""
    y = tl.zeros(c.shape, tl.float32)
    if bias is not None:
        y += tl.load(bias + c, mask=here, other=0.0).to(tl.float32)
    for tap in tl.static_range(K - 1):
        at = length - (K - 1) + tap
        held = tl.load(ring + tl.maximum(at, 0) % size * C + c, mask=here & (at >= 0), other=0.0)
        y += held.to(tl.float32) * tl.load(weight + c * K + tap, mask=here, other=0.0).to(tl.float32)
    return y, tl.load(weight + c * K + K - 1, mask=here, other=0.0).to(tl.float32)


@triton.jit
def completed(y, tap, new, ACT: tl.constexpr):
    """The convolution with its new input, and the activation behind it."""
    y += new.to(tl.float32) * tap
    return y if ACT is None else activate(y, ACT)


@triton.jit
def keep(state, new, inside, ring, own, new_own, here, shared, new_shared, more, new_more, entry, real, first):
    """Writes a tile of the state and the new inputs of channels: a head's own, and two sets that the heads of a group
    share, which the first program of the group writes."""
    tl.store(state, new, mask=inside & real)
    tl.store(ring + own, new_own, mask=here & real)
    tl.store(ring + shared, new_shared, mask=entry & real & first)
    tl.store(ring + more, new_more, mask=entry & real & first)


@triton.jit
def given_out(
    y, z, scale, real, row, group, c, here, out, sums, arrived,
    W: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, GATE_FIRST: tl.constexpr, UNNORMED: tl.constexpr,
):  # fmt: skip
    """Puts y, the numbers c of a row of W, where it belongs; what of it is normalised, and whether that was the last of
    its norm's group."""
    opening = z * tl.sigmoid(z)
    if GATE_FIRST:
        y *= opening
    last = False
    if UNNORMED:
        numbers = y * scale if GATE_FIRST else y * scale * opening
        tl.store(out + c, tl.where(real, numbers, 0.0), mask=here)
        y = tl.where(here & real, y, 0.0)
    elif PROGRAMS:
        tl.store(sums + row * W + c, y, mask=here)
        last = arrive(arrived, row * (W // GROUP) + group, PROGRAMS)
    else:
        tl.store(out + row * W + c, tl.where(real, y, 0.0), mask=here)
    return y, last


@triton.jit
def normalise(
    row, group, real, out, sums, gate, gate_row, weight, eps,
    W: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The norm of a group of a row, all of whose numbers are in `sums`."""
    k = tl.arange(0, GROUP_BLOCK)
    inside = k < GROUP
    k += group * GROUP
    y = tl.load(sums + row * W + k, mask=inside, other=0.0, cache_modifier=".cg")
    scale = tl.load(weight + k % DIM, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        z = tl.load(gate + row * gate_row + k, mask=inside, other=0.0).to(tl.float32)
        scale *= z * tl.sigmoid(z)
    y *= tl.rsqrt(tl.sum(y * y, axis=0) / GROUP + eps) * scale
    tl.store(out + row * W + k, tl.where(real, y, 0.0), mask=inside)


def _ending(norm: GatedRMSNorm | None, gate: Tensor, heads: int, dim: int, blocks: int) -> Ending:
    """For heads of `dim` numbers, each in `blocks` programs."""
    if norm is None:
        return Ending(None, 0.0, None, None, 0, 1, 1, 0, True, False)
    rows, device = gate.shape[0], gate.device
    width, stretch = heads * dim, norm.weight.shape[0]
    group = stretch // norm.groups
    if group % dim or width % stretch:
        raise InputError(f"a norm of {norm.groups} groups over {stretch} numbers does not fit {heads} heads of {dim}")
    if rows == 1 and group == width and gate.dtype != torch.float16:  # whose range is short without the division
        squares = torch.empty(heads * blocks, device=device)
        return Ending(norm.weight, norm.eps, squares, None, group, 1, stretch, 0, norm.gate_first, True)
    if rows * width // group > COUNTERS:
        raise InputError(f"{rows} rows with {width // group} norms each; at most {COUNTERS} in all: take fewer rows")
    sums = torch.empty(rows, width, device=device)
    block, programs = triton.next_power_of_2(group), group // dim * blocks
    arrived, gate_first = scratch(device)[1], norm.gate_first
    return Ending(norm.weight, norm.eps, sums, arrived, group, block, stretch, programs, gate_first, False)


def _tile(rule: Rule, rows: int, tile: Tile | None) -> tuple[Tile, bool]:
    """What a program holds, and whether there are many states (see `recur.py`)."""
    return tile or TILES[type(rule)], rows * torch.Size(rule.state_shape).numel() >= MANY


def _warps(tile: Tile, ending: Ending) -> int:
    return max(tile.warps, ending.GROUP_BLOCK // (32 * MOST_OF_A_THREAD))


def _act(conv: ShortConvolution) -> str | None:
    return None if conv.act is None else act_kind(conv.act)


def _rows(x: Tensor) -> Tensor:
    """[B, 1, N] with the numbers of a row together."""
    return x if x.stride(2) == 1 else x.contiguous()


# -- SSD -------------------------------------------------------------------------------------------------------------


@triton.jit
def _ssd_kernel(
    x, dt, gate, taps, bias, A, skip, dt_bias, low, high, weight, eps, sums, arrived, out, rings, table,
    x_row, dt_row, gate_row,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, PROGRAMS: tl.constexpr,
    GATE_FIRST: tl.constexpr, UNNORMED: tl.constexpr, BLOCK: tl.constexpr, N_BLOCK: tl.constexpr,
    LIVE_ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): the i-th BLOCK of the P rows of a head's state. Channels: x, B, C."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    C: tl.constexpr = H * P + 2 * (H // SHARED) * N
    p, n = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
    here, entry = p < P, n < N
    inside = here[:, None] & entry[None, :]
    c = head * P + p
    at_B = H * P + head // SHARED * N + n
    at_C = at_B + (H // SHARED) * N
    at, counts = state_of(table) + (row * H + head) * (P * N) + p[:, None] * N + n[None, :], tl.load(table + COUNTS)
    ring, size, length = ring_of(rings, row, C, x.dtype.element_ty)
    count = count_of(counts, row, 1)
    h = tl.load(at, mask=inside & (count > 0) if LIVE_ONLY else inside, other=0.0)  # [P, N]
    x_sum, x_tap = begun(ring, size, length, taps, bias, c, here, C, K)
    B_sum, B_tap = begun(ring, size, length, taps, bias, at_B, entry, C, K)
    C_sum, C_tap = begun(ring, size, length, taps, bias, at_C, entry, C, K)
    a = tl.load(A + head).to(tl.float32)
    step_bias = None if dt_bias is None else tl.load(dt_bias + head).to(tl.float32)
    D = None if skip is None else tl.load(skip + head).to(tl.float32)
    norm_scale = tl.load(weight + c, mask=here, other=0.0).to(tl.float32) if UNNORMED else None
    begin_together(PDL)  # the product behind reads nothing but weights before it waits
    new_x = tl.load(x + row * x_row + c, mask=here, other=0.0)
    new_B = tl.load(x + row * x_row + at_B, mask=entry, other=0.0)
    new_C = tl.load(x + row * x_row + at_C, mask=entry, other=0.0)
    raw = tl.load(dt + row * dt_row + head).to(tl.float32)
    z = tl.load(gate + row * gate_row + c, mask=here, other=0.0).to(tl.float32)

    real = count > 0
    values = completed(x_sum, x_tap, new_x, ACT)
    keys = completed(B_sum, B_tap, new_B, ACT)
    queries = completed(C_sum, C_tap, new_C, ACT)
    h, y = ssd_token(h, values, step_size(raw, step_bias, low, high), keys, queries, a)
    ring += length % size * C
    first = (block == 0) & (head % SHARED == 0)
    if not PROGRAMS:
        keep(at, h, inside, ring, c, new_x, here, at_B, new_B, at_C, new_C, entry, real, first)
    if D is not None:
        y += D * values
    group = head * P // GROUP if GROUP else 0
    y, last = given_out(
        y, z, norm_scale, real, row, group, c, here, out, sums, arrived, H * P, GROUP, PROGRAMS, GATE_FIRST, UNNORMED
    )
    if UNNORMED:
        tl.store(sums + head * tl.num_programs(0) + block, tl.sum(y * y, axis=0))
    if PROGRAMS:  # what is kept is written now, so that nobody who waits for y waits for it
        keep(at, h, inside, ring, c, new_x, here, at_B, new_B, at_C, new_C, entry, real, first)
        if last:
            normalise(
                row, group, real, out, sums, gate, gate_row, weight, eps, H * P, GROUP, GROUP_BLOCK, DIM, GATE_FIRST
            )


def _mix_ssd(
    rule: SSD, x: Tensor, inputs: Tensors, constants: Tensors, rings: Tensor, table: Tensor,
    conv: ShortConvolution, gate: Tensor, norm: GatedRMSNorm | None,
    *, skip: Tensor | None = None, dt_bias: Tensor | None = None, dt_limit: tuple[float, float] | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    rows, heads, dim, state = x.shape[0], rule.heads, rule.head_dim, rule.state
    x, dt, z = _rows(x), _rows(inputs["dt"]), _rows(gate)
    tile, many = _tile(rule, rows, tile)
    wide = triton.next_power_of_2(state)
    block = min(max(tile.numbers // wide, 1), triton.next_power_of_2(dim))
    blocks = triton.cdiv(dim, block)
    end = _ending(norm, z, heads, dim, blocks)
    out = torch.empty(rows, 1, heads * dim, dtype=gate.dtype, device=x.device)
    launch(
        _ssd_kernel, (blocks, heads, rows),
        x, dt, z, conv.weight, conv.bias, constants["A"], skip, dt_bias, *bounds(dt_limit), *end[:4], out, rings, table,
        x.stride(0), dt.stride(0), z.stride(0), heads, dim, state, heads // rule.groups, conv.weight.shape[1],
        _act(conv), *end[4:], block, wide, many, num_warps=_warps(tile, end),
    )  # fmt: skip
    return end.of(out)


# -- gated delta -----------------------------------------------------------------------------------------------------


@triton.jit
def _delta_kernel(
    x, g, beta, gate, taps, bias, A, dt_bias, scale, weight, eps, sums, arrived, out, rings, table,
    x_row, g_row, beta_row, gate_row,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, PROGRAMS: tl.constexpr,
    GATE_FIRST: tl.constexpr, UNNORMED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
    LIVE_ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): the i-th BLOCK of the V columns of a head's state. Channels: q, k, v."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    C: tl.constexpr = 2 * (H // SHARED) * D + H * V
    d, e = tl.arange(0, D_BLOCK), block * BLOCK + tl.arange(0, BLOCK)
    entry, here = d < D, e < V
    inside = entry[:, None] & here[None, :]
    at_q = head // SHARED * D + d
    at_k = at_q + (H // SHARED) * D
    c = head * V + e
    at_v = 2 * (H // SHARED) * D + c
    at, counts = state_of(table) + (row * H + head) * (D * V) + d[:, None] * V + e[None, :], tl.load(table + COUNTS)
    ring, size, length = ring_of(rings, row, C, x.dtype.element_ty)
    count = count_of(counts, row, 1)
    s = tl.load(at, mask=inside & (count > 0) if LIVE_ONLY else inside, other=0.0)  # [D, V]
    q_sum, q_tap = begun(ring, size, length, taps, bias, at_q, entry, C, K)
    k_sum, k_tap = begun(ring, size, length, taps, bias, at_k, entry, C, K)
    v_sum, v_tap = begun(ring, size, length, taps, bias, at_v, here, C, K)
    a = None if A is None else tl.load(A + head).to(tl.float32)
    step_bias = None if dt_bias is None else tl.load(dt_bias + head).to(tl.float32)
    norm_scale = tl.load(weight + c, mask=here, other=0.0).to(tl.float32) if UNNORMED else None
    begin_together(PDL)  # the product behind reads nothing but weights before it waits
    new_q = tl.load(x + row * x_row + at_q, mask=entry, other=0.0)
    new_k = tl.load(x + row * x_row + at_k, mask=entry, other=0.0)
    new_v = tl.load(x + row * x_row + at_v, mask=here, other=0.0)
    log = tl.load(g + row * g_row + head).to(tl.float32)
    strength = tl.load(beta + row * beta_row + head).to(tl.float32)
    z = tl.load(gate + row * gate_row + c, mask=here, other=0.0).to(tl.float32)

    real = count > 0
    query = completed(q_sum, q_tap, new_q, ACT)
    key = completed(k_sum, k_tap, new_k, ACT)
    value = completed(v_sum, v_tap, new_v, ACT)
    s, y = delta_token(s, query, key, value, log, strength, a, step_bias, scale, UNIT)
    ring += length % size * C
    first = (block == 0) & (head % SHARED == 0)
    if not PROGRAMS:
        keep(at, s, inside, ring, at_v, new_v, here, at_q, new_q, at_k, new_k, entry, real, first)
    group = head * V // GROUP if GROUP else 0
    y, last = given_out(
        y, z, norm_scale, real, row, group, c, here, out, sums, arrived, H * V, GROUP, PROGRAMS, GATE_FIRST, UNNORMED
    )
    if UNNORMED:
        tl.store(sums + head * tl.num_programs(0) + block, tl.sum(y * y, axis=0))
    if PROGRAMS:  # what is kept is written now, so that nobody who waits for y waits for it
        keep(at, s, inside, ring, at_v, new_v, here, at_q, new_q, at_k, new_k, entry, real, first)
        if last:
            normalise(
                row, group, real, out, sums, gate, gate_row, weight, eps, H * V, GROUP, GROUP_BLOCK, DIM, GATE_FIRST
            )


def _mix_delta(
    rule: GatedDelta, x: Tensor, inputs: Tensors, rings: Tensor, table: Tensor,
    conv: ShortConvolution, gate: Tensor, norm: GatedRMSNorm | None,
    *, unit: bool = False, gates: tuple[Tensor, Tensor] | None = None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    rows, heads, key, value = x.shape[0], rule.value_heads, rule.key_dim, rule.value_dim
    x, g, beta, z = _rows(x), _rows(inputs["g"]), _rows(inputs["beta"]), _rows(gate)
    A, dt_bias = gates or (None, None)
    tile, many = _tile(rule, rows, tile)
    tall = triton.next_power_of_2(key)
    block = min(max(tile.numbers // tall, 1), triton.next_power_of_2(value))
    blocks = triton.cdiv(value, block)
    end = _ending(norm, z, heads, value, blocks)
    out = torch.empty(rows, 1, heads * value, dtype=gate.dtype, device=x.device)
    launch(
        _delta_kernel, (blocks, heads, rows),
        x, g, beta, z, conv.weight, conv.bias, A, dt_bias, key**-0.5, *end[:4], out, rings, table,
        x.stride(0), g.stride(0), beta.stride(0), z.stride(0),
        heads, key, value, heads // rule.key_heads, conv.weight.shape[1], _act(conv), *end[4:], unit, block,
        tall, many, num_warps=_warps(tile, end),
    )  # fmt: skip
    return end.of(out)
