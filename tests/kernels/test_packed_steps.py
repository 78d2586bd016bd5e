"""Captured steps over packed weights make what plain passes over them make."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lamina import kernels
from lamina.activation import Gating
from lamina.config import Config
from lamina.kernels.packed.serve import why_model_unread
from lamina.model import Model
from lamina.models.llama import Llama
from lamina.nn import Embedding, Experts, GatedMLP, Linear
from lamina.nn.moe.experts import why_host_counts
from lamina.weights import JoinedWeight, PackedWeight, weight_format
from lamina.weights.int_groups import IntGroups
from lamina.weights.quantize import put_packed, quantize_weights
from lamina.weights.repack import SplitMXFP4
from tests.kernels.runs import both

CONFIG: dict[str, Any] = dict(
    model_type="llama", vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-5,
    tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
)  # fmt: skip


@functools.cache
def packed_llama(weights: str) -> Model:
    torch.manual_seed(0)
    model = Llama.build(Config(CONFIG)).eval()
    quantize_weights(model, weights)
    return model


@pytest.mark.parametrize("weights", ["int4", "fp8"])
@pytest.mark.usefixtures("few_programs")
def test_a_captured_step_over_packed_weights_makes_the_tokens_of_plain_passes(weights: str) -> None:
    both(packed_llama(weights))


def in_formats(linear: nn.Module, *names: str) -> None:
    """Gives a linear layer rows in several formats."""
    rows = linear.weight.detach().chunk(len(names))  # type: ignore[union-attr, operator]
    packed = [
        PackedWeight(form := weight_format(name), form.pack(part), part.shape)
        for name, part in zip(names, rows, strict=True)
    ]
    put_packed([(linear, "weight")], JoinedWeight(packed))


def by_kernel(module: nn.Module, *given: Any, **named: Any) -> Tensor:
    with torch.no_grad(), kernels.in_use():
        out: Tensor = module(*given, **named)
    return out


@pytest.mark.usefixtures("few_programs")
def test_rows_of_several_formats_are_one_linear_layer() -> None:
    torch.manual_seed(0)
    linear, mlp = Linear(32, 24), GatedMLP(32, 32)
    in_formats(linear, "int8", "int4", "fp8")
    in_formats(mlp.gate_up, "int8", "int4")
    quantize_weights(mlp.down, "int8")
    for rows in (1, 3):
        x, onto = torch.randn(rows, 32), torch.randn(rows, 24)
        scale = torch.rand(24)
        with torch.no_grad():
            want = linear(x, onto, before=0.5, scale=scale)
            assert torch.allclose(by_kernel(linear, x, onto, before=0.5, scale=scale), want, atol=1e-3)
            assert torch.allclose(by_kernel(mlp, x), mlp(x), atol=1e-3)


def test_a_permutation_of_columns_permutes_the_vectors() -> None:
    torch.manual_seed(0)
    linear = Linear(64, 8, bias=False)
    form, order = IntGroups(4, 32), torch.randperm(64, dtype=torch.int32)
    parts = form.pack(linear.weight.detach())
    put_packed([(linear, "weight")], PackedWeight(form, parts | {"order": order}, (8, 64)))
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert torch.allclose(by_kernel(linear, x), linear(x), atol=1e-3)


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_an_embedding_has_the_rows_of_its_packed_weight(weights: str) -> None:
    torch.manual_seed(0)
    embedding = Embedding(9, 96)
    packed = PackedWeight(form := weight_format(weights), form.pack(embedding.weight.detach()), (9, 96))
    put_packed([(embedding, "weight")], packed)
    ids, onto = torch.tensor([[3, 8], [0, 3]]), torch.randn(2, 2, 96)
    with torch.no_grad():
        assert torch.allclose(by_kernel(embedding, ids), embedding(ids), atol=1e-6)
        named: dict[str, Any] = dict(scale=3.3, onto=onto)
        assert torch.allclose(by_kernel(embedding, ids, **named), embedding(ids, **named), atol=1e-5)


def mxfp4(weight: Tensor) -> PackedWeight:
    codes = torch.randint(0, 256, (*weight.shape[:-1], weight.shape[-1] // 2), dtype=torch.uint8)
    scales = torch.randint(120, 124, (*weight.shape[:-1], weight.shape[-1] // 32), dtype=torch.uint8)
    return PackedWeight(SplitMXFP4(), {"codes": codes, "scales": scales}, weight.shape)


PACKED_EXPERTS = pytest.mark.parametrize(
    ("weights", "how"),
    [
        ("int4", {}),
        ("int8", dict(identity=1)),
        ("fp8", dict(gated=False, act="relu2")),
        ("mxfp4", dict(bias=True, act=Gating("quick_gelu", limit=7.0, plus=1.0, slope=1.7))),
    ],
)


def packed_experts(weights: str, **how: Any) -> Experts:
    """Three experts with packed stacks."""
    experts = Experts(3, 32, 32, **how)
    for name in ("gate_up", "up", "down"):
        if isinstance(weight := getattr(experts, name, None), Tensor):
            form = None if weights == "mxfp4" else weight_format(weights)
            size = weight.detach() * 0.3
            packed = mxfp4(size) if form is None else PackedWeight(form, form.pack(size), weight.shape)
            put_packed([(experts, name)], packed)
    if how.get("bias"):
        for bias in (experts.gate_up_bias, experts.down_bias):
            nn.init.normal_(bias)
    return experts


@PACKED_EXPERTS
@torch.no_grad()
def test_packed_experts_of_a_prompt_are_one_grouped_product_that_asks_the_host_nothing(
    weights: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    experts = packed_experts(weights, **how).bfloat16()
    x, weight = torch.randn(20, 32, dtype=torch.bfloat16), torch.rand(20, 2)
    chosen = torch.stack([torch.randperm(3 + experts.identity)[:2] for _ in range(20)])
    want, listed = experts(x, chosen, weight), Tensor.tolist
    monkeypatch.setattr("lamina.kernels.fuses", lambda x: not torch.is_grad_enabled())

    def refused(tensor: Tensor) -> Any:
        assert tensor.dtype != torch.int32, "the sizes of groups were read"
        return listed(tensor)

    monkeypatch.setattr(Tensor, "tolist", refused)
    found = experts(x, chosen, weight)
    assert float((found - want).float().abs().max() / want.float().abs().max()) < 2e-2
    monkeypatch.setattr("lamina.nn.moe.experts.MOST_UNPACKED", 100)
    reason = why_host_counts(nn.ModuleDict({"moe": experts}), torch.bfloat16)
    assert reason is not None and reason.startswith("moe: experts of 0.0 GiB a layer are dequantized one by one, so")
    with pytest.raises(AssertionError, match="sizes of groups were read"):
        experts(x, chosen, weight)


@PACKED_EXPERTS
def test_packed_experts_by_kernels_are_those_of_plain_passes(
    weights: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("lamina.kernels.packed.experts.ROWS", 8)
    experts = packed_experts(weights, **how)
    assert why_model_unread(experts) is None
    x, weight, chosen = torch.randn(2, 32), torch.rand(2, 2), torch.tensor([[2, 0], [1, 2 + experts.identity]])
    with torch.no_grad():
        want = experts(x, chosen, weight)
        got = by_kernel(experts, x, chosen, weight)
    assert torch.allclose(got, want, atol=2e-3 * float(want.abs().max()))


def test_what_no_kernel_reads_is_said_with_its_path() -> None:
    model = nn.Sequential(Linear(32, 8))
    blocks = torch.zeros(8, 34, dtype=torch.uint8)
    put_packed([(model[0], "weight")], PackedWeight(weight_format("Q8_0"), {"blocks": blocks}, (8, 32)))
    assert why_model_unread(model) == "0.weight: no kernel of the GPU reads the weight format Q8_0"
