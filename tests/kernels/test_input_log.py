"""What a cache with slack logs is what the rule itself is given, also where its kernel makes that from projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.kernels.recurrent import recur
from lamina.kernels.recurrent.input_log import logged_inputs
from lamina.nn.linear import Linear
from lamina.nn.norm import RMSNorm
from lamina.recurrence import RGLRU, SSD, WKV, ChannelDelta, GatedDelta, Rule, SelectiveScan
from lamina.recurrence.rg_lru import Gates
from tests.kernels.test_recur import LARGER, table_of
from tests.recurrence.inputs import Case

Around = dict[str, Any]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def gates_of(channels: int) -> Gates:
    weights = normal(channels, 50) / 4, normal(channels), normal(channels, 50) / 4, normal(channels)
    return Gates(*weights, rate=-normal(channels).exp())


def decays(heads: int, *shape: int) -> tuple[Tensor, Tensor]:
    return -torch.rand(heads), normal(heads, *shape)


WAYS: dict[str, tuple[type[Rule], Callable[[Any], Around], set[str]]] = {  # the inputs that the kernel makes
    "ssd": (SSD, lambda rule: {"skip": normal(rule.heads)}, set()),
    "ssd, step sizes": (SSD, lambda rule: {"dt_bias": normal(rule.heads), "dt_limit": (0.01, 0.5)}, {"dt"}),
    "scan, step sizes": (SelectiveScan, lambda rule: {"dt_bias": normal(rule.channels)}, {"dt"}),
    "scan, product and norms": (
        SelectiveScan,
        lambda rule: {
            "dt_product": Linear(40, rule.channels, bias=False).requires_grad_(False),
            "dt_norm": RMSNorm(40, 1e-2, weight=False), "dt_bias": normal(rule.channels),
            "norms": (1e-2, torch.rand(rule.state), None),
        },
        {"dt", "B", "C"},
    ),
    "delta, doubled": (GatedDelta, lambda rule: {"doubled": True}, {"beta"}),
    "delta, as projected": (
        GatedDelta,
        lambda rule: {"unit": True, "gates": decays(rule.value_heads), "doubled": True},
        {"q", "k", "g", "beta"},
    ),
    "delta by channel": (
        ChannelDelta,
        lambda rule: {"unit": True, "gates": decays(rule.heads, rule.key_dim)},
        {"q", "k", "g", "beta"},
    ),
    "lru": (RGLRU, lambda rule: {}, set()),
    "lru, gates": (
        RGLRU,
        lambda rule: {"gates": gates_of(rule.channels), "positions": torch.tensor([[0, 1], [5, 6]])},
        {"x", "g"},
    ),
    "wkv": (WKV, lambda rule: {"gate": normal(2, 2, rule.channels)}, set()),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])  # with one, the scan's product is in its kernel
@pytest.mark.parametrize("way", WAYS)
def test_kernels_store_the_inputs_that_they_make(way: str, rows: int) -> None:
    torch.manual_seed(0)
    kind, make, made = WAYS[way]
    rule = next(rule for rule in LARGER if isinstance(rule, kind))
    case, around = Case(rule, rows=2, tokens=2).to(torch.float32), make(rule)
    inputs = {name: x[:rows] for name, x in case.inputs.items()}
    around = {name: x[:rows] if name in ("gate", "positions") else x for name, x in around.items()}
    if "dt_product" in around:
        inputs["dt"] = normal(rows, 2, 40)
    if way == "ssd":  # step sizes that all tokens share
        inputs["dt"] = torch.ones(rule.input_shapes["dt"]).expand(rows, 2, -1)
    logged, ready = logged_inputs(rule, inputs, around, torch.float32)
    assert set(ready) == made and list(logged) == list(rule.input_shapes)
    state, counts = case.state[:rows].clone(), torch.full((rows,), 2)
    how = dict(around, write=False)
    out = recur.recur_step(rule, inputs, case.constants, table_of(state, counts), **how, ready=ready)
    assert torch.equal(out, recur.recur_step(rule, inputs, case.constants, table_of(state, counts), **how))
    for name, expected in rule.before(inputs, **around).items():
        torch.testing.assert_close(logged[name], expected, rtol=1e-5, atol=1e-6)


def test_logs_are_in_the_dtype_of_the_model_but_for_exact_inputs() -> None:
    rule = GatedDelta(key_heads=1, value_heads=2, key_dim=4, value_dim=4)
    case = Case(rule, rows=1, tokens=1).to(torch.float32)
    logged, _ = logged_inputs(rule, case.inputs, {"unit": True}, torch.bfloat16)
    kinds = {name: x.dtype for name, x in logged.items()}
    assert kinds == dict.fromkeys("qkv", torch.bfloat16) | {"g": torch.float32, "beta": torch.bfloat16}
