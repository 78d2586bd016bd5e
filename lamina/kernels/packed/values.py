"""Packed codes to values of a tile, for matrix units: scale · code, rounded to the dtype of the vectors.

4-bit codes give two tiles of values: of the lower halves of bytes, values 0 to 15 of each 32, and of the upper, 16 to
31. Scales and zeros are prepared once for each group (`code_scales`) and then broadcast over its codes.

For bfloat16 two bytes become values in PTX, with as few instructions as can be, since they count in products of many
vectors. A code of up to 8 bits is a bfloat16 without a conversion: the bits of c are the number c · 2^-133. One
multiplication and addition makes scale · (c - zero) of it, where 2^133 is part of the factor. The product is exact
before the addition; scale and scale · zero are rounded to bfloat16. fp8 and MXFP4 codes have their exponent moved to
its place in a bfloat16, which gives 2^-120 and 2^-126 of the value. So that factors stay finite, all values made by
words are 2^-24 (`LOWERED`) of what they should be, which the sums are multiplied with in the end. The reference is
`plain_values`, which the interpreter runs.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.launch import BY_ASSEMBLY
from lamina.kernels.packed.words import e2m1_double

LOWERED = tl.constexpr(2.0**-24)
OF_BITS = tl.constexpr(2.0**109)  # 2^133 · LOWERED

# $0 is two values in bfloat16, $1 two bytes, $2 a factor in the lower and an addend in the upper half of a word (twice,
# since two bytes have one each). ptxas does what does not depend on the bytes once for each factor. fma.rn.bf16x2 is
# there from sm_80 on, mul and sub from sm_90 on: 0x3F80 is 1, 0xBF80 -1, 0x8000 -0, 0x3D80 1/16.
SPREAD = """{{
    .reg .b32 word, low, high, sign, factor, addend, none, large;
    mov.b32 none, 0x80008000;
    mov.b32 large, {large};
    cvt.u32.u16 word, $1;
    prmt.b32 word, word, 0, {order};
"""
IN_LOWER = SPREAD.format(order="0x4140", large="0x7E807E80")  # 2^126
IN_UPPER = SPREAD.format(order="0x1404", large="0x7B807B80")  # 2^120
FACTOR = """
    prmt.b32 factor, $2, 0, 0x1010;
    prmt.b32 addend, $2, 0, 0x3232;
"""
END = """
    fma.rn.bf16x2 $0, {value}, factor, {addend};
}}"""
SUM, PRODUCT = END.format(value="low", addend="addend"), END.format(value="low", addend="none")


def _int4(is_high: bool) -> str:
    """The bits of the code times the factor plus the addend. Upper halves are 16 times as large."""
    lower = "mov.b32 high, 0x3D803D80; fma.rn.bf16x2 factor, factor, high, none;" if is_high else ""
    return f"""{IN_LOWER}{FACTOR}
    {lower}
    and.b32 low, word, {"0x00F000F0" if is_high else "0x000F000F"};{SUM}"""


def _mxfp4(shift: int) -> str:
    """Sign to bit 15, the other three bits to bits 6 to 8."""
    return f"""{IN_LOWER}{FACTOR}
    shl.b32 low, word, {6 - shift};
    and.b32 low, low, 0x01C001C0;
    shl.b32 sign, word, {12 - shift};
    lop3.b32 low, sign, 0x80008000, low, 0xEA;
    fma.rn.bf16x2 low, low, large, none;{PRODUCT}"""


def _int8() -> str:
    """The bits of code + 128 times the factor plus the addend."""
    return f"""{IN_LOWER}{FACTOR}
    xor.b32 low, word, 0x00800080;{SUM}"""


def _int8_plus() -> str:
    """128 + (c & 127) less 128 + (c & 128), which is 128 or 256: exact beside an offset, which may be far smaller."""
    return f"""{IN_LOWER}{FACTOR}
    lop3.b32 low, word, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 high, word, 0x00800080, 0x43004300, 0xEA;
    mov.b32 sign, 0xBF80BF80;
    fma.rn.bf16x2 low, high, sign, low;{SUM}"""


def _fp8(is_scaled: bool) -> str:
    """Bytes to the upper halves of words, exponents shifted to their place, times 2^120."""
    end = f"fma.rn.bf16x2 low, low, large, none;{PRODUCT}" if is_scaled else "fma.rn.bf16x2 $0, low, large, none;\n}"
    return f"""{IN_UPPER}{FACTOR if is_scaled else ""}
    shr.u32 low, word, 4;
    and.b32 low, low, 0x07F007F0;
    lop3.b32 low, word, 0x80008000, low, 0xEA;
    {end}"""


INT4_LOW, INT4_HIGH = tl.constexpr(_int4(False)), tl.constexpr(_int4(True))
MXFP4_LOW, MXFP4_HIGH = tl.constexpr(_mxfp4(0)), tl.constexpr(_mxfp4(4))
INT8, INT8_PLUS = tl.constexpr(_int8()), tl.constexpr(_int8_plus())
FP8, BARE_FP8 = tl.constexpr(_fp8(True)), tl.constexpr(_fp8(False))
BARE, OF_WORD = tl.constexpr("=r,h"), tl.constexpr("=r,h,r,r")


@triton.jit
def e8m0(exponent):
    """2^(exponent - 127) in float32."""
    return tl.exp2(exponent.to(tl.float32) - 127)


@triton.jit
def two_halves(lower, upper):
    """Two numbers, in bfloat16, as one word."""
    lower = lower.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    upper = upper.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return lower | (upper << 16)


@triton.constexpr_function
def by_words(dtype, kind, is_signed):
    """Whether values are made by PTX, two at a time."""
    return BY_ASSEMBLY.value and dtype == tl.bfloat16 and (kind != "int8" or is_signed)


@triton.jit
def code_scales(scale, zero, DTYPE: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, ZEROS: tl.constexpr):
    """Scales and zeros, of one shape, as `code_values` takes them: two tensors of that shape. Those `by_words` are one
    tensor, twice.

    zero   zeros if ZEROS is "integer", offsets if it is "offset", otherwise not read
    """
    factor = e8m0(scale) if KIND == "mxfp4" else scale.to(tl.float32)
    if not by_words(DTYPE, KIND, SIGNED):
        return factor, zero.to(tl.float32)
    else:
        addend = zero.to(tl.float32) * LOWERED
        if KIND == "int4" or (KIND == "int8" and ZEROS == ""):
            factor = (factor * OF_BITS).to(tl.bfloat16).to(tl.float32)
            if ZEROS != "offset":
                minus = zero.to(tl.float32) if ZEROS == "integer" else 8.0 if KIND == "int4" else 128.0
                addend = factor * (-LOWERED / OF_BITS) * minus
        else:
            factor *= LOWERED
        word = two_halves(factor, addend)
        return word, word


@triton.jit
def code_values(
    codes, factor, zero, HIGH: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr,
    SIGNED: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """codes uint8 -> their values in DTYPE: of the upper halves of bytes if HIGH, otherwise of the lower halves, or of
    whole bytes for kinds of 8 bits. factor and zero are those of `code_scales`, broadcast to the shape of codes; codes
    whose places differ in the lowest bit alone have the same. Not SCALED: fp8 without the factor. LOWERED of the
    values if SCALED and `by_words`."""
    if not by_words(DTYPE, KIND, SIGNED):
        return plain_values(codes, factor, zero, HIGH, SCALED, DTYPE, KIND, SIGNED, ZEROS)
    elif not SCALED:
        return tl.inline_asm_elementwise(BARE_FP8, BARE, [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        EIGHT: tl.constexpr = FP8 if KIND == "fp8" else INT8_PLUS if ZEROS == "offset" else INT8
        FOUR: tl.constexpr = MXFP4_LOW if KIND == "mxfp4" else INT4_LOW
        UPPER: tl.constexpr = MXFP4_HIGH if KIND == "mxfp4" else INT4_HIGH
        WORDS: tl.constexpr = EIGHT if KIND == "fp8" or KIND == "int8" else UPPER if HIGH else FOUR
        return tl.inline_asm_elementwise(WORDS, OF_WORD, [codes, factor], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def plain_values(
    codes, factor, zero, HIGH: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr,
    SIGNED: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """As `code_values`, in float32, of scales and zeros or offsets in float32."""
    code = codes.to(tl.int32)
    if KIND == "int4" or KIND == "mxfp4":
        code = code >> 4 if HIGH else code & 15
    if KIND == "mxfp4":
        value = e2m1_double(code).to(tl.float32) * 0.5
    elif KIND == "fp8":
        bits = ((code << 24) >> 4) & -2014314496  # 0x87F00000; 2^-120 of the value
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif KIND == "int8" and SIGNED:
        value = ((code << 24) >> 24).to(tl.float32)
    else:
        value = code.to(tl.float32)
    if ZEROS == "integer":
        value -= zero
    elif KIND == "int4" and ZEROS == "":
        value -= 8.0
    if SCALED:
        value *= factor
    if ZEROS == "offset":
        value += zero
    return value.to(DTYPE)


@triton.jit
def tile_values(
    codes, scale, zero, DTYPE: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, ZEROS: tl.constexpr
):  # fmt: skip
    """codes [ROWS, PIECES, 16] uint8, scale and zero [ROWS, PIECES] -> values of the lower and the upper halves of
    bytes, [ROWS, PIECES, 16] of DTYPE each, rounded once; for kinds of 8 bits both are the same tile."""
    factor = (e8m0(scale) if KIND == "mxfp4" else scale.to(tl.float32))[:, :, None]
    zero = zero.to(tl.float32)[:, :, None]
    low = plain_values(codes, factor, zero, False, True, DTYPE, KIND, SIGNED, ZEROS)
    high = low
    if KIND == "int4" or KIND == "mxfp4":
        high = plain_values(codes, factor, zero, True, True, DTYPE, KIND, SIGNED, ZEROS)
    return low, high
