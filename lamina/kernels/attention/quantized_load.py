"""Loads of quantized keys and values for attention over codes, and the way of its output back from codes to heads."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.entry import store_pointer
from lamina.kernels.quant.dequantize import (
    dequantize_planes,
    fp8_planes,
    hadamard32,
    index_along,
    mask_within,
    repeated,
)
from lamina.kernels.quant.layout import (
    GROUP,
    code_bytes,
    group_words,
    groups_of,
    high_bytes,
    padded_words,
    word_bytes,
)


@triton.jit
def store_of(table, COLUMN: tl.constexpr, new, origin, WIDTH: tl.constexpr):
    """Pointer to cell `origin` of the store in a column: WIDTH values per cell, of the type of pointer `new`."""
    return store_pointer(table, COLUMN, new.dtype) + origin * WIDTH


@triton.jit
def tokens_of(store, new, cell, u, WIDTH: tl.constexpr, APART: tl.constexpr):
    """Pointers to tokens: to their cells in the store; with APART, to token u of this pass's own where u >= 0."""
    at = store + cell * WIDTH
    if APART:
        at = tl.where(u < 0, at, new + u * WIDTH)
    return at


@triton.jit
def in_pairs(scales):
    """A pointer to float16 scales and offsets as a pointer to pairs of both, 32 bits each."""
    return scales.to(tl.pointer_type(tl.uint32), bitcast=True)


@triton.jit
def load_tokens(
    codes, scales, high,  # the row's stores of this head
    new_codes, new_scales, new_high,  # this pass's parts of this head, [T, width] each
    cell, u, there,  # of N tokens: cell in the store, index among the new ones (negative: committed), mask
    D: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, APART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """-> (planes of N tokens [N, words], the offsets of their groups [N, OFFSETS]); for fp8, 256 times the scale of
    each token [N, 1] instead of offsets.

    A scale and an offset are one 32-bit load: L2 bandwidth limits the kernel. TRANSPOSED: tokens are columns, in the
    result and in cell, u and there.
    """
    WORDS: tl.constexpr = code_bytes(D, FORM) // max(1, word_bytes(D, FORM))
    PADDED: tl.constexpr = padded_words(D, FORM)
    w = index_along(PADDED, TRANSPOSED)
    at_words = tokens_of(codes, new_codes, cell, u, WORDS, APART)
    words = tl.load(at_words + w, mask=mask_within(there, w, WORDS, PADDED), other=0)
    if FORM == "plain":
        return (words,), words
    elif FORM == "fp8":
        scale = tl.load(tokens_of(scales, new_scales, cell, u, 1, APART), mask=there, other=0.0).to(tl.float32)
        return fp8_planes(words, D, EXACT), scale * 256
    else:
        GROUPS: tl.constexpr = groups_of(D)
        ROOM: tl.constexpr = PADDED // group_words(D, FORM)
        at, g = tokens_of(in_pairs(scales), in_pairs(new_scales), cell, u, GROUPS, APART), index_along(ROOM, TRANSPOSED)
        pairs = tl.load(at + g, mask=mask_within(there, g, GROUPS, ROOM), other=0)
        scale = (pairs & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        offset = repeated((pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True), max(1, 16 // ROOM), TRANSPOSED)
        if EXACT:
            scale, offset = scale.to(tl.float32), offset.to(tl.float32)
        bits = tokens_of(high, new_high, cell, u, high_bytes(D, FORM), APART)
        scale = repeated(scale, group_words(D, FORM), TRANSPOSED)
        return dequantize_planes(words, scale, bits, there, D, FORM, TRANSPOSED), offset


@triton.jit
def add_offsets(mix, by_group, M: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr):
    """mix [M, columns] plus what the offsets add to each group, by_group [M, OFFSETS]. OFFSETS is at least 16, so a
    group may have several equal entries: their mean counts."""
    G: tl.constexpr = padded_words(D, FORM) // group_words(D, FORM)
    TIMES: tl.constexpr = max(1, 16 // G)
    by_group = tl.sum(tl.reshape(by_group, [M, G, TIMES]), axis=2) / TIMES
    return mix + tl.reshape(tl.broadcast_to(by_group[:, :, None], [M, G, GROUP]), [M, G * GROUP])


@triton.jit
def rotate_back(mix, R: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr):
    """mix [R, COLUMNS] with the Hadamard rotation of each whole group undone."""
    G: tl.constexpr = COLUMNS // GROUP
    column = tl.arange(0, COLUMNS)[None, :]
    back = tl.reshape(hadamard32(tl.reshape(mix, [R * G, GROUP]), R * G), [R, COLUMNS])
    return tl.where((column // GROUP + 1) * GROUP <= DV, back, mix)  # a smaller last group was not rotated
