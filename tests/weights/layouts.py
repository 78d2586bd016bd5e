"""Weights as other programs store them, written value by value from the descriptions of their formats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GROUP = 32
Encoded = tuple[dict[str, Tensor], Tensor]
"""What is appended to the module's name -> tensor; and the values that this stands for"""


def codes_of(out: int, width: int, bits: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes [out, in], scales [groups, out] and zeros [groups, out]"""
    noise = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (out, width), generator=noise)
    scales = (torch.rand(width // GROUP, out, generator=noise) / (4 << bits)).half()
    return codes, scales, torch.randint(1, 1 << bits, (width // GROUP, out), generator=noise)


def word(values: list[int], bits: int) -> int:
    """Values in one int32, the first in the lowest bits."""
    total = sum(value << bits * i for i, value in enumerate(values))
    return total - (1 << 32) if total >= 1 << 31 else total


def words(rows: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> int32 [n, m · bits / 32]"""
    each = 32 // bits
    place = order or tuple(range(each))
    packed = [[word([row[i + p] for p in place], bits) for i in range(0, len(row), each)] for row in rows.tolist()]
    return torch.tensor(packed, dtype=torch.int32)


def values_of(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None = None) -> Tensor:
    index = torch.arange(codes.shape[1]) // GROUP if groups is None else groups.long()
    return scales.float().T[:, index] * (codes - zeros.T[:, index])


def awq(weight: Tensor, seed: int) -> Encoded:
    codes, scales, zeros = codes_of(*weight.shape, 4, seed)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {".qweight": words(codes.T, 4, order), ".qzeros": words(zeros, 4, order), ".scales": scales}
    return tensors, values_of(codes, scales, zeros)


def gptq(bits: int, version: int = 1, act_order: bool = False) -> Callable[[Tensor, int], Encoded]:
    def encode(weight: Tensor, seed: int) -> Encoded:
        codes, scales, zeros = codes_of(*weight.shape, bits, seed)
        groups = torch.arange(weight.shape[1]) // GROUP
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
        stored = zeros - 1 if version == 1 else zeros
        tensors = {".qweight": words(codes, bits).T.contiguous(), ".qzeros": words(stored, bits)}
        return tensors | {".scales": scales, ".g_idx": groups.int()}, values_of(codes, scales, zeros, groups)

    return encode


def compressed(bits: int, symmetric: bool = True) -> Callable[[Tensor, int], Encoded]:
    """pack-quantized"""

    def encode(weight: Tensor, seed: int) -> Encoded:
        codes, scales, zeros = codes_of(*weight.shape, bits, seed)
        zeros = torch.full_like(zeros, 1 << bits - 1) if symmetric else zeros
        tensors = {".weight_packed": words(codes, bits), ".weight_scale": scales.T.contiguous()}
        tensors[".weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            tensors[".weight_zero_point"] = words(zeros, bits).T.contiguous()
        return tensors, values_of(codes, scales, zeros)

    return encode


def int_quantized(weight: Tensor, seed: int) -> Encoded:
    noise = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, weight.shape, dtype=torch.int8, generator=noise)
    scales = torch.rand(weight.shape[0], 1, generator=noise) / 500
    return {".weight": codes, ".weight_scale": scales}, codes * scales


def float8(kind: str, name: str = "weight_scale") -> Callable[[Tensor, int], Encoded]:
    def encode(weight: Tensor, seed: int) -> Encoded:
        noise = torch.Generator().manual_seed(seed)
        codes = weight.mul(20).to(torch.float8_e4m3fn)
        out, width = weight.shape
        size = {"tensor": (), "row": (out, 1), "block": (-(-out // 128), -(-width // 128))}[kind]
        scales = torch.rand(size, generator=noise).add(0.1) / 10
        full = scales
        if kind == "block":
            full = scales.repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :width]
        return {".weight": codes, f".{name}": scales, ".input_scale": torch.ones(())}, codes.float() * full

    return encode


GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": GROUP}}}
CT = {"quant_method": "compressed-tensors", "config_groups": GROUPS}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LAYOUTS: dict[str, tuple[dict, Callable[[Tensor, int], Encoded]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq(4)),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, gptq(8)),
    "gptq, version 2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, 2)),
    "gptq, act-order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, gptq(4, act_order=True)),
    "pack-quantized": (CT | {"format": "pack-quantized"}, compressed(4)),
    "pack-quantized, 8 bits": (CT | {"format": "pack-quantized"}, compressed(8)),
    "pack-quantized, zeros": (CT | {"format": "pack-quantized"}, compressed(4, symmetric=False)),
    "pack-quantized, 8 bits, zeros": (CT | {"format": "pack-quantized"}, compressed(8, symmetric=False)),
    "int-quantized": (CT | {"format": "int-quantized"}, int_quantized),
    "float-quantized": (CT | {"format": "float-quantized"}, float8("row")),
    "fp8, a scale for a matrix": ({"quant_method": "fp8"}, float8("tensor")),
    "fp8, blocks": (FP8_BLOCKS, float8("block", "weight_scale_inv")),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, float8("row")),
}  # fmt: skip
"""Name -> quantization_config, and how a weight is stored"""
