"""The short causal convolution for a few tokens per row, on the ring of inputs that the cache keeps.

The layer is a few kilobytes, so latency limits it: everything is loaded at once, the K - 1 inputs before the new tokens
from the ring and the T new ones from this pass. One program does this for a block of channels of one row, then stores
the new inputs to the ring and applies the activation that follows, if asked.

The ring is found through the cache's entry table (`columns.py`): inputs [B, S, C], a ring of R >= K slots, lengths and
counts [B]. Row b takes its first counts[b] tokens; the rest write nothing to the ring and give zeros. Everything that
was written before the pass is loaded before waiting for the launch just before, as in `state.py`.
Reference: `lamina.recurrence.conv.causal_convolution_by_steps`.
"""

# The kernel gathers tensors in tuples that grow:
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.entry import COUNTS, RING, SLOTS, STORE, count_of, lengths_of
from lamina.kernels.gemm.epilogue import act_kind, activate
from lamina.kernels.launch import begin, launch

BLOCKS = {False: (64, 2), True: (256, 4)}  # many channels -> channels per program, warps
MANY = 2**18  # channels of all rows from which larger blocks still fill the GPU


@triton.jit
def ring_of(table, row, C: tl.constexpr, dtype: tl.constexpr):
    """-> (pointer to the row's inputs [S, C], slots of the ring, committed tokens of the row)."""
    ring = tl.multiple_of(tl.load(table + STORE).to(tl.pointer_type(dtype)), 16)
    slots, size = tl.load(table + SLOTS), tl.load(table + RING)
    length = tl.load(lengths_of(table) + row)
    return ring + row * slots * C, size.to(tl.int32), length.to(tl.int32)


@triton.jit
def _convolve(
    x, weight, bias, inward, outward,  # [B, T, C], [C, K], [C] or None, gates before and after [B, T, C] or None
    out, table,  # [B, T, C]; the entry's table row, whose store is the ring [B, S, C]
    x_row, x_token, in_row, in_token, out_row, out_token,  # strides of x and of the gates
    T: tl.constexpr, C: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row): channels i · BLOCK … of the row, all T tokens."""
    row, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c_mask = c < C
    counts = tl.load(table + COUNTS)
    ring, size, length = ring_of(table, row, C, x.dtype.element_ty)
    count = count_of(counts, row, T)
    inputs, taps = (), ()  # K - 1 + T inputs and K taps, [BLOCK] each
    for tap in tl.static_range(K):
        taps += (tl.load(weight + c * K + tap, mask=c_mask, other=0.0).to(tl.float32),)
    start = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        start += tl.load(bias + c, mask=c_mask, other=0.0).to(tl.float32)
    for back in tl.static_range(K - 1, 0, -1):
        p = length - back  # position
        inputs += (tl.load(ring + tl.maximum(p, 0) % size * C + c, mask=c_mask & (p >= 0), other=0.0),)
    begin(PDL)
    for t in tl.static_range(T):
        new = tl.load(x + row * x_row + t * x_token + c, mask=c_mask, other=0.0)
        if inward is not None:
            opening = tl.load(inward + row * in_row + t * in_token + c, mask=c_mask, other=0.0)
            new = (new.to(tl.float32) * opening.to(tl.float32)).to(x.dtype.element_ty)
        inputs += (new,)
    for t in tl.static_range(T):
        y = start
        for tap in tl.static_range(K):
            y += inputs[t + tap].to(tl.float32) * taps[tap]
        y = y if ACT is None else activate(y, ACT)
        if outward is not None:
            y *= tl.load(outward + row * out_row + t * out_token + c, mask=c_mask, other=0.0).to(tl.float32)
        tl.store(out + (row * T + t) * C + c, tl.where(t < count, y, 0.0), mask=c_mask)
    if WRITE:
        if T > 1:  # several tokens may take slots that another thread still reads; one token takes none of those
            tl.debug_barrier()
        for t in tl.static_range(T):
            newest = (t < count) & (t >= count - size)  # no slot is written twice
            tl.store(ring + (length + t) % size * C + c, inputs[K - 1 + t], mask=c_mask & newest)


def convolve_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor,
    *,
    act: str | None = None,
    gates: tuple[Tensor, Tensor] | None = None,
    write: bool = True,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """x [B, T, C] of any strides, weight [C, K], bias [C] -> act(convolution) [B, T, C].

    act     a name that `act_kind` knows
    gates   factors [B, T, C] of the input and of the output
    write   stores the inputs of real tokens to the ring
    block   channels and warps per program, for measuring other configurations
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    rows, tokens, channels = x.shape
    out = torch.empty(rows, tokens, channels, dtype=x.dtype, device=x.device)
    width, warps = block or BLOCKS[rows * channels >= MANY]
    inward, outward = gates or (None, None)
    strides = [stride for gate in gates or () for stride in gate.stride()[:2]] or [0] * 4
    launch(
        _convolve, (triton.cdiv(channels, width), rows),
        x, weight.contiguous(), bias, inward, outward, out, table, x.stride(0), x.stride(1), *strides,
        tokens, channels, weight.shape[1], None if act is None else act_kind(act), write, width,
        num_warps=warps,
    )  # fmt: skip
    return out
