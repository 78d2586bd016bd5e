"""What a product does with its sums before they are stored, and how parts of a sum meet; shared by the product kernels.

A sum over a long row may be cut into parts that different programs compute. Each writes its part to a scratch store and
counts itself; the last to arrive adds the parts, always in the same order, and sets the counter back to zero. So a
captured graph can be replayed, results repeat bit for bit, and no kernel of its own is needed to clear or to add.
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

KINDS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu"}
KINDS |= {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
Act = str | Callable[[Tensor], Tensor]


@cache
def act_kind(act: Act) -> str:
    """Which formula `activate` uses for an activation, given by its name or as the function of `lamina.nn`.

    >>> act_kind("swish"), act_kind(torch.nn.functional.silu)
    ('silu', 'silu')
    """
    name = act if isinstance(act, str) else next((name for name, f in ACTIVATIONS.items() if f is act), str(act))
    if name not in KINDS:
        raise InputError(f"activation {name!r} has no kernel; known: {', '.join(KINDS)}")
    return KINDS[name]


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation of float32 numbers."""
    if ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "relu":
        y = tl.maximum(x, 0.0)
    elif ACT == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACT == "gelu_tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 1 + tanh(u) = 2 sigmoid(2u)
    return y


@triton.jit
def wanted(m, at, keep, M, bias, factors, residual,
           GATED: tl.constexpr, BIAS: tl.constexpr, FACTORS: tl.constexpr, RESIDUAL: tl.constexpr):  # fmt: skip
    """What `finish` needs for outputs m beside their sums: bias, the partner's bias, factor, and residual (which lies
    `at` there). Loaded early, so that nobody waits for it."""
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
    """Stores y + residual with y = (before · a + bias) · scale · factor, softly capped, or act(y) · (before · b + bias)
    when gated, at `out` where `keep`; returns what it stores."""
    y = (a * before + first) * scale * factor
    if GATED:
        y = activate(y, ACT) * (b * before + second)
    if SOFTCAP:
        y = softcap * (2 * tl.sigmoid(2 * y / softcap) - 1)  # softcap · tanh(y / softcap)
    y = (y + rest).to(out.dtype.element_ty)
    tl.store(out, y, mask=keep)
    return y


@triton.jit
def arrive(arrived, group, SPLITS: tl.constexpr):
    """Counts this program's part as written; whether it was the last of its group."""
    tl.debug_barrier()  # every thread's part is written before one thread counts
    last = tl.atomic_add(arrived + group, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(arrived + group, 0)
    return last


@triton.jit
def plus(total, lost, more):
    """total + more, and what the rounding of it has lost; the next sum makes up for that (Kahan's way)."""
    if BY_ASSEMBLY:  # else the compiler would make this sum one with the product that gives `more`
        more = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [more], dtype=tl.float32, is_pure=True, pack=1)
    more -= lost
    after = total + more
    return after, (after - total) - more
