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

from lamina.checkpoint.quantized.code_order import AWQ_ORDER, Room, StoredCodes, in_order, other_sign
from lamina.checkpoint.quantized.layout import Layout, Settings, check_finite, check_parts
from lamina.errors import CheckpointError
from lamina.weights.int_groups import IntGroups
from lamina.weights.nibbles import LANES
from lamina.weights.packed import PackedWeight

# -- zeros and the order of columns ------------------------------------------------------------------------------------


def unpacked(words: Tensor, bits: int, axis: int, plus: int = 0) -> Tensor:
    """int32 -> uint8, 32 / bits times as many along an axis, the lowest bits first; `plus` is added, modulo 2^bits. For
    zeros, which are few: codes keep several values in a byte.

    >>> unpacked(torch.tensor([[0x21]], dtype=torch.int32), 4, 1)[0, :3].tolist()
    [1, 2, 0]
    """
    if words.is_meta:  # PyTorch computes the shapes of integer operations in Python, and imports sympy and its compiler
        shape = [size * 32 // bits if i == axis else size for i, size in enumerate(words.shape)]
        return words.new_empty(shape, dtype=torch.uint8)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values = ((words.unsqueeze(-1) >> shifts) + plus & (1 << bits) - 1).to(torch.uint8)
    return values.movedim(-1, axis + 1).flatten(axis, axis + 1)


def column_order(groups: Tensor | None, width: int, count: int, name: str) -> Tensor | None:
    """Columns sorted by their group, int32 [in]; None if they are in order already.

    groups   the group of each column [in]; None or -1: they are in order
    count    of groups; `packed_weight` refuses one that does not divide the width
    """
    if groups is None or bool((groups == -1).all()) or not count or width % count:
        return None
    if tuple(groups.shape) != (width,):
        raise CheckpointError(f"{name}: its g_idx has the shape {list(groups.shape)}; it has {width} inputs")
    usual = torch.arange(width, dtype=groups.dtype) // (width // count)
    if torch.equal(groups, usual):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], usual):
        raise CheckpointError(
            f"{name}: its g_idx does not divide {width} inputs into {count} groups of equal size; it has values from "
            f"{int(groups.min())} to {int(groups.max())}"
        )
    return order.int()


# -- weights -----------------------------------------------------------------------------------------------------------


def packed_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, bits: int, width: int, name: str
) -> PackedWeight:
    """codes uint8 [out, in · bits / 8], scales and zeros [out, groups] -> the weight; checked"""
    out = codes.shape[0]
    if scales.ndim != 2 or scales.shape[0] != out or scales.shape[1] == 0 or width % scales.shape[1]:
        raise CheckpointError(f"{name} is int{bits} [{out}, {width}] with scales {list(scales.shape)}")
    format = IntGroups(bits, width // scales.shape[1])
    parts = {"codes": codes.contiguous(), "scales": scales.contiguous()}
    if zeros is not None:
        parts["zeros"] = zeros.contiguous()
    if order is not None:
        parts["order"] = order.to(codes.device)
    shape = (out, width)
    format.check(parts, shape, name)
    check_finite(scales, f"{name} is {format}")
    return PackedWeight(format, parts, shape)


def bits_of(settings: Settings, name: str) -> int:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits not in (4, 8):
        raise CheckpointError(f"{name} has {bits} bits ({settings.get('quant_method')}); 4 and 8 bits are read")
    return int(bits)


def check_lanes(bits: int, width: int, name: str) -> None:
    if bits == 4 and width % LANES:
        raise CheckpointError(f"{name} is int4 with rows of {width} values; a multiple of {LANES} is needed")


def awq(parts: dict[str, Tensor], settings: Settings, name: str, room: Room | None = None) -> PackedWeight:
    bits, version = bits_of(settings, name), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise CheckpointError(f"{name} is AWQ with {bits} bits, version {version}; 4 bits in version gemm are read")
    words, zeros = parts["codes"], parts.get("zeros")
    check_parts(words, zeros, parts["scales"], name)
    check_lanes(4, width := words.shape[0], name)
    if zeros is not None:
        place = torch.tensor([AWQ_ORDER.index(i) for i in range(8)], device=zeros.device)
        zeros = unpacked(zeros, 4, 1).unflatten(1, (-1, 8)).index_select(2, place).flatten(1).T
    codes = in_order(StoredCodes(words, 4, width, awq=True), room)
    return packed_weight(codes, parts["scales"].T, zeros, None, 4, width, name)


def gptq(parts: dict[str, Tensor], settings: Settings, name: str, room: Room | None = None) -> PackedWeight:
    bits, words, scales = bits_of(settings, name), parts["codes"], parts["scales"]
    check_parts(words, parts["zeros"], scales, name)
    check_lanes(bits, width := words.shape[0] * 32 // bits, name)
    minus = 0 if settings.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    zeros = unpacked(parts["zeros"], bits, 1, plus=minus)  # [groups, out]
    order = column_order(parts.get("groups"), width, scales.shape[0], name)
    codes = in_order(StoredCodes(words.T, bits, width, order), room)
    return packed_weight(codes, scales.T, zeros.T, order, bits, width, name)


def compressed(parts: dict[str, Tensor], settings: Settings, name: str, room: Room | None = None) -> PackedWeight:
    out, width = (int(size) for size in parts["shape"])
    words, scales = parts["codes"], parts["scales"]
    check_parts(words, parts.get("zeros"), scales, name)
    bits = next((n for n in (4, 8) if words.shape[1] == -(-width * n // 32)), None)
    if bits is None or words.shape[0] != out:
        raise CheckpointError(
            f"{name} is [{out}, {width}] by weight_shape, with codes {list(words.shape)}; 4 and 8 bits are read"
        )
    check_lanes(bits, width, name)
    if scales.ndim < 2 or scales.shape[0] != out:  # one for the whole matrix
        scales = scales.reshape(-1, 1).expand(out, 1)
    order = column_order(parts.get("groups"), width, scales.shape[1], name)
    signed = bits == 8 and "zeros" not in parts
    codes = in_order(StoredCodes(words, bits, width, order, signed=signed), room)
    if (zeros := parts.get("zeros")) is not None:
        plus = 1 << bits - 1
        zeros = unpacked(zeros, bits, 0)[:out] if zeros.dtype == torch.int32 else (zeros.int() + plus).to(torch.uint8)
    return packed_weight(codes, scales, zeros, order, bits, width, name)


def int_quantized(parts: dict[str, Tensor], settings: Settings, name: str, room: Room | None = None) -> PackedWeight:
    codes, scales, zeros = parts["codes"], parts["scales"], parts.get("zeros")
    check_parts(codes, zeros, scales, name)
    out, width = codes.shape
    if scales.ndim < 2 or scales.shape[0] != out:
        scales = scales.reshape(-1, 1).expand(out, 1)
    codes = codes.view(torch.uint8)
    if zeros is not None:
        zeros = (zeros.int() + 128).to(torch.uint8).reshape(-1, scales.shape[1]).expand(out, -1)
        codes = other_sign(codes)
    return packed_weight(codes, scales, zeros, None, 8, width, name)


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
