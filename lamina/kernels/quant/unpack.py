"""Words of codes to float16 values in PTX, two words at a time (`pack=2`), with few instructions.

The bits of a code c make a float16 without a conversion: 0x5C00 | c is the float16 256 + c / 4. One fma with the
group's scale s subtracts 256 · s and gives s · c / 4, rounded once. The upper half of a byte is not shifted down, so
its code gives 4 · s · c. `layout.plane_factor` has these factors. A float8 e4m3 gives 1/256 of its value as a float16
by moving its bits.

The reference is the other branch of `dequantize.dequantize_planes` and `dequantize.fp8_planes`, which the interpreter
runs.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

# $0 to $3 are the planes, $4 the words and $5 their scales. Codes a and b are in the low byte of a word, c and d in the
# high byte. lop3 with 0xEA is (x & mask) | bits.
FIRST = """{
    .reg .b32 upper, less, low, high, at, a, b, c, d;
    mov.b32 less, 0xDC00DC00;
    mul.f16x2 less, $5, less;
    shr.u32 upper, $4, 8;
    lop3.b32 a, $4, 0x000F000F, 0x5C005C00, 0xEA;
    lop3.b32 b, $4, 0x00F000F0, 0x5C005C00, 0xEA;
    lop3.b32 c, upper, 0x000F000F, 0x5C005C00, 0xEA;
    lop3.b32 d, upper, 0x00F000F0, 0x5C005C00, 0xEA;
"""
LAST = """
    fma.rn.f16x2 $0, a, $5, less;
    fma.rn.f16x2 $1, b, $5, less;
    fma.rn.f16x2 $2, c, $5, less;
    fma.rn.f16x2 $3, d, $5, less;
}"""


def _above(bit: int, one: str, other: str) -> str:
    """Adds one more bit to the codes a, b, c, d: bits 0, 16, 1 and 17 of a register per word, `one` and `other`."""
    lower, upper = f"0x{0x00010001 << bit:08X}", f"0x{0x00100010 << bit:08X}"
    return f"""
    prmt.b32 low, {one}, {other}, 0x5410;
    prmt.b32 high, {one}, {other}, 0x7632;
    shl.b32 at, low, {bit};
    lop3.b32 a, at, {lower}, a, 0xEA;
    shl.b32 at, high, {bit + 4};
    lop3.b32 b, at, {upper}, b, 0xEA;
    shl.b32 at, low, {bit - 1};
    lop3.b32 c, at, {lower}, c, 0xEA;
    shl.b32 at, high, {bit + 3};
    lop3.b32 d, at, {upper}, d, 0xEA;
"""


FOUR = tl.constexpr(FIRST + LAST)
FIVE = tl.constexpr(FIRST + _above(4, "$6", "$7") + LAST)
SIX = tl.constexpr(FIRST + _above(4, "$6", "$7") + _above(5, "$8", "$9") + LAST)
EIGHT = tl.constexpr("""{
    .reg .b32 upper, less, a, b;
    mov.b32 less, 0xDC00DC00;
    mul.f16x2 less, $3, less;
    shr.u32 upper, $2, 8;
    lop3.b32 a, $2, 0x00FF00FF, 0x5C005C00, 0xEA;
    lop3.b32 b, upper, 0x00FF00FF, 0x5C005C00, 0xEA;
    fma.rn.f16x2 $0, a, $3, less;
    fma.rn.f16x2 $1, b, $3, less;
}""")
FP8 = tl.constexpr("""{
    .reg .b32 a, b, sign;
    shl.b32 a, $2, 7;
    and.b32 a, a, 0x3F803F80;
    shl.b32 sign, $2, 8;
    lop3.b32 $0, sign, 0x80008000, a, 0xEA;
    shr.u32 b, $2, 1;
    and.b32 b, b, 0x3F803F80;
    lop3.b32 $1, $2, 0x80008000, b, 0xEA;
}""")
TWO_PLANES = tl.constexpr((tl.float16, tl.float16))
FOUR_PLANES = tl.constexpr((tl.float16, tl.float16, tl.float16, tl.float16))


@triton.jit
def four_bits(words, scales):
    """words and scales [M, words] -> planes 0 to 3, float16 [M, words] each; the same for the functions below."""
    return tl.inline_asm_elementwise(FOUR, "=r,=r,=r,=r,r,r", [words, scales], dtype=FOUR_PLANES, is_pure=True, pack=2)


@triton.jit
def five_bits(words, scales, fifth):
    """fifth: uint32 [M, words], the fifth bits of each word's codes at bits 0, 16, 1 and 17."""
    return tl.inline_asm_elementwise(
        FIVE, "=r,=r,=r,=r,r,r,r,r", [words, scales, fifth], dtype=FOUR_PLANES, is_pure=True, pack=2
    )


@triton.jit
def six_bits(words, scales, fifth, sixth):
    return tl.inline_asm_elementwise(
        SIX, "=r,=r,=r,=r,r,r,r,r,r,r", [words, scales, fifth, sixth], dtype=FOUR_PLANES, is_pure=True, pack=2
    )


@triton.jit
def eight_bits(words, scales):
    """-> planes 0 and 1."""
    return tl.inline_asm_elementwise(EIGHT, "=r,=r,r,r", [words, scales], dtype=TWO_PLANES, is_pure=True, pack=2)


@triton.jit
def fp8_words(words):
    """-> planes 0 and 1 of float8 codes, times 1/256."""
    return tl.inline_asm_elementwise(FP8, "=r,=r,r", [words], dtype=TWO_PLANES, is_pure=True, pack=2)
