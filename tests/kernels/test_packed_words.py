"""Values of packed codes as GPUs make them: the PTX of `values.py`, run here instruction by instruction, gives what the
codes stand for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.packed import values
from lamina.kernels.packed.values import code_scales

Bits = np.ndarray[Any, np.dtype[np.uint32]]
BYTES = torch.arange(256, dtype=torch.uint8)


@triton.jit
def scale_kernel(scale, zero, out, N: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    word, _ = code_scales(tl.load(scale + i), tl.load(zero + i), tl.bfloat16, KIND, True, ZEROS)
    tl.store(out + i, word)


def run(program: str, codes: Bits, words: Bits) -> Bits:
    """What the program leaves in $0, for two bytes ($1) and a word ($2) each; all its registers have 32 bits."""
    registers: dict[str, Bits] = {"$1": codes, "$2": words}

    def read(name: str) -> Bits:
        return np.full_like(codes, int(name, 16)) if name.startswith("0x") else registers[name]

    for line in re.split(r"[;{}\n]+", program):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, operands = line.split(maxsplit=1)
        target, *sources = [operand.strip() for operand in operands.split(",")]
        if name in ("shl.b32", "shr.u32"):
            given, shift = read(sources[0]), np.uint32(int(sources[1]))
            registers[target] = given << shift if name == "shl.b32" else given >> shift
        elif name == "prmt.b32":
            both, order = read(sources[0]), int(sources[2], 16)
            assert sources[1] == "0"  # bytes 4 to 7
            bytes_of = [(both >> np.uint32(8 * i)) & np.uint32(255) for i in range(4)] + [np.zeros_like(both)] * 4
            chosen = [bytes_of[(order >> 4 * i) & 15] << np.uint32(8 * i) for i in range(4)]
            registers[target] = chosen[0] | chosen[1] | chosen[2] | chosen[3]
        elif name == "lop3.b32":
            a, b, c = map(read, sources[:3])
            assert sources[3] == "0xEA"
            registers[target] = (a & b) | c
        else:
            registers[target] = PLAIN[name](*map(read, sources))
    return registers["$0"]


def fma(*three: Bits) -> Bits:
    a, b, c = (numbers(bits).double() for bits in three)
    return (a * b + c).to(torch.bfloat16).contiguous().view(torch.int32).numpy().view(np.uint32).reshape(-1)


PLAIN = {
    "mov.b32": lambda a: a,
    "cvt.u32.u16": lambda a: a & np.uint32(0xFFFF),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "fma.rn.bf16x2": fma,
}


def numbers(bits: Bits) -> Tensor:
    """Words -> the two numbers in bfloat16 of each, [words, 2]"""
    return torch.from_numpy(bits.view(np.int32)).view(torch.bfloat16).view(-1, 2)


def exact(kind: str, half: str, codes: Tensor) -> Tensor:
    """The numbers that the codes stand for, before scales."""
    code = codes.long()
    if kind == "int8":
        return codes.view(torch.int8).double()
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).double()
    code = code >> 4 if half == "upper" else code & 15
    doubled = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12]).double()
    return code.double() if kind == "int4" else doubled[code & 7] / 2 * torch.where(code & 8 > 0, -1.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "zeros", "half", "program"),
    [
        ("int4", "", "lower", values.INT4_LOW), ("int4", "", "upper", values.INT4_HIGH),
        ("int4", "integer", "lower", values.INT4_LOW), ("int4", "integer", "upper", values.INT4_HIGH),
        ("int4", "offset", "lower", values.INT4_LOW), ("int4", "offset", "upper", values.INT4_HIGH),
        ("mxfp4", "", "lower", values.MXFP4_LOW), ("mxfp4", "", "upper", values.MXFP4_HIGH),
        ("int8", "", "", values.INT8), ("int8", "offset", "", values.INT8_PLUS), ("fp8", "", "", values.FP8),
    ],
)  # fmt: skip
def test_words_are_the_values_of_codes(
    kind: str, zeros: str, half: str, program: tl.constexpr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "BY_ASSEMBLY", tl.constexpr(True))
    noise, groups = torch.Generator().manual_seed(0), 64
    codes = BYTES[BYTES & 127 != 127] if kind == "fp8" else BYTES  # not nan
    codes = codes[: len(codes) // 2 * 2]
    scale = torch.exp2(torch.rand(groups, generator=noise) * 30 - 20)
    zero = torch.zeros(groups)
    given: Tensor = scale
    if kind == "mxfp4":
        given = torch.randint(100, 140, (groups,), generator=noise, dtype=torch.uint8)
        scale = torch.exp2(given.double() - 127)
    if zeros == "integer":
        zero = torch.randint(0, 16, (groups,), generator=noise).float()
    elif zeros == "offset":
        zero = torch.randn(groups, generator=noise) * scale
    words = torch.empty(groups, dtype=torch.int32)
    scale_kernel[(1,)](given, zero, words, groups, kind, zeros)

    pairs = codes.view(torch.uint16).numpy().astype(np.uint32)
    made = run(program.value, np.tile(pairs, groups), np.repeat(words.numpy().view(np.uint32), len(pairs)))
    got = numbers(made).double().view(groups, -1) / values.LOWERED.value

    s, z = scale.double()[:, None], zero.double()[:, None]
    minus = s * (8 if kind == "int4" else 0) if zeros == "" else -z if zeros == "offset" else s * z
    number = exact(kind, half, codes)
    want = s * number - minus
    parts = (s * number).abs() + z.abs() if zeros == "offset" else want.abs() + minus.abs()
    most = want.abs() + parts  # each part is rounded, and their sum
    assert ((got - want).abs() <= most * 2.0**-8 + 1e-30).all()
    assert (got[(want == 0) & (minus == 0)] == 0).all()


def test_fp8_without_its_scale_is_exact() -> None:
    codes = BYTES[BYTES & 127 != 127]
    made = run(values.BARE_FP8.value, codes.view(torch.uint16).numpy().astype(np.uint32), np.zeros(127, np.uint32))
    assert (numbers(made).double().view(-1) == codes.view(torch.float8_e4m3fn).double()).all()
