"""The gated delta rule over prompts against its rule: any number of chunks, ragged rows, NaN, large decays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lamina.kernels.limits import CARDS
from lamina.kernels.recurrent.prompt.gated_delta import Walk, gated_delta_prompt, shared_bytes, walk_for
from lamina.recurrence import GatedDelta
from tests.recurrence.inputs import Case, error

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # NaN where there is no token is meant

SMALL = GatedDelta(key_heads=1, value_heads=2, key_dim=16, value_dim=16)


def case_of(rule: GatedDelta, rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> Case:
    case = Case(rule, rows, tokens, seed=tokens).to(torch.float32)
    case.inputs = {name: x if name in rule.exact else x.to(dtype) for name, x in case.inputs.items()}
    return case


def run(case: Case, counts: Tensor | None = None, walk: Walk | None = None) -> tuple[Tensor, Tensor]:
    assert isinstance(case.rule, GatedDelta)
    return gated_delta_prompt(case.rule, case.state, case.inputs, case.constants, counts, walk=walk)


def truth_of(case: Case, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """In float64, token by token."""
    wide = case.to(torch.float64)
    return wide.rule.scan(wide.state, wide.inputs, {}, valid)


def check(case: Case, loose: float = 1e-5) -> None:
    """Against the truth: at most `loose`, or twice the error of the plain computation in the same formats."""
    (out, state), (expected, final) = run(case), truth_of(case)
    plain, after = case.rule.chunk(case.state, case.inputs, {})
    assert out.dtype == plain.dtype and out.shape == plain.shape
    assert error(out, expected) <= max(loose, 2 * error(plain, expected))
    half = out.dtype != torch.float32  # then factors have 16 bits of precision, a state without cancellation about 1e-5
    assert error(state, final) <= max(1e-4 if half else loose, 2 * error(after, final))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 31, 64, 150])
def test_any_number_of_tokens_equals_the_rules_scan(tokens: int, dtype: torch.dtype) -> None:
    case = case_of(SMALL, 1, tokens, dtype)
    before = case.state.clone()
    check(case, loose=1e-6)
    assert torch.equal(case.state, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "rule", [GatedDelta(1, 1, 24, 40), GatedDelta(2, 2, 128, 16), GatedDelta(1, 3, 6, 20)], ids=str
)
def test_heads_of_any_size_and_groups_equal_the_rules_scan(rule: GatedDelta, dtype: torch.dtype) -> None:
    check(case_of(rule, 1, 70, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_rows_stop_at_their_counts_and_padding_may_be_nan(dtype: torch.dtype) -> None:
    case = case_of(SMALL, 4, 130, dtype)
    counts = torch.tensor([130, 0, 64, 7])
    valid = torch.arange(130) < counts[:, None]
    case.state[1].view(-1)[:4] = torch.tensor([-0.0, 1e-42, torch.inf, torch.nan])
    expected, final = truth_of(case, valid)
    case.inputs = case.poisoned(valid)
    out, state = run(case, counts)
    assert not out[~valid].any()
    assert error(out[valid], expected[valid]) < (1e-5 if dtype is torch.float32 else 1e-2)
    assert error(state[counts > 0], final[counts > 0]) < 2e-5
    assert torch.equal(state[1].view(torch.int32), case.state[1].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_decays_forget_and_small_ones_behind_them_stay_exact(dtype: torch.dtype) -> None:
    case = case_of(SMALL, 1, 70, dtype)
    case.inputs["g"][:, ::7] = -1e4
    case.inputs["g"][:, 20:40] = -80.0
    case.inputs["g"][:, 41] = -torch.inf
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strengths_up_to_two_and_keys_that_are_alike(dtype: torch.dtype) -> None:
    case = case_of(SMALL, 1, 66, dtype)
    keys = normalize(case.inputs["k"][:, :1].float() + 0.2 * case.inputs["k"].float(), dim=-1)
    case.inputs["k"] = keys.to(dtype)
    case.inputs["beta"] = 2 * case.inputs["beta"]
    case.inputs["g"] = 0.01 * case.inputs["g"]
    check(case)


def test_two_calls_in_sequence_are_one() -> None:
    case = case_of(SMALL, 1, 100)
    out, state = run(case)
    first, half = gated_delta_prompt(SMALL, case.state, case.cut(0, 37), {}, None)
    second, last = gated_delta_prompt(SMALL, half, case.cut(37, 100), {}, None)
    assert error(torch.cat([first, second], 1), out) < 2e-6 and error(last, state) < 2e-6


def test_inputs_may_be_slices_of_one_projection() -> None:
    case = case_of(SMALL, 2, 20)
    expected = run(case)
    sizes = [x[0, 0].numel() for x in case.inputs.values()]
    joined = torch.cat([x.reshape(2, 20, -1) for x in case.inputs.values()], -1).split(sizes, -1)
    case.inputs = {n: part.view(x.shape) if x.dim() == 3 else part.unflatten(-1, x.shape[2:])
                   for (n, x), part in zip(case.inputs.items(), joined, strict=True)}  # fmt: skip
    assert not case.inputs["q"].is_contiguous()
    assert all(map(torch.equal, run(case), expected))


def test_tiles_of_columns_do_not_change_the_values() -> None:
    case = case_of(GatedDelta(1, 1, 16, 40), 1, 20)
    narrow, wide = (run(case, walk=Walk(block, 4, 1)) for block in (16, 64))
    assert error(narrow[0], wide[0]) < 1e-6 and error(narrow[1], wide[1]) < 1e-6


def test_no_tokens_keep_the_state() -> None:
    case = case_of(SMALL, 2, 1)
    case.inputs = case.cut(0, 0)
    out, state = run(case)
    assert out.shape == (2, 0, 2, 16) and state is case.state


def test_every_card_has_a_walk_for_every_head() -> None:
    for card in CARDS.values():
        for itemsize in (2, 4):
            for dim in (16, 64, 128, 256):
                for states in (4, 32, 2048):
                    walk = walk_for(states, dim, dim, itemsize, card)
                    assert shared_bytes(walk, dim, itemsize, card) <= card.shared
    assert walk_for(32, 128, 128, 2, CARDS[90]) == Walk(32, 4, 3)
