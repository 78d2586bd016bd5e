"""The arguments of native kernels, as the structs of `src/` declare them. Every field has eight bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes by the number that kernels know them by (`Type` in vectors.h)."""
ACTS = {
    name: i
    for i, name in enumerate(("", "silu", "relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "tanh", "sigmoid"))
}
"""Activations by the number that kernels know them by (`Act` in activation.h)."""
MOST_DIMS = 6
MOST_SPLITS = 32
STRETCH = 4096
MOST_HEAD = 1024
MOST_INPUTS = 5


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def fields(pointers: str, integers: str, numbers: str = "") -> list[tuple[str, Any]]:
    """Names of pointers, then of integers, then of numbers (double), with their types."""
    kinds: list[tuple[str, Any]] = [(pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (numbers, ctypes.c_double)]
    return [(name, kind) for names, kind in kinds for name in names.split()]


def struct(name: str, pointers: str, integers: str, numbers: str = "") -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields(pointers, integers, numbers)})


EmbedArgs = struct("EmbedArgs", "ids weight residual out", "rows width vocab count", "scale")
NormArgs = struct(
    "NormArgs", "x weight bias residual out", "rows width x_stride weight_type centred", "eps plus"
)  # fmt: skip
GatedNormArgs = struct(
    "GatedNormArgs", "x gate weight out",
    "rows width x_stride gate_outer gate_stride gate_inner weight_type groups gate_first sigmoid", "eps",
)  # fmt: skip
RopeArgs = struct("RopeArgs", "positions frequencies cos sin", "rows pairs", "scale")
QuantizeArgs = struct("QuantizeArgs", "x codes scales sums", "rows width x_stride")
PermuteArgs = struct("PermuteArgs", "x order out", "rows width x_stride")
ProductArgs = struct(
    "ProductArgs", "segments bias scales residual out wide", "count rows outputs bias_type act gated block",
    "scale softcap",
)  # fmt: skip
HeadsArgs = struct(
    "HeadsArgs", "q k v out cos sin q_weight k_weight factor table k_coding v_coding",
    "rows q_heads k_heads dim value_dim q_row q_head k_row k_head v_row v_head rope_row factor_row "
    "pairs neighbours norms weight_type keep page store_type rotate_queries", "q_eps k_eps q_plus k_plus",
)  # fmt: skip
AttentionArgs = struct(
    "AttentionArgs", "q out table sinks bias bucket_of gate parts k_coding v_coding arrived chosen",
    "rows q_heads k_heads dim value_dim window size keep page store_type sinks_type bias_kind bias_type "
    "farthest added gate_row gate_head value_stride top", "scale softcap",
)  # fmt: skip
LatentArgs = struct(
    "LatentArgs", "q kv up weight cos sin out table coding",
    "rows heads nope rope rank up_head up_type weight_type q_row q_head kv_row rope_row neighbours pairs keep page "
    "store_type", "eps plus",
)  # fmt: skip
CodingArgs = struct("CodingArgs", "mean", "layout rotate dim")
LatentOutArgs = struct("LatentOutArgs", "mix up out", "rows heads value rank up_head up_type")
IndexScoresArgs = struct(
    "IndexScoresArgs", "q weights table coding", "rows heads dim top weights_row page store_type"
)  # fmt: skip
SelectTokensArgs = struct("SelectTokensArgs", "table chosen", "rows top")
RecallArgs = struct("RecallArgs", "out seen table coding", "rows room dim window size keep page store_type")
ConvolveArgs = struct(
    "ConvolveArgs", "x weight bias inward outward out table",
    "rows channels kernel x_row in_row out_row act weight_type bias_type store_type",
)  # fmt: skip
StateArgs = struct("StateArgs", "state table", "rows values write")
SsdArgs = struct("SsdArgs", "x dt B C A out table log", "rows heads dim state groups x_row dt_row B_row C_row")
ScanArgs = struct("ScanArgs", "x dt B C A out table log", "rows channels state x_row dt_row B_row C_row")
DeltaArgs = struct(
    "DeltaArgs", "q k v g beta out table log",
    "rows heads key_heads key_dim dim by_channel q_row k_row v_row g_row beta_row",
)  # fmt: skip
LruArgs = struct("LruArgs", "x g out table log", "rows channels x_row g_row")
WkvArgs = struct("WkvArgs", "k v w first out table log", "rows channels k_row v_row")
RouteArgs = struct(
    "RouteArgs", "logits bias scales chosen weights",
    "rows stride experts each score normed groups groups_each group_best", "factor least eps jitter",
)  # fmt: skip
ExpertSumArgs = struct("ExpertSumArgs", "pairs chosen weights x residual out", "rows each width experts")
ReduceArgs = struct("ReduceArgs", "x out", "rows width x_row op")
PositionsArgs = struct("PositionsArgs", "header out", "rows last")
ChooseArgs = struct(
    "ChooseArgs", "logits scores header counts seed numbers best where", "rows vocab logits_type parts"
)  # fmt: skip
CommitArgs = struct("CommitArgs", "best where header ids counts left ends", "rows parts ends_count")

CodesArgs = struct("CodesArgs", "words order out", "outputs width bits awq out_step in_step flip")


class ExpertsArgs(ctypes.Structure):
    _fields_ = fields(
        "weight steps bias chosen weights x wide out",
        "segments experts pairs width outputs x_each gated act bias_type block",
    ) + fields("qx qx_scales qx_sums", "", "limit plus slope")


class LogArgs(ctypes.Structure):
    _fields_ = [
        ("input", ctypes.c_void_p * MOST_INPUTS), ("table", ctypes.c_void_p), ("rows", ctypes.c_int64),
        ("count", ctypes.c_int64), ("stride", ctypes.c_int64 * MOST_INPUTS), ("size", ctypes.c_int64 * MOST_INPUTS),
        ("type", ctypes.c_int64 * MOST_INPUTS),
    ]  # fmt: skip


class ElementwiseArgs(ctypes.Structure):
    _fields_ = [
        ("inputs", ctypes.c_void_p * 3), ("out", ctypes.c_void_p), ("op", ctypes.c_int64), ("dims", ctypes.c_int64),
        ("numel", ctypes.c_int64), ("in_type", ctypes.c_int64 * 3), ("out_type", ctypes.c_int64),
        ("size", ctypes.c_int64 * MOST_DIMS), ("in_stride", ctypes.c_int64 * MOST_DIMS * 3),
        ("out_stride", ctypes.c_int64 * MOST_DIMS), ("alpha", ctypes.c_double), ("beta", ctypes.c_double),
    ]  # fmt: skip
