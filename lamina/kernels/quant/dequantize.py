"""Codes to values inside kernels: by planes for matrix products (`layout.py`), or in head order (`dequantize`).

`unpack.py` makes float16 values of the bits of a code alone, times a fixed factor per plane (`plane_factor`). The scale
of a group is applied to the planes. Its offset stays out of the loop over values: it enters as one small product with
the sums of the queries over groups. The scale of fp8, one per token, is applied to scores and probabilities.

Tensors of N tokens have tokens as rows; with TRANSPOSED, as columns.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.launch import BY_ASSEMBLY
from lamina.kernels.quant.layout import (
    GROUP,
    column_of,
    group_words,
    nibbles,
    padded_words,
    plane_factor,
    planes_in,
    value_at,
    word_bytes,
)
from lamina.kernels.quant.unpack import eight_bits, five_bits, four_bits, fp8_words, six_bits

# -- tuples, masks and indices ---------------------------------------------------------------------------------------


@triton.jit
def appended(planes, plane):
    return planes + (plane,)  # noqa: RUF005  (Triton knows no other way)


@triton.jit
def repeated(x, TIMES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """x [N, groups] -> [N, TIMES · groups], each value TIMES times; TRANSPOSED: [groups, N] -> [TIMES · groups, N]."""
    if TRANSPOSED:
        wide = tl.broadcast_to(x[:, None, :], [x.shape[0], TIMES, x.shape[1]])
        return tl.reshape(wide, [x.shape[0] * TIMES, x.shape[1]])
    else:
        wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], TIMES])
        return tl.reshape(wide, [x.shape[0], x.shape[1] * TIMES])


@triton.jit
def index_along(COUNT: tl.constexpr, TRANSPOSED: tl.constexpr):
    """0, 1, … COUNT - 1 as [1, COUNT]; TRANSPOSED: as [COUNT, 1]."""
    return tl.arange(0, COUNT)[:, None] if TRANSPOSED else tl.arange(0, COUNT)[None, :]


@triton.jit
def mask_within(there, index, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """there & (index < WIDTH), without the comparison where nothing is padded."""
    return there if WIDTH == PADDED else there & (index < WIDTH)


# -- planes ----------------------------------------------------------------------------------------------------------


@triton.jit
def planes_with_high_bits(words, scales, high, there, D: tl.constexpr, FORM: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Planes of 5- or 6-bit codes where all groups are whole: the fifth bits of a group are one 32-bit word, and so are
    the sixth. Arguments as for `dequantize_planes`."""
    WORDS: tl.constexpr = padded_words(D, FORM)
    ROOM: tl.constexpr = WORDS // group_words(D, FORM)
    g = index_along(ROOM, TRANSPOSED)
    at, there = high.to(tl.pointer_type(tl.uint32), bitcast=True) + g * (FORM - 4), mask_within(there, g, D // 32, ROOM)
    shift = (index_along(WORDS, TRANSPOSED) % 8 * 2).to(tl.uint32)
    EACH: tl.constexpr = group_words(D, FORM)
    fifth = repeated(tl.load(at, mask=there, other=0), EACH, TRANSPOSED) >> shift
    if FORM == 5:
        return five_bits(words, scales, fifth)
    else:
        return six_bits(words, scales, fifth, repeated(tl.load(at + 1, mask=there, other=0), EACH, TRANSPOSED) >> shift)


@triton.jit
def fp8_to_half(code):
    """1/256 of a float8 e4m3 as a float16: the same bits, shifted to the places that float16 has them in."""
    code = code.to(tl.uint16)
    return ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.float16, bitcast=True)


