"""Recurrent rules for a few tokens per row, on the states that a cache keeps: one kernel per rule.

The state is found through the cache's entry table (`columns.py`), so one captured launch serves any cache. `state.py`
explains how the kernels work. What model code does around a rule (`Rule.before`, `Rule.after`) runs in the same kernel
where a keyword asks for it; without keywords a function is `Rule.scan` in place. References: `lamina.recurrence`.

For one token per row, `mixer.py` has the convolution before and the gated norm after the rule in the same kernel too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.recurrent.gated_delta import gated_delta_step
from lamina.kernels.recurrent.rg_lru import rg_lru_step
from lamina.kernels.recurrent.selective_scan import selective_scan_step, with_step_sizes
from lamina.kernels.recurrent.ssd import ssd_step
from lamina.kernels.recurrent.wkv import wkv_step
from lamina.recurrence import RGLRU, SSD, WKV, ChannelDelta, GatedDelta, Rule, SelectiveScan
from lamina.recurrence.rule import Tensors


def with_products(rule: Rule, inputs: Tensors, around: Mapping[str, Any]) -> tuple[Tensors, Mapping[str, Any]]:
    """(inputs, around) with the products in them computed that the rule's kernel might compute by itself."""
    return with_step_sizes(inputs, **around) if isinstance(rule, SelectiveScan) else (inputs, around)


def recur_step(rule: Rule, inputs: Tensors, constants: Tensors, table: Tensor, **around: Any) -> Tensor:
    """The rule's own `scan` on the state behind `table`, in place: inputs [B, T, *shape] -> outputs [B, T, ...].

    around   what the rule's `before` and `after` do, in the same kernel; `write=False` leaves the state unchanged, and
             `ready` is filled with what `before` makes of the inputs, for a log of them (`input_log.py`)
    """
    match rule:
        case SSD():
            return ssd_step(inputs, constants, table, **around)
        case SelectiveScan():
            return selective_scan_step(inputs, constants, table, **around)
        case GatedDelta() | ChannelDelta():
            return gated_delta_step(inputs, constants, table, **around)
        case RGLRU():
            return rg_lru_step(inputs, constants, table, **around)
        case WKV():
            return wkv_step(inputs, constants, table, **around)
    raise InputError(
        f"no kernel for the rule {rule}; there is one for SSD, SelectiveScan, GatedDelta, ChannelDelta, RGLRU and WKV, "
        "or use rule.scan"
    )
