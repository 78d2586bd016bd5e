"""Memory calls of recurrent layers in a native program: the short convolution, and the rules.

A rule's `before` and `after` (step sizes, gates, norms) are recorded operation by operation; the update of the state is
one kernel. The references are `lamina.recurrence`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.errors import CaptureError
from lamina.native.arguments import (
    TYPES,
    ConvolveArgs,
    DeltaArgs,
    LogArgs,
    LruArgs,
    ScanArgs,
    SsdArgs,
    StateArgs,
    WkvArgs,
    pointer,
)
from lamina.native.operations import NativeRecorder, act_kind
from lamina.native.weights import type_of
from lamina.recurrence import RGLRU, SSD, WKV, ChannelDelta, GatedDelta, Rule, SelectiveScan

if TYPE_CHECKING:
    from lamina.recurrence.rule import Tensors

RULES = (SSD, SelectiveScan, GatedDelta, ChannelDelta, RGLRU, WKV)
MOST_VALUES = 1024  # of a head of a delta rule


def convolve(
    recorder: NativeRecorder, table: Tensor, dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None,
    *, act: str | None, gates: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """x [B, 1, C], weight [C, K] -> act(convolution) [B, 1, C]; the input goes into the ring."""
    kind = act_kind(act)
    if kind is None:
        raise CaptureError(f"no native kernel computes the activation {act!r} of a convolution")
    x, weight = _rows(x), weight.contiguous()
    inward, outward = (None, None) if gates is None else (_rows(gate) for gate in gates)
    (rows, channels), kernel = x.shape, weight.shape[1]
    out = recorder.new(rows, 1, channels)
    arguments = ConvolveArgs(
        x=x.data_ptr(), weight=weight.data_ptr(), bias=pointer(bias), inward=pointer(inward), outward=pointer(outward),
        out=out.data_ptr(), table=table.data_ptr(), rows=rows, channels=channels, kernel=kernel, x_row=x.stride(0),
        in_row=0 if inward is None else inward.stride(0), out_row=0 if outward is None else outward.stride(0), act=kind,
        weight_type=type_of(weight), bias_type=0 if bias is None else type_of(bias), store_type=TYPES[dtype],
    )  # fmt: skip
    kept = (x, weight, bias, inward, outward, out, table)
    recorder.add("convolve", arguments, *kept, work=8 * channels * kernel * rows)
    return out


def recur(
    recorder: NativeRecorder, table: Tensor, dtype: torch.dtype, rule: Rule, inputs: Tensors, constants: Tensors,
    around: Mapping[str, Any],
) -> Tensor:  # fmt: skip
    """Runs the rule on from the rows' states, in place: inputs [B, 1, *shape] -> outputs [B, 1, ...]

    dtype   of the model, in which a cache with slack logs inputs
    """
    ready = rule.before(inputs, **around)
    if type(rule) not in RULES:
        return rule.after(_by_pytorch(recorder, table, rule, ready, constants), ready, **around)
    return rule.after(_update(recorder, table, dtype, rule, ready, constants), ready, **around)


def _update(
    recorder: NativeRecorder, table: Tensor, dtype: torch.dtype, rule: Rule, inputs: Tensors, constants: Tensors
) -> Tensor:
    logged = {name: _rows(inputs[name]) for name in rule.input_shapes}
    given = {name: x for name, x in logged.items() if name != "token"}
    log = _log(table, dtype, rule, logged)
    fixed = {name: value.float().contiguous() for name, value in constants.items()}
    rows, shape = given[rule.value].shape[0], rule.input_shapes[rule.value]
    out = recorder.new(rows, 1, *shape)
    common: dict[str, Any] = {"out": out.data_ptr(), "table": table.data_ptr(), "rows": rows}
    common["log"] = ctypes.addressof(log)
    common |= {name: x.data_ptr() for name, x in (given | fixed).items()}
    common |= {f"{name}_row": x.stride(0) for name, x in given.items()}
    match rule:
        case SSD(heads=heads, head_dim=dim, state=state, groups=groups):
            kernel, arguments = "ssd", SsdArgs(heads=heads, dim=dim, state=state, groups=groups, **common)
        case SelectiveScan(channels=channels, state=state):
            kernel, arguments = "scan", ScanArgs(channels=channels, state=state, **common)
        case GatedDelta(key_heads=key_heads, value_heads=heads, key_dim=key_dim, value_dim=dim):
            sizes = dict(heads=heads, key_heads=key_heads, key_dim=key_dim, dim=dim, by_channel=0)
            kernel, arguments = "delta", DeltaArgs(**sizes, **common)
        case ChannelDelta(heads=heads, key_dim=key_dim, value_dim=dim):
            sizes = dict(heads=heads, key_heads=heads, key_dim=key_dim, dim=dim, by_channel=1)
            kernel, arguments = "delta", DeltaArgs(**sizes, **common)
        case RGLRU(channels=channels):
            kernel, arguments = "lru", LruArgs(channels=channels, **common)
        case WKV(channels=channels):
            kernel, arguments = "wkv", WkvArgs(channels=channels, **common)
        case _:
            raise CaptureError(f"there is no native kernel for the rule {type(rule).__name__}")
    size = rows * torch.Size(rule.state_shape).numel()
    recorder.add(kernel, arguments, given, fixed, out, table, log, work=4 * size)
    recorder.add("log", log, logged, table, work=2 * sum(x.numel() for x in logged.values()))
    return out


def _by_pytorch(recorder: NativeRecorder, table: Tensor, rule: Rule, inputs: Tensors, constants: Tensors) -> Tensor:
    """A rule from outside the package: its own operations, on a copy of the states that then goes back."""
    rows = inputs[rule.value].shape[0]
    state = recorder.new(rows, *rule.state_shape)
    _copy_state(recorder, table, state, write=False)
    out, after = rule.chunk(state, {name: inputs[name].float() for name in rule.input_shapes}, constants)
    _copy_state(recorder, table, after.float().contiguous(), write=True)
    return out


def _copy_state(recorder: NativeRecorder, table: Tensor, state: Tensor, *, write: bool) -> None:
    rows, values = state.shape[0], state[0].numel()
    arguments = StateArgs(
        state=state.data_ptr(), table=table.data_ptr(), rows=rows, values=values, write=write
    )  # fmt: skip
    recorder.add("state", arguments, state, table, work=2 * state.numel())


def _log(table: Tensor, dtype: torch.dtype, rule: Rule, inputs: Mapping[str, Tensor]) -> LogArgs:
    """How a cache with slack logs the inputs [B, values] of a token."""
    log = LogArgs(table=table.data_ptr(), rows=inputs[rule.value].shape[0], count=len(inputs))
    for i, (name, x) in enumerate(inputs.items()):
        log.input[i], log.stride[i], log.size[i] = x.data_ptr(), x.stride(0), x.shape[1]
        log.type[i] = TYPES[torch.float32 if name in rule.exact else dtype]
    return log


def _rows(x: Tensor) -> Tensor:
    """[B, 1, …] -> float32 [B, values], the values of a row next to each other."""
    flat = x.float().reshape(x.shape[0], -1)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def why_no_rule(rule: Rule, slack: int) -> str | None:
    """Why a native step does not run this rule over a cache with this slack."""
    if type(rule) not in RULES:
        reason = (
            f"its slack is {slack}; a native step keeps no log of inputs of {type(rule).__name__}, a rule from outside"
        )
        return reason if slack else None
    if isinstance(rule, GatedDelta | ChannelDelta) and rule.value_dim > MOST_VALUES:
        return f"heads of {rule.value_dim} values; the native kernel of delta rules takes up to {MOST_VALUES}"
    return None
