"""Small floats: float8 beside its scales, and the MXFP4 experts of GPT-OSS.

FP8      weight float8_e4m3fn [out, in]; weight_scale_inv (DeepSeek and others: blocks of 128 × 128, by which values
         are multiplied) or weight_scale: one, one for each row, or one for each block
MXFP4    gate_up_proj_blocks uint8 [E, out, in / 32, 16], gate_up_proj_scales uint8 [E, out, in / 32]: matrices that
         are not transposed, as those of a plain checkpoint of GPT-OSS are
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.checkpoint.quantized.code_order import Room
from lamina.checkpoint.quantized.layout import Layout, Settings, check_finite
from lamina.errors import CheckpointError
from lamina.weights.format import weight_format
from lamina.weights.fp8 import BLOCK, Fp8
from lamina.weights.gguf_blocks import mxfp4_blocks
from lamina.weights.packed import PackedWeight


def float8(parts: dict[str, Tensor], settings: Settings, name: str, room: Room | None = None) -> PackedWeight:
    codes, scales = parts["codes"], parts["scales"].float()
    if codes.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"{name} is {codes.dtype}; of eight-bit floats, float8_e4m3fn is read")
    lead, out = codes.shape[:-2], codes.shape[-2]
    if scales.numel() == (codes.shape[0] if lead else 1):  # one for each matrix
        format, scales = Fp8(0, 0), scales.reshape(*lead, 1, 1)
    elif scales.shape == (*lead, out) or scales.shape == (*lead, out, 1):
        format, scales = Fp8(1, 0), scales.reshape(*lead, out, 1)
    else:
        format = Fp8(*block_size(settings))
    format.check({"codes": codes, "scales": scales}, codes.shape, name)
    check_finite(scales, f"{name} is {format}")
    return PackedWeight(format, {"codes": codes, "scales": scales}, codes.shape)


def block_size(settings: Settings) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    groups = settings.get("config_groups") or {}
    found = settings.get("weight_block_size")
    for group in groups.values():
        found = found or (group.get("weights") or {}).get("block_structure")
    rows, columns = found or (BLOCK, BLOCK)
    return int(rows), int(columns)


def mxfp4(parts: dict[str, Tensor], settings: Settings, name: str, room: Room | None = None) -> PackedWeight:
    codes, exponents = parts["codes"], parts["scales"]
    if codes.ndim < 3 or codes.shape[-1] != 16 or codes.shape[:-1] != exponents.shape:
        raise CheckpointError(f"{name} is MXFP4 with codes {list(codes.shape)} and scales {list(exponents.shape)}")
    shape = (*codes.shape[:-2], codes.shape[-2] * 32)
    return PackedWeight(weight_format("MXFP4"), {"blocks": mxfp4_blocks(codes, exponents)}, shape)


FLOAT8 = Layout({"": "codes", "_scale_inv": "scales", "_scale": "scales"}, ("codes", "scales"), float8)
GPT_OSS = Layout({"_blocks": "codes", "_scales": "scales"}, ("scales", "codes"), mxfp4, fn=lambda t: t.transpose(1, 2))
