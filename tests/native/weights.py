"""Random weights of every format, each with the values that PyTorch or `gguf` give for it."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from lamina.native.products import Product, describe

HALVES = {
    **{name: [0] for name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS")},
    **{name: [0, 2] for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")},
    **{"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "MXFP4": []},
}
"""Where the blocks of a GGUF format hold float16 scales, in bytes."""

Case = tuple[Product, torch.Tensor, list[torch.Tensor]]
"""A weight, its values [out, in], and the tensors that its pointers point to."""


def gguf_weight(name: str, out: int, inputs: int, seed: int = 0) -> Case:
    """Random bytes, apart from scales of a usual size."""
    random = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (out * (inputs // values), size), dtype=np.uint8)
    for at in HALVES[name]:
        scales = random.uniform(-0.02, 0.02, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(115, 123, len(blocks))
    truth = torch.from_numpy(gguf.dequantize(blocks, kind).reshape(out, inputs))
    codes = torch.from_numpy(blocks.reshape(out, -1))
    return describe(name, (out, inputs), codes), truth, [codes]


def plain_weight(dtype: torch.dtype, out: int, inputs: int) -> Case:
    codes = torch.randn(out, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    return describe(str(dtype).removeprefix("torch."), (out, inputs), codes), codes.float(), [codes]


def int_weight(bits: int, group: int, dtype: torch.dtype, zeros: bool, out: int, inputs: int) -> Case:
    """value = scale * (code - zero), and the nibble order of IntGroups."""
    generator = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(0, 1 << bits, (out, inputs), generator=generator)
    scales = (torch.rand(out, inputs // group, generator=generator) * 0.02).to(dtype)
    zero = torch.full(scales.shape, 1 << bits - 1)
    if zeros:
        zero = torch.randint(0, 1 << bits, scales.shape, generator=generator)
    values = scales.float().repeat_interleave(group, 1) * (codes - zero.repeat_interleave(group, 1)).float()
    if bits == 8:
        packed = (codes if zeros else codes - 128).to(torch.uint8)  # without zeros: the bits of signed codes
    else:
        halves = codes.view(out, inputs // 32, 2, 16)
        packed = (halves[:, :, 0] | halves[:, :, 1] << 4).to(torch.uint8).reshape(out, -1).contiguous()
    stored = zero.to(torch.uint8) if zeros else None
    weight = describe(f"int{bits}", (out, inputs), packed, scales, stored, group)
    return weight, values, [packed, scales, *([stored] if stored is not None else [])]


def fp8_weight(scales: torch.Tensor, group: int, scale_out: int, out: int, inputs: int) -> Case:
    codes = torch.randn(out, inputs, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    spread = scales.float().repeat_interleave(scale_out, 0)[:out].repeat_interleave(group, 1)[:, :inputs]
    weight = describe("fp8", (out, inputs), codes, scales, None, group, scale_out)
    return weight, codes.float() * spread, [codes, scales]


def all_weights(out: int = 7, inputs: int = 512) -> dict[str, Case]:
    """One weight of each format, and of each kind of scales and zeros."""
    cases = {name: gguf_weight(name, out, inputs) for name in HALVES}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cases[str(dtype).removeprefix("torch.")] = plain_weight(dtype, out, inputs - 3)
    for bits in (8, 4):
        cases[f"int{bits}"] = int_weight(bits, 32, torch.float16, False, out, inputs)
        cases[f"int{bits}-zeros-64"] = int_weight(bits, 64, torch.float32, True, out, inputs)
        cases[f"int{bits}-row"] = int_weight(bits, inputs, torch.bfloat16, False, out, inputs)
        cases[f"int{bits}-zeros-96"] = int_weight(bits, 96, torch.bfloat16, True, out, 288)
    cases["fp8-tensor"] = fp8_weight(torch.full((1, 1), 0.3), inputs + 5, out, out, inputs + 5)
    cases["fp8-row"] = fp8_weight(torch.rand(out, 1), inputs, 1, out, inputs)
    cases["fp8-blocks"] = fp8_weight(torch.rand(2, 3).bfloat16(), 128, 128, 128 + out, 300)
    return cases
