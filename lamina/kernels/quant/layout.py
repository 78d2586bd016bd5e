"""The layout of packed codes as kernels see it: which value of a head is in which bits of which word.

A token's codes are read as *words* of 16 bits (8 bits where a group has an odd number of bytes). A word holds two codes
of eight bits, or the low four bits of four codes (`cache/codec/bitpack.py`). Taking one code out of every word gives a
*plane*: its codes have the same bit position in all words, so one mask and one shift extract it, and no value moves
from one thread to another. A dot product over a head is the sum of dot products over planes, with the queries reordered
to match; an output has one matrix per plane of the values.

    8 bits, fp8         planes 0, 1          word w of a group: values 2w, 2w + 1
    4, 5 and 6 bits     planes 0, 1, 2, 3    word w of a group: values 2w, 2w + 16, 2w + 1, 2w + 17

A *column* is a position in head order padded to whole groups of 32 values. `dequantize.py` turns words into values.

The reference is `lamina.cache.codec.formats`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(32)  # values that share a scale and an offset


# -- sizes per token and head, from its dim and format: 8, 6, 5, 4, "fp8" or "plain" ---------------------------------


@triton.constexpr_function
def nibbles(form):
    """Whether the low four bits of codes are packed two to a byte."""
    return form in (6, 5, 4)


@triton.constexpr_function
def offsets(form):
    """Whether groups have an offset beside their scale."""
    return form in (8, 6, 5, 4)


@triton.constexpr_function
def groups_of(dim):
    return -(-dim // 32)


@triton.constexpr_function
def padded_groups(dim):
    """Groups, padded to a power of two."""
    return 1 << (-(-dim // 32) - 1).bit_length()


@triton.constexpr_function
def code_bytes(dim, form):
    """Bytes of codes, without the bits above the fourth; values where they are plain."""
    whole, rest = divmod(dim, 32)
    return whole * 16 + (rest + 1) // 2 if form in (6, 5, 4) else dim


@triton.constexpr_function
def scale_values(dim, form):
    """float16 values beside the codes: scale and offset per group, or one scale per token for fp8."""
    return {"plain": 0, "fp8": 1}.get(form, 2 * -(-dim // 32))


@triton.constexpr_function
def high_bytes(dim, form):
    """Bytes of the bits above the fourth, for codes of 5 and 6 bits."""
    return (form - 4) * (dim // 32 * 4 + (dim % 32 + 7) // 8) if form in (6, 5) else 0


@triton.constexpr_function
def word_bytes(dim, form):
    """Bytes per word; 0 where values are plain."""
    rest = dim % 32
    last = (rest + 1) // 2 if form in (6, 5, 4) else rest
    return 0 if form == "plain" else 1 if last % 2 else 2


@triton.constexpr_function
def group_words(dim, form):
    """Words per whole group."""
    each = word_bytes(dim, form)
    return 32 if form == "plain" else (16 if form in (6, 5, 4) else 32) // each


@triton.constexpr_function
def padded_words(dim, form):
    """Words of all groups, padded to the smallest side of a matrix product."""
    return max(16, padded_groups(dim) * group_words(dim, form))


@triton.constexpr_function
def planes_in(dim, form):
    """Codes per word."""
    return max(1, word_bytes(dim, form)) * (2 if form in (6, 5, 4) else 1)


@triton.constexpr_function
def plane_factor(plane, form):
    """The fixed factor on the values of a plane (see `unpack.py`). Queries and outputs are divided by it."""
    return 1.0 if form in ("plain", "fp8") else 4.0 if form in (6, 5, 4) and plane % 2 else 0.25


# -- columns ---------------------------------------------------------------------------------------------------------


@triton.jit
def value_at(column, D: tl.constexpr, FORM: tl.constexpr):
    """-> (the index in the head of the value in this column, whether there is one).

    Columns are groups of 32. A smaller last group that is packed in two halves has each half at a multiple of 16.
    """
    group, e = column // GROUP, column % GROUP
    size = tl.minimum(tl.maximum(D - group * GROUP, 0), GROUP)
    n, there = e, e < size
    if nibbles(FORM):
        half = (size + 1) // 2
        n = e // 16 * half + e % 16
        there = (e % 16 < half) & (n < size)
    return group * GROUP + n, there


@triton.jit
def column_of(word, PLANE: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr):
    """The column of this plane's value in each word."""
    EACH: tl.constexpr = group_words(D, FORM)
    BYTES: tl.constexpr = max(1, word_bytes(D, FORM))
    e = word % EACH * BYTES
    if nibbles(FORM):
        e += PLANE % 2 * 16 + PLANE // 2
    else:
        e += PLANE
    return word // EACH * GROUP + e


@triton.jit
def planes_to_columns(planes, M: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr):
    """A tuple of planes [M, words] -> their values in column order [M, 32 · groups]."""
    G: tl.constexpr = padded_words(D, FORM) // group_words(D, FORM)
    if nibbles(FORM):
        low, high = planes[0], planes[1]
        if word_bytes(D, FORM) == 2:
            low, high = tl.join(low, planes[2]), tl.join(high, planes[3])
        low, high = tl.reshape(low, [M, G, 16]), tl.reshape(high, [M, G, 16])
        return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), [M, G * GROUP])
    elif planes_in(D, FORM) == 2:
        return tl.reshape(tl.join(planes[0], planes[1]), [M, G * GROUP])
    else:
        return planes[0]
