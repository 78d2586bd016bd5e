"""The selective scan over prompts against its rule: any number of tokens and channels, ragged rows, NaN in padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lamina.kernels.limits import CARDS
from lamina.kernels.recurrent.prompt.selective_scan import Tile, selective_scan_prompt, tile_for
from lamina.recurrence import SelectiveScan
from tests.recurrence.inputs import Case, error

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # NaN where there is no token is meant

SMALL = Tile(values=64, warps=1, group=4)


def case_of(rule: SelectiveScan, rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> Case:
    case = Case(rule, rows, tokens, seed=tokens).to(torch.float32)
    case.inputs = {name: x if name in rule.exact else x.to(dtype) for name, x in case.inputs.items()}
    return case


def run(case: Case, counts: Tensor | None = None, tile: Tile | None = SMALL) -> tuple[Tensor, Tensor]:
    assert isinstance(case.rule, SelectiveScan)
    return selective_scan_prompt(case.rule, case.state, case.inputs, case.constants, counts, tile=tile)


def truth_of(case: Case, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """In float64, token by token."""
    wide = case.to(torch.float64)
    return wide.rule.scan(wide.state, wide.inputs, wide.constants, valid)


@pytest.mark.parametrize("tokens", [1, 3, 4, 9])
@pytest.mark.parametrize("rule", [SelectiveScan(10, 16), SelectiveScan(20, 4), SelectiveScan(5, 3)], ids=str)
def test_tokens_are_the_rules_scan(rule: SelectiveScan, tokens: int) -> None:
    case = case_of(rule, 2, tokens)
    before = case.state.clone()
    out, state = run(case)
    expected, final = truth_of(case)
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert error(out, expected) < 1e-6
    assert error(state, final) < 1e-6
    assert torch.equal(case.state, before)


def test_the_tile_of_the_device_is_the_same() -> None:
    case = case_of(SelectiveScan(10, 16), 1, 19)
    assert error(run(case, tile=None)[0], run(case)[0]) < 1e-6


def test_ragged_rows_stop_at_their_counts_and_padding_may_be_nan() -> None:
    case = case_of(SelectiveScan(10, 16), 4, 9)
    counts = torch.tensor([9, 0, 5, 4])
    valid = torch.arange(9) < counts[:, None]
    case.state[1].view(-1)[:4] = torch.tensor([-0.0, 1e-42, torch.inf, torch.nan])
    expected, final = truth_of(case, valid)
    case.inputs = case.poisoned(valid)
    out, state = run(case, counts)
    assert not out[~valid].any()
    assert error(out[valid], expected[valid]) < 1e-6
    assert error(state[counts > 0], final[counts > 0]) < 1e-6
    assert torch.equal(state[1].view(torch.int32), case.state[1].view(torch.int32))


def test_half_precision_is_as_exact_as_the_plain_computation() -> None:
    case = case_of(SelectiveScan(12, 16), 2, 40, torch.bfloat16)
    (out, state), (expected, final) = run(case), truth_of(case)
    plain, _ = case.rule.chunk(case.state, case.inputs, case.constants)
    assert out.dtype == torch.bfloat16
    assert error(out, expected) <= 2 * error(plain, expected)
    assert error(state, final) < 1e-6


def test_large_steps_forget_everything_before() -> None:
    case = case_of(SelectiveScan(4, 16), 1, 6)
    case.inputs["dt"][:, 3] = 1e4
    (out, state), (expected, final) = run(case), truth_of(case)
    assert error(out, expected) < 1e-6 and error(state, final) < 1e-6


def test_two_calls_in_sequence_are_one() -> None:
    case = case_of(SelectiveScan(10, 16), 2, 11)
    out, state = run(case)
    parts, half = [], case.state
    for first, last in ((0, 5), (5, 11)):
        y, half = selective_scan_prompt(
            SelectiveScan(10, 16), half, case.cut(first, last), case.constants, None, tile=SMALL
        )
        parts.append(y)
    assert error(torch.cat(parts, 1), out) < 1e-6 and error(half, state) < 1e-6


def test_inputs_may_be_slices_of_one_projection() -> None:
    case = case_of(SelectiveScan(10, 16), 2, 5)
    expected = run(case)
    joined = torch.cat(list(case.inputs.values()), -1)
    case.inputs = dict(zip(case.inputs, joined.split([10, 10, 16, 16], -1), strict=True))
    assert all(map(torch.equal, run(case), expected))


def test_no_tokens_keep_the_state() -> None:
    case = case_of(SelectiveScan(10, 16), 2, 1)
    case.inputs = case.cut(0, 0)
    out, state = run(case)
    assert out.shape == (2, 0, 10) and state is case.state


def test_few_states_load_more_tokens_ahead() -> None:
    assert tile_for(5120 * 16, 2, CARDS[90]).group > tile_for(64 * 5120 * 16, 2, CARDS[90]).group
