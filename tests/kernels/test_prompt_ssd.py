"""SSD over long prompts against the rule's own scan: chunks, ragged rows, NaN in padding, groups, large decays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lamina.kernels.limits import CARDS, INTERPRETER
from lamina.kernels.recurrent.prompt.ssd import Tile, shared_bytes, ssd_prompt, tile_for
from lamina.recurrence import SSD
from tests.recurrence.inputs import Case, error

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # NaN where there is no token

SMALL = Tile(
    chunk=16, values=16, columns=16, heads=2, warps=4, stages=1, state_tile=(16, 16), state_warps=4, state_stages=2
)
RULE = SSD(heads=4, head_dim=8, state=16, groups=2)
LARGER = SSD(heads=2, head_dim=20, state=24, groups=1)  # two tiles each way, the last one not full


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that programs compute several heads each."""
    monkeypatch.setattr("lamina.kernels.limits.INTERPRETER", replace(INTERPRETER, multiprocessors=1))


def valid_of(counts: Tensor | None, tokens: int) -> Tensor | None:
    return None if counts is None else torch.arange(tokens) < counts[:, None]


def check(case: Case, counts: Tensor | None = None, tile: Tile | None = SMALL, most: float = 1e-5) -> None:
    """The kernels against the scan in float64, with NaN wherever there is no token."""
    tokens = case.inputs["x"].shape[1]
    valid, single = valid_of(counts, tokens), case.to(torch.float32)
    inputs = single.inputs if valid is None else single.poisoned(valid)
    before = single.state.clone()
    out, new = ssd_prompt(case.rule, single.state, inputs, single.constants, counts, tile=tile)
    wide = single.to(torch.float64)
    truth, final = case.rule.scan(wide.state, wide.inputs, wide.constants, valid)
    assert torch.equal(single.state, before) and out.dtype == torch.float32 and out.shape == truth.shape
    assert error(new, final) < most
    if valid is not None:
        assert (out[~valid] == 0).all()
        out, truth = out[valid], truth[valid]
    assert error(out, truth) < most


@pytest.mark.parametrize("tokens", [1, 15, 16, 37])
@pytest.mark.parametrize("rule", [RULE, LARGER], ids=str)
def test_whole_prompts_are_the_rules_scan(rule: SSD, tokens: int) -> None:
    check(Case(rule, rows=1, tokens=tokens, seed=tokens))


def test_tiles_as_configured_give_the_same() -> None:
    check(Case(LARGER, rows=1, tokens=70), tile=None)


def test_ragged_rows_end_where_they_end_and_padding_may_be_nan() -> None:
    check(Case(RULE, rows=4, tokens=35), torch.tensor([35, 0, 16, 18]))


def test_a_row_without_tokens_keeps_every_bit_of_its_state() -> None:
    case = Case(RULE, rows=2, tokens=20).to(torch.float32)
    counts = torch.tensor([0, 20])
    case.state[0].view(-1)[:4] = torch.tensor([-0.0, 1e-42, torch.inf, torch.nan])
    inputs = case.poisoned(torch.arange(20) < counts[:, None])
    out, new = ssd_prompt(RULE, case.state, inputs, case.constants, counts, tile=SMALL)
    assert torch.equal(new[0].view(torch.int32), case.state[0].view(torch.int32))
    assert not out[0].any() and out[1].isfinite().all() and not torch.equal(new[1], case.state[1])


@pytest.mark.parametrize("rate", [-2.0, -200.0, -1e6])
def test_large_decays_leave_small_ones_their_digits(rate: float) -> None:
    case = Case(RULE, rows=1, tokens=32)
    case.constants["A"][:] = rate
    case.inputs["dt"] = -0.3 / rate * torch.rand(1, 32, 4, dtype=torch.float64)
    case.inputs["dt"][:, torch.arange(32) % 16 < 10] = 50.0
    case.inputs["x"] /= case.inputs["dt"][..., None]  # so that each token adds as much to the state
    check(case, most=2e-6)


