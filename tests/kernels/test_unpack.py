"""The assembly that makes numbers of codes, run instruction by instruction, gives what the formats decode."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from lamina.cache.codec.bitpack import pack
from lamina.kernels.quant import unpack
from lamina.kernels.quant.layout import plane_factor

WORD = 0xFFFFFFFF


def halves(register: int) -> np.ndarray:
    return np.array([register], dtype=np.uint32).view(np.float16)


def together(numbers: np.ndarray) -> int:
    return int(numbers.astype(np.float16).view(np.uint32)[0])


def prmt(a: int, b: int, choice: int) -> int:
    source = [(a | b << 32) >> 8 * i & 255 for i in range(8)]
    return sum(source[choice >> 4 * i & 7] << 8 * i for i in range(4))


def run(assembly: str, **registers: int) -> dict[str, int]:
    """The registers after the few instructions that `unpack` uses; lop3 with 0xEA is (a & b) | c."""
    held = {name.replace("r", "$"): value for name, value in registers.items()}

    def value(name: str) -> int:
        return held[name] if name in held else int(name, 0)

    for line in assembly.splitlines():
        found = re.fullmatch(r"\s*([a-z0-9.]+) (.*);", line)
        if not found or found[1] == ".reg":
            continue
        to, *given = found[2].split(", ")
        x = [value(name) for name in given]
        if found[1].startswith("lop3"):
            assert given[3] == "0xEA"
        held[to] = {
            "mov": lambda x=x: x[0],
            "and": lambda x=x: x[0] & x[1],
            "shl": lambda x=x: x[0] << x[1] & WORD,
            "shr": lambda x=x: x[0] >> x[1],
            "lop3": lambda x=x: x[0] & x[1] | x[2],
            "prmt": lambda x=x: prmt(*x),
            "mul": lambda x=x: together(halves(x[0]) * halves(x[1])),
            "fma": lambda x=x: together(halves(x[0]).astype(float) * halves(x[1]) + halves(x[2])),
        }[found[1].split(".")[0]]()
    return held


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_four_planes_of_a_group(bits: int) -> None:
    torch.manual_seed(bits)
    text = {4: unpack.FOUR, 5: unpack.FIVE, 6: unpack.SIX}[bits].value
    codes = torch.randint(0, 2**bits, (32,), dtype=torch.uint8)
    low, high = pack(codes, bits)
    words = low.numpy().view(np.uint16)
    above = [int(word) for word in high.numpy().view(np.uint32)]
    scales = np.array([0.0371, 2.5], dtype=np.float16)
    for w in range(0, 8, 2):
        more = {f"r{6 + 2 * i + j}": word >> 2 * (w + j) for i, word in enumerate(above) for j in (0, 1)}
        pair = int(words[w]) | int(words[w + 1]) << 16
        after = run(text, r4=pair, r5=together(scales), **more)
        for plane, number in enumerate((0, 16, 1, 17)):
            ours = np.array([int(codes[2 * (w + j) + number]) for j in (0, 1)])
            expected = (ours * plane_factor(plane, bits) * scales.astype(float)).astype(np.float16)
            assert (halves(after[f"${plane}"]) == expected).all()


def test_two_planes_of_bytes_and_of_floats() -> None:
    scales = np.array([0.0371, 2.5], dtype=np.float16)
    for byte in range(256):
        word = byte | (255 - byte) << 8
        both = word | word << 16
        after = run(unpack.EIGHT.value, r2=both, r3=together(scales))
        for plane, code in enumerate((byte, 255 - byte)):
            expected = (code * plane_factor(plane, 8) * scales.astype(float)).astype(np.float16)
            assert (halves(after[f"${plane}"]) == expected).all()
        if byte in (0, 127, 128, 255):  # no number, or the other one of the word is none
            continue
        after = run(unpack.FP8.value, r2=both)
        for plane, code in enumerate((byte, 255 - byte)):
            number = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
            assert (halves(after[f"${plane}"]).astype(float) * 256 == number).all()
