"""The rules against the plain PyTorch forms in transformers, as a truth from outside."""

from __future__ import annotations

import torch

from lamina.recurrence import SSD, WKV, ChannelDelta, GatedDelta, SelectiveScan

from .inputs import Case, error

TOLERANCE = 1e-5  # relative, float32 on both sides


def test_selective_scan_equals_mamba() -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    rule = SelectiveScan(channels=12, state=4)
    case = Case(rule, rows=2, tokens=70).to(torch.float32)
    x, dt, B, C = (case.inputs[name].transpose(1, 2) for name in ("x", "dt", "B", "C"))
    expected_out, expected_state = mamba_selective_scan(x, dt, case.constants["A"], B, C, return_last_state=True)
    out, state = rule.chunk(rule.zero_state(2), case.inputs, case.constants)
    assert error(out, expected_out.transpose(1, 2)) < TOLERANCE
    assert error(state, expected_state) < TOLERANCE


def test_ssd_equals_mamba2() -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    rule = SSD(heads=6, head_dim=4, state=5, groups=2)
    case = Case(rule, rows=2, tokens=70).to(torch.float32)
    expected_out, expected_state = mamba2_chunk_scan(
        case.inputs["x"],
        case.inputs["dt"],
        case.constants["A"],
        case.inputs["B"],
        case.inputs["C"],
        chunk_size=16,
        initial_states=case.state,
        return_final_states=True,
    )
    out, state = rule.chunk(case.state, case.inputs, case.constants)
    assert error(out, expected_out) < TOLERANCE
    assert error(state, expected_state) < TOLERANCE


def test_gated_delta_equals_qwen3_next() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    rule = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
    case = Case(rule, rows=2, tokens=70).to(torch.float32)
    # Theirs wants the key heads repeated, and scales the query itself.
    expected_out, expected_state = torch_recurrent_gated_delta_rule(
        (case.inputs["q"] * rule.key_dim**0.5).repeat_interleave(2, 2),
        case.inputs["k"].repeat_interleave(2, 2),
        case.inputs["v"],
        case.inputs["g"],
        case.inputs["beta"],
        initial_state=case.state,
        output_final_state=True,
    )
    out, state = rule.chunk(case.state, case.inputs, case.constants)
    assert error(out, expected_out) < TOLERANCE
    assert error(state, expected_state) < TOLERANCE


def test_channel_delta_equals_kimi() -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    rule = ChannelDelta(heads=3, key_dim=8, value_dim=6)
    case = Case(rule, rows=2, tokens=20).to(torch.float32)
    q, k, v, g, beta = (case.inputs[name] for name in ("q", "k", "v", "g", "beta"))
    expected_out, expected_state = recurrent_kimi_delta_attention(
        q * rule.key_dim**0.5, k, v, g, beta, initial_state=case.state, output_final_state=True
    )
    out, state = rule.chunk(case.state, case.inputs, {})
    assert error(out, expected_out) < TOLERANCE
    assert error(state, expected_state) < TOLERANCE


def test_wkv_equals_rwkv_from_nothing_and_from_a_state() -> None:
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    rule = WKV(channels=12)
    case = Case(rule, rows=2, tokens=70).to(torch.float32)
    k, v, w, first = case.inputs["k"], case.inputs["v"], case.constants["w"], case.constants["first"]
    for state in (None, case.state):
        given = None if state is None else list(state.unbind(1))
        expected_out, expected_state = rwkv_linear_attention_cpu((-w).log(), first, k, v, given, return_state=True)
        out, new = rule.chunk(rule.zero_state(2) if state is None else state, case.inputs, case.constants)
        assert error(out, expected_out) < TOLERANCE
        assert error(new, torch.stack(expected_state, 1)) < TOLERANCE
