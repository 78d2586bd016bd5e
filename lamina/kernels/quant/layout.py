"""Packed numbers as kernels see them: where a number lies in its code words, and how words become numbers.

A token's codes are read as *words* of 16 bits (of 8 where a group has an odd number of bytes). A word holds two numbers
of eight bits, or four of which the low four bits are there (`cache/codec/bitpack.py`). Taking one number out of every
word gives a *plane*: numbers of the same few bits of a word, so a mask and a shift make it. A product over a head is
the sum of products over planes, with queries picked to match; an output has one matrix for each plane of the values. No
number ever moves from one thread to another.

    8 bits, fp8         planes 0, 1          word w of a group: numbers 2w, 2w + 1
    4, 5 and 6 bits     planes 0, 1, 2, 3    word w of a group: numbers 2w, 2w + 16, 2w + 1, 2w + 17

What bits alone make of a code (`unpack`) has a fixed factor, `weight_of` its plane, which goes onto queries and
outputs. Offsets stay out of the loop over numbers: they are one small product with the sums of the queries over groups.
The scale of fp8, one for a token, goes onto scores and shares.

The reference is `lamina.cache.codec.formats`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.launch import BY_ASSEMBLY
from lamina.kernels.quant.unpack import eight_bits, five_bits, floats, four_bits, six_bits

GROUP = tl.constexpr(32)


# -- sizes, all of them from the head dim and the format: 8, 6, 5, 4, "fp8" or "plain" -------------------------------


@triton.constexpr_function
def nibbles(form):
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
    return 1 << (-(-dim // 32) - 1).bit_length()


@triton.constexpr_function
def code_bytes(dim, form):
    whole, rest = divmod(dim, 32)
    return whole * 16 + (rest + 1) // 2 if form in (6, 5, 4) else dim


@triton.constexpr_function
def scale_numbers(dim, form):
    return {"plain": 0, "fp8": 1}.get(form, 2 * -(-dim // 32))


@triton.constexpr_function
def high_bytes(dim, form):
    return (form - 4) * (dim // 32 * 4 + (dim % 32 + 7) // 8) if form in (6, 5) else 0


@triton.constexpr_function
def word_bytes(dim, form):
    """Bytes of a word; 0 where numbers are plain."""
    rest = dim % 32
    last = (rest + 1) // 2 if form in (6, 5, 4) else rest
    return 0 if form == "plain" else 1 if last % 2 else 2


@triton.constexpr_function
def group_words(dim, form):
    """Words of a whole group."""
    each = word_bytes(dim, form)
    return 32 if form == "plain" else (16 if form in (6, 5, 4) else 32) // each


@triton.constexpr_function
def padded_words(dim, form):
    """Words of all groups, padded to what a product takes."""
    return max(16, padded_groups(dim) * group_words(dim, form))


@triton.constexpr_function
def planes_in(dim, form):
    return max(1, word_bytes(dim, form)) * (2 if form in (6, 5, 4) else 1)


@triton.constexpr_function
def weight_of(plane, form):
    """What a plane's numbers come multiplied by."""
    return 1.0 if form in ("plain", "fp8") else 4.0 if form in (6, 5, 4) and plane % 2 else 0.25


# -- places ----------------------------------------------------------------------------------------------------------


@triton.jit
def number_at(column, D: tl.constexpr, FORM: tl.constexpr):
    """The number of a head in this column, and whether there is one. Columns are groups of 32; where a smaller group is
    packed in halves, each half begins at a multiple of 16."""
    group, e = column // GROUP, column % GROUP
    size = tl.minimum(tl.maximum(D - group * GROUP, 0), GROUP)
    n, there = e, e < size
    if nibbles(FORM):
        half = (size + 1) // 2
        n = e // 16 * half + e % 16
        there = (e % 16 < half) & (n < size)
    return group * GROUP + n, there


@triton.jit
def column_in(word, PLANE: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr):
    """The column of this plane's number in each word."""
    EACH: tl.constexpr = group_words(D, FORM)
    BYTES: tl.constexpr = max(1, word_bytes(D, FORM))
    e = word % EACH * BYTES
    if nibbles(FORM):
        e += PLANE % 2 * 16 + PLANE // 2
    else:
        e += PLANE
    return word // EACH * GROUP + e


@triton.jit
def in_columns(planes, M: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr):
    """planes [M, words] -> their numbers by column [M, 32 · groups]"""
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


