"""What a recurrent state is rewound from: the base states of a cache with slack.

A cache with slack keeps an older state of each row, its base, and the inputs of the tokens since
(`lamina/cache/layers/recurrent.py` explains why). When a pass commits tokens, `move_base` folds the base of rows whose
log would overflow forward, to `slack` tokens behind the new length: over logged inputs, or, if the new base is among
the new tokens, from the state before the pass over those.

Per layer the order is `move_base`, the rule, `log_inputs`: the first reads the old state, and what the log is about to
lose. The base moves once in `slack` + 1 tokens of a row. In between, programs of `move_base` end at once.

Inputs are those of the rule itself (`Rule.before`), in the dtype of the log, [R, T, *shape] for R rows: see
`logged_inputs`.
"""

# Kernels have arguments that may be None:
# mypy: disable-error-code="assignment"
# mypy: allow-untyped-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.entry import BASE, BASES, LOG, SLACK, row_of, store_pointer
from lamina.kernels.launch import begin, launch
from lamina.kernels.recurrent.gated_delta import delta_token
from lamina.kernels.recurrent.ssd import ssd_token
from lamina.kernels.recurrent.state import state_of, tile_for
from lamina.kernels.recurrent.wkv import EMPTY, merge
from lamina.recurrence import RGLRU, SSD, WKV, ChannelDelta, GatedDelta, Rule, SelectiveScan
from lamina.recurrence.rule import Tensors

CHANNELS = 256  # of a program of `move_base`, for rules with a few values per channel


# -- inside kernels --------------------------------------------------------------------------------------------------


@triton.jit
def moves(table, row, T: tl.constexpr, SKIP: tl.constexpr = False):
    """How a row's base state moves: -> (first, end, length, in_pass), over the tokens first … end - 1; none if equal.

    in_pass   the new base is among the T new tokens: from the state before the pass, at `length`, over new inputs.
              With SKIP it does not move then
    """
    length, count = row_of(table, row, T)
    slack = tl.load(table + SLACK).to(tl.int32)
    base = tl.load(tl.load(table + BASES).to(tl.pointer_type(tl.int64)) + row).to(tl.int32)
    after = length + count
    full = (count > 0) & (after - base > 2 * slack)
    end = tl.where(full, after - slack, base)
    in_pass = end > length
    first = tl.where(in_pass, end if SKIP else length, base)
    return first, end, length, in_pass


@triton.jit
def start_of(table, in_pass, at, mask):
    """-> (the values that the fold starts from, pointer to those of the base). at: values of the layer's states"""
    base = state_of(table, BASE) + at
    return tl.load(tl.where(in_pass, state_of(table) + at, base), mask=mask, other=0.0), base


@triton.jit
def input_at(
    table, INPUT: tl.constexpr, SIZE: tl.constexpr, new, token,  # the new inputs of the row; the stride of its tokens
    row, position, length, in_pass, at, mask,
):  # fmt: skip
    """Values `at` of one input of the token at `position`, float32: of the log, or with `in_pass` of the new inputs.
    INPUT: which of the rule's; SIZE: its values per token."""
    kept = 2 * tl.load(table + SLACK).to(tl.int32)
    log = store_pointer(table, LOG + INPUT, new.dtype) + (row * kept + position % kept) * SIZE
    new += (position - length).to(tl.int64) * token
    return tl.load(tl.where(in_pass, new, log) + at, mask=mask, other=0.0).to(tl.float32)


# -- one kernel for each rule ----------------------------------------------------------------------------------------
# SKIP: rows whose new base is among the new tokens are left out, since a prompt folds those itself, many at a time.


