"""Elementwise operations of PyTorch as the native kernel `elementwise`, and reductions of the last axis as `reduce`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.native.arguments import ACTS, MOST_DIMS, TYPES, ElementwiseArgs, ReduceArgs

if TYPE_CHECKING:
    from lamina.native.recorder import Recorder

aten = torch.ops.aten
NAMES = """copy add sub mul div neg square sqrt rsqrt exp log softplus clamp maximum minimum addcmul pow abs activate
sin cos"""
OPS = {name: i for i, name in enumerate(NAMES.split())}
"""Operations by the number that the kernel knows them by (`Elementwise` in elementwise.h)."""
Form = tuple[str, list[Any], float, float]
"""Name of the operation, its operands (tensors or numbers), alpha and beta."""


def _binary(op: str) -> Callable[..., Form]:
    return lambda x, y, alpha=1.0: (op, [x, y], float(alpha), 0.0)


def _unary(op: str, alpha: float = 0.0) -> Callable[..., Form]:
    return lambda x: (op, [x], alpha, 0.0)


def _act(name: str) -> Callable[..., Form]:
    return _unary("activate", ACTS[name])


def _gelu(x: Tensor, approximate: str = "none") -> Form:
    return "activate", [x], ACTS["gelu_tanh" if approximate == "tanh" else "gelu"], 0.0


def _clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Form:
    return "clamp", [x], -torch.inf if low is None else low, torch.inf if high is None else high


def _pow(x: Tensor, exponent: float) -> Form:
    return ("square", [x], 0.0, 0.0) if exponent == 2 else ("pow", [x], float(exponent), 0.0)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Form:
    return "softplus", [x], float(beta), float(threshold)


FORMS: dict[Any, Callable[..., Form]] = {
    aten.add.Tensor: _binary("add"),
    aten.sub.Tensor: _binary("sub"),
    aten.mul.Tensor: _binary("mul"),
    aten.div.Tensor: _binary("div"),
    aten.maximum.default: _binary("maximum"),
    aten.minimum.default: _binary("minimum"),
    aten.neg.default: _unary("neg"),
    aten.sqrt.default: _unary("sqrt"),
    aten.rsqrt.default: _unary("rsqrt"),
    aten.exp.default: _unary("exp"),
    aten.log.default: _unary("log"),
    aten.abs.default: _unary("abs"),
    aten.sin.default: _unary("sin"),
    aten.cos.default: _unary("cos"),
    aten.square.default: _unary("square"),
    aten.silu.default: _act("silu"),
    aten.relu.default: _act("relu"),
    aten.tanh.default: _act("tanh"),
    aten.sigmoid.default: _act("sigmoid"),
    aten.gelu.default: _gelu,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.pow.Tensor_Scalar: _pow,
    aten.softplus.default: _softplus,
    aten.addcmul.default: lambda x, y, z, value=1: ("addcmul", [x, y, z], float(value), 0.0),
    aten._to_copy.default: lambda x, **_: ("copy", [x], 0.0, 0.0),
    aten.clone.default: lambda x, **_: ("copy", [x], 0.0, 0.0),
    aten.copy_.default: lambda to, x, *_: ("copy", [x], 0.0, 0.0),
    aten.add_.Tensor: _binary("add"),
    aten.mul_.Tensor: _binary("mul"),
}


def elementwise_of(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Records func as a kernel that writes `out`; False if the kernel does not know it, or not for these dtypes."""
    if func is aten.cat.default:
        return _cat(recorder, *args, **kwargs, out=out)
    if func in REDUCTIONS:
        return _reduce(recorder, REDUCTIONS[func], *args, **kwargs, out=out)
    if func not in FORMS or not isinstance(out, Tensor):
        return False
    op, operands, alpha, beta = FORMS[func](*args, **kwargs)
    return record(recorder, op, operands, out, alpha, beta)


REDUCTIONS = {aten.sum.dim_IntList: 0, aten.mean.dim: 1, aten.amax.default: 2}


def _reduce(recorder: Recorder, op: int, x: Tensor, dim: Any, keepdim: bool = False, *, out: Tensor, **_: Any) -> bool:
    """Over the last axis alone, of float32."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    last = x.dim() - 1
    if [one % x.dim() for one in dims] != [last] or x.dtype != torch.float32 or out.dtype != x.dtype or not x.numel():
        return False
    flat = x.reshape(-1, x.shape[-1])
    if flat.data_ptr() != x.data_ptr() or flat.stride(1) != 1:
        return False
    arguments = ReduceArgs(
        x=flat.data_ptr(), out=out.data_ptr(), rows=flat.shape[0], width=flat.shape[1], x_row=flat.stride(0), op=op
    )
    recorder.add("reduce", arguments, x, out, work=0)
    return True


def _cat(recorder: Recorder, parts: list[Tensor], dim: int = 0, *, out: Tensor) -> bool:
    if any(part.dtype not in TYPES or part.dim() != out.dim() for part in parts):
        return False
    places = out.split([part.shape[dim] for part in parts], dim)
    return all(
        record(recorder, "copy", [part], place) for part, place in zip(parts, places, strict=True) if part.numel()
    )


def record(
    recorder: Recorder, op: str, operands: list[Any], out: Tensor, alpha: float = 0.0, beta: float = 0.0
) -> bool:
    """Appends out = op(operands), broadcast to the shape of out; False if the kernel cannot do it."""
    tensors = [one if isinstance(one, Tensor) else torch.tensor(float(one)) for one in operands]
    if any(one.dtype not in TYPES for one in (*tensors, out)) or out.numel() == 0:
        return False
    shaped = [one.expand(out.shape) for one in tensors]
    dims = _coalesced(list(out.shape), [list(one.stride()) for one in (*shaped, out)])
    if len(dims) > MOST_DIMS:
        return False
    pad = [(1, *([0] * (len(shaped) + 1)))] * (MOST_DIMS - len(dims))
    dims = pad + dims
    arguments = ElementwiseArgs(
        out=out.data_ptr(), op=OPS[op], dims=len(dims), numel=out.numel(), out_type=TYPES[out.dtype],
        alpha=float(alpha), beta=float(beta),
    )  # fmt: skip
    for i, one in enumerate(shaped):
        arguments.inputs[i], arguments.in_type[i] = one.data_ptr(), TYPES[one.dtype]
        arguments.in_stride[i][:] = [dim[1 + i] for dim in dims]
    arguments.size[:], arguments.out_stride[:] = [dim[0] for dim in dims], [dim[-1] for dim in dims]
    recorder.add("elementwise", arguments, *tensors, out, work=out.numel() * 4)
    return True


def _coalesced(sizes: list[int], strides: list[list[int]]) -> list[tuple[int, ...]]:
    """(size, strides …) of each dimension, with neighbours merged where every operand can walk them as one.

    >>> _coalesced([2, 1, 3, 4], [[12, 12, 4, 1], [0, 0, 4, 1]])
    [(2, 12, 0), (12, 1, 1)]
    """
    found: list[tuple[int, ...]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if found and all(before == step * size for before, step in zip(found[-1][1:], steps, strict=True)):
            found[-1] = (found[-1][0] * size, *steps)
        else:
            found.append((size, *steps))
    return found or [(1, *([0] * len(strides)))]