def test_decays_to_nothing_give_no_nan() -> None:
    case = Case(RULE, rows=2, tokens=33)
    case.constants["A"] *= torch.tensor([1e4, 1e30, torch.inf, 1.0])
    check(case, torch.tensor([33, 20]))


def test_two_calls_in_sequence_are_one() -> None:
    case = Case(RULE, rows=2, tokens=45).to(torch.float32)
    whole, end = ssd_prompt(RULE, case.state, case.inputs, case.constants, tile=SMALL)
    first, middle = ssd_prompt(RULE, case.state, case.cut(0, 19), case.constants, tile=SMALL)
    second, last = ssd_prompt(RULE, middle, case.cut(19, 45), case.constants, tile=SMALL)
    assert error(torch.cat([first, second], 1), whole) < 2e-6
    assert error(last, end) < 2e-6


def test_no_tokens_give_no_outputs_and_the_state_itself() -> None:
    case = Case(RULE, rows=2, tokens=0).to(torch.float32)
    out, new = ssd_prompt(RULE, case.state, case.inputs, case.constants)
    assert out.shape == (2, 0, 4, 8) and new is case.state


def test_slices_of_a_projection_need_no_copy() -> None:
    case = Case(RULE, rows=2, tokens=18).to(torch.float32)
    expected = ssd_prompt(RULE, case.state, case.inputs, case.constants, tile=SMALL)
    sizes = [32, 4, 32, 32]
    parts = torch.cat([case.inputs[name].flatten(2) for name in RULE.input_shapes], -1).split(sizes, -1)
    inputs = {
        name: part.unflatten(-1, shape) for (name, shape), part in zip(RULE.input_shapes.items(), parts, strict=True)
    }
    found = ssd_prompt(RULE, case.state, inputs, case.constants, tile=SMALL)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_plain_computation(dtype: torch.dtype) -> None:
    case = Case(SSD(heads=2, head_dim=16, state=32, groups=1), rows=1, tokens=50)
    case = case.to(torch.float32)
    inputs = {name: x if name == "dt" else x.to(dtype) for name, x in case.inputs.items()}
    wide = {name: x.double() for name, x in inputs.items()}
    constants = {"A": case.constants["A"].double()}
    truth, final = case.rule.scan(case.state.double(), wide, constants)
    plain, _ = case.rule.chunk(case.state, inputs, case.constants)
    out, new = ssd_prompt(case.rule, case.state, inputs, case.constants, tile=SMALL)
    assert out.dtype == dtype and new.dtype == torch.float32
    assert error(out, truth) <= 2 * error(plain, truth)
    assert error(new, final) < torch.finfo(dtype).eps / 2  # each token is rounded once


def test_skip_gate_and_step_sizes_can_be_in_the_launches() -> None:
    case = Case(RULE, rows=2, tokens=21).to(torch.float32)
    counts = torch.tensor([21, 9])
    valid = torch.arange(21) < counts[:, None]
    around = {"skip": torch.randn(4), "gate": torch.randn(2, 21, 4, 8), "dt_bias": torch.randn(4)}
    limit = (0.1, 2.0)
    case.inputs["dt"] = torch.randn(2, 21, 4)
    inputs = case.poisoned(valid)
    out, new = ssd_prompt(RULE, case.state, inputs, case.constants, counts, dt_limit=limit, tile=SMALL, **around)
    ready = RULE.before(inputs, dt_limit=limit, **around)
    truth, final = RULE.scan(case.state, ready, case.constants, valid)
    truth = RULE.after(truth, ready, **around)
    assert error(out[valid], truth[valid]) < 1e-5 and error(new, final) < 1e-5
    assert not out[~valid].any()


def test_every_card_has_a_tile_for_every_head() -> None:
    for card in CARDS.values():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for dim, state in ((64, 128), (128, 256), (64, 64), (80, 16)):
                for tokens in (1, 100, 4096):
                    tile = tile_for(tokens, dim, state, dtype, card)
                    assert shared_bytes(tile, state, dtype) <= card.shared
