"""Puts the codes of quantized checkpoints into the order of `IntGroups`: from the memory map, with all threads."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.checkpoint.quantized.code_order import Room, StoredCodes
from lamina.native.arguments import CodesArgs, pointer
from lamina.native.library import why_not_at_once
from lamina.native.program import operation, run_on_pytorch_threads
from lamina.notices import notice
from lamina.weights.nibbles import LANES

SIGN_BITS = 0x80808080  # of each byte of a word
LEAST_BYTES = 1 << 16  # from which on several threads share a matrix


def native_codes(codes: StoredCodes, room: Room) -> Tensor | None:
    """uint8 [out, in · bits / 8] in memory of `room`; None for what the kernel does not read, and without a library."""
    if not _serves(codes):
        return None
    if (reason := why_not_at_once()) is not None:
        notice(f"codes of quantized weights are put into order by PyTorch, since {reason}")
        return None
    words = codes.words
    if words.stride(1) != 1 and (codes.awq or words.stride(0) != 1):
        words = words.contiguous()
    order = None if codes.order is None else codes.order.to(torch.int32).contiguous()
    out = room(*codes.shape)
    arguments = CodesArgs(
        words=words.data_ptr(), order=pointer(order), out=out.data_ptr(), outputs=out.shape[0], width=codes.width,
        bits=codes.bits, awq=codes.awq, out_step=words.stride(0), in_step=words.stride(1),
        flip=SIGN_BITS if codes.signed else 0,
    )  # fmt: skip
    run_on_pytorch_threads([operation("codes", arguments, serial=out.nbytes < LEAST_BYTES)])
    return out


def _serves(codes: StoredCodes) -> bool:
    """Whether words and order are what the kernel reads: it checks no bounds."""
    words, bits, order = codes.words, codes.bits, codes.order
    if words.device.type != "cpu" or words.dtype != torch.int32 or words.ndim != 2 or bits not in (4, 8):
        return False
    if (bits == 4 and codes.width % LANES) or (bits == 4 and codes.signed) or (codes.awq and order is not None):
        return False
    if order is not None and (len(order) != codes.width or int(order.min()) < 0 or int(order.max()) >= codes.width):
        return False
    return words.shape[0] == codes.width if codes.awq else words.shape[1] * 32 >= codes.width * bits
