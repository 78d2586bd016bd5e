"""Every rule: the form for many tokens agrees with one token at a time, whatever the cut, mask or dtype."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lamina.recurrence import SSD, WKV, ChannelDelta, GatedDelta, Rule, SelectiveScan
from lamina.recurrence import rule as rule_module
from lamina.recurrence.rule import segment_sums

from .inputs import ONE_OF_EACH, RULES, Case, error

EXACT = 1e-12  # relative, float64: the two forms differ by rounding only

every_rule = pytest.mark.parametrize("rule", RULES, ids=str)
each_kind = pytest.mark.parametrize("rule", ONE_OF_EACH, ids=lambda rule: type(rule).__name__)


@pytest.fixture(params=[1, 2**11, 2**26], ids=["one chunk at a time", "a few", "all"])
def scratch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How much a call may hold at once: decides how many chunks go side by side."""
    monkeypatch.setattr(rule_module, "_scratch", lambda state: request.param)
    return int(request.param)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 64, 65, 200])
@every_rule
def test_chunk_equals_scan(rule: Rule, tokens: int, scratch: int) -> None:
    case = Case(rule, rows=2, tokens=tokens, seed=tokens)
    out, state = rule.chunk(case.state, case.inputs, case.constants)
    expected_out, expected_state = rule.scan(case.state, case.inputs, case.constants)
    assert out.shape == expected_out.shape == case.inputs[rule.value].shape
    assert error(out, expected_out) < EXACT
    assert error(state, expected_state) < EXACT


@pytest.mark.parametrize("tokens", [2, 13, 64])
@every_rule
def test_all_tokens_at_once_equal_scan(rule: Rule, tokens: int) -> None:
    case = Case(rule, rows=2, tokens=min(tokens, rule.most_at_once), seed=tokens)
    if isinstance(rule, WKV):
        case.inputs["token"][0, 1] = case.inputs["v"][0, 1] = case.inputs["k"][0, 1] = 0  # as a masked token is
    out, state = rule.at_once(case.state, case.inputs, case.constants)
    expected_out, expected_state = rule.scan(case.state, case.inputs, case.constants)
    assert error(out, expected_out) < EXACT
    assert error(state, expected_state) < EXACT


@pytest.mark.parametrize("tokens", [1, 33, 130])
@pytest.mark.parametrize("kind", ["prefix", "holes"])
@every_rule
def test_masked_tokens_change_nothing_whatever_they_hold(rule: Rule, kind: str, tokens: int, scratch: int) -> None:
    case = Case(rule, rows=3, tokens=tokens, seed=tokens)
    valid = case.mask(kind)
    out, state = rule.chunk(case.state, case.poisoned(valid), case.constants, valid)
    assert out.isfinite().all()
    for row in range(3):
        # The row's real tokens alone, one after the other.
        real = {name: x[row : row + 1, valid[row]] for name, x in case.inputs.items()}
        expected_out, expected_state = rule.scan(case.state[row : row + 1], real, case.constants)
        assert error(out[row : row + 1, valid[row]], expected_out) < EXACT
        assert error(state[row : row + 1], expected_state) < EXACT
    other_out, other_state = rule.chunk(case.state, case.poisoned(valid, 1e30), case.constants, valid)
    assert torch.equal(out[valid], other_out[valid])
    assert torch.equal(state, other_state)


@pytest.mark.parametrize("tokens", [1, 5, 150])
@pytest.mark.parametrize("form", ["chunk", "scan"])
@each_kind
def test_a_row_without_tokens_keeps_every_bit_of_its_state(rule: Rule, form: str, tokens: int) -> None:
    case = Case(rule, rows=4, tokens=tokens).to(torch.float32)
    valid = case.mask("none")
    valid[1] = True
    before = case.state
    before[0].view(-1)[:4] = torch.tensor([-0.0, 1e-42, torch.inf, torch.nan])
    _, after = getattr(rule, form)(before, case.poisoned(valid), case.constants, valid)
    still = [0, 2, 3]
    assert torch.equal(after[still].view(torch.int32), before[still].view(torch.int32))
    assert not torch.equal(after[1], before[1])


