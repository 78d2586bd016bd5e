"""Blocks of keys and values in tensors, as attention over any View reads them: loads, scores, and what queries see.

Keys are in tensors [B, H, S, D] in any order, with their positions beside them; slots without a token may hold NaN.
What a query sees is decided by positions, or by bits (`lamina.attention.mask_bits`). `many.py` and `few.py` use it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.mask_bits import MaskBits
from lamina.attention.window import Near, Window
from lamina.kernels.attention.online_softmax import LOG2E
from lamina.kernels.attention.visible import window_arguments
from lamina.kernels.launch import BY_ASSEMBLY

# -- on the host -----------------------------------------------------------------------------------------------------


def kind_of(window: Window) -> tuple[str, int, int]:
    """(kind, size, first tokens that it keeps), as the kernel takes a window."""
    return ("near", window.size, 0) if isinstance(window, Near) else window_arguments(window)


def mask_arguments(mask: MaskBits | None) -> tuple[Tensor | None, tuple[int, ...]]:
    """-> (bits, their strides of rows and queries), as kernels take them."""
    return (None, (0, 0)) if mask is None else (mask.bits, mask.bits.stride()[:2])


def head_parts(dim: int) -> tuple[int, int]:
    """A head's values as two powers of two, of which the second may be 0: a product of a head of 192 as one of 256
    would waste a quarter.

    >>> head_parts(128), head_parts(192), head_parts(80), head_parts(12)
    ((128, 0), (128, 64), (64, 16), (16, 0))
    """
    whole = triton.next_power_of_2(dim)
    half = whole // 2
    if dim == whole or dim <= 16:
        return max(16, whole), 0
    rest = max(16, triton.next_power_of_2(dim - half))
    return (half, rest) if rest < half else (whole, 0)


# -- inside kernels --------------------------------------------------------------------------------------------------


@triton.jit
def load_keys(
    k, beside, s, k_token, beside_token, d, e, held, D: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Keys s [1, N] transposed, [FIRST, N] and [REST, N].

    held     None, or which of them there are
    beside   None, or where the second part is
    """
    keys = k + s * k_token
    x = _load(keys + d[:, None], held, (d < D)[:, None], D < FIRST)
    y = x
    if REST:
        if beside is not None:
            keys = beside + s * beside_token
        y = _load(keys + e[:, None], held, (e < D)[:, None], D < FIRST + REST)
    return x, y


@triton.jit
def load_values(values, dv, held, DV: tl.constexpr, DV_PAD: tl.constexpr):
    """[N, DV_PAD], zero where nothing is held: a NaN there, times a weight of 0, would be NaN."""
    return _load(values + dv[None, :], held, (dv < DV)[None, :], DV < DV_PAD)


@triton.jit
def _load(at, held, inside, PADDED: tl.constexpr):
    if held is None:
        if PADDED:
            return tl.load(at, mask=inside, other=0.0)
        else:
            return tl.load(at)
    else:
        return tl.load(at, mask=held & inside, other=0.0)


@triton.jit
def scores_in_powers(a, b, x, y, scale, softcap, REST: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores in powers of two, [M, N]"""
    scores = tl.dot(a, x, input_precision="ieee")
    if REST:
        scores = tl.dot(b, y, scores, input_precision="ieee")
    scores *= scale
    if SOFTCAP:
        scores = softcap * LOG2E * _tanh(scores / softcap)
    return scores


@triton.jit
def _tanh(x):
    if BY_ASSEMBLY:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def shown_by_bits(bits, t, s, bits_token):
    """Whether queries t [M] see the keys in slots s [N], by the bits of their row."""
    byte = tl.load(bits + t.to(tl.int64)[:, None] * bits_token + (s >> 3)[None, :]).to(tl.int32)
    return ((byte >> (s & 7)[None, :]) & 1) != 0


@triton.jit
def shown_by_position(q, kv, size, keep, KIND: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether queries at positions q see keys at kv: the rule of `View` without spans and segments."""
    if KIND == "sliding":
        shown = (kv > q - size) | (kv < keep)
    elif KIND == "near":
        shown = (kv >= q - size) & (kv <= q + size)
    elif KIND == "chunked":
        shown = q // size == kv // size
    else:
        shown = (q >= 0) & (kv >= 0)
    if CAUSAL:
        shown = shown & (kv <= q)
    return shown
