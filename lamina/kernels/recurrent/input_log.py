"""What a recurrent state is rewound over: the log of inputs of a cache with slack.

The log is a ring of 2 · slack slots per row. A launch after the rule writes the inputs of the newest tokens into it;
before that, the base state moves over the inputs that they replace (`rewind.py`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.entry import LOG, SLACK, row_of, store_pointer
from lamina.kernels.launch import begin, launch
from lamina.kernels.recurrent.state import contiguous_tokens
from lamina.recurrence import RGLRU, SSD, ChannelDelta, GatedDelta, Rule, SelectiveScan
from lamina.recurrence.rule import Tensors

MOST_INPUTS = 5  # of a rule
BLOCK = 1024  # values of each input that a program copies


def logged_inputs(
    rule: Rule, inputs: Tensors, around: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Tensors, Tensors]:
    """-> (the inputs of the rule itself in its order, as the log has them; those of them that are empty yet)

    The second are what the rule's kernel makes of the inputs that it is given: `recur_step(ready=…)` fills them.
    dtype: of the model
    """
    made, like = _made_by(rule, around), inputs[rule.value]
    logged: dict[str, Tensor] = {}
    for name, shape in rule.input_shapes.items():
        kind = torch.float32 if name in rule.exact else dtype
        if name in made:
            logged[name] = torch.empty(*like.shape[:2], *shape, dtype=kind, device=like.device)
        else:
            logged[name] = contiguous_tokens(inputs[name].to(kind))
    return logged, {name: logged[name] for name in made}


def _made_by(rule: Rule, around: Mapping[str, Any]) -> tuple[str, ...]:
    """The inputs that the kernel of this rule computes by itself from those that it is given."""
    given = {name for name, value in around.items() if value is not None}
    match rule:
        case SSD():
            return ("dt",) if "dt_bias" in given else ()
        case SelectiveScan():
            sizes = ("dt",) if given & {"dt_bias", "dt_product", "dt_divisor"} else ()
            return (*sizes, "B", "C") if "norms" in given else sizes
        case GatedDelta() | ChannelDelta():
            unit = ("q", "k") if around.get("unit") else ()
            return (*unit, "g", "beta") if "gates" in given else (*unit, "beta") if around.get("doubled") else unit
        case RGLRU():
            return ("x", "g") if "gates" in given else ()
    return ()


@triton.jit
def _log_inputs(
    a, b, c, d, e, table,  # the rule's inputs [R, T, *shape] in its order, None behind the last; the entry's table row
    a_row, a_token, b_row, b_token, c_row, c_token, d_row, d_token, e_row, e_token,  # strides
    T: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,  # values each
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, t, row): values i · BLOCK … of each input of the row's token t, if its log still has it after."""
    begin(PDL)
    row, t = tl.program_id(2).to(tl.int64), tl.program_id(1)
    length, count = row_of(table, row, T)
    kept = 2 * tl.load(table + SLACK).to(tl.int32)
    if (t < count) & (t >= count - kept):
        cell, at = row * kept + (length + t) % kept, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        _log_one(table, 0, a, row * a_row + t * a_token, cell, at, A)
        _log_one(table, 1, b, row * b_row + t * b_token, cell, at, B)
        _log_one(table, 2, c, row * c_row + t * c_token, cell, at, C)
        _log_one(table, 3, d, row * d_row + t * d_token, cell, at, D)
        _log_one(table, 4, e, row * e_row + t * e_token, cell, at, E)


@triton.jit
def _log_one(table, INPUT: tl.constexpr, x, token, cell, at, SIZE: tl.constexpr):
    """Copies values `at` of a token of x to a cell of its log; nothing where there is no such input."""
    if x is not None:
        log = store_pointer(table, LOG + INPUT, x.dtype) + cell * SIZE
        tl.store(log + at, tl.load(x + token + at, mask=at < SIZE), mask=at < SIZE)


def log_inputs(inputs: Tensors, table: Tensor) -> None:
    """Writes the inputs of the newest real tokens, of `logged_inputs`, into the log. After the rule has run."""
    some = list(inputs.values())
    (rows, tokens), sizes = some[0].shape[:2], [x[0, 0].numel() for x in some]
    missing, block = MOST_INPUTS - len(some), min(BLOCK, triton.next_power_of_2(max(sizes)))
    strides = [stride for x in some for stride in x.stride()[:2]]
    launch(
        _log_inputs, (triton.cdiv(max(sizes), block), tokens, rows),
        *some, *[None] * missing, table, *strides, *[0] * (2 * missing), tokens, *sizes, *[0] * missing, block,
        num_warps=4,
    )  # fmt: skip
