"""The epilogue of product kernels, and how programs that share a sum combine their partial sums (split-K).

With split-K several programs compute parts of one sum. Each stores its partial sum in the workspace and increments a
counter. The last to arrive adds all parts, always in the same order, and resets the counter to zero. So a captured
graph can be replayed, results repeat bit for bit, and neither adding nor clearing needs a launch.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Callable
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from lamina.activation import ACTIVATIONS
from lamina.errors import InputError
from lamina.kernels.launch import BY_ASSEMBLY

# Name in `lamina.activation` -> formula of `activate`.
KINDS = {name: name for name in ("silu", "relu", "relu2", "gelu", "quick_gelu", "tanh", "sigmoid")}
KINDS |= {"swish": "silu", "gelu_python": "gelu"}
KINDS |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
Act = str | Callable[[Tensor], Tensor]


@cache
def act_kind(act: Act) -> str:
    """The formula of `activate` for an activation, given by its name or as the function of `lamina.activation`.

    >>> act_kind("swish"), act_kind(torch.nn.functional.silu)
    ('silu', 'silu')
    """
    kind = kind_of(act)
    if kind is None:
        raise InputError(f"activation {act!r} has no kernel; known: {', '.join(KINDS)}")
    return kind


@cache
def kind_of(act: Act) -> str | None:
    """As `act_kind`; None for an activation that no kernel computes, such as a module of one's own."""
    name = act if isinstance(act, str) else next((name for name, f in ACTIVATIONS.items() if f is act), "")
    return KINDS.get(name)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation of float32 values."""
    if ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "relu":
        y = tl.maximum(x, 0.0)
    elif ACT == "relu2":
        y = tl.maximum(x, 0.0)
        y *= y
    elif ACT == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif ACT == "sigmoid":
        y = tl.sigmoid(x)
    elif ACT == "tanh":
        y = 2 * tl.sigmoid(2 * x) - 1
    elif ACT == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACT == "gelu_tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 1 + tanh(u) = 2 sigmoid(2u)
    return y


@triton.jit
def joined(y, z, ACT: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, PLUS: tl.constexpr, SLOPE: tl.constexpr):
    """`Gating` of float32 gates y and ups z; act(y) if not GATED. A NaN stays one."""
    if LIMIT > 0:
        y = tl.where(y > LIMIT, LIMIT, y)
        z = tl.where(z > LIMIT, LIMIT, tl.where(z < -LIMIT, -LIMIT, z))
    y = activate(y * SLOPE, ACT) / SLOPE if SLOPE != 1 else activate(y, ACT)
    if PLUS != 0:
        z += PLUS
    return y * z if GATED else y


@triton.jit
def wanted(m, at, keep, M, bias, factors, residual,
           GATED: tl.constexpr, BIAS: tl.constexpr, FACTORS: tl.constexpr, RESIDUAL: tl.constexpr):  # fmt: skip
    """Loads what `finish` needs beside the sums: bias of the gate or product, bias of the up row, factor, residual.

    m, at, keep       output indices, offsets into the residual, and which of them exist; one shape
    bias, factors     [M] ([2M] if GATED), [M]; residual any shape, read at `at`

    Apart from `finish`, so that a kernel can issue these loads before its sums are complete."""
    first, second, factor, rest = 0.0, 0.0, 1.0, 0.0
    if BIAS:
        first = tl.load(bias + m, mask=keep, other=0).to(tl.float32)
        if GATED:
            second = tl.load(bias + M + m, mask=keep, other=0).to(tl.float32)
    if FACTORS:
        factor = tl.load(factors + m, mask=keep, other=0).to(tl.float32)
    if RESIDUAL:
        rest = tl.load(residual + at, mask=keep, other=0).to(tl.float32)
    return first, second, factor, rest


@triton.jit
def finish(a, b, first, second, factor, rest, before, scale, softcap, out, keep,
           GATED: tl.constexpr, ACT: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """Stores y + rest at the pointers `out` where `keep`; -> the stored values, rounded to the dtype of out.

    y = (before · a + first) · scale · factor, then act(y) unless ACT is "", times (before · b + second) if GATED, then
    soft-capped. a and b are the sums (b of the up rows) in float32, of the shape of out and keep; first, second, factor
    and rest come from `wanted`.
    """
    y = (a * before + first) * scale * factor
    if ACT != "":
        y = activate(y, ACT)
    if GATED:
        y = y * (b * before + second)
    if SOFTCAP:
        y = softcap * (2 * tl.sigmoid(2 * y / softcap) - 1)  # softcap · tanh(y / softcap)
    y = (y + rest).to(out.dtype.element_ty)
    tl.store(out, y, mask=keep)
    return y


@triton.jit
def arrive(arrived, group, SPLITS: tl.constexpr):
    """Counts this program's partial sum as stored; -> True for the last of the SPLITS programs of a group.

    arrived [groups] int32. The atomic releases what this program stored and acquires what the others did."""
    tl.debug_barrier()  # all threads of the program have stored before one of them counts
    last = tl.atomic_add(arrived + group, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(arrived + group, 0)
    return last


@triton.jit
def plus(total, lost, more):
    """Kahan summation: total + more, and the rounding error of that sum, which the next call subtracts."""
    if BY_ASSEMBLY:  # hides `more` from the compiler, which would fuse this sum into the tensor core product
        more = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [more], dtype=tl.float32, is_pure=True, pack=1)
    more -= lost
    after = total + more
    return after, (after - total) - more
