"""What a product does with its sums before they are stored, and how parts of a sum meet; shared by the product kernels.

A sum over a long row may be cut into parts that different programs compute. Each writes its part to a scratch store and
counts itself; the last to arrive adds the parts, always in the same order, and sets the counter back to zero. So a
captured graph can be replayed, results repeat bit for bit, and no kernel of its own is needed to clear or to add.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.activation import ACTIVATIONS
from lamina.errors import InputError, LaminaError

PARTS = 4 << 20  # numbers of float32 in the scratch store
COUNTERS = 1 << 16

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


@cache
def scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where parts of sums meet: [PARTS] float32 and [COUNTERS] zeros; one for a device."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise LaminaError("the scratch store of products cannot be made while a graph is captured: run a step before")
    return torch.empty(PARTS, device=device), torch.zeros(COUNTERS, dtype=torch.int32, device=device)


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
def added(n, m, keep, M, bias, residual, residual_stride,
          GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr):  # fmt: skip
    """What `finish` adds at [n, m]: bias, the partner's bias, residual. Loaded early, so that nobody waits for it."""
    zero = tl.zeros([1, 1], dtype=tl.float32)
    first, second, rest = zero, zero, zero
    if BIAS:
        first = tl.load(bias + m, mask=keep, other=0).to(tl.float32)
        if GATED:
            second = tl.load(bias + M + m, mask=keep, other=0).to(tl.float32)
    if RESIDUAL:
        rest = tl.load(residual + n * residual_stride + m, mask=keep, other=0).to(tl.float32)
    return first, second, rest


@triton.jit
def finish(a, b, first, second, rest, n, m, keep, M, scale, out, GATED: tl.constexpr, ACT: tl.constexpr):
    """Stores (a + bias) · scale + residual, or act(a + bias) · (b + bias), at out[n, m] where `keep`; out: [N, M]"""
    y = activate(a + first, ACT) * (b + second) if GATED else (a + first) * scale + rest
    tl.store(out + n * M + m, y.to(out.dtype.element_ty), mask=keep)


@triton.jit
def arrive(arrived, group, SPLITS: tl.constexpr):
    """Counts this program's part as written; whether it was the last of its group."""
    tl.debug_barrier()  # every thread's part is written before one thread counts
    last = tl.atomic_add(arrived + group, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(arrived + group, 0)
    return last