@each_kind
def test_trailing_masked_tokens_leave_the_state_of_the_last_real_token_exactly(rule: Rule) -> None:
    case = Case(rule, rows=2, tokens=40).to(torch.float32)
    valid = torch.arange(40) < torch.tensor([[7], [23]])
    _, after = rule.scan(case.state, case.poisoned(valid), case.constants, valid)
    for row, count in enumerate([7, 23]):
        short = {name: x[:, :count] for name, x in case.inputs.items()}
        _, expected = rule.scan(case.state, short, case.constants)
        assert torch.equal(after[row], expected[row])
    # Carrying a state through whole pieces without a token is exact in the form for many tokens too.
    _, once = rule.chunk(case.state, case.inputs, case.constants)
    _, twice = rule.chunk(once, case.poisoned(case.mask("none")), case.constants, case.mask("none"))
    assert torch.equal(once, twice)


@pytest.mark.parametrize("seed", range(2))
@every_rule
def test_any_cut_of_a_sequence_equals_one_run(rule: Rule, seed: int) -> None:
    tokens = 100
    case = Case(rule, rows=2, tokens=tokens, seed=seed)
    valid = case.mask("holes") if seed % 2 else None
    expected_out, expected_state = rule.chunk(case.state, case.inputs, case.constants, valid)
    picks = random.Random(seed)
    cuts = [0, *sorted(picks.choices(range(tokens + 1), k=picks.randint(1, 12))), tokens]  # empty pieces too
    state, outs = case.state, []
    for first, last in itertools.pairwise(cuts):
        part = None if valid is None else valid[:, first:last]
        out, state = rule.chunk(state, case.cut(first, last), case.constants, part)
        outs.append(out)
    assert error(torch.cat(outs, 1), expected_out) < EXACT
    assert error(state, expected_state) < EXACT


@every_rule
def test_float32_chunk_is_within_twice_the_error_of_a_float32_scan_or_2e_6(rule: Rule, scratch: int) -> None:
    case = Case(rule, rows=2, tokens=150)
    single = case.to(torch.float32)
    truth = rule.scan(case.state, case.inputs, case.constants)
    plain = rule.scan(single.state, single.inputs, single.constants)
    fast = rule.chunk(single.state, single.inputs, single.constants)
    for a, b, exact in zip(fast, plain, truth, strict=True):
        assert a.dtype == torch.float32
        assert error(a, exact) < max(2 * error(b, exact), 2e-6)


@pytest.mark.parametrize("forget", [-1e4, -torch.inf], ids=["nearly all", "all"])
@pytest.mark.parametrize("rule", [rule for rule in ONE_OF_EACH if isinstance(rule, GatedDelta | ChannelDelta)], ids=str)
def test_small_decays_survive_after_a_token_that_forgets(rule: Rule, forget: float) -> None:
    case = Case(rule, rows=1, tokens=60)
    case.inputs["g"][:, 5] = forget
    single = case.to(torch.float32)
    truth = rule.scan(case.state, case.inputs, case.constants)
    fast = rule.chunk(single.state, single.inputs, single.constants)
    for a, exact in zip(fast, truth, strict=True):
        assert error(a, exact) < 2e-6


@pytest.mark.parametrize("tokens", [1, 70])
@each_kind
def test_bfloat16_inputs_give_bfloat16_outputs_from_a_float32_state(rule: Rule, tokens: int) -> None:
    case = Case(rule, rows=2, tokens=tokens).to(torch.float32, inputs=torch.bfloat16)
    out, state = rule.chunk(case.state, case.inputs, case.constants)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    wide = {name: x.double() for name, x in case.inputs.items()}
    constants = {name: x.double() for name, x in case.constants.items()}
    expected_out, expected_state = rule.scan(case.state.double(), wide, constants)
    assert error(state, expected_state) < 2e-6  # the inputs are rounded once, by the caller
    assert error(out, expected_out) < 2**-8


@pytest.mark.parametrize("tokens", [1, 130])
@each_kind
def test_chunk_compiles_to_one_graph(rule: Rule, tokens: int) -> None:
    case = Case(rule, rows=2, tokens=tokens).to(torch.float32)
    valid = case.mask("holes")
    torch.compiler.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(rule.chunk, fullgraph=True, backend=count)
    with torch.inference_mode(False), torch.no_grad():
        normal = Case(rule, rows=2, tokens=tokens).to(torch.float32)
        for _ in range(2):
            out, state = compiled(normal.state, normal.inputs, normal.constants, valid)
    expected_out, expected_state = rule.scan(case.state, case.inputs, case.constants, valid)
    assert graphs == 1
    assert error(out, expected_out) < 1e-5
    assert error(state, expected_state) < 1e-5


