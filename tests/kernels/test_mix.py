"""The mixer in one kernel: one token through it is convolution, rule, gate and norm one after the other, in place."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina import kernels
from lamina.activation import activation
from lamina.cache.memory import Memory
from lamina.cache.spec import Recurrent
from lamina.kernels.columns import entry_row
from lamina.kernels.gemm.deferred_norm import Unnormed
from lamina.kernels.gemm.epilogue import KINDS
from lamina.kernels.gemm.product import linear, product
from lamina.kernels.recurrent import mixer as mix
from lamina.kernels.recurrent.state import Tile
from lamina.kernels.workspace import scratch
from lamina.nn import GatedRMSNorm, ShortConvolution
from lamina.recurrence import SSD, ChannelDelta, GatedDelta, Rule, SelectiveScan, causal_convolution_by_steps
from lamina.runtime.gpu.backend import KERNELS, TableEntry
from lamina.runtime.step import CapturedStep
from lamina.sampling.chooser import Chooser
from tests.families.harness import pair
from tests.kernels.launches import noted
from tests.kernels.stores import Ring
from tests.recurrence.inputs import error

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # NaN where there is no token is meant

SMALL: list[Rule] = [
    SSD(heads=2, head_dim=3, state=5, groups=1),
    SSD(heads=4, head_dim=4, state=8, groups=2),
    GatedDelta(key_heads=1, value_heads=2, key_dim=6, value_dim=3),
    GatedDelta(key_heads=3, value_heads=3, key_dim=4, value_dim=4),
    ChannelDelta(heads=2, key_dim=4, value_dim=3),
]
LARGER: list[Rule] = [  # several tiles to a head, the last one not full
    SSD(heads=2, head_dim=20, state=64, groups=2),
    GatedDelta(key_heads=1, value_heads=2, key_dim=48, value_dim=20),
    ChannelDelta(heads=2, key_dim=48, value_dim=20),
]
each_kind = pytest.mark.parametrize("rule", LARGER, ids=lambda rule: type(rule).__name__)


@dataclass
class Mixer:
    """Rows that hold some tokens, one new token each, and the parameters of a mixer."""

    rule: Rule
    ring: Ring
    state: Tensor
    x: Tensor  # [B, 1, C], as are the next three slices of one projection
    inputs: dict[str, Tensor]
    gate: Tensor
    counts: Tensor
    conv: ShortConvolution
    norm: GatedRMSNorm | None
    constants: dict[str, Tensor]
    around: dict[str, Any]

    @classmethod
    def random(
        cls, rule: Rule, seed: int, dtype: torch.dtype = torch.float32, norm: str | None = None, rows: int = 3
    ) -> Mixer:
        torch.manual_seed(seed)
        picks = random.Random(seed)
        small = ("dt",) if isinstance(rule, SSD) else ("g", "beta")
        shapes = rule.input_shapes
        heads, dim = shapes[rule.value]
        width, channels = heads * dim, sum(prod(shape) for name, shape in shapes.items() if name not in small)
        taps = picks.randint(2, 5)
        lengths = [picks.randint(taps, 30), picks.randint(0, 1), picks.randint(1, taps)][:rows]
        history = [torch.randn(length, channels).to(dtype) for length in lengths]
        sizes = [prod(shapes[name]) for name in small]
        projected = torch.randn(rows, 1, 3 + width + channels + sum(sizes)).to(dtype)
        _, gate, x, *parts = projected.split([3, width, channels, *sizes], dim=-1)
        rest = [part.unflatten(-1, shapes[name]) for name, part in zip(small, parts, strict=True)]
        conv = ShortConvolution(channels, taps, bias=picks.random() < 0.5, act=picks.choice([None, *KINDS]))
        if isinstance(rule, SSD):
            constants = {"A": -torch.rand(heads)}
            around = {"dt_bias": torch.randn(heads) - 2, "dt_limit": (0.01, 0.5), "skip": torch.randn(heads)}
        else:
            constants = {}
            around = {"unit": True, "gates": (-torch.rand(heads), torch.randn(shapes["g"]))}
            if isinstance(rule, GatedDelta):
                around["doubled"] = picks.random() < 0.5
        made = None
        match norm or picks.choice(["none", "whole", "groups", "heads"]):
            case "whole":
                made = GatedRMSNorm(width, 1e-5, gate_first=picks.random() < 0.5)
            case "groups":
                groups = picks.choice([n for n in range(1, heads + 1) if heads % n == 0])
                made = GatedRMSNorm(width, 1e-5, groups=groups, gate_first=picks.random() < 0.5)
            case "heads":
                made = GatedRMSNorm(dim, 1e-5, gate_first=picks.random() < 0.5, sigmoid=isinstance(rule, ChannelDelta))
        for module in (conv, made):
            for parameter in () if module is None else module.parameters():
                parameter.data = torch.randn(parameter.shape).to(dtype)
        return cls(
            rule, Ring(history, taps + picks.choice([0, 0, 3]), dtype), torch.randn(rows, *rule.state_shape), x,
            dict(zip(small, rest, strict=True)), gate, torch.tensor([1, picks.randint(0, 1), 1][:rows]), conv, made,
            constants, around,
        )  # fmt: skip

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Of the ring and of the state."""
        counts = self.counts.data_ptr()
        return self.ring.table(self.counts), torch.tensor(entry_row({"k": self.state.data_ptr(), "counts": counts}))

    def run(self, **more: Any) -> Tensor:
        """The kernel, on this ring and this state."""
        with torch.no_grad():
            return mix.mix_step(
                self.rule, self.x, self.inputs, self.constants, *self.tables,
                conv=self.conv, gate=self.gate, norm=self.norm, **self.around, **more,
            )  # fmt: skip

    def memory(self) -> Memory:
        """What a captured step gives to the mixer's layer."""
        ring, state = self.tables
        entries = {"conv": TableEntry(self.conv.spec, ring), "state": TableEntry(Recurrent(self.rule), state)}
        return Memory(SimpleNamespace(backend=KERNELS), 0, entries)  # type: ignore[arg-type]

    def plain(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Out [B, 1, W] and the new state, one operation after the other, in `dtype` where it is given."""

        def cast(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(cast, x))
            return x.detach().to(dtype) if isinstance(x, Tensor) and dtype else x

        taps, shapes = self.conv.weight.shape[1], self.rule.input_shapes
        past = torch.cat([self.ring.past(row, taps) for row in range(len(self.x))])
        y = causal_convolution_by_steps(*map(cast, (past, self.x, self.conv.weight, self.conv.bias)))
        y = y if self.conv.act is None else activation(self.conv.act)(y)
        mixed = [name for name in shapes if name not in self.inputs]
        parts = y.split([prod(shapes[name]) for name in mixed], dim=-1)
        inputs = {name: part.unflatten(-1, shapes[name]) for name, part in zip(mixed, parts, strict=True)}
        inputs |= {name: cast(x) for name, x in self.inputs.items()}
        around, gate = {name: cast(x) for name, x in self.around.items()}, cast(self.gate)
        constants = {name: cast(x) for name, x in self.constants.items()}
        if self.norm is None:
            around["gate"] = gate.unflatten(-1, shapes[self.rule.value])
        ready = self.rule.before(inputs, **around)
        out, state = self.rule.scan(cast(self.state), ready, constants, self.counts[:, None] > 0)
        out = self.rule.after(out, ready, **around).flatten(2)
        if self.norm is not None:
            stretch = self.norm.weight.shape[0]
            out = self.norm(out.unflatten(-1, (-1, stretch)), gate.unflatten(-1, (-1, stretch))).flatten(2)
        return out.detach(), state.detach()


def divided(out: Tensor) -> Tensor:
    return out if isinstance(out, Tensor) else out.divided()


def check(one: Mixer, **more: Any) -> None:
    """The kernel against the plain operations, with NaN wherever there is no token."""
    live = one.counts > 0
    expected, final = one.plain()
    for x in (one.x, one.gate, *one.inputs.values()):
        x[~live] = torch.nan
    slots, before = one.ring.store.shape[1], one.ring.store.clone()
    kept = one.state[~live].clone()
    out = divided(one.run(**more))
    assert out.shape == expected.shape and out.dtype == one.gate.dtype
    assert error(out[live], expected[live]) < 2e-5
    assert (out[~live] == 0).all()
    assert error(one.state[live], final[live]) < 5e-6
    assert torch.equal(one.state[~live].view(torch.int32), kept.view(torch.int32))
    for row, length in enumerate(one.ring.lengths.tolist()):
        if live[row]:
            before[row, length % slots] = one.x[row, 0]
    assert torch.equal(one.ring.store.view(torch.int32), before.view(torch.int32))
    assert not scratch(one.x.device)[1].any()  # counted back to zero


@pytest.mark.parametrize("rule", SMALL, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_one_token_is_convolution_rule_gate_and_norm(rule: Rule, seed: int) -> None:
    check(Mixer.random(rule, seed))


@pytest.mark.parametrize("norm", ["none", "whole", "heads"])
@each_kind
def test_programs_that_share_a_head_or_a_norm_make_it_whole(rule: Rule, norm: str) -> None:
    for numbers in (512, 2**20):
        check(Mixer.random(rule, numbers, norm=norm), tile=Tile(numbers, 4))


@each_kind
def test_a_launch_of_many_states_is_the_same(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.kernels.recurrent.state.LARGE", 1)
    one = Mixer.random(rule, 5, norm="whole")
    one.counts[:] = torch.tensor([1, 0, 1])
    check(one)


@each_kind
def test_a_row_without_a_token_keeps_every_bit(rule: Rule) -> None:
    one = Mixer.random(rule, 1, norm="heads")
    one.counts[:] = torch.tensor([0, 1, 0])
    one.state[0].view(-1)[:4] = torch.tensor([-0.0, 1e-42, torch.inf, torch.nan])
    check(one)


@each_kind
def test_bfloat16_is_no_further_from_the_truth_than_the_plain_operations(rule: Rule) -> None:
    one = Mixer.random(rule, 3, torch.bfloat16)
    live = one.counts > 0
    truth, final = one.plain(torch.float64)
    plain, plain_state = one.plain()
    out = divided(one.run())
    assert out.dtype == torch.bfloat16
    assert error(out[live], truth[live]) <= 2 * error(plain[live], truth[live]) + 2**-8
    assert error(one.state[live], final[live]) <= 2 * error(plain_state[live], final[live]) + 1e-6


@pytest.mark.parametrize("rule", SMALL[::2], ids=str)
def test_many_tokens_go_around_the_ring(rule: Rule) -> None:
    one = Mixer.random(rule, 2)
    one.counts[:] = 1
    for _ in range(6):
        expected, final = one.plain()
        out = divided(one.run())
        assert error(out, expected) < 2e-5
        assert error(one.state, final) < 5e-6
        one.ring.history = [torch.cat([old, new]) for old, new in zip(one.ring.history, one.x, strict=True)]
        one.ring.lengths += 1
        one.x = torch.randn(one.x.shape)


@pytest.mark.parametrize("norm", ["none", "heads"])
@pytest.mark.parametrize("rule", SMALL[::2], ids=str)
def test_several_tokens_through_a_memory_are_one_after_the_other(rule: Rule, norm: str) -> None:
    one = Mixer.random(rule, 4, norm=norm)
    ring, state, rows = one.ring.store.clone(), one.state.clone(), len(one.counts)
    several = {
        name: torch.randn(rows, 3, *x.shape[2:]) for name, x in {"x": one.x, "gate": one.gate, **one.inputs}.items()
    }

    def mixed(first: int, last: int) -> Tensor:
        x, gate, *rest = (part[:, first:last] for part in several.values())
        inputs = dict(zip(one.inputs, rest, strict=True))
        with torch.no_grad(), kernels.in_use():
            return divided(
                memory.mix(rule, x, inputs, one.constants, conv=one.conv, gate=gate, norm=one.norm, around=one.around)
            )

    one.counts[:] = 1
    memory = one.memory()
    singly = []
    for t in range(3):
        singly.append(mixed(t, t + 1))
        one.ring.lengths += 1
    after = one.ring.store.clone(), one.state.clone()
    one.ring.store.copy_(ring), one.state.copy_(state)
    one.ring.lengths -= 3
    one.counts[:] = 3
    assert error(mixed(0, 3), torch.cat(singly, 1)) < 2e-5
    assert torch.equal(one.ring.store.nan_to_num(), after[0].nan_to_num())
    assert error(one.state, after[1]) < 5e-6


@pytest.mark.parametrize("rule", SMALL + LARGER, ids=str)
def test_one_row_under_one_norm_is_left_undivided(rule: Rule) -> None:
    for numbers in (512, 2**20):
        one = Mixer.random(rule, numbers, norm="whole", rows=1)
        check(one, tile=Tile(numbers, 4))
        assert isinstance(one.run(), Unnormed)


@each_kind
def test_the_product_behind_divides(rule: Rule) -> None:
    for gate_first, dtype in ((True, torch.float32), (False, torch.float32), (True, torch.bfloat16)):
        one = Mixer.random(rule, 6, dtype, norm="whole", rows=1)
        assert one.norm is not None
        one.norm.gate_first = gate_first
        width = one.gate.shape[2]
        weight, onto = (torch.randn(7, n).to(dtype) for n in (width, 1))
        truth, plain = (
            linear(one.plain(to)[0][0], weight.to(to), residual=onto.T.to(to)) for to in (torch.float64, dtype)
        )
        out = one.run(tile=Tile(512, 4))
        assert isinstance(out, Unnormed)
        got = product(out.x[0], weight, residual=onto.T.contiguous(), squares=out.squares, eps=out.eps)
        assert error(got, truth) <= 2 * error(plain, truth) + (1e-5 if dtype == torch.float32 else 2**-8)


@each_kind
def test_one_row_without_a_token_is_zeros_and_squares_of_zeros(rule: Rule) -> None:
    one = Mixer.random(rule, 7, norm="whole", rows=1)
    one.counts[:] = 0
    check(one)
    out = one.run()
    assert isinstance(out, Unnormed) and not out.squares.any() and not out.x.any()


def test_what_could_leave_the_range_of_float16_is_divided_at_once() -> None:
    one = Mixer.random(SMALL[0], 8, torch.float16, norm="whole", rows=1)
    expected, _ = one.plain(torch.float64)
    out = one.run()
    assert isinstance(out, Tensor)
    assert error(out, expected) < 2**-8


@each_kind
def test_many_states_go_the_way_that_is_faster(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.kernels.recurrent.state.LARGE", 1)
    one = Mixer.random(rule, 9, norm="whole")
    launched: list[str] = []
    with torch.no_grad(), kernels.in_use(), noted(launched):
        one.memory().mix(
            rule, one.x, one.inputs, one.constants, conv=one.conv, gate=one.gate, norm=one.norm, around=one.around
        )
    apart = ["_convolve", "_ssd", "_gated_norm_kernel"]
    assert launched == (apart if isinstance(rule, SSD) else ["_delta_kernel"])


def test_a_captured_step_of_one_row_gives_the_logits_of_a_plain_pass() -> None:
    model = pair("mamba2", "tied, biases, one group, long kernel")[1]
    ids = torch.tensor([[5, 9, 12, 3]])
    plain, replayed = (model.new_cache(rows=1, capacity=16) for _ in range(2))
    for cache in (plain, replayed):
        model(ids, cache=cache)
    step = CapturedStep(model, 1, Chooser())
    step.begin(replayed, torch.tensor([7]), [4], ())
    step.run(1)
    expected = model(torch.tensor([[7]]), cache=plain, logits="last")
    assert replayed.logits is not None
    torch.testing.assert_close(replayed.logits, expected, rtol=1e-4, atol=1e-4)


def test_what_the_kernel_cannot_do_is_refused() -> None:
    one = Mixer.random(SMALL[0], 0)
    one.norm = GatedRMSNorm(6, 1e-5, groups=3)
    with pytest.raises(ValueError, match="a norm of 3 groups over 6 values does not fit 2 heads of 3"):
        one.run()
    one.x = one.x.repeat(1, 2, 1)
    with pytest.raises(ValueError, match="one token a row, not 2"):
        one.run()
    one = Mixer.random(SMALL[0], 0)
    one.rule = SelectiveScan(channels=6, state=4)
    with pytest.raises(ValueError, match="no kernel mixes by the rule SelectiveScan"):
        one.run()
