"""Packed codes to values of a tile, for matrix units: scale · code, rounded to the dtype of the vectors.

A tile of codes is [ROWS, PIECES, 16] bytes, a piece of 16 bytes after the other, with one scale for each piece. 4-bit
codes give two tiles of values: of the lower halves of bytes, values 0 to 15 of each 32, and of the upper, 16 to 31.

For bfloat16 four bytes become values in PTX with few instructions. Bits of a code c make a bfloat16 without a
conversion: 0x4300 | c is 128 + c, from which 128 plus the zero is subtracted, exactly. fp8 and MXFP4 codes have their
exponent moved to its place in a bfloat16, which gives 2^-120 and 2^-126 of the value. The reference is the other branch
of `tile_values`, which the interpreter runs.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.launch import BY_ASSEMBLY
from lamina.kernels.packed.words import e2m1_double

# bfloat16x2: fma.rn.bf16x2 exists from sm_80 on, mul and sub from sm_90 on. 0x3F80 is 1, 0xBF80 -1, 0x8000 -0.
SPREAD = """{{
    .reg .b32 a, b, low, high, sign, one, less, none, large;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xBF80BF80;
    mov.b32 none, 0x80008000;
    mov.b32 large, 0x7E807E80;
    prmt.b32 a, {source}, 0, 0x4140;
    prmt.b32 b, {source}, 0, 0x4342;
"""
# In: four bytes, scales (2), minus (2): 128 + zero negated, plus (2): offsets. Out: lower halves (2), upper halves (2).
INT4 = tl.constexpr(
    SPREAD.format(source="$4")
    + """
    lop3.b32 low, a, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 low, low, one, $7;
    fma.rn.bf16x2 $0, low, $5, $9;
    lop3.b32 low, b, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 low, low, one, $8;
    fma.rn.bf16x2 $1, low, $6, $10;
    shr.u32 a, a, 4;
    shr.u32 b, b, 4;
    lop3.b32 high, a, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 high, high, one, $7;
    fma.rn.bf16x2 $2, high, $5, $9;
    lop3.b32 high, b, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 high, high, one, $8;
    fma.rn.bf16x2 $3, high, $6, $10;
}"""
)
# In: four bytes, scales (2). Sign to bit 15, the other three bits to bits 6 to 8; 0x7E80 is 2^126.
MXFP4 = tl.constexpr(
    SPREAD.format(source="$4")
    + "".join(
        f"""
    shl.b32 low, {one}, {6 - down};
    and.b32 low, low, 0x01C001C0;
    shl.b32 sign, {one}, {12 - down};
    lop3.b32 low, sign, 0x80008000, low, 0xEA;
    fma.rn.bf16x2 low, low, large, none;
    fma.rn.bf16x2 ${out}, low, {scale}, none;
"""
        for one, down, out, scale in (("a", 0, 0, "$5"), ("b", 0, 1, "$6"), ("a", 4, 2, "$5"), ("b", 4, 3, "$6"))
    )
    + "}"
)
# In: four bytes, scales (2), minus (2), plus (2). 128 + (c & 127) less 128 + (c & 128), which is 128 or 256.
INT8 = tl.constexpr(
    SPREAD.format(source="$2")
    + "".join(
        f"""
    lop3.b32 low, {one}, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 high, {one}, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 low, high, less, low;
    fma.rn.bf16x2 ${out}, low, {scale}, {plus};
"""
        for one, out, scale, plus in (("a", 0, "$3", "$5"), ("b", 1, "$4", "$6"))
    )
    + "}"
)
# In: four bytes, scales (2). 0x7B80 is 2^120.
FP8 = tl.constexpr(
    """{
    .reg .b32 a, b, low, none, large;
    mov.b32 none, 0x80008000;
    mov.b32 large, 0x7B807B80;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
"""
    + "".join(
        f"""
    shr.u32 low, {one}, 4;
    and.b32 low, low, 0x07F007F0;
    lop3.b32 low, {one}, 0x80008000, low, 0xEA;
    fma.rn.bf16x2 low, low, large, none;
    fma.rn.bf16x2 ${out}, low, {scale}, none;
"""
        for one, out, scale in (("a", 0, "$3"), ("b", 1, "$4"))
    )
    + "}"
)
TWO = tl.constexpr((tl.bfloat16, tl.bfloat16))


@triton.jit
def e8m0(exponent):
    """2^(exponent - 127) in float32."""
    return tl.exp2(exponent.to(tl.float32) - 127)


@triton.jit
def tile_values(
    codes, scale, zero, DTYPE: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, ZEROS: tl.constexpr,
    BARE: tl.constexpr,
):  # fmt: skip
    """codes [ROWS, PIECES, 16] uint8, scale and zero [ROWS, PIECES] -> values of the lower and the upper halves of
    bytes, [ROWS, PIECES, 16] of DTYPE each; for kinds of 8 bits both are the same tile.

    zero   zeros if ZEROS is "integer", offsets if it is "offset"
    BARE   without scales, which are not read; not with offsets
    """
    factor = e8m0(scale) if KIND == "mxfp4" else scale.to(tl.float32)
    factor = tl.full(scale.shape, 1.0, tl.float32) if BARE else factor
    if BY_ASSEMBLY and tl.bfloat16 == DTYPE and (KIND != "int8" or SIGNED):
        factors = factor.to(tl.bfloat16)[:, :, None]
        if KIND == "int4":
            minus = tl.full(scale.shape, -128.0 if ZEROS == "offset" else -136.0, tl.float32)
            if ZEROS == "integer":
                minus = -128.0 - zero.to(tl.float32)
            plus = zero.to(tl.bfloat16) if ZEROS == "offset" else tl.full(scale.shape, -0.0, tl.bfloat16)
            return tl.inline_asm_elementwise(
                INT4, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
                [codes, factors, minus.to(tl.bfloat16)[:, :, None], plus[:, :, None]], dtype=TWO, is_pure=True, pack=4,
            )  # fmt: skip
        elif KIND == "mxfp4":
            return tl.inline_asm_elementwise(
                MXFP4, "=&r,=&r,=&r,=&r,r,r,r", [codes, factors], dtype=TWO, is_pure=True, pack=4
            )
        elif KIND == "int8":
            plus = zero.to(tl.bfloat16) if ZEROS == "offset" else tl.full(scale.shape, -0.0, tl.bfloat16)
            values = tl.inline_asm_elementwise(
                INT8, "=&r,=&r,r,r,r,r,r", [codes, factors, plus[:, :, None]], dtype=tl.bfloat16, is_pure=True, pack=4
            )
            return values, values
        else:
            values = tl.inline_asm_elementwise(
                FP8, "=&r,=&r,r,r,r", [codes, factors], dtype=tl.bfloat16, is_pure=True, pack=4
            )
            return values, values
    else:
        code = codes.to(tl.int32)
        if KIND == "mxfp4":
            low, high = e2m1_double(code & 15).to(tl.float32) * 0.5, e2m1_double(code >> 4).to(tl.float32) * 0.5
        elif KIND == "int4":
            low, high = (code & 15).to(tl.float32), (code >> 4).to(tl.float32)
        elif KIND == "fp8":
            bits = ((code << 24) >> 4) & -2014314496  # 0x87F00000; 2^-120 of the value
            low = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
            high = low
        else:
            low = ((code << 24) >> 24 if SIGNED else code).to(tl.float32)
            high = low
        if ZEROS == "integer":
            less = zero.to(tl.float32)[:, :, None]
            low, high = low - less, high - less
        elif KIND == "int4" and ZEROS == "":
            low, high = low - 8.0, high - 8.0
        low, high = low * factor[:, :, None], high * factor[:, :, None]
        if ZEROS == "offset":
            more = zero.to(tl.float32)[:, :, None]
            low, high = low + more, high + more
        return low.to(DTYPE), high.to(DTYPE)
