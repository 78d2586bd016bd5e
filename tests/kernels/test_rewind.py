"""The kernels that keep what a state is rewound from: the base moves over the right inputs, the log has the newest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.columns import entry_row
from lamina.kernels.recurrent.input_log import log_inputs, logged_inputs
from lamina.kernels.recurrent.prompt.carried import store_base
from lamina.kernels.recurrent.rewind import move_base, tokens_to_base
from lamina.recurrence import Rule
from tests.kernels.test_recur import LARGER, half
from tests.recurrence.inputs import ONE_OF_EACH, Case, error

SLACK, T = 3, 8
# (position of the base, length, new tokens) of each row. A log has room for six tokens.
ROWS = [
    (4, 9, 0),  # no token, though its log is nearly full
    (4, 9, 1),  # room in the log
    (3, 9, 1),  # full: the base moves to 7, over inputs 3 … 6, around the end of the log
    (10, 16, 3),  # full: the base moves to the length before the pass
    (10, 14, 8),  # full: it moves to 19, over the first five new tokens
    (0, 0, 8),  # empty, and more new tokens than the log has room for
    (0, 1, 2),
]
MOVED = [4, 4, 7, 16, 19, 5, 0]  # positions of the bases after the pass
every_rule = pytest.mark.parametrize("rule", [*ONE_OF_EACH, *LARGER], ids=str)


class Kept:
    """The states and logs of a layer, with NaN in slots of the log that hold nothing, and its table."""

    def __init__(self, rule: Rule, narrow: bool = False) -> None:
        case, older = (in_dtype(Case(rule, len(ROWS), tokens, seed=tokens), narrow) for tokens in (T, 2 * SLACK))
        self.rule, self.new, self.past, self.constants = rule, case.inputs, older.inputs, case.constants
        self.head, self.base, self.log = case.state, older.state, dict[str, Tensor]()
        for name, shape in rule.input_shapes.items():
            log = torch.full((len(ROWS), 2 * SLACK, *shape), torch.nan, dtype=self.new[name].dtype)
            for row, (base, length, _) in enumerate(ROWS):
                for position in range(base, length):
                    log[row, position % 6] = self.past[name][row, position - base]
            self.log[name] = log
        logs = {f"log.{i}": x.data_ptr() for i, x in enumerate(self.log.values())}
        bases, lengths, counts = (torch.tensor(column) for column in zip(*ROWS, strict=True))
        self.stores = {"k": self.head, "base": self.base, "bases": bases, "lengths": lengths, "counts": counts}
        columns = {name: x.data_ptr() for name, x in self.stores.items()} | logs | {"slack": SLACK}
        self.table = torch.tensor(entry_row(columns))

    def folded(self, state: Tensor, inputs: dict[str, Tensor], row: int, tokens: int) -> Tensor:
        some = {name: x[row : row + 1, :tokens].float() for name, x in inputs.items()}
        return self.rule.scan(state[row : row + 1], some, self.constants)[1][0] if tokens else state[row]

    def moved(self) -> Tensor:
        """The base states after the pass."""
        rows = []
        for row, (base, length, _) in enumerate(ROWS):
            to = MOVED[row]
            start = (self.head, self.new, row, to - length) if to > length else (self.base, self.past, row, to - base)
            rows.append(self.folded(*start))
        return torch.stack(rows)


def in_dtype(case: Case, narrow: bool) -> Case:
    return half(case) if narrow else case.to(torch.float32)


@every_rule
def test_the_base_moves_only_where_the_log_would_overflow_and_over_the_right_inputs(rule: Rule) -> None:
    kept = Kept(rule)
    before, expected, head = kept.base.clone(), kept.moved(), kept.head.clone()
    move_base(rule, kept.new, kept.constants, kept.table)
    assert error(kept.base, expected) < 3e-6
    for row, (base, _, _) in enumerate(ROWS):
        assert torch.equal(kept.base[row], before[row]) == (MOVED[row] == base)
    assert torch.equal(kept.head, head)


@every_rule
def test_the_log_has_the_inputs_of_the_newest_real_tokens(rule: Rule) -> None:
    kept = Kept(rule)
    expected = {name: x.clone() for name, x in kept.log.items()}
    for name, log in expected.items():
        for row, (_, length, count) in enumerate(ROWS):
            for t in range(max(count - 6, 0), count):
                log[row, (length + t) % 6] = kept.new[name][row, t]
    log_inputs(kept.new, kept.table)
    for name, log in expected.items():
        torch.testing.assert_close(kept.log[name], log, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", LARGER, ids=lambda rule: type(rule).__name__)
def test_bfloat16_logs_and_slices_of_a_projection(rule: Rule) -> None:
    kept = Kept(rule, narrow=True)
    flat = [x.float().reshape(len(ROWS), T, -1) for x in kept.new.values()]
    parts = torch.cat(flat, dim=-1).split([x.shape[-1] for x in flat], dim=-1)
    shapes = rule.input_shapes
    sliced = {
        name: part.unflatten(-1, shapes[name]) if shapes[name] else part[..., 0]
        for name, part in zip(shapes, parts, strict=True)
    }  # in float32, and a log is in the dtype of the model
    (logged, _), expected = logged_inputs(rule, sliced, {}, torch.bfloat16), kept.moved()
    move_base(rule, logged, kept.constants, kept.table)
    assert error(kept.base, expected) < 3e-6
    log_inputs(logged, kept.table)
    for name, log in kept.log.items():
        assert torch.equal(log[4, (14 + 7) % 6], kept.new[name][4, 7])


@every_rule
def test_a_prompt_folds_new_tokens_into_the_base_by_itself(rule: Rule) -> None:
    kept = Kept(rule)
    expected, counts = kept.moved(), tokens_to_base(kept.table, len(ROWS), T)
    assert counts.tolist() == [0, 0, 0, 0, 5, 5, 0]
    valid = torch.arange(T) < counts[:, None]
    new = rule.chunk(kept.head, kept.new, kept.constants, valid)[1]
    before = kept.base.clone()
    move_base(rule, kept.new, kept.constants, kept.table, skip=True)
    assert torch.equal(kept.base[counts > 0], before[counts > 0])
    store_base(new, kept.table, counts)
    assert error(kept.base, expected) < 3e-5


def test_a_rule_without_a_kernel_is_refused_by_name() -> None:
    kept = Kept(LARGER[0])
    other: Any = SimpleNamespace(value=kept.rule.value, state_shape=kept.rule.state_shape)
    with pytest.raises(InputError, match=r"no kernel moves the base state of the rule namespace\(value='x'"):
        move_base(other, kept.new, kept.constants, kept.table)