# -- numbers ---------------------------------------------------------------------------------------------------------


@triton.jit
def and_one(planes, plane):
    return planes + (plane,)  # noqa: RUF005  (Triton knows no other way)


@triton.jit
def repeated(x, TIMES: tl.constexpr, ACROSS: tl.constexpr):
    """x [N, groups] -> [N, TIMES · groups], each number TIMES times; ACROSS: [groups, N] -> [TIMES · groups, N]"""
    if ACROSS:
        wide = tl.broadcast_to(x[:, None, :], [x.shape[0], TIMES, x.shape[1]])
        return tl.reshape(wide, [x.shape[0] * TIMES, x.shape[1]])
    else:
        wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], TIMES])
        return tl.reshape(wide, [x.shape[0], x.shape[1] * TIMES])


@triton.jit
def numbered(COUNT: tl.constexpr, ACROSS: tl.constexpr):
    """0, 1, … along the columns of a matrix whose rows are tokens; ACROSS: along the rows, where columns are tokens."""
    return tl.arange(0, COUNT)[:, None] if ACROSS else tl.arange(0, COUNT)[None, :]


@triton.jit
def within(there, index, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """there and, where it needs to be asked, index < WIDTH."""
    return there if WIDTH == PADDED else there & (index < WIDTH)


@triton.jit
def with_high_bits(words, scales, high, there, D: tl.constexpr, FORM: tl.constexpr, ACROSS: tl.constexpr):
    """Planes of five or six bits where all groups are whole: each plane of high bits is one number of 32 bits."""
    WORDS: tl.constexpr = padded_words(D, FORM)
    ROOM: tl.constexpr = WORDS // group_words(D, FORM)
    g = numbered(ROOM, ACROSS)
    at, there = high.to(tl.pointer_type(tl.uint32), bitcast=True) + g * (FORM - 4), within(there, g, D // 32, ROOM)
    shift = (numbered(WORDS, ACROSS) % 8 * 2).to(tl.uint32)
    EACH: tl.constexpr = group_words(D, FORM)
    fifth = repeated(tl.load(at, mask=there, other=0), EACH, ACROSS) >> shift
    if FORM == 5:
        return five_bits(words, scales, fifth)
    else:
        return six_bits(words, scales, fifth, repeated(tl.load(at + 1, mask=there, other=0), EACH, ACROSS) >> shift)


@triton.jit
def float8(code):
    """The float16 that is 1/256 of a float8 e4m3: the same bits, elsewhere."""
    code = code.to(tl.uint16)
    return ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.float16, bitcast=True)


@triton.jit
def high_bits(high, column, inside, D: tl.constexpr, FORM: tl.constexpr):
    """The bits above the fourth of the numbers in these columns, of the tokens at `high`: one along the rows, the other
    along the columns of what comes out."""
    d, there = number_at(column, D, FORM)
    there = there & inside
    group, n = column // GROUP, d % GROUP
    size = tl.minimum(D - group * GROUP, GROUP)
    plane = (size + 7) // 8
    bits = tl.zeros(there.shape, tl.int32)
    for i in tl.static_range(FORM - 4):
        byte = tl.load(high + group * (4 * (FORM - 4)) + i * plane + n // 8, mask=there, other=0)
        bits += (byte.to(tl.int32) >> n % 8 & 1) << 4 + i
    return bits


@triton.jit
def planes_of(words, scales, high, there, D: tl.constexpr, FORM: tl.constexpr, ACROSS: tl.constexpr):
    """words [N, words] of N tokens -> the numbers of each plane, times `weight_of` it, in the type of scales.

    scales [N, words] are those of the words; high [N, 1] points to the bits above the fourth of the tokens `there`.
    ACROSS: columns are tokens in all of them.
    """
    FAST: tl.constexpr = BY_ASSEMBLY and word_bytes(D, FORM) == 2 and scales.dtype == tl.float16
    if FORM == 4 and FAST:
        return four_bits(words, scales)
    elif FORM == 8 and FAST:
        return eight_bits(words, scales)
    elif FORM != 4 and FORM != 8 and D % 32 == 0 and FAST:
        return with_high_bits(words, scales, high, there, D, FORM, ACROSS)
    else:
        w = numbered(padded_words(D, FORM), ACROSS)
        planes = ()
        for p in tl.static_range(planes_in(D, FORM)):
            if nibbles(FORM):
                codes = (words >> (p // 2 * 8 + p % 2 * 4) & 15).to(tl.int32)
                if FORM != 4:
                    codes += high_bits(high, column_in(w, p, D, FORM), there, D, FORM)
            else:
                codes = (words >> (p * 8) & 255).to(tl.int32)
            planes = and_one(planes, codes.to(scales.dtype) * weight_of(p, FORM) * scales)
        return planes


@triton.jit
def float_planes(words, D: tl.constexpr, EXACT: tl.constexpr):
    """The same of fp8: 1/256 of its numbers, before the token's scale."""
    if BY_ASSEMBLY and word_bytes(D, "fp8") == 2 and not EXACT:
        return floats(words)
    else:
        planes = ()
        for p in tl.static_range(planes_in(D, "fp8")):
            numbers = float8(words >> (p * 8) & 255)
            planes = and_one(planes, numbers.to(tl.float32) if EXACT else numbers)
        return planes


@triton.jit
def as_float(number):
    """A whole number from 0 to 2^22 in float32, by its bits: converting takes the units four times as long."""
    return (number | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.constexpr_function
def whole_groups(first, many, padded):
    return first % 32 == 0 and many % 32 == 0 and many == padded


@triton.jit
def of_groups(scales, there, FIRST: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """Every other number from `scales` on, one for each group: those of the WIDTH numbers from FIRST on, [N, WIDTH]"""
    at = scales + 2 * (FIRST // 32 + tl.arange(0, WIDTH // 32)[None, :])
    ours = tl.load(at, mask=there, other=0.0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(ours[:, :, None], [N, WIDTH // 32, 32]), [N, WIDTH])


@triton.jit
def decoded(
    codes, scales, high, there, FIRST: tl.constexpr, MANY: tl.constexpr, PADDED: tl.constexpr,
    D: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The numbers FIRST … FIRST + MANY - 1 of tokens whose parts begin at codes, scales and high [N, 1], in float32: as
    they are seen where nothing is turned or centred. [N, PADDED], zeros at the end and where not `there` [N, 1]"""
    N: tl.constexpr = there.shape[0]
    WHOLE: tl.constexpr = whole_groups(FIRST, MANY, PADDED)
    d = FIRST + tl.arange(0, PADDED)[None, :]
    inside = there if WHOLE else there & (d < FIRST + MANY)
    if FORM == "fp8":
        scale = tl.load(scales, mask=there, other=0.0).to(tl.float32) * 256
        return float8(tl.load(codes + d, mask=inside, other=0)).to(tl.float32) * scale
    else:
        group, n = d // GROUP, d % GROUP
        if FORM == 8:
            number = tl.load(codes + d, mask=inside, other=0).to(tl.int32)
        else:
            if WHOLE:
                upper, i = n // 16, n % 16
                at = tl.max_contiguous(tl.multiple_of(group * 16 + i, (1, 16)), (1, 16))
            else:
                half = (tl.minimum(D - group * GROUP, GROUP) + 1) // 2
                upper, i = tl.where(n >= half, 1, 0), tl.where(n >= half, n - half, n)
                at = group * 16 + i
            byte = tl.load(codes + at, mask=inside, other=0)
            number = (byte.to(tl.uint32) >> (upper * 4).to(tl.uint32) & 15).to(tl.int32)
            if FORM != 4:
                number += high_bits(high, group * GROUP + upper * 16 + i, inside, D, FORM)
        if WHOLE:
            scale = of_groups(scales, there, FIRST, N, PADDED)
            offset = of_groups(scales + 1, there, FIRST, N, PADDED)
        else:
            scale = tl.load(scales + 2 * group, mask=inside, other=0.0).to(tl.float32)
            offset = tl.load(scales + 2 * group + 1, mask=inside, other=0.0).to(tl.float32)
        return as_float(number) * scale + offset


@triton.jit
def made_once(x):
    """x, of 16 bits, in a way that keeps the compiler from making it again for each product it is in."""
    if BY_ASSEMBLY and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def turned(x, N: tl.constexpr):
    """x [N, 32] times the Hadamard matrix of 32, which is its own inverse: five times the sums and differences of
    neighbours, sums in front."""
    for _ in tl.static_range(5):
        a, b = tl.split(tl.reshape(x, [N, 16, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [N, 32])
    return x * 0.17677669529663687
