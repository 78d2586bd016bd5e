"""One vector times packed codes, 16 bytes of codes at a time: the inner loop of `gemv.py`.

Integer codes are multiplied as integers. x is rounded to 16-bit integers, with a step for every 16 bytes of codes (16
or 32 values): the error is at most 2^-16 of the largest of those values, far below the rounding of bfloat16. The
instruction dp2a multiplies two 16-bit integers with two bytes and adds both to a 32-bit sum, so a code costs less than
one instruction and no conversion. Sums over a piece are exact, then multiplied by step and scale in float32.

MXFP4 codes are doubled, which makes them integers from -12 to 12. fp8 codes are converted to float32.

A piece is 16 bytes of codes, four 32-bit words. Each thread owns whole pieces, so every tensor here is [PIECES]: a word
of each piece of one row, or a value, or a pair of values, of x. Values of a piece by the word they are in:

    int8, fp8     word q has values 4q … 4q + 3
    4 bits        word q has values 4q … 4q + 3 in the lower halves of its bytes, 16 + 4q … 16 + 4q + 3 in the upper
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, misc"
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.launch import BY_ASSEMBLY

MAGIC = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it rounds to an integer, in the lower bits
MAGIC_BITS = tl.constexpr(0x4B400000)
LARGEST = tl.constexpr(32767.0)

# $0 the sum, $1 to $4 the words of a piece, from $5 on pairs of x in the order of `vector_pieces`.


def _chain(register: str, sign: str, first: int, second: int) -> str:
    """Adds four bytes of a register times two pairs of x to the sum."""
    return f"""
    dp2a.lo.s32.{sign} sum, ${first}, {register}, sum;
    dp2a.hi.s32.{sign} sum, ${second}, {register}, sum;"""


def _eight_bits(sign: str) -> str:
    chains = "".join(_chain(f"${1 + q}", sign, 5 + 2 * q, 6 + 2 * q) for q in range(4))
    return f"{{ .reg .s32 sum; mov.b32 sum, 0;{chains} mov.b32 $0, sum; }}"


def _four_bits() -> str:
    lines = "{ .reg .s32 sum; .reg .b32 low, high; mov.b32 sum, 0;"
    for q in range(4):
        lines += f"""
    and.b32 low, ${1 + q}, 0x0F0F0F0F;
    shr.u32 high, ${1 + q}, 4;
    and.b32 high, high, 0x0F0F0F0F;"""
        lines += _chain("low", "u32", 5 + 2 * q, 6 + 2 * q) + _chain("high", "u32", 13 + 2 * q, 14 + 2 * q)
    return lines + " mov.b32 $0, sum; }"


def _e2m1() -> str:
    """A byte permutation looks up four codes at once: their sizes, the same negated, and a mask of their signs."""
    lines = "{ .reg .s32 sum; .reg .b32 low, code, size, less, sign; mov.b32 sum, 0;"
    for q in range(4):
        word = f"${1 + q}"
        lines += f"""
    shl.b32 low, {word}, 4;
    and.b32 code, {word}, 0x77777777;"""
        for half, order in ((0, "0xD9C8"), (1, "0xFBEA")):
            lines += "" if half == 0 else "\n    shr.u32 code, code, 16;"
            lines += f"""
    prmt.b32 size, 0x03020100, 0x0C080604, code;
    prmt.b32 less, 0xFDFEFF00, 0xF4F8FAFC, code;
    prmt.b32 sign, low, {word}, {order};
    lop3.b32 size, sign, less, size, 0xCA;"""
            lines += _chain("size", "s32", 5 + 4 * q + 2 * half, 6 + 4 * q + 2 * half)
    return lines + " mov.b32 $0, sum; }"


INT8, UINT8 = tl.constexpr(_eight_bits("s32")), tl.constexpr(_eight_bits("u32"))
UINT4, E2M1 = tl.constexpr(_four_bits()), tl.constexpr(_e2m1())
WITH_8, WITH_16 = tl.constexpr("=r" + ",r" * 12), tl.constexpr("=r" + ",r" * 20)
FP8 = tl.constexpr("""{
    .reg .b16 first, second, a, b, c, d;
    .reg .b32 low, high;
    mov.b32 {first, second}, $4;
    cvt.rn.f16x2.e4m3x2 low, first;
    cvt.rn.f16x2.e4m3x2 high, second;
    mov.b32 {a, b}, low;
    mov.b32 {c, d}, high;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")
FOUR_FLOATS = tl.constexpr((tl.float32, tl.float32, tl.float32, tl.float32))


@triton.jit
def columns_of_four(x, PIECES: tl.constexpr):
    """x [PIECES, 4] -> its columns, [PIECES] each, without a move between threads."""
    even, odd = tl.split(tl.reshape(x, [PIECES, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def pair_halves(x, at, there):
    """The values 2 · at and 2 · at + 1 of x as float32, read as one word; zero unless there (None: all are)."""
    ONE: tl.constexpr = x.dtype.element_ty
    WIDE: tl.constexpr = tl.int64 if ONE.primitive_bitwidth == 32 else tl.int32
    pointer = x.to(tl.pointer_type(WIDE), bitcast=True) + at
    if there is None:
        words = tl.load(pointer, eviction_policy="evict_last")
    else:
        words = tl.load(pointer, mask=there, other=0, eviction_policy="evict_last")
    if tl.bfloat16 == ONE:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    elif tl.float16 == ONE:
        low, high = (words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low, high = (words & 0xFFFFFFFF).to(tl.int32), (words >> 32).to(tl.int32)
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def size_bits(x):
    """|x| as an integer, in the same order: inf and nan are largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def paired(low, high):
    """Two integers of 16 bits in one word."""
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def vector_pieces(x, start, K, KIND: tl.constexpr, PIECES: tl.constexpr, SPAN: tl.constexpr, WHOLE: tl.constexpr):
    """Values start … start + PIECES · SPAN of x -> tuple of [PIECES], steps, sums.

    int8, int4   pairs of neighbours as 16-bit integers: (0, 1), (2, 3) …
    mxfp4        pairs of a value and the one 16 after it: (0, 16), (1, 17) …
    fp8          values as float32
    steps        float32 [PIECES]; sums int32 [PIECES] of the integers; both unused if fp8
    """
    LOADS: tl.constexpr = SPAN // 8  # of four pairs each
    piece = start // SPAN + tl.arange(0, PIECES)
    there = None if WHOLE else (piece * SPAN < K)[:, None]
    lows, highs = (), ()
    for i in tl.static_range(LOADS):
        at = (piece * (SPAN // 2))[:, None] + (4 * i + tl.arange(0, 4))[None, :]
        low, high = pair_halves(x, at, there)
        lows += (low,)
        highs += (high,)
    found = ()
    steps = tl.zeros([PIECES], tl.float32)
    sums = tl.zeros([PIECES], tl.int32)
    if KIND == "fp8":
        for i in tl.static_range(LOADS):
            low, high = columns_of_four(lows[i], PIECES), columns_of_four(highs[i], PIECES)
            for j in tl.static_range(4):
                found += (low[j], high[j])
    else:
        bits = tl.maximum(size_bits(lows[0]), size_bits(highs[0]))
        for i in tl.static_range(1, LOADS):
            bits = tl.maximum(bits, tl.maximum(size_bits(lows[i]), size_bits(highs[i])))
        largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
        steps = largest * (1 / LARGEST)
        inverse = (LARGEST / tl.maximum(largest, 1e-30))[:, None]
        ints, more = (), ()
        total = tl.zeros([PIECES, 4], tl.int32)
        for i in tl.static_range(LOADS):
            low = (lows[i] * inverse + MAGIC).to(tl.int32, bitcast=True)
            high = (highs[i] * inverse + MAGIC).to(tl.int32, bitcast=True)
            total += (low - MAGIC_BITS) + (high - MAGIC_BITS)
            ints += (low,)
            more += (high,)
        sums = tl.sum(total, 1)
        if KIND == "mxfp4":
            for i in tl.static_range(2):
                low = columns_of_four(paired(ints[i], ints[i + 2]), PIECES)
                high = columns_of_four(paired(more[i], more[i + 2]), PIECES)
                for j in tl.static_range(4):
                    found += (low[j], high[j])
        else:
            for i in tl.static_range(LOADS):
                found += columns_of_four(paired(ints[i], more[i]), PIECES)
    return found, steps, sums


@triton.jit
def e2m1_double(codes):
    """Twice the value of e2m1 codes 0 … 15."""
    exponent, odd = codes >> 1 & 3, codes & 1
    size = tl.where(exponent == 0, odd, (2 + odd) << tl.maximum(exponent - 1, 0))
    return tl.where(codes & 8 != 0, -size, size)


@triton.jit
def times_pair(first, second, pair):
    """Two codes times the two 16-bit integers of a pair: what half of a dp2a does."""
    return first * ((pair << 16) >> 16) + second * (pair >> 16)


@triton.jit
def integer_sums(words, x, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """Four words [PIECES] of each piece times the pairs x of `vector_pieces` -> int32 [PIECES]."""
    w0, w1, w2, w3 = words
    if BY_ASSEMBLY and KIND == "int8":
        ASM: tl.constexpr = INT8 if SIGNED else UINT8
        return tl.inline_asm_elementwise(
            ASM, WITH_8, [w0, w1, w2, w3, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    elif BY_ASSEMBLY:
        CODE: tl.constexpr = UINT4 if KIND == "int4" else E2M1
        return tl.inline_asm_elementwise(
            CODE, WITH_16,
            [w0, w1, w2, w3, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13],
             x[14], x[15]], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total = tl.zeros(w0.shape, tl.int32)
        for q in tl.static_range(4):
            for i in tl.static_range(2):  # bytes 2i and 2i + 1
                first, second = words[q] >> (16 * i) & 255, words[q] >> (16 * i + 8) & 255
                if KIND == "int8":
                    if SIGNED:
                        first, second = (first << 24) >> 24, (second << 24) >> 24
                    total += times_pair(first, second, x[2 * q + i])
                elif KIND == "int4":
                    total += times_pair(first & 15, second & 15, x[2 * q + i])
                    total += times_pair(first >> 4, second >> 4, x[8 + 2 * q + i])
                else:
                    total += times_pair(e2m1_double(first & 15), e2m1_double(first >> 4), x[4 * q + 2 * i])
                    total += times_pair(e2m1_double(second & 15), e2m1_double(second >> 4), x[4 * q + 2 * i + 1])
        return total


@triton.jit
def fp8_floats(words, NATIVE: tl.constexpr):
    """words of four fp8 codes -> four float32 tensors.

    The arithmetic shift leaves the sign where it is and moves exponent and mantissa to the places that float32 has them
    in, which gives 2^-120 of the value. NATIVE: by the conversion instruction of sm_89 and later."""
    if NATIVE:
        return tl.inline_asm_elementwise(FP8, "=r,=r,=r,=r,r", [words], dtype=FOUR_FLOATS, is_pure=True, pack=1)
    else:
        floats = ()
        for i in tl.static_range(4):
            bits = ((words << (24 - 8 * i)) >> 4) & -2014314496  # 0x87F00000
            floats += (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36,)  # 2^120
        return floats
