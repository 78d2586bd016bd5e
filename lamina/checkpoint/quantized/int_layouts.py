"""Integers as AWQ, GPTQ and compressed-tensors store them, 8 or 4 bits, packed into int32 -> `IntGroups`.

AWQ                 qweight [in, out / 8]: along the outputs, in the order 0 2 4 6 1 3 5 7
                    qzeros [in / group, out / 8] likewise, scales [in / group, out]
GPTQ                qweight [in · bits / 32, out]: along the inputs; qzeros [in / group, out · bits / 32] along the
                    outputs, each minus one (not so in version 2); scales [in / group, out]
                    g_idx [in]: the group of each input, not in order if the columns were sorted (act-order)
compressed-tensors  weight_packed [out, in · bits / 32]: along the inputs, each plus half of the range; weight_scale
                    [out, in / group]; weight_zero_point [out · bits / 32, in / group]; weight_shape; weight_g_idx
                    or weight int8 [out, in] beside weight_scale and weight_zero_point (int-quantized)
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.checkpoint.quantized.layout import Layout, Settings
from lamina.errors import CheckpointError
from lamina.weights.int_groups import LANES, IntGroups, pack_nibbles
from lamina.weights.packed import PackedWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpacked(words: Tensor, bits: int, axis: int) -> Tensor:
    """int32 -> uint8, 32 / bits times as many along an axis; the lowest bits come first.

    >>> unpacked(torch.tensor([[0x21]], dtype=torch.int32), 4, 1)[0, :3].tolist()
    [1, 2, 0]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8)
    return values.movedim(-1, axis + 1 if axis >= 0 else axis).flatten(axis, axis + 1)


def groups_of(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, bits: int, name: str
) -> PackedWeight:
    """codes uint8 [out, in], scales and zeros [out, groups] -> the weight; checked"""
    out, width = codes.shape
    if scales.ndim != 2 or scales.shape[0] != out or width % scales.shape[1]:
        raise CheckpointError(f"{name} is int{bits} [{out}, {width}] with scales {list(scales.shape)}")
    if bits == 4 and width % LANES:
        raise CheckpointError(f"{name} is int4 with rows of {width} values; a multiple of {LANES} is needed")
    format = IntGroups(bits, width // scales.shape[1])
    parts = {"codes": pack_nibbles(codes) if bits == 4 else codes.contiguous(), "scales": scales.contiguous()}
    if zeros is not None:
        parts["zeros"] = zeros.contiguous()
    if order is not None:
        parts["order"] = order
    format.check(parts, codes.shape, name)
    return PackedWeight(format, parts, codes.shape)


def bits_of(settings: Settings, name: str) -> int:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits not in (4, 8):
        raise CheckpointError(f"{name} has {bits} bits ({settings.get('quant_method')}); 4 and 8 bits are read")
    return int(bits)


def awq(parts: dict[str, Tensor], settings: Settings, name: str) -> PackedWeight:
    bits, version = bits_of(settings, name), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise CheckpointError(f"{name} is AWQ with {bits} bits, version {version}; 4 bits in version gemm are read")

    def columns(words: Tensor) -> Tensor:  # [rows, out / 8] -> [rows, out]
        eight = unpacked(words, 4, 1).unflatten(1, (-1, 8))
        place = torch.tensor([AWQ_ORDER.index(i) for i in range(8)], device=words.device)
        return eight.index_select(2, place).flatten(1)

    codes, scales = columns(parts["codes"]).T, parts["scales"].T
    return groups_of(codes, scales, columns(parts["zeros"]).T if "zeros" in parts else None, None, 4, name)


def gptq(parts: dict[str, Tensor], settings: Settings, name: str) -> PackedWeight:
    bits = bits_of(settings, name)
    codes, zeros = unpacked(parts["codes"], bits, 0).T, unpacked(parts["zeros"], bits, 1).T  # [out, in], [out, groups]
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = zeros + 1 & (1 << bits) - 1
    codes, order = in_order(codes, parts.get("groups"), parts["scales"].shape[0], name)
    return groups_of(codes, parts["scales"].T, zeros, order, bits, name)


def in_order(codes: Tensor, groups: Tensor | None, count: int, name: str) -> tuple[Tensor, Tensor | None]:
    """Columns sorted by their group, and the column of the weight that each is; None if they are in order already."""
    width = codes.shape[1]
    if groups is None or width % count:
        return codes, None
    usual = torch.arange(width, dtype=groups.dtype) // (width // count)
    if torch.equal(groups, usual):
        return codes, None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], usual):
        raise CheckpointError(f"{name}: its g_idx does not divide {width} inputs into {count} groups of equal size")
    return codes.index_select(1, order.to(codes.device)), order.int().to(codes.device)


def compressed(parts: dict[str, Tensor], settings: Settings, name: str) -> PackedWeight:
    out, width = (int(size) for size in parts["shape"])
    words, scales = parts["codes"], parts["scales"]
    bits = next((n for n in (4, 8) if words.shape[1] == -(-width * n // 32)), None)
    if bits is None or words.shape[0] != out:
        raise CheckpointError(
            f"{name} is [{out}, {width}] by weight_shape, with codes {list(words.shape)}; 4 and 8 bits are read"
        )
    codes, half = unpacked(words, bits, 1)[:, :width], 1 << bits - 1
    if scales.ndim < 2 or scales.shape[0] != out:  # one for the whole matrix
        scales = scales.reshape(-1, 1).expand(out, 1)
    zeros = parts.get("zeros")
    if zeros is not None:
        zeros = unpacked(zeros, bits, 0)[:out] if zeros.dtype == torch.int32 else (zeros.int() + half).to(torch.uint8)
    elif bits == 8:
        codes = codes ^ 128  # to signed bytes
    codes, order = in_order(codes, parts.get("groups"), scales.shape[1], name)
    return groups_of(codes, scales, zeros, order, bits, name)


def int_quantized(parts: dict[str, Tensor], settings: Settings, name: str) -> PackedWeight:
    codes, scales, zeros = parts["codes"], parts["scales"], parts.get("zeros")
    out = codes.shape[0]
    if scales.ndim < 2 or scales.shape[0] != out:
        scales = scales.reshape(-1, 1).expand(out, 1)
    bytes_ = codes.view(torch.uint8)
    if zeros is None:
        return groups_of(bytes_, scales, None, None, 8, name)
    zeros = (zeros.int() + 128).to(torch.uint8).reshape(-1, scales.shape[1]).expand(out, -1)
    return groups_of(bytes_ ^ 128, scales, zeros, None, 8, name)


AWQ = Layout({".qweight": "codes", ".qzeros": "zeros", ".scales": "scales"}, ("scales", "codes"), awq, ".weight")
GPTQ = Layout(
    {".qweight": "codes", ".qzeros": "zeros", ".scales": "scales", ".g_idx": "groups"}, ("scales", "zeros", "codes"),
    gptq, ".weight", values=("groups",),
)  # fmt: skip
COMPRESSED = Layout(
    {
        "_packed": "codes", "_scale": "scales", "_zero_point": "zeros", "_shape": "shape", "_g_idx": "groups",
    },
    ("scales", "shape", "codes"), compressed, values=("groups", "shape"),
)  # fmt: skip
INT_QUANTIZED = Layout({"": "codes", "_scale": "scales", "_zero_point": "zeros"}, ("codes", "scales"), int_quantized)