@triton.jit
def high_bits(high, column, inside, D: tl.constexpr, FORM: tl.constexpr):
    """The bits above the fourth of the codes in these columns. `high` points to each token's bits; tokens and columns
    are along different axes, and the result has both."""
    d, there = value_at(column, D, FORM)
    there = there & inside
    group, n = column // GROUP, d % GROUP
    size = tl.minimum(D - group * GROUP, GROUP)
    plane = (size + 7) // 8  # bytes that hold one bit of every code of the group
    bits = tl.zeros(there.shape, tl.int32)
    for i in tl.static_range(FORM - 4):
        byte = tl.load(high + group * (4 * (FORM - 4)) + i * plane + n // 8, mask=there, other=0)
        bits += (byte.to(tl.int32) >> n % 8 & 1) << 4 + i
    return bits


@triton.jit
def dequantize_planes(words, scales, high, there, D: tl.constexpr, FORM: tl.constexpr, TRANSPOSED: tl.constexpr):
    """words [N, words] of N tokens -> a tuple of planes [N, words]: code · scale · `plane_factor`, in scales' dtype.

    scales [N, words] are those of each word's group. high [N, 1] points to the bits above the fourth of the tokens that
    are there [N, 1]. TRANSPOSED: [words, N] and [1, N].
    """
    FAST: tl.constexpr = BY_ASSEMBLY and word_bytes(D, FORM) == 2 and scales.dtype == tl.float16
    if FORM == 4 and FAST:
        return four_bits(words, scales)
    elif FORM == 8 and FAST:
        return eight_bits(words, scales)
    elif FORM != 4 and FORM != 8 and D % 32 == 0 and FAST:
        return planes_with_high_bits(words, scales, high, there, D, FORM, TRANSPOSED)
    else:
        w = index_along(padded_words(D, FORM), TRANSPOSED)
        planes = ()
        for p in tl.static_range(planes_in(D, FORM)):
            if nibbles(FORM):
                codes = (words >> (p // 2 * 8 + p % 2 * 4) & 15).to(tl.int32)
                if FORM != 4:
                    codes += high_bits(high, column_of(w, p, D, FORM), there, D, FORM)
            else:
                codes = (words >> (p * 8) & 255).to(tl.int32)
            planes = appended(planes, codes.to(scales.dtype) * plane_factor(p, FORM) * scales)
        return planes


@triton.jit
def fp8_planes(words, D: tl.constexpr, EXACT: tl.constexpr):
    """words [N, words] of fp8 codes -> a tuple of planes: 1/256 of their values, without the token's scale."""
    if BY_ASSEMBLY and word_bytes(D, "fp8") == 2 and not EXACT:
        return fp8_words(words)
    else:
        planes = ()
        for p in tl.static_range(planes_in(D, "fp8")):
            values = fp8_to_half(words >> (p * 8) & 255)
            planes = appended(planes, values.to(tl.float32) if EXACT else values)
        return planes


# -- values in head order --------------------------------------------------------------------------------------------


@triton.jit
def exact_float(code):
    """An integer from 0 to 2^22 in float32, by its bits: a conversion instruction has a quarter of the throughput."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.constexpr_function
def whole_groups(first, many, padded):
    """Whether values first … first + many - 1 are whole groups without padding."""
    return first % 32 == 0 and many % 32 == 0 and many == padded


@triton.jit
def group_scales(scales, there, FIRST: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """Every other float16 from `scales` [N, 1] on, one per group, for values FIRST … FIRST + WIDTH - 1 -> [N, WIDTH].

    Scales and offsets alternate: from `scales` on these are the scales, from `scales + 1` on the offsets.
    """
    at = scales + 2 * (FIRST // 32 + tl.arange(0, WIDTH // 32)[None, :])
    ours = tl.load(at, mask=there, other=0.0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(ours[:, :, None], [N, WIDTH // 32, 32]), [N, WIDTH])


@triton.jit
def dequantize(
    codes, scales, high, there,  # [N, 1] each: pointers to the tokens' codes, scales and high bits; which exist
    FIRST: tl.constexpr, MANY: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Values FIRST … FIRST + MANY - 1 of N tokens of D values -> float32 [N, PADDED]; zeros past MANY and where a token
    is not there. For formats without Hadamard rotation and key mean."""
    N: tl.constexpr = there.shape[0]
    WHOLE: tl.constexpr = whole_groups(FIRST, MANY, PADDED)
    d = FIRST + tl.arange(0, PADDED)[None, :]
    inside = there if WHOLE else there & (d < FIRST + MANY)
    if FORM == "fp8":
        scale = tl.load(scales, mask=there, other=0.0).to(tl.float32) * 256
        return fp8_to_half(tl.load(codes + d, mask=inside, other=0)).to(tl.float32) * scale
    else:
        group, n = d // GROUP, d % GROUP
        if FORM == 8:
            code = tl.load(codes + d, mask=inside, other=0).to(tl.int32)
        else:
            if WHOLE:
                upper, i = n // 16, n % 16
                at = tl.max_contiguous(tl.multiple_of(group * 16 + i, (1, 16)), (1, 16))
            else:
                half = (tl.minimum(D - group * GROUP, GROUP) + 1) // 2
                upper, i = tl.where(n >= half, 1, 0), tl.where(n >= half, n - half, n)
                at = group * 16 + i
            byte = tl.load(codes + at, mask=inside, other=0)
            code = (byte.to(tl.uint32) >> (upper * 4).to(tl.uint32) & 15).to(tl.int32)
            if FORM != 4:
                code += high_bits(high, group * GROUP + upper * 16 + i, inside, D, FORM)
        if WHOLE:
            scale = group_scales(scales, there, FIRST, N, PADDED)
            offset = group_scales(scales + 1, there, FIRST, N, PADDED)
        else:
            scale = tl.load(scales + 2 * group, mask=inside, other=0.0).to(tl.float32)
            offset = tl.load(scales + 2 * group + 1, mask=inside, other=0.0).to(tl.float32)
        return exact_float(code) * scale + offset


@triton.jit
def materialize(x):
    """x, of 16 bits, through a move that the compiler cannot see through: otherwise it would dequantize x again for
    each product that x is in."""
    if BY_ASSEMBLY and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def hadamard32(x, N: tl.constexpr):
    """x [N, 32] times the orthonormal Hadamard matrix of 32, which is its own inverse: five rounds of sums and
    differences of neighbours, sums first."""
    for _ in tl.static_range(5):
        a, b = tl.split(tl.reshape(x, [N, 16, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [N, 32])
    return x * 0.17677669529663687