@triton.jit
def _move_ssd(
    x, dt, B, A, table,  # [R, T, H, P], [R, T, H], [R, T, G, N], [H]; the entry's table row
    x_row, x_token, dt_row, dt_token, B_row, B_token,  # strides
    T: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr,  # SHARED: heads per group
    BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, SKIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): rows i · BLOCK … of the head's state [P, N]."""
    begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, end, length, in_pass = moves(table, row, T, SKIP)
    if first < end:
        p, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
        mask = (p < P)[:, None] & (n < N)[None, :]
        h, base = start_of(table, in_pass, (row * H + head) * (P * N) + p[:, None] * N + n[None, :], mask)
        a, group = tl.load(A + head).to(tl.float32), head // SHARED
        x, dt, B = x + row * x_row, dt + row * dt_row, B + row * B_row
        for t in range(first, end):
            new_x = input_at(table, 0, H * P, x, x_token, row, t, length, in_pass, head * P + p, p < P)
            size = input_at(table, 1, H, dt, dt_token, row, t, length, in_pass, head, True)
            new_B = input_at(table, 2, H // SHARED * N, B, B_token, row, t, length, in_pass, group * N + n, n < N)
            h, _ = ssd_token(h, new_x, size, new_B, new_B, a)
        tl.store(base, h, mask=mask)


@triton.jit
def _move_scan(
    x, dt, B, A, table,  # [R, T, C] twice, [R, T, N], [C, N]; the entry's table row
    x_row, x_token, dt_row, dt_token, B_row, B_token,  # strides
    T: tl.constexpr, C: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, SKIP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row): channels i · BLOCK … of the row's state [C, N]."""
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    first, end, length, in_pass = moves(table, row, T, SKIP)
    if first < end:
        c, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
        at, mask = c[:, None] * N + n[None, :], (c < C)[:, None] & (n < N)[None, :]
        h, base = start_of(table, in_pass, row * (C * N) + at, mask)
        a = tl.load(A + at, mask=mask, other=0.0).to(tl.float32)
        x, dt, B = x + row * x_row, dt + row * dt_row, B + row * B_row
        for t in range(first, end):
            new_x = input_at(table, 0, C, x, x_token, row, t, length, in_pass, c, c < C)
            size = input_at(table, 1, C, dt, dt_token, row, t, length, in_pass, c, c < C)
            new_B = input_at(table, 2, N, B, B_token, row, t, length, in_pass, n, n < N)
            h = tl.exp(size[:, None] * a) * h + (size * new_x)[:, None] * new_B[None, :]
        tl.store(base, h, mask=mask)


@triton.jit
def _move_delta(
    k, v, g, beta, table,  # [R, T, H // SHARED, K], [R, T, H, V], [R, T, H] or with BY_CHANNEL [R, T, H, K], [R, T, H]
    k_row, k_token, v_row, v_token, g_row, g_token, beta_row, beta_token,  # strides
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SHARED: tl.constexpr, BY_CHANNEL: tl.constexpr,
    BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, SKIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): columns i · BLOCK … of the head's state [K, V]. SHARED: value heads per key head."""
    begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, end, length, in_pass = moves(table, row, T, SKIP)
    if first < end:
        d, e = tl.arange(0, K_BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = (d < K)[:, None] & (e < V)[None, :]
        s, base = start_of(table, in_pass, (row * H + head) * (K * V) + d[:, None] * V + e[None, :], mask)
        k, v, g, beta = k + row * k_row, v + row * v_row, g + row * g_row, beta + row * beta_row
        for t in range(first, end):
            at = head // SHARED * K + d
            new_k = input_at(table, 1, H // SHARED * K, k, k_token, row, t, length, in_pass, at, d < K)
            new_v = input_at(table, 2, H * V, v, v_token, row, t, length, in_pass, head * V + e, e < V)
            if BY_CHANNEL:
                new_g = input_at(table, 3, H * K, g, g_token, row, t, length, in_pass, head * K + d, d < K)
            else:
                new_g = input_at(table, 3, H, g, g_token, row, t, length, in_pass, head, True)
            strength = input_at(table, 4, H, beta, beta_token, row, t, length, in_pass, head, True)
            s, _ = delta_token(s, new_k, new_k, new_v, new_g, strength, BY_CHANNEL)
        tl.store(base, s, mask=mask)


@triton.jit
def _move_lru(
    x, g, table,  # [R, T, C] twice; the entry's table row
    x_row, x_token, g_row, g_token,  # strides
    T: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, SKIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row): channels i · BLOCK … of the row's state [C]."""
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    first, end, length, in_pass = moves(table, row, T, SKIP)
    if first < end:
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        h, base = start_of(table, in_pass, row * C + c, c < C)
        x, g = x + row * x_row, g + row * g_row
        for t in range(first, end):
            new_x = input_at(table, 0, C, x, x_token, row, t, length, in_pass, c, c < C)
            log = input_at(table, 1, C, g, g_token, row, t, length, in_pass, c, c < C)
            h = tl.exp(log) * h + new_x
        tl.store(base, h, mask=c < C)


@triton.jit
def _move_wkv(
    k, v, w, table,  # [R, T, C] twice, [C]; the entry's table row
    k_row, k_token, v_row, v_token,  # strides
    T: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, SKIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row): channels i · BLOCK … of the row's state [3, C]."""
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    first, end, length, in_pass = moves(table, row, T, SKIP)
    if first < end:
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        num, num_at = start_of(table, in_pass, row * (3 * C) + c, c < C)
        den, den_at = start_of(table, in_pass, row * (3 * C) + C + c, c < C)
        top, top_at = start_of(table, in_pass, row * (3 * C) + 2 * C + c, c < C)
        top = tl.where(den == 0.0, EMPTY, top)
        decay = tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)
        k, v = k + row * k_row, v + row * v_row
        for t in range(first, end):
            new_k = input_at(table, 0, C, k, k_token, row, t, length, in_pass, c, c < C)
            new_v = input_at(table, 1, C, v, v_token, row, t, length, in_pass, c, c < C)
            num, den, top = merge(num, den, top + decay, new_v, new_k)
        tl.store(num_at, num, mask=c < C)
        tl.store(den_at, den, mask=c < C)
        tl.store(top_at, top, mask=c < C)


def move_base(rule: Rule, inputs: Tensors, constants: Tensors, table: Tensor, *, skip: bool = False) -> None:
    """Moves the base states of rows whose log would overflow; inputs: of `logged_inputs`. Before the rule's states are
    stored. With one token per row, the new inputs are not read.

    skip   leaves out the rows of `tokens_to_base`
    """
    rows, tokens = inputs[rule.value].shape[:2]
    values = math.prod(rule.state_shape)
    match rule:
        case SSD(heads=heads, head_dim=dim, state=state, groups=groups):
            wide, tile = triton.next_power_of_2(state), tile_for(SSD, rows * values, None)[0]
            block = min(max(tile.values // wide, 1), triton.next_power_of_2(dim))
            x, dt, B = (inputs[name] for name in ("x", "dt", "B"))
            launch(
                _move_ssd, (triton.cdiv(dim, block), heads, rows),
                x, dt, B, constants["A"], table, *x.stride()[:2], *dt.stride()[:2], *B.stride()[:2],
                tokens, heads, dim, state, heads // groups, block, wide, skip, num_warps=tile.warps,
            )  # fmt: skip
        case SelectiveScan(channels=channels, state=state):
            wide, tile = triton.next_power_of_2(state), tile_for(SelectiveScan, rows * values, None)[0]
            block = min(max(tile.values // wide, 1), triton.next_power_of_2(channels))
            x, dt, B = (inputs[name] for name in ("x", "dt", "B"))
            launch(
                _move_scan, (triton.cdiv(channels, block), rows),
                x, dt, B, constants["A"], table, *x.stride()[:2], *dt.stride()[:2], *B.stride()[:2],
                tokens, channels, state, block, wide, skip, num_warps=tile.warps,
            )  # fmt: skip
        case GatedDelta() | ChannelDelta():
            k, v, g, beta = (inputs[name] for name in ("k", "v", "g", "beta"))
            (key_heads, key), (heads, value) = k.shape[2:], v.shape[2:]
            tall, tile = triton.next_power_of_2(key), tile_for(type(rule), rows * values, None)[0]
            block = min(max(tile.values // tall, 1), triton.next_power_of_2(value))
            launch(
                _move_delta, (triton.cdiv(value, block), heads, rows),
                k, v, g, beta, table, *k.stride()[:2], *v.stride()[:2], *g.stride()[:2], *beta.stride()[:2],
                tokens, heads, key, value, heads // key_heads, g.dim() == 4, block, tall, skip, num_warps=tile.warps,
            )  # fmt: skip
        case RGLRU(channels=channels):
            block, (x, g) = min(CHANNELS, triton.next_power_of_2(channels)), (inputs[name] for name in ("x", "g"))
            launch(
                _move_lru, (triton.cdiv(channels, block), rows),
                x, g, table, *x.stride()[:2], *g.stride()[:2], tokens, channels, block, skip, num_warps=2,
            )  # fmt: skip
        case WKV(channels=channels):
            block, (k, v) = min(CHANNELS, triton.next_power_of_2(channels)), (inputs[name] for name in ("k", "v"))
            launch(
                _move_wkv, (triton.cdiv(channels, block), rows),
                k, v, constants["w"], table, *k.stride()[:2], *v.stride()[:2], tokens, channels, block, skip,
                num_warps=2,
            )  # fmt: skip
        case _:
            raise InputError(f"no kernel moves the base state of the rule {rule}: give the cache slack=0")


# -- prompts ---------------------------------------------------------------------------------------------------------


@triton.jit
def _tokens_to_base(out, table, T: tl.constexpr, PDL: tl.constexpr):
    """Program (row): writes the new tokens up to the row's new base, out [R]; 0 if that is not among them."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, end, length, in_pass = moves(table, row, T)
    tl.store(out + row, tl.where(in_pass, end - length, 0).to(tl.int64))


def tokens_to_base(table: Tensor, rows: int, tokens: int) -> Tensor:
    """How many of each row's `tokens` new tokens the new base comes after, int64 [rows]; 0 where it does not move or is
    not among them. It is then the state after that many, from the state before the pass."""
    out = torch.empty(rows, dtype=torch.int64, device=table.device)
    launch(
        _tokens_to_base, (rows,), out, table, tokens, num_warps=1,
    )  # fmt: skip
    return out