@each_kind
def test_arguments_are_not_written_to(rule: Rule) -> None:
    case, same = (Case(rule, rows=2, tokens=70).to(torch.float32) for _ in range(2))
    rule.chunk(case.state, case.inputs, case.constants, case.mask("holes"))
    assert torch.equal(case.state, same.state)
    assert all(torch.equal(x, same.inputs[name]) for name, x in case.inputs.items())


@each_kind
def test_zero_inputs_are_no_token(rule: Rule) -> None:
    case = Case(rule, rows=2, tokens=1)
    nothing = {name: torch.zeros_like(x[:, 0]) for name, x in case.inputs.items()}
    _, after = rule.step(case.state, nothing, case.constants)
    assert torch.equal(after, case.state)


def test_rules_are_values() -> None:
    assert SSD(4, 2, 3, 1) == SSD(4, 2, 3, groups=1) != SSD(4, 2, 3, 2)
    assert len({SelectiveScan(2, 3), SelectiveScan(2, 3), SelectiveScan(3, 2)}) == 2
    assert GatedDelta(1, 2, 3, 4) != SSD(1, 2, 3, 1)
    assert list(GatedDelta(1, 2, 3, 4).input_shapes.items()) == [
        ("q", (1, 3)),
        ("k", (1, 3)),
        ("v", (2, 4)),
        ("g", (2,)),
        ("beta", (2,)),
    ]
    state = GatedDelta(1, 2, 3, 4).zero_state(5)
    assert (state.shape, state.dtype, state.any().item()) == ((5, 2, 3, 4), torch.float32, False)


def test_wrong_shapes_are_refused_by_name() -> None:
    rule = SSD(heads=4, head_dim=2, state=3, groups=2)
    case = Case(rule, rows=2, tokens=5)
    with pytest.raises(ValueError, match=r"input 'B' has shape \[2, 4, 2, 3\], .* needs \[2, 5, 2, 3\]"):
        rule.chunk(case.state, case.inputs | {"B": case.inputs["B"][:, :4]}, case.constants)
    with pytest.raises(ValueError, match=r"takes the inputs \['x', 'dt', 'B', 'C'\], not \['x'\]"):
        rule.chunk(case.state, {"x": case.inputs["x"]}, case.constants)
    with pytest.raises(ValueError, match=r"state has shape \[2, 4, 2\], .* needs \[B, \*\[4, 2, 3\]\]"):
        rule.chunk(case.state[..., 0], case.inputs, case.constants)
    with pytest.raises(ValueError, match="4 heads cannot share 3 groups"):
        SSD(heads=4, head_dim=2, state=3, groups=3)
    with pytest.raises(ValueError, match="3 value heads cannot share 2 key heads"):
        GatedDelta(key_heads=2, value_heads=3, key_dim=4, value_dim=4)


@pytest.mark.parametrize("k", [-500.0, 0.0, 500.0])
def test_wkv_of_any_exponent_is_the_mean_of_the_values(k: float) -> None:
    rule = WKV(channels=1)
    v = torch.tensor([1.0, 2.0, 4.0]).reshape(1, 3, 1)
    inputs = {"k": torch.full((1, 3, 1), k), "v": v, "token": torch.ones(1, 3)}
    constants = {"w": torch.tensor([-1e-9]), "first": torch.zeros(1)}
    for form in (rule.chunk, rule.scan):
        out, _ = form(rule.zero_state(1), inputs, constants)
        assert torch.allclose(out.flatten(), torch.tensor([1.0, 1.5, 7 / 3]))


def test_segment_sums_keep_a_small_decay_after_a_large_one() -> None:
    logs = torch.tensor([-1e-3, -1e6, -1e-3, -2e-3])
    sums = segment_sums(logs)
    assert sums[3, 1] == -1e-3 + torch.tensor(-2e-3)
    assert (sums.triu(1).masked_select(torch.ones(4, 4).triu(1).bool()) == -torch.inf).all()
