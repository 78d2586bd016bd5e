"""Recurrences of captured passes over a cache with slack: the rule, the log of its inputs and the base state.

`lamina.cache.layers.recurrent` says what a cache keeps so that a state can be rewound. Here captured steps, passes and
prompts keep it up to date on the device (kernels/recurrent: `rewind.py`, `input_log.py`), so captured and plain passes
over one cache may alternate. The log has the inputs of the rule itself: what a rule's kernel makes of projections on
the way (`Rule.before`: step sizes, gates, norms) it also stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.recurrence import WKV, Rule

if TYPE_CHECKING:
    from lamina.cache.layers.base import Key
    from lamina.recurrence.rule import Tensors
    from lamina.runtime.captured import Captured
    from lamina.runtime.gpu.backend import TableEntry

# Kernel modules import Triton at their top, so the functions below import them when they first launch.

AFTER = ("skip", "gate", "act")  # of `around`: what a rule does with its output (`Rule.after`)

Run = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
"""(state [R, *state], counts [R], valid [R, T]) -> (outputs, the state after the first counts tokens of each row)."""


def recur_logged(
    one: Captured, key: Key, entry: TableEntry, inputs: Tensors, constants: Tensors, around: Mapping[str, Any]
) -> Tensor:
    """A few tokens per row: `KernelBackend.recur` for a cache with slack."""
    from lamina.kernels.recurrent.input_log import log_inputs, logged_inputs
    from lamina.kernels.recurrent.recur import recur_step
    from lamina.kernels.recurrent.rewind import move_base

    rule, table, later, one.constants[key] = entry.spec.rule, entry.table, entry.later, constants
    if isinstance(rule, WKV):
        inputs = rule.before(inputs)
    logged, ready = logged_inputs(rule, inputs, around, one.model.dtype)
    if later is None:
        move_base(rule, logged, constants, table)  # of one token, which no base comes after: `ready` may be empty yet
        out = recur_step(rule, inputs, constants, table, **around, ready=ready)
        log_inputs(logged, table)
        return out

    def commit() -> None:
        move_base(rule, logged, constants, later)
        recur_step(rule, logged, constants, later)
        log_inputs(logged, later)

    entry.at_commit = commit
    return recur_step(rule, inputs, constants, table, **around, ready=ready, write=False)


def recur_prompt(
    one: Captured, key: Key, entry: TableEntry, inputs: Tensors, constants: Tensors, run: Run
) -> tuple[Tensor, Tensor]:
    """Many tokens per row: runs the rule, and before the new state [R, *state] is stored, the log and the base.
    -> (outputs, new state)

    inputs   of the rule itself: of `prepared`
    """
    from lamina.kernels.recurrent.input_log import log_inputs, logged_inputs
    from lamina.kernels.recurrent.prompt.carried import load_state, store_base
    from lamina.kernels.recurrent.rewind import move_base, tokens_to_base

    rule, table, one.constants[key] = entry.spec.rule, entry.table, constants
    logged, _ = logged_inputs(rule, inputs, {}, one.model.dtype)
    tokens = logged[rule.value].shape[1]
    state = load_state(table, one.rows, rule.state_shape)
    counts = tokens_to_base(table, one.rows, tokens)
    base = run(state, counts, torch.arange(tokens, device=counts.device) < counts[:, None])[1]
    move_base(rule, logged, constants, table, skip=True)
    store_base(base, table, counts)
    log_inputs(logged, table)
    return run(state, one.counts, one.valid)


def prepared(rule: Rule, inputs: Tensors, around: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """(the inputs of the rule itself, the part of `around` that concerns its output)."""
    after = {name: value for name, value in around.items() if name in AFTER}
    return rule.before(inputs, **around), after
