"""`PackedWeight` and `JoinedWeight` as parts of a model: moved, converted, saved, shared, joined, stacked."""

from __future__ import annotations

import copy

import pytest
import torch

from lamina.nn import Linear
from lamina.nn.embedding import Embedding
from lamina.weights import (
    FORMATS,
    JoinedWeight,
    PackedWeight,
    along_rows,
    has_kernels,
    kernels_of,
    named_weights,
    packed_linear,
    stacked,
    use_kernels,
)  # fmt: skip
from lamina.weights.quantize import put_packed, quantize_weights
from tests.weights.test_formats import random_parts


def packed(name: str, out: int = 40, seed: int = 0) -> PackedWeight:
    return PackedWeight(FORMATS[name], random_parts(name, out, 256, seed), (out, 256))


def test_segments_of_several_formats_are_one_matrix():
    several = [packed("Q4_K"), packed("Q6_K", 24), packed("int8", 8)]
    rows = along_rows(several)
    assert isinstance(rows, JoinedWeight) and rows.shape == (72, 256) and len(rows.segments) == 3
    dense = torch.cat([one.dense() for one in several])
    assert torch.equal(rows.dense(), dense) and rows.nbytes == sum(one.nbytes for one in several)
    x, ids = torch.randn(2, 3, 256), torch.tensor([[71, 0], [40, 63]])
    assert torch.allclose(packed_linear(x, rows), x @ dense.T, rtol=1e-4, atol=1e-3)
    assert torch.equal(rows.rows(ids), dense[ids])


@pytest.mark.parametrize("name", ["Q4_1", "int4", "fp8"])
def test_neighbours_of_one_format_become_one_tensor_if_asked(name):
    several = [packed(name), packed(name, 24, 1), packed("Q8_0", 8)]
    merged = along_rows(several, merge=True)
    assert [one.shape[0] for one in merged.segments] == [64, 8]
    assert torch.equal(merged.dense(), torch.cat([one.dense() for one in several]))


def test_experts_that_are_neighbours_in_memory_are_stacked_without_a_copy():
    whole = packed("Q4_1", 60)
    parts = [PackedWeight(whole.format, {"blocks": whole.blocks[i : i + 20]}, (20, 256)) for i in (0, 20, 40)]
    stack = stacked(parts)
    assert stack.shape == (3, 20, 256) and stack.blocks.data_ptr() == whole.blocks.data_ptr()
    assert torch.equal(stack.dense(), whole.dense().view(3, 20, 256))
    assert torch.equal(stack.entry(2).dense(), parts[2].dense())
    apart = stacked([parts[2], parts[0], parts[1]])
    assert torch.equal(apart.dense(), whole.dense().view(3, 20, 256)[[2, 0, 1]])
    assert stacked([parts[0], packed("Q8_0", 20)]) is None


def test_a_conversion_keeps_the_bits_and_changes_the_dtype_of_values():
    layer = Linear(256, 40)
    quantize_weights(layer, "fp8")
    before = {name: part.clone() for name, part in layer.weight.parts.items()}
    layer.to(torch.bfloat16)
    assert layer.bias.dtype == layer.weight.dtype == torch.bfloat16
    for name, part in layer.weight.parts.items():
        assert part.dtype == before[name].dtype and torch.equal(part.view(torch.uint8), before[name].view(torch.uint8))
    assert layer(torch.randn(2, 256, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert layer.to("meta").weight.is_meta


def test_state_dict_restores_a_packed_weight():
    one, other = Linear(64, 8), Linear(64, 8)
    for layer in (one, other):
        quantize_weights(layer, "int4")
    assert set(one.state_dict()) == {"bias", "weight.codes", "weight.scales", "weight.zeros"}
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.weight.dense(), other.weight.dense())
    assert torch.equal(copy.deepcopy(one).weight.dense(), one.weight.dense())


def test_a_tied_head_shares_the_packed_weight_and_counts_once():
    model = torch.nn.Module()
    model.embedding, model.head = Embedding(50, 64), Linear(64, 50, bias=False)
    model.head.weight = model.embedding.weight
    plain = model.embedding.weight.clone()
    quantize_weights(model, "int4")
    assert (
        model.head.weight is model.embedding.weight and model.head.weight.format.bits == 8
    )  # as of the ends of a model
    assert [name for name, _ in named_weights(model)] == ["embedding.weight"]
    ids = torch.tensor([[4, 7]])
    assert torch.equal(model.embedding(ids), model.head.weight.dense()[ids])
    assert (model.embedding(ids) - plain[ids]).abs().max() < 0.03


def test_kernels_take_over_where_they_serve_and_only_there():
    weight, x = packed("Q8_0"), torch.randn(3, 256)
    seen = []

    def product(x, one):
        seen.append(one.formats)
        return torch.zeros(len(x), one.shape[0]) if one.formats == ["Q8_0"] else None

    before = kernels_of("cpu")
    use_kernels("cpu", None)
    plain = packed_linear(x, rows := along_rows([weight, packed("Q4_1")]))
    assert not has_kernels("cpu")
    use_kernels("cpu", product)
    try:
        assert has_kernels("cpu") and (packed_linear(x, weight) == 0).all()
        mixed = packed_linear(x, rows, torch.ones(80))
    finally:
        use_kernels("cpu", before)
    assert seen == [["Q8_0"], ["Q8_0", "Q4_1"], ["Q8_0"], ["Q4_1"]] and (mixed[:, :40] == 1).all()
    assert torch.equal(mixed[:, 40:], plain[:, 40:] + 1)


def test_a_packed_weight_replaces_the_parameter():
    layer = Linear(256, 40, bias=False)
    put_packed([(layer, "weight")], packed("Q5_K"))
    assert not list(layer.parameters()) and layer.weight.formats == ["Q5_K"]
    x = torch.randn(5, 256)
    assert torch.allclose(layer(x, scale=2.0), 2 * (x @ layer.weight.dense().T), rtol=1e-4, atol=1e-2)
