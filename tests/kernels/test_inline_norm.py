"""Layer norms that the products behind them compute: the kernel, and what is inline in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina import kernels
from lamina.config import Config
from lamina.errors import InputError, LaminaError
from lamina.kernels.gemm.fusion import Fusions
from lamina.kernels.gemm.inline_norm import Inlined
from lamina.kernels.gemm.product import Rows, product, whole_rows
from lamina.kernels.workspace import Workspace
from lamina.models import family_of
from lamina.nn import LayerNorm, Linear
from lamina.runtime.step import CapturedStep
from lamina.sampling.chooser import Chooser
from tests.kernels.launches import launches
from tests.kernels.test_product import numbers

pytestmark = pytest.mark.usefixtures("few_programs")


def layer_norm(width: int, weight: bool = True, bias: bool = True, dtype: torch.dtype = torch.float32) -> LayerNorm:
    norm = LayerNorm(width, weight=weight, bias=bias).to(dtype).requires_grad_(False)
    for i, parameter in enumerate(norm.parameters()):
        parameter.copy_(numbers(width, dtype=dtype, seed=10 + i))
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_a_product_computes_the_layer_norm_of_its_input(mean: float, dtype: torch.dtype) -> None:
    norm = layer_norm(80, dtype=dtype)
    x = (numbers(1, 80, dtype=torch.float32) + mean).to(dtype)
    weight, bias, rest = (numbers(*size, dtype=dtype, seed=i) for i, size in enumerate([(6, 80), (6,), (1, 6)], 1))
    got = product(x, weight, bias=bias, residual=rest, before=0.5, scale=3.0, norm=norm)
    exact = [one.double() for one in (x, norm.weight, norm.bias, weight, bias, rest)]  # type: ignore[union-attr]
    normed = torch.nn.functional.layer_norm(exact[0], (80,), *exact[1:3], norm.eps)
    want = exact[5] + (normed * 0.5 @ exact[3].T + exact[4]) * 3
    torch.testing.assert_close(got, want.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize(("weight", "bias"), [(False, False), (True, False), (False, True)])
def test_norms_without_weight_or_bias(weight: bool, bias: bool) -> None:
    norm = layer_norm(32, weight, bias)
    x, matrix = (numbers(n, 32, dtype=torch.float32, seed=n) for n in (1, 3))
    torch.testing.assert_close(product(x, matrix, norm=norm), norm(x) @ matrix.T, rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_held_whole_are_refused() -> None:
    x, norm = torch.zeros(1, 64), LayerNorm(64)
    for config in (Rows(2, 16, 1, held=2), Rows(2, 32, 1, held=1, splits=2)):
        with pytest.raises(InputError, match="an inline norm needs held blocks that are all of 64"):
            product(x, torch.zeros(4, 64), norm=norm, config=config)
    assert whole_rows(8000, 2560, 2) is None and whole_rows(100, 1600, 2) is None and whole_rows(100, 24, 2) is None


def test_to_anything_but_a_small_product_it_is_the_tensor_that_the_norm_gives() -> None:
    norm, x = layer_norm(16), numbers(1, 1, 16, dtype=torch.float32)
    asked: list[int] = []
    left = Inlined(x, norm, lambda unchanged: asked.append(1))
    torch.testing.assert_close(left * 2, norm(x) * 2)
    torch.testing.assert_close(left[..., :3] + 1, norm(x)[..., :3] + 1)
    assert len(asked) == 2 and "Inlined" in repr(left) and left.shape == x.shape
    ragged, linear = layer_norm(24), Linear(24, 5).requires_grad_(False)  # 24 is three blocks of 8: too short
    x = numbers(1, 24, dtype=torch.float32)
    with kernels.in_use():
        got = linear(Inlined(x, ragged, lambda unchanged: asked.append(1)))
    torch.testing.assert_close(got, linear(ragged(x)))
    assert len(asked) == 3


def test_an_input_that_is_changed_between_norm_and_product_is_an_error() -> None:
    norm, linear, x = layer_norm(16), Linear(16, 4).requires_grad_(False), numbers(1, 16, dtype=torch.float32)
    workspace = Workspace(x.device)
    workspace.fusions = Fusions(inline={norm})
    with kernels.in_use(workspace):
        y = norm(x)
        assert isinstance(y, Inlined)
        x.mul_(2)
        with pytest.raises(LaminaError, match="the input of a layer norm was changed in place"):
            linear(y)


WHISPER: dict[str, Any] = dict(
    model_type="whisper", vocab_size=30, d_model=16, decoder_attention_heads=2, encoder_attention_heads=2,
    decoder_ffn_dim=32, encoder_ffn_dim=16, decoder_layers=2, encoder_layers=1, num_mel_bins=4,
    max_source_positions=8, max_target_positions=16, decoder_start_token_id=1, pad_token_id=0,
)  # fmt: skip


def whisper() -> Any:
    torch.manual_seed(0)
    model = family_of(Config(WHISPER)).build(Config(WHISPER)).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.4)
    return model


def test_a_block_of_whisper_is_six_products_and_two_attentions() -> None:
    model = whisper()
    start, blocks, end = launches(model, source=model.random_source(1, 6))
    product_, attend = "rows_kernel", "_attend_token"
    assert blocks == [[product_, attend, product_, product_, attend, product_, product_, product_]] * 2
    assert start == ["_positions", "_embed", "_embed"] and end == ["rows_kernel", "_finish"]
    assert str(model.fusion_plan).splitlines()[1] == "blocks.0.source_norm    → products  inline"


def test_captured_steps_of_whisper_are_plain_ones() -> None:
    model = whisper()
    source = model.random_source(1, 6, torch.Generator().manual_seed(1))
    captured, plain = (model.new_cache(rows=1, capacity=8, source=source) for _ in range(2))
    step = CapturedStep(model, 1, Chooser())
    step.begin(captured, torch.tensor([3]), [2], ())
    step.run(2)
    ids = torch.tensor([3])
    for _ in range(2):
        expected = model(ids[:, None], cache=plain, logits="last")
        ids = expected.argmax(-1)
    assert captured.tokens == plain.tokens
    torch.testing.assert_close(captured.logits, expected, rtol=1e-4, atol=1e-4)
