"""The recurrent kernels: a few tokens through them are the rule's own scan, in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.kernels.columns import entry_row
from lamina.kernels.recurrent import recur
from lamina.kernels.recurrent.state import Tile
from lamina.nn.linear import Linear
from lamina.nn.norm import RMSNorm
from lamina.recurrence import RGLRU, SSD, WKV, ChannelDelta, GatedDelta, Rule, SelectiveScan
from lamina.recurrence.gated_delta import unit_length as unit
from lamina.recurrence.rg_lru import Gates
from tests.recurrence.inputs import RULES, Case, error

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # NaN where there is no token is meant

LARGER: list[Rule] = [  # several tiles to a head, the last one not full
    SelectiveScan(channels=70, state=16),
    SSD(heads=2, head_dim=20, state=64, groups=1),
    GatedDelta(key_heads=1, value_heads=2, key_dim=48, value_dim=40),
    ChannelDelta(heads=2, key_dim=48, value_dim=40),
    RGLRU(channels=300),
    WKV(channels=200),
]
EVERY = [*RULES, *LARGER]
every_rule = pytest.mark.parametrize("rule", EVERY, ids=str)
each_kind = pytest.mark.parametrize("rule", LARGER, ids=lambda rule: type(rule).__name__)


def table_of(state: Tensor, counts: Tensor | None) -> Tensor:
    return torch.tensor(entry_row({"k": state.data_ptr(), "counts": 0 if counts is None else counts.data_ptr()}))


def valid_of(counts: Tensor | None, tokens: int) -> Tensor | None:
    return None if counts is None else torch.arange(tokens) < counts[:, None]


def half(case: Case) -> Case:
    """The case in float32, its inputs in bfloat16 but for those that models keep exact."""
    case = case.to(torch.float32)
    case.inputs = {n: x if n in case.rule.exact else x.bfloat16() for n, x in case.inputs.items()}
    return case


@pytest.mark.parametrize("tokens", [1, 2, 6])
@every_rule
def test_tokens_through_the_kernel_are_the_rules_scan(rule: Rule, tokens: int) -> None:
    case = Case(rule, rows=2, tokens=tokens, seed=tokens).to(torch.float32)
    check(case, None)
    check(case, torch.tensor([tokens, tokens // 2]))


@each_kind
def test_a_launch_of_many_states_is_the_same(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.kernels.recurrent.state.LARGE", 1)
    check(Case(rule, rows=3, tokens=2).to(torch.float32), torch.tensor([2, 0, 1]))


@each_kind
def test_sixteen_tokens_and_rows_that_stop_anywhere_among_them(rule: Rule) -> None:
    check(Case(rule, rows=3, tokens=16).to(torch.float32), torch.tensor([16, 0, 7]))


def check(case: Case, counts: Tensor | None) -> None:
    """The kernel against the scan, with NaN wherever there is no token."""
    rule, tokens = case.rule, case.inputs[case.rule.value].shape[1]
    valid = valid_of(counts, tokens)
    inputs = case.inputs if valid is None else case.poisoned(valid)
    expected_out, expected = rule.scan(case.state, inputs, case.constants, valid)
    state = case.state.clone()
    out = recur.recur_step(rule, inputs, case.constants, table_of(state, counts))
    assert out.dtype == torch.float32 and out.shape == expected_out.shape
    assert error(state, expected) < 2e-6
    if valid is not None:
        assert (out[~valid] == 0).all()
        out, expected_out = out[valid], expected_out[valid]
    assert error(out, expected_out) < 3e-6


@each_kind
def test_bfloat16_inputs_are_computed_with_in_float32(rule: Rule) -> None:
    case = half(Case(rule, rows=2, tokens=3))
    wide = {name: x.float() for name, x in case.inputs.items()}
    truth, final = rule.scan(case.state, wide, case.constants)
    state = case.state.clone()
    out = recur.recur_step(rule, case.inputs, case.constants, table_of(state, None))
    assert out.dtype == torch.bfloat16
    # One step of the format: the interpreter cuts off what the device rounds.
    assert ((out - truth).abs() <= 2**-7 * truth.abs() + 1e-5).all()
    assert error(state, final) < 2e-6


@pytest.mark.parametrize("tokens", [1, 6])
@each_kind
def test_a_row_without_tokens_keeps_every_bit(rule: Rule, tokens: int) -> None:
    case = Case(rule, rows=3, tokens=tokens).to(torch.float32)
    counts = torch.tensor([0, tokens, 0])
    before = case.state.clone()
    before[0].view(-1)[:4] = torch.tensor([-0.0, 1e-42, torch.inf, torch.nan])
    state = before.clone()
    inputs = case.poisoned(valid_of(counts, tokens))
    out = recur.recur_step(rule, inputs, case.constants, table_of(state, counts))
    assert out.isfinite().all()
    assert torch.equal(state[[0, 2]].view(torch.int32), before[[0, 2]].view(torch.int32))
    assert not torch.equal(state[1], before[1])


@each_kind
def test_a_state_that_is_not_to_be_written_stays_and_outputs_are_the_same(rule: Rule) -> None:
    case = Case(rule, rows=2, tokens=3).to(torch.float32)
    state, counts = case.state.clone(), torch.tensor([3, 1])
    looked = recur.recur_step(rule, case.inputs, case.constants, table_of(state, counts), write=False)
    assert torch.equal(state, case.state)
    assert torch.equal(looked, recur.recur_step(rule, case.inputs, case.constants, table_of(state, counts)))
    assert not torch.equal(state, case.state)


@each_kind
def test_one_token_after_the_other_is_several_at_once(rule: Rule) -> None:
    case = Case(rule, rows=2, tokens=5).to(torch.float32)
    once, by_one = case.state.clone(), case.state.clone()
    out = recur.recur_step(rule, case.inputs, case.constants, table_of(once, None))
    for t in range(5):
        y = recur.recur_step(rule, case.cut(t, t + 1), case.constants, table_of(by_one, None))
        assert torch.equal(y[:, 0], out[:, t])
    assert torch.equal(once, by_one)


@each_kind
def test_inputs_may_be_slices_of_one_projection_and_tiles_of_any_size(rule: Rule) -> None:
    case = Case(rule, rows=2, tokens=2).to(torch.float32)
    expected, final = rule.scan(case.state, case.inputs, case.constants)
    sizes = [x[0, 0].numel() for x in case.inputs.values()]
    joined = torch.cat([x.reshape(2, 2, -1) for x in case.inputs.values()], -1)
    views = {
        name: part.unflatten(-1, x.shape[2:]) if x.dim() > 2 else part[..., 0]
        for (name, x), part in zip(case.inputs.items(), joined.split(sizes, -1), strict=True)
    }
    for numbers in (512, 2**20):
        state = case.state.clone()
        out = recur.recur_step(rule, views, case.constants, table_of(state, None), tile=Tile(numbers, 4))
        assert error(out, expected) < 3e-6
        assert error(state, final) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [SSD, SelectiveScan])
def test_step_sizes_skip_and_gate_can_be_done_on_the_way(kind: type[Rule], dtype: torch.dtype) -> None:
    rule = next(rule for rule in LARGER if isinstance(rule, kind))
    case = Case(rule, rows=2, tokens=3).to(torch.float32, dtype)
    case.inputs["dt"] = (3 * torch.randn(case.inputs["dt"].shape)).to(dtype)
    counts = torch.tensor([3, 1])
    valid = valid_of(counts, 3)
    assert valid is not None
    per_head = case.inputs["dt"].shape[2]
    skip, bias, gate = torch.randn(per_head), torch.randn(per_head) - 4, torch.randn(case.inputs["x"].shape).to(dtype)
    limits = {"dt_limit": (0.01, 0.5)} if kind is SSD else {}

    dt = F.softplus(case.inputs["dt"] + bias).clamp(*limits.get("dt_limit", (0.0, torch.inf)))
    y, expected = rule.scan(case.state, {**case.inputs, "dt": dt}, case.constants, valid)
    y = y + (skip[:, None] if kind is SSD else skip) * case.inputs["x"]
    opened = (y * F.silu(gate.to(y.dtype))).to(gate.dtype)

    step = recur.ssd_step if kind is SSD else recur.selective_scan_step
    loose = 3e-6 if dtype is torch.float32 else 1e-2
    for extra, plain in (({}, y), ({"gate": gate}, opened)):
        state = case.state.clone()
        out = step(
            case.inputs, case.constants, table_of(state, counts), skip=skip, dt_bias=bias, **limits, **extra
        )  # fmt: skip
        assert out.dtype == plain.dtype
        assert error(out[valid], plain[valid]) < loose
        assert error(state, expected) < 3e-6


@pytest.mark.parametrize("weighted", [False, True])
def test_the_selective_scan_can_norm_its_matrices(weighted: bool) -> None:
    rule = next(rule for rule in LARGER if isinstance(rule, SelectiveScan))
    case = Case(rule, rows=2, tokens=3).to(torch.float32)
    weights = (torch.rand(rule.state), torch.rand(rule.state)) if weighted else (None, None)
    normed = {n: F.rms_norm(case.inputs[n], (rule.state,), w, 1e-2) for n, w in zip("BC", weights, strict=True)}
    expected, final = rule.scan(case.state, {**case.inputs, **normed}, case.constants)
    around: dict[str, Any] = {"norms": (1e-2, *weights)}
    assert torch.equal(rule.scan(case.state, rule.before(case.inputs, **around), case.constants)[0], expected)
    state = case.state.clone()
    out = recur.recur_step(rule, case.inputs, case.constants, table_of(state, None), **around)
    assert error(out, expected) < 3e-6
    assert error(state, final) < 3e-6


@pytest.mark.parametrize("rows", [1, 3])  # in the scan's launch, and before it
@pytest.mark.parametrize(
    "norm", [None, RMSNorm(70, 1e-2, weight=False), RMSNorm(70, 1e-2)], ids=["", "plain", "weight"]
)
def test_step_sizes_can_be_a_product_with_the_norm_of_their_input(rows: int, norm: RMSNorm | None) -> None:
    rule = next(rule for rule in LARGER if isinstance(rule, SelectiveScan))
    case = Case(rule, rows=rows, tokens=1).to(torch.float32)
    product = Linear(70, rule.channels, bias=False)
    if norm is not None and norm.weight is not None:
        torch.nn.init.uniform_(norm.weight)
    case.inputs["dt"] = torch.randn(rows, 1, 75)[..., :70]
    around: dict[str, Any] = {"dt_product": product, "dt_norm": norm, "dt_bias": torch.randn(rule.channels)}
    with torch.no_grad():
        dt = product(case.inputs["dt"] if norm is None else norm(case.inputs["dt"]))
        ready = {**case.inputs, "dt": F.softplus(dt + around["dt_bias"])}
        expected, final = rule.scan(case.state, ready, case.constants)
        assert error(rule.scan(case.state, rule.before(case.inputs, **around), case.constants)[0], expected) < 1e-6
        state = case.state.clone()
        out = recur.recur_step(rule, case.inputs, case.constants, table_of(state, None), **around)
    assert error(out, expected) < 3e-6
    assert error(state, final) < 3e-6


def test_small_step_sizes_keep_their_digits() -> None:
    rule = SelectiveScan(channels=8, state=1)
    raw = torch.tensor([-30.0, -17.0, -9.0, -3.0, 0.0, 5.0, 19.0, 25.0]).reshape(1, 1, 8)
    inputs = {"x": torch.ones(1, 1, 8), "dt": raw, "B": torch.ones(1, 1, 1), "C": torch.ones(1, 1, 1)}
    constants = {"A": torch.zeros(8, 1)}
    state = rule.zero_state(1)
    out = recur.selective_scan_step(inputs, constants, table_of(state, None), dt_bias=torch.zeros(8))
    assert torch.allclose(out.double(), F.softplus(raw.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [GatedDelta, ChannelDelta])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_delta_can_take_queries_keys_and_gates_as_projected(kind: type[Rule], dtype: torch.dtype) -> None:
    rule = next(rule for rule in LARGER if isinstance(rule, kind))
    case = Case(rule, rows=2, tokens=3).to(torch.float32)
    draw = torch.Generator().manual_seed(1)
    raw = {n: torch.randn(x.shape, generator=draw).to(dtype) for n, x in case.inputs.items()}
    A = -torch.rand(rule.state_shape[0], generator=draw)
    bias = torch.randn(rule.input_shapes["g"], generator=draw)
    counts = torch.tensor([1, 3])
    ready = {
        "q": unit(raw["q"]) * rule.state_shape[1] ** -0.5,
        "k": unit(raw["k"]),
        "v": raw["v"],
        "g": A.reshape(-1, *(1,) * (bias.dim() - 1)) * F.softplus(raw["g"] + bias),
        "beta": raw["beta"].sigmoid(),
    }
    valid = valid_of(counts, 3)
    assert valid is not None
    expected_out, expected = rule.scan(case.state, ready, {}, valid)
    state = case.state.clone()
    out = recur.gated_delta_step(raw, {}, table_of(state, counts), unit=True, gates=(A, bias))
    loose = 3e-6 if dtype is torch.float32 else 1e-2
    assert error(out[valid], expected_out[valid]) < loose
    assert error(state, expected) < loose


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 5])
def test_rg_lru_makes_its_gates_from_its_input(dtype: torch.dtype, rows: int) -> None:
    rule, heads, block = RGLRU(channels=60), 3, 20
    draw = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    weights = [normal(60, block) / 4, normal(60), normal(60, block) / 4, normal(60)]
    gates = Gates(*(weight.to(dtype) for weight in weights), rate=-normal(60).exp())
    x, gate = normal(rows, 3, 60).to(dtype), normal(rows, 3, 60).to(dtype)
    counts, start = torch.tensor([3, 1, 0, 2, 3][:rows]), torch.tensor([0, 4, 0, 0, 7][:rows])
    positions = start[:, None] + torch.arange(3)
    before = normal(rows, 60)
    valid = valid_of(counts, 3)
    assert valid is not None
    # One head at a time, as the formula says.
    opened, log = torch.empty(rows, 3, 60), torch.empty(rows, 3, 60)
    for h in range(heads):
        part = slice(h * block, (h + 1) * block)
        wide = x[..., part].float()
        opened[..., part] = wide @ gates.open_weight[part].float().T + gates.open_bias[part].float()
        log[..., part] = wide @ gates.decay_weight[part].float().T + gates.decay_bias[part].float()
    g = gates.rate * log.sigmoid()
    scale = torch.where((positions == 0)[..., None], 1.0, (1 - (2 * g.double()).exp()).sqrt().float())
    y, expected = rule.scan(before, {"x": x.float() * opened.sigmoid() * scale, "g": g}, {}, valid)
    y = y * F.gelu(gate.float(), approximate="tanh")

    around = {"gates": gates, "positions": positions, "gate": gate, "act": "gelu_pytorch_tanh"}
    loose = 3e-6 if dtype is torch.float32 else 2e-2
    state = before.clone()
    out = recur.recur_step(rule, {"x": x}, {}, table_of(state, counts), **around)
    assert out.dtype == dtype
    assert error(out[valid], y[valid]) < loose
    assert error(state, expected) < (3e-6 if dtype is torch.float32 else 1e-5)
    ready = rule.before({"x": x}, **around)
    plain, after = rule.scan(before, ready, {}, valid)
    assert error(rule.after(plain, ready, **around)[valid], y[valid]) < loose
    assert error(after, expected) < loose


def test_wkv_starts_from_nothing_at_any_exponent_and_opens_by_a_sigmoid() -> None:
    rule = WKV(channels=8)
    case = Case(rule, rows=2, tokens=3).to(torch.float32)
    case.inputs["k"] = 200 * case.inputs["k"]
    gate = torch.randn(2, 3, 8)
    out, expected = rule.scan(rule.zero_state(2), case.inputs, case.constants)
    state = rule.zero_state(2)
    got = recur.recur_step(rule, case.cut(0, 3), case.constants, table_of(state, None), gate=gate)
    assert error(got, out * gate.sigmoid()) < 1e-5
    assert error(state, expected) < 1e-5
