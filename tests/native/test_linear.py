"""Products of plain passes with packed weights: native kernels against the dequantized product."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lamina
from lamina.activation import activation
from lamina.native import library
from lamina.native.arguments import ACTS
from lamina.native.linear import linear, why_no_native_products
from lamina.native.products import products, quantize
from lamina.nn import Experts, GatedMLP, Linear
from lamina.weights import FORMATS, PackedWeight, along_rows, packed_linear, weight_format
from lamina.weights.packed import Packed
from lamina.weights.quantize import quantize_weights
from tests.families.harness import relative
from tests.weights.test_families import packed_model
from tests.weights.test_formats import OUT, WIDTH, random_parts

pytestmark = pytest.mark.skipif(why_no_native_products() is not None, reason="no native products on this machine")
PATHS = [path for path in ("avx2", "avx512", "neon") if products().lamina_set_isa(path.encode()) == 0]
INTEGER = [name for name in FORMATS if name != "fp8"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = products().lamina_isa()
    assert products().lamina_set_isa(request.param.encode()) == 0
    yield request.param
    products().lamina_set_isa(before)


def packed(name: str) -> PackedWeight:
    """[151, 512]: the outputs are no multiple of what kernels compute together"""
    format = FORMATS[name]
    return PackedWeight(format, random_parts(name, OUT, WIDTH), (OUT, WIDTH))


def rows_among_nans(rows: int, width: int) -> Tensor:
    """Random rows with NaN before, between and after them in memory."""
    room = torch.full((rows + 2, width + 5), float("nan"))
    room[1:-1, 2 : width + 2] = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    return room[1:-1, 2 : width + 2]


def rounded(x: Tensor) -> Tensor:
    codes, scales, _ = quantize(x.contiguous())
    return codes.float() * scales.repeat_interleave(32, 1)


def close(found: Tensor, x: Tensor, dense: Tensor) -> None:
    assert ((found - x @ dense.T).abs() <= 2e-5 * (x.abs() @ dense.abs().T) + 1e-6).all()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_equals_its_dequantized_product(name: str, path: str) -> None:
    weight = packed(name)
    dense = weight.dense(torch.float32)
    for rows in (1, 3, 5, 40, 131):
        x = rows_among_nans(rows, weight.shape[1])
        weight.activations = "float32"
        found = linear(x, weight)
        assert found is not None
        close(found, x, dense)
        weight.activations = "int8"
        found = linear(x, weight)
        assert found is not None
        close(found, rounded(x) if name in INTEGER else x, dense)


def test_segments_and_what_surrounds_a_product_are_one_call(path: str) -> None:
    weight = along_rows([packed("Q4_1"), packed("fp8"), packed("Q6_K")])
    dense, outputs = weight.dense(torch.float32), weight.shape[0]
    bias, onto = torch.randn(outputs), torch.randn(2, 20, outputs)
    for activations in ("float32", "int8"):
        weight.activations = activations
        x = torch.randn(2, 20, weight.shape[1])
        found = linear(x, weight, bias, onto, scale=0.3, act=ACTS["silu"])
        exact = torch.nn.functional.silu((x @ dense.T + bias) * 0.3) + onto
        assert found is not None and relative(found, exact) < (1e-4 if activations == "float32" else 0.05)
        gated = linear(x, weight, bias, scale=0.5, act=ACTS["gelu_tanh"], gated=True)
        gate, up = (x @ dense.T + bias).chunk(2, dim=-1)
        exact = activation("gelu_pytorch_tanh")(gate * 0.5) * up
        assert gated is not None and relative(gated, exact) < (1e-4 if activations == "float32" else 0.05)


def test_columns_in_another_order_are_permuted_first() -> None:
    int8 = weight_format("int8")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).int()
    values = torch.randn(9, 64)
    weight = PackedWeight(int8, {**int8.pack(values), "order": order}, (9, 64))
    x = torch.randn(33, 64)
    found = linear(x, weight)
    assert found is not None
    close(found, x, weight.dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    weight, x = packed("Q4_K"), torch.randn(9, 512).to(dtype)
    found = linear(x[:, : weight.shape[1]], weight)
    wanted = x[:, : weight.shape[1]].float() @ weight.dense(torch.float32).T
    assert found is not None and found.dtype == dtype and relative(found.float(), wanted) < 2e-2


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(path: str) -> None:
    weight = packed("Q5_K")
    for activations in ("float32", "int8"):
        weight.activations = activations
        x = torch.randn(77, weight.shape[1])
        whole = linear(x, weight)
        assert whole is not None
        assert torch.equal(linear(x[40:77], weight), whole[40:])  # type: ignore[arg-type]
        other = x.clone()
        other[:40] = float("nan")
        assert torch.equal(linear(other, weight)[40:], whole[40:])  # type: ignore[index]
        library.set_threads(1)
        try:
            assert torch.equal(linear(x, weight), whole)  # type: ignore[arg-type]
        finally:
            library.set_threads(None)


def test_threads_of_pytorch_and_of_the_own_pool_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = along_rows([packed("Q4_1"), packed("Q6_K")]), torch.randn(90, WIDTH)
    weight.activations = "int8"
    library.set_threads(2)
    try:
        found = linear(x, weight)
        monkeypatch.setattr("lamina.native.program.pytorch_team", lambda: None)
        other = linear(x, weight)
    finally:
        library.set_threads(None)
    assert found is not None and other is not None and torch.equal(found, other)


def test_modules_compute_what_they_compute_with_dequantized_weights() -> None:
    x, onto = torch.randn(1, 21, 64), torch.randn(1, 21, 64)
    chosen, weights = torch.randint(0, 4, (1, 21, 2)), torch.rand(1, 21, 2)
    for module, given in ((GatedMLP(64, 96), (x, onto)), (Experts(4, 64, 96), (x, chosen, weights))):
        quantize_weights(module, "int8")
        for one in module.modules():
            if isinstance(one, Packed):
                one.activations = "float32"
        found = [module(*given)]
        with torch.no_grad():
            found.append(module(*given))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lamina.native.linear._serves", lambda *given: False)
            wanted = module(*given)
        assert all(relative(one, wanted) < 1e-5 for one in found)


def test_gradients_of_activations_are_those_of_pytorch() -> None:
    layer = Linear(64, 8, bias=False)
    quantize_weights(layer, "int8")
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.dense().sum(0).expand(3, -1))  # type: ignore[operator]


def test_gradients_of_a_bias_and_of_a_residual_are_those_of_pytorch() -> None:
    layer, onto = Linear(64, 8), torch.zeros(3, 8, requires_grad=True)
    quantize_weights(layer, "int8")
    layer(torch.randn(3, 64), onto).sum().backward()
    assert layer.bias.grad is not None and onto.grad is not None
    assert (layer.bias.grad == 3).all() and (onto.grad == 1).all()


def test_without_the_library_pytorch_multiplies_and_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model("dense")
    monkeypatch.setattr("lamina.native.linear.why_not", lambda: "no C++ compiler found")
    weight, x = packed("Q4_0"), torch.randn(5, WIDTH)
    weight.activations = "int8"
    assert linear(x, weight) is None
    close(packed_linear(x, weight), x, weight.dense())
    assert "by dequantizing blocks of rows in PyTorch, since no C++ compiler found" in model.explain()


def test_a_weight_whose_parts_were_replaced_is_read_anew() -> None:
    int8 = weight_format("int8")
    weight = PackedWeight(int8, int8.pack(torch.eye(32)), (32, 32))
    x = torch.randn(4, 32)
    assert relative(linear(x, weight), x) < 1e-2  # type: ignore[arg-type]
    weight.replace(int8, int8.pack(2 * torch.eye(32)))
    assert relative(linear(x, weight), 2 * x) < 1e-2  # type: ignore[arg-type]


@torch.no_grad()
def test_prompts_in_chunks_and_beside_others_differ_by_no_more_than_rounding() -> None:
    model = packed_model("dense")
    ids = torch.randint(0, 60, (2, 70), generator=torch.Generator().manual_seed(0))
    exact = model(ids[:1])
    for cut in (1, 3, 33, 64):
        cache = model.new_cache(1)
        parts = [model(part, cache=cache) for part in ids[:1].split([cut, 70 - cut], dim=1)]
        assert relative(torch.cat(parts, dim=1), exact) < 0.02
    assert relative(model(ids)[:1], exact) < 0.02


@torch.no_grad()
def test_a_prompt_of_the_demo_model_is_near_that_of_its_dequantized_weights() -> None:
    packed_one, plain = (lamina.load("smollm2", device="cpu", weights=how) for how in (None, "plain"))
    ids = torch.randint(0, packed_one.vocab, (1, 96), generator=torch.Generator().manual_seed(0))
    wanted = plain(ids).log_softmax(dim=-1)
    rounded = packed_one(ids).log_softmax(dim=-1)
    assert float((wanted.exp() * (wanted - rounded)).sum(-1).mean()) < 0.01
    packed_one.activations = "float32"
    assert relative(packed_one(ids), plain(ids)) < 1e-4
